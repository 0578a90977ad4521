from __future__ import annotations

import gzip
import io
import json

import pytest
from rich.console import Console

from engine import profiling, report
from engine.arms import compiled, operator_set
from engine.config import CompileConfig, TrainConfig
from engine.report import Table

SILU_MUL = ("fusedops::silu_mul", "fusedops::silu_mul_backward")


def profiled(comparison, directory):
    """What the terminal shows, and each arm's trace (its events) and table (its text)."""
    console = Console(file=io.StringIO(), width=200)
    profiling.run(comparison, directory, console)
    traces, texts = {}, {}
    for arm in comparison.arms:
        with gzip.open(profiling.trace_path(directory, arm.name), "rt", encoding="utf-8") as file:
            traces[arm.name] = json.load(file)["traceEvents"]
        texts[arm.name] = profiling.table_path(directory, arm.name).read_text(encoding="utf-8")
    return console.file.getvalue(), traces, texts


def test_traces_and_tables_have_the_operators_by_name(toy_task, compare, tmp_path):
    shown, traces, texts = profiled(compare(toy_task()), tmp_path)
    names = {arm: [event.get("name") for event in events] for arm, events in traces.items()}
    for operator in SILU_MUL:
        assert names["fused"].count(operator) == profiling.STEPS and operator not in names["native"]
        line = next(line for line in texts["fused"].splitlines() if line.startswith(f"{operator} "))
        assert line.split()[1] == "1"
    assert "aten::silu" in names["native"] and "aten::silu" in texts["native"]
    assert [name for name in names["fused"] if str(name).startswith("training step")] == [
        f"training step {n}" for n in range(1, profiling.STEPS + 1)
    ]
    assert "fused: operators by CPU time" in shown and "trace-<arm>.json.gz" in shown
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{kind}-{arm}.{end}" for arm in ("native", "fused") for kind, end in (("trace", "json.gz"), ("profile", "txt"))
    }


def test_shares_are_of_all_time_and_sorted(toy_task, compare, tmp_path):
    _, _, texts = profiled(compare(toy_task(), ("fused",)), tmp_path)
    rows = [line.split() for line in texts["fused"].splitlines()[3:]]
    shares = [float(row[-1].removesuffix("%")) for row in rows]
    own, whole = ([float(row[column]) for row in rows] for column in (-2, -3))
    assert shares == sorted(shares, reverse=True) and 95 < sum(shares) < 100.0 + 0.05 * len(shares)
    assert all(b >= a - 1e-3 for a, b in zip(own, whole, strict=True))


def test_a_compiled_arm_is_profiled_too(toy_task, compare, tmp_path):
    comparison = compare(toy_task(), ("fused",))
    comparison.arms = [compiled(comparison.arms[0], CompileConfig("default", backend="aot_eager"))]
    _, traces, _ = profiled(comparison, tmp_path)
    names = [event.get("name") for event in traces["fused+compile"]]
    assert "aten::silu" in names and "fusedops::silu_mul" not in names  # it handed over


def test_another_run_in_the_directory_has_none_of_it(toy_task, compare, tmp_path):
    profiled(compare(toy_task(), ("native",)), tmp_path)
    report.clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_columns_are_aligned():
    table = Table("t", ("name", "n"), [("a", "1"), ("longer name", "12345")])
    assert profiling.aligned(table).splitlines() == [
        "name             n",
        "a                1",
        "longer name  12345",
    ]


@pytest.mark.gpu
def test_on_a_gpu_times_are_the_gpus(toy_task, compare, tmp_path):
    comparison = compare(toy_task(), ("fused",), train=TrainConfig(device="cuda"))
    shown, traces, texts = profiled(comparison, tmp_path)
    assert "fused: operators by GPU time" in shown and "fused: kernels by GPU time" in texts["fused"]
    assert any(event.get("cat") == "kernel" for event in traces["fused"])
    operators = texts["fused"].split("fused: kernels by GPU time")[0]
    assert all(f"\n{operator} " in operators for operator in SILU_MUL), texts["fused"]


@pytest.mark.gpu
@pytest.mark.slow
def test_of_cuda_graphs_kernels_come_first(toy_task, compare, tmp_path):
    comparison = compare(toy_task(), ("native",), train=TrainConfig(device="cuda"))
    comparison.arms = [compiled(operator_set("native", ("activation",)), CompileConfig("reduce_overhead"))]
    _, _, texts = profiled(comparison, tmp_path)
    text = texts["native+reduce_overhead"]
    assert text.startswith("native+reduce_overhead: kernels by GPU time"), text
