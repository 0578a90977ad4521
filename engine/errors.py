"""The errors a user is meant to read, as lines that name what was asked for and what exists, and their exit codes."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

MAX_LINES = 15
MERGING = "Error merging override "
"""How Hydra begins to say which override did not fit: of several for one key, the one that was wrong."""


class ConfigError(Exception):
    """The configuration asks for something that does not exist or is out of range."""


class RunError(RuntimeError):
    """A run cannot go on, for a reason that its message tells: a loss is not finite, a swap swapped nothing."""


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop, and the step that was under way has ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the machine, as PyTorch or Python says it."""
    # On the CPU PyTorch raises a RuntimeError that only its text tells from others.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def unknown(asked: str, kind: str, name: str, existing: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist: what was asked for, the nearest name that exists, all of them."""
    names = list(existing)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"{asked}: there is no {kind} {name!r}{hint}\nthere are: {', '.join(names) or 'none'}")


def explain(error: BaseException, overrides: Iterable[str] = ()) -> str:
    """At most fifteen lines on a configuration error of ours, Hydra's or OmegaConf's.

    overrides: the command line's, to say which of them was meant.
    """
    lines = _explanation(error, list(overrides)).strip().splitlines()
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], "..."]
    return "\n".join(lines)


def _explanation(error: BaseException, overrides: list[str]) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return str(unknown(f"{group}={option}", f"option of {group}", option, error.options))
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not of the form key=value ({str(error).splitlines()[0]})"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        key = cause.full_key or str(cause.key)
        parent, _, name = key.rpartition(".")
        names = [str(k) for k in cause.parent_node if k != "hydra"]
        return str(unknown(_asked(key, overrides), f"key of {parent}" if parent else "key", name, names))
    if isinstance(cause, ValidationError) and cause.full_key:
        expected = _expected(cause)
        reason = f"expected {expected}" if expected else str(cause.msg or cause).splitlines()[0]
        asked = str(error).removeprefix(MERGING) if str(error).startswith(MERGING) else cause.full_key
        return f"{_asked(asked, overrides)}: {reason}"
    return "\n".join(str(e) for e in dict.fromkeys((error, cause)) if e is not None and str(e))


def _asked(key: str, overrides: list[str]) -> str:
    """The override of the command line that set `key`, or the key alone."""
    return next((o for o in overrides if o.lstrip("+~").split("=")[0] == key), key)


def _expected(error: ValidationError) -> str | None:
    """The type the schema gives the key that a value did not fit."""
    owner, name = error.object_type, str(error.full_key).rpartition(".")[2]
    if not isinstance(owner, type) or not hasattr(owner, "__dataclass_fields__"):
        return None
    hint: Any = get_type_hints(owner).get(name)
    if hint is None:
        return None
    parts = [getattr(part, "__name__", str(part)) for part in get_args(hint) or (hint,)]
    return " or ".join("null" if part == "NoneType" else part for part in parts)


CONFIGURATION_ERRORS = (ConfigError, HydraException, OmegaConfBaseException)
"""What `explain` explains."""


class Failure(NamedTuple):
    """How a program ends that cannot go on."""

    message: str
    exit_code: int


def failure(error: BaseException, overrides: Iterable[str] = ()) -> Failure | None:
    """What to tell of an error that a user is meant to read; None for one that is a fault of the program.

    overrides: the command line's, to say which of them was meant.
    """
    if isinstance(error, CONFIGURATION_ERRORS):
        return Failure(explain(error, overrides), 2)
    if isinstance(error, RunError):
        return Failure(f"the run stopped: {error}", 1)
    if is_out_of_memory(error):
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Failure(f"the run stopped: out of memory: {reason}", 1)
    if isinstance(error, OSError):  # a full disk, a run directory that cannot be made
        return Failure(f"the run stopped: {error}", 1)
    return None
