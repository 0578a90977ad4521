"""The record of every operator's schema, which later versions stay compatible with: exported programs hold schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from fusedops import registry

HOW_TO_RECORD = "python -m fusedops.testing --record-schemas"


def current() -> dict[str, str]:
    """The schema of every registered operator by its name, as PyTorch prints it."""
    return {name: str(operator.op._schema) for name, operator in sorted(registry.OPERATORS.items())}


def incompatibilities(recorded: Mapping[str, str], schemas: Mapping[str, str]) -> list[str]:
    """What a program that was exported with the recorded schemas would trip over, one line an operator."""
    parse, lines = torch._C.parse_schema, []
    for name, old in recorded.items():
        if name not in schemas:
            lines.append(f"{name}: was {old} and is gone")
        elif not parse(schemas[name]).is_backward_compatible_with(parse(old)):  # type: ignore[attr-defined]
            lines.append(f"{name}: was {old} and is {schemas[name]}; new arguments go last and have defaults")
    return lines


def read(path: Path) -> dict[str, str]:
    """The record in a file, or an empty one where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def record(path: Path) -> None:
    """Write the present schemas to `path`. Raises ValueError where one is incompatible with what it holds."""
    lines = incompatibilities(read(path), current())
    if lines:
        raise ValueError("schemas stay compatible:\n" + "\n".join(lines))
    path.write_text(json.dumps(current(), indent=2) + "\n")
