"""profile=true: a trace of some training steps of each arm, and the table of the operators in it.

The steps are extra ones, after the training and the timing pass, so that what the profiler costs is in no figure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.autograd import DeviceType

from engine import files
from engine.arms import Arm
from engine.comparison import Comparison
from engine.compilation import compiling
from engine.loop import WARMUP_STEPS, matmul_precision
from engine.operators import stderr_closed
from engine.report import Table
from fusedops.registration import NAMESPACE, function_name
from fusedops.registry import OPERATORS

STEPS = 3
"""Training steps in a trace."""
ROWS, ROWS_SHOWN = 60, 12
"""Rows of a table in its file, and of the one on the terminal."""


def table_path(directory: Path, arm: str) -> Path:
    """Where an arm's table is."""
    return directory / f"profile-{arm}.txt"


def trace_path(directory: Path, arm: str) -> Path:
    """Where an arm's trace is, in Chrome's format: https://ui.perfetto.dev and chrome://tracing show it."""
    return directory / f"trace-{arm}.json.gz"


def run(comparison: Comparison, directory: Path, console: Console) -> None:
    """Profile each arm of a comparison: trace and table in the run directory, the first rows on the terminal."""
    for arm in comparison.arms:
        with matmul_precision(comparison.train.tf32), compiling([arm]):
            profile = profile_steps(comparison.step_of(arm), comparison.device)
        comparison.release()
        temporary = directory / f".trace-{os.getpid()}.tmp.json.gz"  # the name decides that it is compressed
        profile.export_chrome_trace(str(temporary))
        os.replace(temporary, trace_path(directory, arm.name))
        tables = operator_tables(arm, profile, comparison.device)
        text = "\n\n".join(f"{table.title}\n\n{aligned(table)}" for table in tables)
        files.write_atomically(table_path(directory, arm.name), text + "\n")
        shown = tables[0]
        Table(shown.title, shown.header, shown.rows[:ROWS_SHOWN]).print(console)
    console.print(f"profiles in {directory}: trace-<arm>.json.gz, profile-<arm>.txt")


def profile_steps(step: Callable[[], object], device: torch.device, steps: int = STEPS) -> torch.profiler.profile:
    """The profile of some training steps, after others that compile and allocate."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(WARMUP_STEPS):
        step()
    for count in (1, steps):  # the first profile sets the profiler up, which would show in its first step
        profile = torch.profiler.profile(activities=activities)
        with stderr_closed():
            profile.start()
        try:
            for index in range(count):
                with torch.profiler.record_function(f"training step {index + 1}"):
                    step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        finally:
            with stderr_closed():
                profile.stop()
    return profile


def operator_tables(arm: Arm, profile: torch.profiler.profile, device: torch.device, steps: int = STEPS) -> list[Table]:
    """Operators by their own time, of the device where there is one, and on a GPU its kernels.

    Kernels come first for an arm of CUDA graphs, in which no operator is called.
    """
    averages = [event for event in profile.key_averages() if not event.is_user_annotation]
    calls = [event for event in averages if event.device_type == DeviceType.CPU]
    if device.type != "cuda":
        return [_table(f"{arm.name}: operators by CPU time", calls, "cpu", steps)]
    kernels = [event for event in averages if event.device_type == DeviceType.CUDA]
    tables = [
        _table(f"{arm.name}: operators by GPU time", calls, "device", steps),
        _table(f"{arm.name}: kernels by GPU time", kernels, "device", steps),
    ]
    return tables[::-1] if arm.compile_mode == "reduce_overhead" else tables


_FUNCTIONS = {function_name(name): f"{NAMESPACE}::{name}" for name in OPERATORS}
"""What runs inside of an operator of ours where its gradient is recorded, which takes the operator's own time."""


def _table(title: str, events: Sequence[Any], clock: str, steps: int) -> Table:
    """The events by their own time on a clock, cpu or device: microseconds there, milliseconds a step here."""
    inside = {_FUNCTIONS[event.key]: event for event in events if event.key in _FUNCTIONS}
    events = [event for event in events if event.key not in _FUNCTIONS]

    def own(event: Any) -> float:
        parts = [event, inside[event.key]] if event.key in inside else [event]
        return sum(getattr(part, f"self_{clock}_time_total") for part in parts)

    whole = sum(own(event) for event in events)
    rows: list[tuple[str, ...]] = [
        (
            event.key,
            f"{event.count / steps:g}",
            f"{getattr(event, f'{clock}_time_total') / steps / 1e3:.3f}",
            f"{own(event) / steps / 1e3:.3f}",
            f"{own(event) / whole:.1%}",
        )
        for event in sorted(events, key=own, reverse=True)[:ROWS]
        if own(event) > 0
    ]
    return Table(title, ("name", "calls a step", "ms a step", "without callees", "share"), rows)


def aligned(table: Table) -> str:
    """A table as lines of text, its columns aligned: the first to the left, numbers to the right."""
    lines = [table.header, *table.rows]
    first, *others = (max(len(line[column]) for line in lines) for column in range(len(table.header)))
    return "\n".join(
        "  ".join([line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], others, strict=True))])
        for line in lines
    )
