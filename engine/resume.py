"""resume=PATH: the command line that continues a run, and what it may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from engine.checkpoint import differences
from engine.errors import ConfigError

KEY = "resume"
DIRECTORY_KEY = "hydra.run.dir"
CHANGEABLE = ("train.checkpoint_every", "train.timing_rounds", "tracker", "profile")
"""Keys, and groups of keys, that a resumed run may set anew: none changes what is trained."""
STUDY = ("equivalence", "equivalence_margin")
"""Keys that a resumed study may set anew besides: pairs are added, or judged by another margin."""


def arguments(command_line: Sequence[str]) -> list[str]:
    """The command line, completed where it has resume=PATH: the run's own overrides first, and its directory.

    Hydra composes the configuration from the overrides that it kept in PATH/.hydra when the run began; those of this
    command line come after them, and `check` says which of them may differ.
    Raises ConfigError for a path that holds no run, and for what does not go with resume.
    """
    given = {_key(argument): argument for argument in command_line if "=" in argument and not argument.startswith("-")}
    if KEY not in given or (path := _value(given[KEY])) is None:
        return list(command_line)
    for argument in command_line:
        if argument in ("-m", "--multirun") or _key(argument) == DIRECTORY_KEY:
            raise ConfigError(f"{argument}: does not go with {KEY}={path}, which continues one run in its directory")
    directory, overrides = Path(path), Path(path) / ".hydra" / "overrides.yaml"
    for file in (directory / "config.yaml", overrides):
        if not file.is_file():
            raise ConfigError(f"{KEY}={path}: there is no run to resume: {file} does not exist")
    saved = yaml.safe_load(overrides.read_text(encoding="utf-8")) or []
    quoted = str(directory).replace("\\", "\\\\").replace("'", "\\'")
    return [
        *(override for override in saved if _key(override) not in given),
        *command_line,
        f"{DIRECTORY_KEY}='{quoted}'",
        "hydra.output_subdir=null",  # .hydra/ stays what the run began with
    ]


def settled(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Of a resolved configuration, what a run keeps from its beginning to its end."""
    kept = OmegaConf.create(dict(resolved))
    for key in (KEY, *CHANGEABLE):
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(kept, parent) if parent else kept
        if node is not None:
            node.pop(name, None)
    result: dict[str, Any] = OmegaConf.to_container(kept)  # type: ignore[assignment]
    return result


def check(directory: Path, resolved: Mapping[str, Any]) -> None:
    """Raise ConfigError naming each key whose value is not that of the run in this directory."""
    saved: Any = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
    begun, asked = settled(saved), settled(resolved)
    allowed: tuple[str, ...] = CHANGEABLE
    if begun.get("equivalence") and asked.get("equivalence"):
        allowed += STUDY
        for key in STUDY:
            begun.pop(key, None)
            asked.pop(key, None)
    different = differences(begun, asked)
    if different:
        begins = f"{KEY}={directory}: a resumed run trains what it began; may be changed: {', '.join(allowed)}"
        raise ConfigError("\n".join([begins, *different]))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _value(override: str) -> str | None:
    value = OverridesParser.create().parse_overrides([override])[0].value()
    return None if value is None else str(value)
