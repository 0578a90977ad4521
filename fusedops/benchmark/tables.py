"""Markdown tables from a report."""

from __future__ import annotations

from collections.abc import Sequence

from fusedops.benchmark import statistics
from fusedops.benchmark.comparison import fastest_rival
from fusedops.benchmark.schema import TIE, ContenderResult, Interval, Report, RequirementResult, RowResult, Timing

SPREAD_SHOWN = 0.05
NOTHING = "-"

SUMMARY_HEADER = (
    "row",
    "work",
    "shape",
    "ours, ms",
    "path",
    "stock, ms",
    "over stock [95 %]",
    "best other, ms",
    "over best [95 %]",
    "error, ours / stock",
    "share of ceiling",
    "memory, MiB, ours / stock",
    "gate",
    "goal",
)
SHORT = ("work", "shape", "ours, ms", "path", "stock, ms", "over stock [95 %]", "best other, ms", "error, ours / stock")
CONTENDER_HEADER = (
    "row",
    "contender",
    "path",
    "GPU, ms",
    "wall, ms",
    "over stock [95 %]",
    "error",
    "share of ceiling",
    "memory, MiB",
    "note",
)


def summary_table(report: Report) -> str:
    """One line a row: ours beside stock and the fastest other, with error, share of the ceiling, gate and goal."""
    return _table(SUMMARY_HEADER, [_summary(row, report.method.seed) for row in report.rows]) + "\n\n" + caption(report)


def short_table(report: Report) -> str:
    """The columns of the summary that a first look needs."""
    columns = [SUMMARY_HEADER.index(name) for name in SHORT]
    lines = [_summary(row, report.method.seed) for row in report.rows]
    return _table(SHORT, [[line[column] for column in columns] for line in lines]) + "\n\n" + caption(report)


def contender_table(report: Report) -> str:
    """One line a contender: every time, ratio and error of the report."""
    lines = [line for row in report.rows for line in _contenders(row)]
    return _table(CONTENDER_HEADER, lines) + "\n\n" + caption(report)


def caption(report: Report) -> str:
    """What the figures are of: machine, versions, commit, date, command, method, ceilings."""
    environment, versions = report.environment, report.environment["versions"]
    parts = [
        environment["gpu"] or "CPU",
        *(
            f"{name} {versions[name]}"
            for name in ("fusedops", "torch", "triton", "cuda", "cudnn")
            if versions.get(name)
        ),
        f"commit {(environment['commit'] or 'unknown')[:12]}",
        environment["date"][:10],
    ]
    text = f"{', '.join(parts)}. `{environment['command']}`. Medians of {report.method.rounds} rounds"
    if report.ceilings is not None:
        rates = "".join(f", {dtype} product {rate:.0f} TFLOP/s" for dtype, rate in report.ceilings.gemm_tflop_s.items())
        text += f"; ceilings of the same run: copy {report.ceilings.copy_gb_s:.0f} GB/s{rates}"
    return text + (". A quick run: its figures mean nothing." if report.quick else ".")


TABLES = {"summary": summary_table, "short": short_table, "contenders": contender_table}
"""The tables of a report, by name."""


def _summary(row: RowResult, seed: int) -> list[str]:
    work = [row.id, f"{row.work}, {row.direction}", _shape(row)]
    if row.comparison is None or row.error is not None:
        return [*work, f"failed: {_cell(row.error)}", *[NOTHING] * (len(SUMMARY_HEADER) - len(work) - 1)]
    (ours,), (stock,) = row.comparison.of_role("fused"), row.comparison.of_role("baseline")
    best = fastest_rival(row.comparison)
    best_time = over_best = NOTHING
    if best is not None and best is not stock:
        best_time = f"{_time(_timing(best))} ({best.name})"
        theirs, own = _timing(best), _timing(ours)
        if theirs is not None and own is not None:
            over_best = _ratio(statistics.ratio(theirs.samples, own.samples, seed))
    return [
        *work,
        _time(_timing(ours)),
        ours.path,
        _time(_timing(stock)),
        _ratio(ours.ratio),
        best_time,
        over_best,
        f"{_error(ours)} / {_error(stock)}",
        _share(ours),
        f"{_mebibytes(ours)} / {_mebibytes(stock)}",
        *(_requirements(row.comparison.requirements, kind) for kind in ("gate", "goal")),
    ]


def _contenders(row: RowResult) -> list[list[str]]:
    if row.comparison is None:
        return [[row.id, *[NOTHING] * (len(CONTENDER_HEADER) - 2), f"failed: {_cell(row.error)}"]]
    lines = []
    for contender in row.comparison.contenders:
        note = "computes less" if contender.role == "bound" else ""
        if contender.status != "ok":
            note = f"{contender.status}: {_cell(contender.reason)}"
        lines.append(
            [
                row.id,
                contender.name,
                contender.path,
                _time(contender.gpu_ms),
                _time(contender.wall_ms),
                NOTHING if contender.role == "baseline" else _ratio(contender.ratio),
                _error(contender),
                _share(contender),
                _mebibytes(contender),
                note,
            ]
        )
    return lines


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(text: str | None) -> str:
    """A text that cannot end its cell."""
    return (text or "").replace("|", "\\|").replace("\n", " ")


def _shape(row: RowResult) -> str:
    return f"{' '.join(f'{name} {size}' for name, size in row.shape.items())}, {row.dtype}"


def _timing(contender: ContenderResult) -> Timing | None:
    return contender.gpu_ms or contender.wall_ms


def _time(timing: Timing | None) -> str:
    if timing is None:
        return NOTHING
    text = _figures(timing.median)
    if timing.highest - timing.lowest > SPREAD_SHOWN * timing.median:
        text += f" ({_figures(timing.lowest)} to {_figures(timing.highest)})"
    return text


def _figures(value: float) -> str:
    """Three significant figures, four from 1 up."""
    return f"{value:.3f}" if value >= 0.1 else f"{value:.3g}"


def _ratio(ratio: Interval | None) -> str:
    return NOTHING if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] {ratio.verdict}"


def _error(contender: ContenderResult) -> str:
    """The largest error among the outputs."""
    values = list(contender.errors.values())
    if not values:
        return NOTHING
    return "NaN" if None in values else f"{max(value for value in values if value is not None):.2e}"


def _share(contender: ContenderResult) -> str:
    return NOTHING if contender.floor_share is None else f"{contender.floor_share:.2f}"


def _mebibytes(contender: ContenderResult) -> str:
    return NOTHING if contender.peak_memory_bytes is None else f"{contender.peak_memory_bytes / 2**20:.0f}"


def _requirements(requirements: Sequence[RequirementResult], kind: str) -> str:
    words = []
    for requirement in requirements:
        if requirement.kind != kind:
            continue
        over = requirement.over if requirement.over != "best" else "best other"
        wanted = f"tie with {over}" if requirement.ratio == 1 - TIE else f"{requirement.ratio:.2f} of {over}"
        words.append(f"{wanted}: {_met(requirement)}")
    return "; ".join(words) or NOTHING


def _met(requirement: RequirementResult) -> str:
    if requirement.measured is None:
        return "not measured"
    return f"{'met' if requirement.met else 'not met'} ({requirement.measured.low:.2f})"
