"""The jobs of one command with -m: one that fails is told at once and the others go on; a table of all at the end.

`python -m engine.multirun DIRECTORY...` makes the table of any run directories.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import failure
from engine.files import write_atomically
from engine.progress import quantity
from engine.report import Table

ERROR_FILE = "error.txt"
NOTE = (
    "Each run stands for itself: they were not timed side by side, clocks and temperature differ between them, and so "
    "no ratio is given. A run of an arm beside its baseline (baseline=native) gives one."
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A job that is over."""

    directory: Path
    overrides: tuple[str, ...]
    error: str | None
    """Why it failed, as its error.txt says."""


class Jobs:
    """The jobs of a command, in order."""

    def __init__(self) -> None:
        self.done: list[Job] = []

    @property
    def failed(self) -> list[Job]:
        """Those that failed."""
        return [job for job in self.done if job.error is not None]

    def run(self, function: Callable[[], None], directory: Path, overrides: Sequence[str]) -> None:
        """Run a job in its directory. What it raises is written there, logged, and kept; a signal ends all jobs."""
        (directory / ERROR_FILE).unlink(missing_ok=True)
        error = None
        try:
            function()
        except Exception as raised:  # noqa: BLE001 - whatever ends a job, the others go on, and the exit code tells
            told = failure(raised, overrides)
            error = told.message if told else "".join(traceback.format_exception(raised))
        self.done.append(Job(directory, tuple(overrides), error))
        if error is not None:
            write_atomically(directory / ERROR_FILE, error.rstrip() + "\n")
            _log.error("job %s failed: %s", directory.name, error)
        gc.collect()  # of the model that is gone, before the next job's
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def conclude(self) -> int:
        """Write comparison.md of all jobs beside their directories, list those that failed on stderr; the exit code."""
        shared = set.intersection(*(set(job.overrides) for job in self.done))
        varied = {job.directory: " ".join(o for o in job.overrides if o not in shared) for job in self.done}
        table, path = join(varied), self.done[0].directory.parent / "comparison.md"
        failures = [f"{job.directory} ({varied[job.directory]}): {_first_line(job)}" for job in self.failed]
        write_atomically(path, markdown(table, failures))
        print(f"{len(table.rows)} arms of {len(self.done)} jobs: {path}")
        if failures:
            print(f"\n{len(failures)} of {len(self.done)} jobs failed:", *failures, sep="\n  ", file=sys.stderr)
        return 1 if failures else 0


def _first_line(job: Job) -> str:
    """Of a message; of a traceback the last one, which is the error."""
    lines = (job.error or "").strip().splitlines()
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def join(runs: Mapping[Path, str]) -> Table:
    """A line for each arm of the runs that ended, from their summary.json.

    runs: directories, each with a word on what is particular to it.
    """
    rows = []
    for directory, particular in runs.items():
        path = directory / "summary.json"
        if path.exists():
            summary = json.loads(path.read_text(encoding="utf-8"))
            run = f"{directory.name} {particular}".rstrip()
            rows += [_row(run, summary, name, arm) for name, arm in summary["arms"].items()]
    header = ("run", "model", "arm", "validation", "throughput (95 % interval)", "ms a step", "peak memory", "device")
    return Table("Runs", header, rows)


def _row(run: str, summary: Mapping[str, Any], name: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
    speed, memory = arm["throughput"], arm["peak_memory_bytes"]
    return (
        run,
        summary["model"],
        name,
        ", ".join(f"{metric} {value:.4f}" for metric, value in arm["metrics"].items()),
        f"{quantity(speed['value'])} {speed['unit']} ({quantity(speed['low'])} to {quantity(speed['high'])})",
        f"{speed['step_ms']:.2f}",
        "-" if memory is None else f"{memory / 2**20:,.0f} MiB",
        summary["device"],
    )


def markdown(table: Table, failures: Sequence[str] = ()) -> str:
    """The table as comparison.md, and the jobs that failed."""
    parts = [f"# {table.title}", table.markdown(), NOTE]
    if failures:
        parts += ["## Failed", "\n".join(f"- {failure}" for failure in failures)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown(join({Path(argument): "" for argument in sys.argv[1:]})), end="")
