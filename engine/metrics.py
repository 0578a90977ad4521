"""metrics.jsonl: a line for each stretch of steps and each evaluation of each arm."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from engine.errors import ConfigError
from engine.files import write_atomically


class MetricsFile:
    """The file, to be entered while an arm adds its lines; each is there as soon as it is written."""

    def __init__(self, path: Path, arm: str) -> None:
        self._path, self._arm = path, arm

    def __enter__(self) -> MetricsFile:
        self._file = open(self._path, "a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line."""
        self._file.write(json.dumps({"arm": self._arm, "step": step, **values}) + "\n")
        self._file.flush()

    def flush_to_disk(self) -> None:
        """Wait until the lines would outlast a loss of power."""
        os.fsync(self._file.fileno())


def rewind(path: Path, arm: str, count: int) -> None:
    """Keep the arm's first `count` lines, all of other arms, and no line that a killed process left unfinished.

    Raises ConfigError naming the file where the arm has fewer.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept, found = [], 0
    for line in (line for line in lines if line.endswith("\n")):
        if json.loads(line)["arm"] == arm:
            found += 1
            if found > count:
                continue
        kept.append(line)
    if found < count:
        raise ConfigError(f"{path}: has {found} lines of {arm}, of {count} written before its checkpoint")
    if kept != lines:
        write_atomically(path, "".join(kept))
