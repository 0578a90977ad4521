"""The benchmark's method: what is refused, how samples are ordered, what ratios and files say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fusedops
from fusedops.benchmark import (
    Comparison,
    Contender,
    ContenderResult,
    Interval,
    Method,
    Report,
    Requirement,
    RowResult,
    WrongResult,
    compare,
    relative_error,
    statistics,
)
from fusedops.benchmark.__main__ import main
from fusedops.benchmark.ceilings import floor_of
from fusedops.benchmark.comparison import interleaved
from fusedops.benchmark.rows import ROWS, Row, select
from fusedops.benchmark.schema import Ceilings, Floor
from fusedops.benchmark.tables import contender_table, short_table, summary_table
from fusedops.benchmark.workloads import Settings, build
from fusedops.benchmark.workloads.linear import check_share_dropped

ROOT = Path(__file__).resolve().parents[2]
FAST = Method(rounds=4, idle_s=0.0, window_ms=0.2)
CPU = torch.device("cpu")


def silu_contenders(x: torch.Tensor, **others: object) -> list[Contender]:
    return [
        Contender("stock", lambda: F.silu(x), role="baseline"),
        Contender("ours", lambda: fusedops.silu(x), path=None, role="fused"),
        *(Contender(name, function) for name, function in others.items()),  # type: ignore[arg-type]
    ]


def silu_errors(x: torch.Tensor):
    reference = F.silu(x.double())
    return lambda outputs: {"y": relative_error(outputs[0], reference)}


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def test_ratio_of_exact_samples_has_no_width():
    interval = statistics.ratio([3.0] * 9, [2.0] * 9)
    assert (interval.value, interval.low, interval.high) == (1.5, 1.5, 1.5)
    assert interval.verdict == "faster"


def test_interval_covers_the_true_ratio_at_about_its_level():
    generator = torch.Generator().manual_seed(11)
    covered = 0
    for trial in range(200):
        a = 2.0 + 0.1 * torch.randn(25, generator=generator)
        b = 1.0 + 0.1 * torch.randn(25, generator=generator)
        interval = statistics.ratio(a.tolist(), b.tolist(), seed=trial)
        assert interval.low <= interval.value <= interval.high
        covered += interval.low <= 2.0 <= interval.high
    assert 0.88 <= covered / 200 <= 1.0


def test_rounds_are_resampled_in_pairs():
    # The machine slows down in some rounds and takes both contenders with it: their ratio is still sure.
    state = [1.0, 1.7, 1.1, 1.9, 1.2, 1.3, 1.6, 1.4, 1.8]
    interval = statistics.ratio([1.2 * s for s in state], state)
    assert interval.low == pytest.approx(1.2) and interval.high == pytest.approx(1.2)


@pytest.mark.parametrize("samples", [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_ratio_refuses_samples_it_cannot_pair(samples):
    with pytest.raises(ValueError, match=r"samples|positive"):
        statistics.ratio(*samples)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (Interval(1.10, 1.03, 1.2), "faster"),
        (Interval(0.90, 0.80, 0.97), "slower"),
        (Interval(1.01, 0.99, 1.03), "tie"),
        (Interval(1.40, 0.85, 2.80), "unclear"),
    ],
)
def test_verdict_counts_the_end_of_the_interval(interval, verdict):
    assert interval.verdict == verdict


# ---------------------------------------------------------------------------------------------------------------------
# Order


def test_each_round_has_every_contender_once_in_a_fresh_order():
    orders = list(interleaved(6, 30, seed=3))
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 20
    assert {order[0] for order in orders} == set(range(6))
    assert orders == list(interleaved(6, 30, seed=3)) != list(interleaved(6, 30, seed=4))


def test_contenders_are_sampled_in_the_interleaved_order():
    called: list[str] = []
    x = torch.randn(64)

    def logged(name: str) -> Contender:
        def function() -> torch.Tensor:
            called.append(name)
            return F.silu(x)

        return Contender(name, function, role="baseline" if name == "a" else "peer")

    # The window is shorter than any call, so that a sample is one call.
    method = Method(rounds=5, idle_s=0.0, window_ms=1e-6, seed=9)
    compare([logged(name) for name in "abc"], method=method, device=CPU)
    expected = ["abc"[index] for order in interleaved(3, 5, seed=9) for index in order]
    assert called[-len(expected) :] == expected


def test_prepare_runs_before_every_call():
    x = torch.randn(33)
    own = torch.empty_like(x)
    contenders = silu_contenders(x)
    contenders.append(
        Contender("in place", lambda: F.silu(own, inplace=True).clone(), prepare=lambda: own.copy_(x), role="peer")
    )
    comparison = compare(contenders, errors=silu_errors(x), method=FAST, device=CPU)
    assert comparison.contender("in place").status == "ok"
    assert comparison.contender("in place").errors["y"] < 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# What gets a time


def test_right_contenders_are_timed_and_compared():
    x = torch.randn(5000)
    comparison = compare(
        silu_contenders(x, other=lambda: x * torch.sigmoid(x)),
        errors=silu_errors(x),
        requirements={
            "gate": [Requirement("stock", 1e-6)],
            "goal": [Requirement("best", 1e6), Requirement("absent", 1)],
        },
        floor=Floor(flops=1, bytes=1, ms=1e-9, limit="memory"),
        method=FAST,
        device=CPU,
    )
    ours = comparison.contender("ours")
    assert (ours.status, ours.path) == ("ok", "cpu")
    assert ours.errors["y"] < 1e-6
    assert ours.gpu_ms is None and ours.peak_memory_bytes is None
    assert len(ours.wall_ms.samples) == FAST.rounds
    assert ours.wall_ms.lowest <= ours.wall_ms.median <= ours.wall_ms.highest
    assert ours.ratio.value == pytest.approx(comparison.contender("stock").wall_ms.median / ours.wall_ms.median)
    assert comparison.contender("stock").ratio.value == 1
    assert ours.floor_share == pytest.approx(1e-9 / ours.wall_ms.median)
    gate, best, absent = comparison.requirements
    assert gate.met is True and gate.against == "stock"
    assert best.met is False and best.against in ("stock", "other")
    assert absent.met is None and absent.measured is None


def test_fast_but_wrong_gets_no_time():
    x = torch.randn(4000, dtype=torch.bfloat16)
    unwritten = F.silu(x)
    unwritten[17] = math.nan
    comparison = compare(
        silu_contenders(
            x,
            zeros=lambda: torch.zeros_like(x),
            relu=lambda: F.relu(x),
            nan=lambda: unwritten,
            close=lambda: F.silu(x) * 1.02,
        ),
        errors=silu_errors(x),
        method=FAST,
        device=CPU,
    )
    for name in ("zeros", "relu", "nan", "close"):
        result = comparison.contender(name)
        assert result.status == "wrong" and result.reason, name
        assert result.wall_ms is None and result.ratio is None
    assert comparison.contender("ours").status == "ok"
    assert comparison.contender("zeros").errors["y"] == pytest.approx(1.0)


def test_error_may_be_three_times_stock_s_and_no_more():
    x = torch.randn(3000)

    def off_by(relative: float):
        return lambda: (F.silu(x.double()) * (1 + relative)).float()

    contenders = [
        Contender("stock", off_by(1e-3), role="baseline"),
        Contender("twice", off_by(2e-3)),
        Contender("four times", off_by(4e-3)),
    ]
    comparison = compare(contenders, errors=silu_errors(x), method=FAST, device=CPU)
    assert [c.status for c in comparison.contenders] == ["ok", "ok", "wrong"]


def test_a_gradient_that_is_wrong_is_seen():
    x = torch.randn(300, requires_grad=True)
    dy = torch.randn(300)

    def graded(factor: float):
        def call():
            y = F.silu(x)
            return y, factor * torch.autograd.grad(y, x, dy)[0]

        return call

    doubled = x.detach().double().requires_grad_()
    reference = F.silu(doubled)
    (gradient,) = torch.autograd.grad(reference, doubled, dy.double())
    comparison = compare(
        [Contender("stock", graded(1.0), role="baseline"), Contender("half", graded(0.5))],
        errors=lambda outputs: {
            "y": relative_error(outputs[0], reference),
            "dx": relative_error(outputs[1], gradient),
        },
        method=FAST,
        device=CPU,
    )
    half = comparison.contender("half")
    assert half.status == "wrong" and "dx" in half.reason
    assert half.errors["y"] < 1e-6 and half.errors["dx"] == pytest.approx(0.5)


def test_a_peer_that_raises_is_unavailable_and_the_others_stay():
    x = torch.randn(50)

    def refuses() -> torch.Tensor:
        raise RuntimeError("no kernel for this shape")

    comparison = compare(silu_contenders(x, peer=refuses), errors=silu_errors(x), method=FAST, device=CPU)
    assert comparison.contender("peer").status == "unavailable"
    assert comparison.contender("peer").reason == "RuntimeError: no kernel for this shape"
    assert comparison.contender("ours").wall_ms is not None


def test_a_fused_contender_that_runs_no_operator_of_ours_is_wrong():
    x = torch.randn(50)
    contenders = [
        Contender("stock", lambda: F.silu(x), role="baseline"),
        Contender("ours", lambda: F.silu(x), path=None, role="fused"),
    ]
    ours = compare(contenders, errors=silu_errors(x), method=FAST, device=CPU).contender("ours")
    assert ours.status == "wrong" and "no operator" in ours.reason


def test_compare_refuses_contenders_it_cannot_compare():
    same = Contender("a", lambda: torch.ones(1), role="baseline")
    with pytest.raises(ValueError, match="twice"):
        compare([same, same], device=CPU)
    with pytest.raises(ValueError, match="baseline"):
        compare([Contender("a", lambda: torch.ones(1))], device=CPU)
    with pytest.raises(ValueError, match="role"):
        Contender("a", lambda: torch.ones(1), role="champion")
    broken = Contender("a", lambda: torch.full((2,), math.nan), role="baseline")
    with pytest.raises(RuntimeError, match="baseline a is wrong"):
        compare([broken], device=CPU)
    with pytest.raises(ValueError, match="rounds is 0"):
        Method(rounds=0)


def test_share_dropped_must_be_p():
    check_share_dropped(0.1001, 0.1, 1_000_000)
    with pytest.raises(WrongResult, match="share dropped is 0"):
        check_share_dropped(26 / 256, 0.1, 60_000_000)


# ---------------------------------------------------------------------------------------------------------------------
# Rows and workloads


def test_floor_is_the_cost_that_the_operators_state():
    gate, up = (torch.randn(64, 32, requires_grad=True) for _ in range(2))
    ceilings = Ceilings(copy_gb_s=1.0, gemm_tflop_s={"float32": 1.0})
    forward = floor_of(lambda: fusedops.silu_mul(gate, up), ceilings, "float32")
    assert forward.bytes == 3 * 64 * 32 * 4
    assert forward.limit == "memory" and forward.ms == pytest.approx(forward.bytes / 1e6)
    both = floor_of(lambda: fusedops.silu_mul(gate, up).sum().backward(), ceilings, "float32")
    assert both.bytes == (3 + 5) * 64 * 32 * 4
    with pytest.raises(RuntimeError, match="no operator"):
        floor_of(lambda: F.silu(gate), ceilings, "float32")


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.id)
def test_every_row_is_right_at_its_quick_size(row: Row):
    torch.manual_seed(5)
    workload = build(row, row.quick, Settings(CPU, compiled=False))
    comparison = compare(
        workload.contenders, errors=workload.errors, method=Method(rounds=1, idle_s=0.0, window_ms=1e-6), device=CPU
    )
    (ours,) = comparison.of_role("fused")
    assert ours.status == "ok", ours.reason
    assert ours.path == "cpu"
    outputs = 1 if row.direction != "forward + backward" else 1 + len(workload.contenders[0].call()[1:])
    assert len(ours.errors) >= outputs and all(0 <= error < 0.02 for error in ours.errors.values())


def test_rows_have_unique_ids_and_requirements_that_exist():
    assert list(ROWS) == [row.id for row in ROWS.values()]
    assert {row.number for row in ROWS.values()} >= {str(number) for number in range(1, 20)}
    contenders = {"stock", "best", "copy", "cuBLASLt epilogue", "torch.compile"}
    contenders |= {"forward Laplacian, torch.compile", "nested autograd", "one table", "apart"}
    for row in ROWS.values():
        assert {r.over for r in (*row.gate, *row.goal)} <= contenders


def test_select():
    assert [row.id for row in select(ids=["4"])] == ["4a", "4b"]
    assert [row.id for row in select(ids=["19c", "1"])] == ["1", "19c"]
    assert [row.id for row in select(ids=["2"])] == ["2"]
    assert [row.id for row in select(ids=["2s"])] == ["2s"]
    assert {row.operator for row in select(["silu_mul"])} == {"silu_mul"}
    assert not any(row.extra for row in select())
    with pytest.raises(ValueError, match="there are silu, silu_mul"):
        select(["sillu"])
    with pytest.raises(ValueError, match="no row '99'"):
        select(ids=["99"])


# ---------------------------------------------------------------------------------------------------------------------
# Files and tables


def a_report() -> Report:
    x = torch.randn(400, dtype=torch.bfloat16)
    comparison = compare(
        silu_contenders(x, wrong=lambda: torch.zeros_like(x)),
        errors=silu_errors(x),
        requirements={"gate": [Requirement("stock", 1e-6)], "goal": [Requirement("best", 1e6)]},
        floor=Floor(1, 2, 1e-9, "memory"),
        method=FAST,
        device=CPU,
    )
    comparison.contenders[-1].errors["y"] = math.nan
    work = {"operator": "silu", "dtype": "bfloat16", "direction": "forward", "options": {"p": 0.1}}
    return Report(
        environment={
            "gpu": "NVIDIA H200",
            "commit": "0123456789abcdef",
            "date": "2026-01-02T03:04:05+00:00",
            "command": "python -m fusedops.benchmark",
            "versions": {"fusedops": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3"},
        },
        method=FAST,
        ceilings=Ceilings(4250.4, {"bfloat16": 736.2}),
        rows=[
            RowResult(
                id="1", work="silu", shape={"rows": 20, "columns": 20}, floor=Floor(1, 2, 1e-9, "memory"),
                comparison=comparison, seconds=1.5, **work,
            ),
            RowResult(id="2", work="broken", shape={"rows": 1}, error="RuntimeError: a | b", **work),
        ],
    )  # fmt: skip


def test_report_survives_its_file(tmp_path):
    report = a_report()
    path = tmp_path / "deep" / "report.json"
    report.write(path)
    read = Report.read(path)
    assert read.rows[0].comparison.contenders[-1].errors == {"y": None}  # JSON has no NaN
    report.rows[0].comparison.contenders[-1].errors["y"] = None
    assert read == report
    assert isinstance(read.rows[0].comparison, Comparison)
    assert isinstance(read.rows[0].comparison.contenders[0], ContenderResult)
    assert list(path.parent.iterdir()) == [path]


def test_report_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "report.json"
    a_report().write(path)
    data = json.loads(path.read_text())
    for change, message in (({"schema": 99}, "schema 99"), ({"colour": "red"}, "colour"), ({"method": None}, "report")):
        path.write_text(json.dumps(data | change))
        with pytest.raises(ValueError, match=message):
            Report.read(path)


def test_tables_say_what_the_report_says():
    report = a_report()
    ours = report.rows[0].comparison.contender("ours")
    text = summary_table(report)
    lines = text.splitlines()
    assert len({line.count("|") - line.count("\\|") for line in lines if line.startswith("|")}) == 1
    assert f"{ours.ratio.value:.2f} [{ours.ratio.low:.2f}, {ours.ratio.high:.2f}]" in lines[2]
    assert f"{ours.errors['y']:.2e}" in lines[2]
    assert "0.00 of stock: met" in lines[2] and "of best other: not met" in lines[2]
    assert "failed: RuntimeError: a \\| b" in lines[3]
    assert "NVIDIA H200" in text and "commit 0123456789ab" in text and "copy 4250 GB/s" in text
    detailed = contender_table(report)
    assert "wrong: error of y is 1, allowed" in detailed
    assert len(detailed.splitlines()) == 2 + 3 + 1 + 2
    assert short_table(report).count("\n") == text.count("\n")


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def test_quick_run_on_the_command_line(tmp_path):
    out = tmp_path / "{gpu}" / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "fusedops.benchmark", "silu", "--quick", "--device", "cpu", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| 1 | silu, forward |" in done.stdout and "its figures mean nothing" in done.stdout
    report = Report.read(tmp_path / "cpu" / "report.json")
    assert report.quick and [row.id for row in report.rows] == ["1"]
    assert report.environment["gpu"] is None and report.environment["versions"]["torch"] == torch.__version__
    assert report.environment["command"] == "python -m fusedops.benchmark silu --quick --device cpu"
    assert report.rows[0].error is None and report.rows[0].floor.bytes == 2 * 48 * 96 * 2


def test_a_row_that_raises_is_kept_and_the_exit_status_tells(tmp_path, monkeypatch, capsys):
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(fusedops, "silu", broken)
    path = tmp_path / "report.json"
    status = main(["--rows", "1,2", "--quick", "--device", "cpu", "--out", str(path)])
    assert status == 1
    first, second = Report.read(path).rows
    assert first.error == "RuntimeError: planted" and second.error is None
    assert "row 1 failed: RuntimeError: planted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sillu"], "operator 'sillu' has no row; there are"),
        (["--rows", "99"], "no row '99'"),
        (["--rounds", "0", "--quick"], "rounds is 0"),
        (["--device", "cpu"], "--quick"),
        (["--device", "foo", "--quick"], "no device 'foo'; there are cpu"),
        (["--device", "cuda:99", "--quick"], "no device 'cuda:99'; there are cpu"),
        (["--window", "nan", "--quick"], "window_ms is nan"),
        (["--idle", "inf", "--quick"], "idle_s is inf"),
        (["--seed", "-1", "--quick"], "seed is -1"),
        (["--quick", "--device", "cpu", "--out", "/dev/null/x/report.json"], "--out /dev/null/x/report.json"),
        (["--quick", "--device", "cpu", "--out", "/tmp"], "--out /tmp"),
    ],
)
def test_the_command_line_refuses_what_it_cannot_run(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


@pytest.mark.gpu
def test_gpu_times_are_those_of_a_cold_copy_and_unwritten_outputs_are_seen():
    x = torch.randn(1 << 26, device="cuda")
    reference = x.double()

    def half_written() -> torch.Tensor:
        y = torch.empty_like(x)
        y[: x.numel() // 2] = x[: x.numel() // 2]
        return y

    comparison = compare(
        [
            Contender("copy", lambda: x.clone(), role="baseline"),
            Contender("small copy", lambda: x[: 1 << 22].clone(), role="bound"),
            Contender("half written", half_written),
        ],
        errors=lambda outputs: {"y": relative_error(outputs[0], reference)},
        method=Method(rounds=3, idle_s=0.05, window_ms=5.0),
    )
    copy, small = comparison.contender("copy"), comparison.contender("small copy")
    assert comparison.contender("half written").status == "wrong"
    assert copy.peak_memory_bytes == x.numel() * 4
    assert 0 < copy.gpu_ms.median < copy.wall_ms.median
    assert 2 * x.numel() * 4 / (copy.gpu_ms.median / 1e3) < 20e12  # twice what any memory of today gives
    # A sixteenth of the bytes in about a sixteenth of the time: no launch gap, no clock of the host is in it.
    assert small.gpu_ms.median < copy.gpu_ms.median / 4


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("id_", ["3", "5a", "8", "18"])
def test_every_contender_of_a_row_runs_on_a_gpu(id_):
    row, device = ROWS[id_], torch.device("cuda", 0)
    torch.manual_seed(6)
    workload = build(row, row.quick, Settings(device))
    comparison = compare(
        workload.contenders,
        errors=workload.errors,
        method=Method(rounds=1, idle_s=0.0, window_ms=0.1),
        device=device,
    )
    torch._dynamo.reset()
    for contender in comparison.contenders:
        # A back end of another version may refuse a shape; what is always there must run, and nothing may be wrong.
        optional = contender.role == "peer" and contender.path != "inductor"
        assert contender.status == "ok" or (optional and contender.status == "unavailable"), contender
        assert (contender.gpu_ms is not None) == (contender.status == "ok")
