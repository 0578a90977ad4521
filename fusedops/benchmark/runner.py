"""Runs rows one after the other and writes the report after each, so that a run that is stopped keeps what it has."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fusedops.benchmark.ceilings import floor_of, measure_ceilings
from fusedops.benchmark.comparison import attempt, compare
from fusedops.benchmark.environment import environment
from fusedops.benchmark.rows import Row
from fusedops.benchmark.schema import Ceilings, Method, Report, RowResult
from fusedops.benchmark.workloads import Settings, build


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
        contenders = (4 if row.operator in ("silu", "smooth_relu", "laplacian3d") else 3) + len(row.peers)
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
