"""Checkpoints: everything that the rest of an arm's training depends on, in one file written whole or not at all.

A checkpoint is a safetensors file: the tensors, and as its metadata a JSON document that holds everything else and says
where each tensor belongs. Nothing in it can run when it is read, which no pickle promises, PyTorch's restricted one
included; any tool that reads safetensors shows its weights; and one file is replaced by another in one step.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.files import flush_to_disk
from fusedops.benchmark.environment import versions

FORMAT = 1
"""Changes when the content does, so that another version's files are refused with a reason."""
DOCUMENT = "fusedops"
"""The metadata's one entry."""
NAME = re.compile(r"checkpoint-(\d+)\.safetensors")
MODEL = "model"

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------------------
# One file


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write nested dicts, lists and tuples of tensors, strings, numbers, bools and None: whole, or not at all.

    Tensors are strided, of any dtype and device; two that are one in memory are stored once. Raises TypeError naming
    the place of anything else, OSError where the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    document = _encode(content, "", tensors, {})
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(tensors, str(temporary), metadata={DOCUMENT: json.dumps(document)})
    except SafetensorError as error:  # a full disk among others
        temporary.unlink(missing_ok=True)
        raise OSError(f"{temporary}: {error}") from error
    flush_to_disk(temporary)
    os.replace(temporary, path)
    flush_to_disk(path.parent)


def read(path: Path, tensors: bool = True) -> dict[str, Any]:
    """The content of a file that `write` wrote, tensors on the CPU; without them, None stands for each.

    Raises ConfigError naming a file that is damaged, not a checkpoint, or of another format.
    """
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            document = json.loads((file.metadata() or {})[DOCUMENT])
            # Copies: what is read would otherwise stay mapped to the file.
            found = {name: file.get_tensor(name).clone() if tensors else None for name in list(file.keys())}
        content: dict[str, Any] = _decode(document, found)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: is no checkpoint, or not a whole one: {reason}") from error
    if content.get("format") != FORMAT:
        raise ConfigError(f"{path}: is a checkpoint of format {content.get('format')}; this version reads {FORMAT}")
    return content


def _encode(value: Any, place: str, tensors: dict[str, Tensor], names: dict[Any, str]) -> Any:
    """The value as JSON, its tensors in `tensors` by their places; `names` has those found so far by where they lie."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"{place}: a checkpoint holds no tensor of layout {value.layout}")
        value = value.detach()
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else place
        if key not in names:
            while place in tensors:  # keys with slashes
                place += "'"
            names[key] = place
            tensors[place] = value.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {"$tensor": names[key]}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise TypeError(f"{place}: a checkpoint holds no key of type {type(key).__name__}")
            pairs.append((key, _encode(item, f"{place}/{key}" if place else str(key), tensors, names)))
        # JSON's keys are strings, those of an optimizer's state are numbers.
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$items": pairs}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{place}/{index}", tensors, names) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{place}: a checkpoint holds no {type(value).__name__}")


def _decode(value: Any, tensors: Mapping[str, Tensor | None]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(_decode(item, tensors) for item in value["$tuple"])
    if "$items" in value:
        return {key: _decode(item, tensors) for key, item in value["$items"]}
    return {key: _decode(item, tensors) for key, item in value.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Models


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that torch.compile wrapped, or the model itself: what has the names of its own parameters."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load a state_dict into a model, compiled or not, every name and shape of it.

    Raises ConfigError naming the source and the names or shapes that do not fit.
    """
    try:
        unwrapped(model).load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise ConfigError(f"{source}: its weights do not fit this model: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The checkpoints of an arm


class ArmCheckpoints:
    """What an arm keeps in its directory: its newest checkpoint, checkpoint-<step>.safetensors, and its trained model.

    identity: what a checkpoint must agree with, nested dicts of plain values: model, arm, device, configuration.
    """

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        self.directory, self._identity = directory, identity
        self.model = directory / MODEL
        """The directory of the trained model."""

    @property
    def newest(self) -> Path | None:
        """The file, or None where there is none."""
        found = _checkpoints(self.directory)
        return found[-1] if found else None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, then remove those before it."""
        self.directory.mkdir(exist_ok=True)
        path = self.directory / f"checkpoint-{step}.safetensors"
        before = _checkpoints(self.directory)
        content = {"format": FORMAT, "identity": self._identity, "versions": _versions(), "step": step, "state": state}
        write(path, content)
        # Files of writes that were killed are named by `write`, or .tmp... by newer versions of safetensors.
        for old in [*before, *self.directory.glob(".checkpoint-*.tmp"), *self.directory.glob(".tmp*")]:
            if old != path:
                old.unlink()

    def check(self) -> None:
        """Raise ConfigError naming the newest checkpoint if `load` would, but for damage to its tensors."""
        self._read(tensors=False)

    def load(self) -> dict[str, Any] | None:
        """The state that the newest checkpoint holds, or None where there is none.

        Raises ConfigError naming the file for one that is damaged, or of another model, arm, device or configuration.
        """
        content = self._read(tensors=True)
        if content is None:
            return None
        different = differences(content["versions"], _versions())
        if different:
            _log.warning("%s: goes on, but maybe not bit for bit: %s", self.newest, "; ".join(different))
        state: dict[str, Any] = content["state"]
        return state

    def _read(self, tensors: bool) -> dict[str, Any] | None:
        path = self.newest
        if path is None:
            return None
        content = read(path, tensors)
        different = differences(content["identity"], self._identity)
        if different:
            raise ConfigError("\n".join([f"{path}: is a checkpoint of another run:", *different]))
        return content


@functools.cache
def _versions() -> dict[str, str | None]:
    return versions()  # asks git


def _checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in an arm's directory, by step."""
    found = [(int(match[1]), path) for path in directory.glob("*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def clear(directory: Path) -> None:
    """Remove the checkpoints and models of an earlier run in the same run directory."""
    for arm in {path.parent for path in directory.glob("*/checkpoint-*.safetensors")}:
        for path in _checkpoints(arm):
            path.unlink()
        shutil.rmtree(arm / MODEL, ignore_errors=True)


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """A line for each value that is not the same in both, by its dotted key."""
    a, b = _flat(saved), _flat(present)
    return [
        f"{key}: {a.get(key, 'not there')} in the run, {b.get(key, 'not there')} now"
        for key in dict.fromkeys([*a, *b])
        if (key in a, a.get(key)) != (key in b, b.get(key))
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
