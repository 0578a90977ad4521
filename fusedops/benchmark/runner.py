"""Runs rows one after the other and writes the report after each, so that a run that is stopped keeps what it has."""

from __future__ import annotations

import datetime
import gc
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fusedops
from fusedops.benchmark.ceilings import floor_of, measure_ceilings
from fusedops.benchmark.comparison import attempt, compare
from fusedops.benchmark.rows import Row
from fusedops.benchmark.schema import Ceilings, Method, Report, RowResult
from fusedops.benchmark.workloads import Settings, build

COMMIT_VARIABLE = "FUSEDOPS_COMMIT"
"""Environment variable that names the commit where the sources are a copy without their repository."""


def environment(device: torch.device) -> dict[str, Any]:
    """What a result depends on besides the code: GPU, versions, commit, date, command, precision settings."""
    triton = metadata.version("triton") if importlib.util.find_spec("triton") is not None else None
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *_arguments()]),
        "commit": commit(),
        "versions": {
            "fusedops": fusedops.__version__,
            "torch": torch.__version__,
            "triton": triton,
            "python": platform.python_version(),
            "cuda": torch.version.cuda if on_gpu else None,
            "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        },
        "tf32": torch.backends.cuda.matmul.allow_tf32 if on_gpu else None,
        "platform": platform.platform(),
    }


def _arguments() -> list[str]:
    """This process's arguments after the interpreter, without where the report goes: a path of this machine."""
    script, *rest = sys.argv
    rest = [
        word for before, word in zip(["", *rest], rest, strict=False) if "--out" not in (before, word.split("=")[0])
    ]
    if Path(script).name == "__main__.py":
        return ["-m", "fusedops.benchmark", *rest]
    return [os.path.relpath(script), *rest]


def commit() -> str | None:
    """The commit of the sources, with "-dirty" where tracked files differ from it; None where nothing tells."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get(COMMIT_VARIABLE)


def slug(device: torch.device) -> str:
    """The device's name as part of a path: "nvidia-h200", or "cpu"."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return "-".join(name.lower().split())


def estimate_seconds(rows: Sequence[Row], method: Method, settings: Settings, *, quick: bool) -> float:
    """About how long the rows will take: samples with their idle, and what building, checking and compiling take."""
    if quick:
        return 1.0 * len(rows)
    seconds = 15.0  # start of the context, the ceilings
    for row in rows:
        contenders = (4 if row.operator in ("silu", "smooth_relu") else 3) + len(row.peers)
        compiled = settings.compiled * (1 + 6 * settings.max_autotune)
        seconds += method.rounds * contenders * (method.idle_s + 1.5e-3 * method.window_ms) + 1.0 + 2.0 * compiled
    return seconds


def run(
    rows: Sequence[Row],
    settings: Settings,
    method: Method,
    *,
    quick: bool = False,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Measure the rows and return the report; `out` is rewritten after each row.

    A row that raises keeps the text of its error and the next one follows (see `failures`).
    """
    report = Report(environment(settings.device), method, quick=quick)
    torch.manual_seed(method.seed)
    report.ceilings = measure_ceilings(settings.device, sorted({row.dtype for row in rows}), method, quick=quick)
    rates = ", ".join(f"{dtype} product {rate:.1f} TFLOP/s" for dtype, rate in report.ceilings.gemm_tflop_s.items())
    say(f"ceilings: copy {report.ceilings.copy_gb_s:.0f} GB/s, {rates}")
    for row in rows:
        report.rows.append(_run_row(row, settings, method, report.ceilings, quick=quick))
        say(summary_line(report.rows[-1]))
        if out is not None:
            report.write(out)
    return report


def _run_row(row: Row, settings: Settings, method: Method, ceilings: Ceilings, *, quick: bool) -> RowResult:
    start = time.perf_counter()
    shape = row.quick if quick else row.shape
    result = RowResult(row.id, row.operator, row.work, shape, row.dtype, row.direction, row.options)

    def measure() -> None:
        torch.manual_seed(method.seed)
        workload = build(row, shape, settings)
        fused = workload.contenders[0]
        result.floor = floor_of(fused.call, ceilings, row.dtype)
        result.comparison = compare(
            workload.contenders,
            errors=workload.errors,
            requirements={} if quick else {"gate": row.gate, "goal": row.goal},
            floor=result.floor,
            method=method,
            device=settings.device,
        )

    result.error = attempt(f"row {row.id}", measure)[1]
    released = attempt(f"the end of row {row.id}", lambda: _release(settings))[1]  # raises after a fault on the GPU
    result.error = result.error or released
    if result.error is None and result.comparison is not None:
        broken = [c for c in result.comparison.of_role("fused") if c.status != "ok"]
        result.error = "; ".join(f"{c.name} is {c.status}: {c.reason}" for c in broken) or None
    result.seconds = time.perf_counter() - start
    return result


def _release(settings: Settings) -> None:
    """Free what the row held: its tensors, and the graphs that torch.compile made for it."""
    if settings.compiled:
        torch._dynamo.reset()
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()


def failures(report: Report) -> list[RowResult]:
    """The rows that raised, or whose fused contender failed or was wrong."""
    return [row for row in report.rows if row.error is not None]


def summary_line(row: RowResult) -> str:
    """One line on a row, for the terminal."""
    head = f"{row.id:>4} {row.work}, {row.direction}"
    if row.comparison is None or row.error is not None:
        return f"{head}: FAILED: {row.error}"
    times = []
    for contender in row.comparison.contenders:
        timing = contender.gpu_ms or contender.wall_ms
        times.append(f"{contender.name} {contender.status if timing is None else f'{timing.median:.4f}'}")
    ours = row.comparison.of_role("fused")[0]
    ratio = "" if ours.ratio is None else f"; {ours.ratio.value:.2f}x [{ours.ratio.low:.2f}, {ours.ratio.high:.2f}]"
    return f"{head}: {', '.join(times)} ms{ratio} ({ours.path}; {row.seconds:.0f} s)"
