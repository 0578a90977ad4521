from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import attribution as script
from benchmarks import tables
from engine import attribution, figures, timing
from engine.arms import operator_set
from engine.attribution import arm_of, decompose, statistics, subsets, verdict
from engine.comparison import Comparison
from engine.config import TrainConfig
from engine.signals import StopSignal
from engine.slot_times import SlotProfile
from engine.step import backward
from fusedops.slots import Implementation
from models.transformer import ModelConfig, StdlibConfig, Task

CPU = torch.device("cpu")
RESOLVED = {"train": {"precision": "fp32"}}


# ---------------------------------------------------------------------------------------------------------------------
# The formula


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_and_residual_sum_to_the_whole(count):
    slots = [f"s{i}" for i in range(count)]
    times = {subset: np.random.default_rng().uniform(1, 2) for subset in subsets(slots)}
    parts = decompose(times, slots)
    assert sum(parts.part.values()) + parts.residual == pytest.approx(parts.total, abs=1e-12)
    assert parts.total == times[frozenset()] - times[frozenset(slots)]
    if count <= 2:
        assert parts.residual == pytest.approx(0, abs=1e-12)


def test_the_parts_of_two_slots_are_their_shapley_values():
    times = {frozenset(): 10.0, frozenset("a"): 9.0, frozenset("b"): 7.0, frozenset("ab"): 5.0}
    parts = decompose(times, ["a", "b"])
    assert parts.alone == {"a": 1.0, "b": 3.0} and parts.left_out == {"a": 2.0, "b": 4.0}
    assert parts.part == {"a": 1.5, "b": 3.5} and parts.total == 5.0


def test_savings_that_add_up_leave_no_residual():
    saved = {"a": 0.5, "b": -0.25, "c": 1.0}
    times = {subset: 8.0 - sum(saved[slot] for slot in subset) for subset in subsets(list(saved))}
    parts = decompose(times, list(saved))
    assert parts.part == saved == parts.alone == parts.left_out and parts.residual == 0


def test_what_three_slots_do_together_is_the_residual():
    times = dict.fromkeys(subsets("abc"), 8.0) | {frozenset("abc"): 5.0}
    parts = decompose(times, "abc")
    assert parts.part == {"a": 1.5, "b": 1.5, "c": 1.5} and parts.total == 3.0 and parts.residual == -1.5


@pytest.mark.parametrize(("count", "arms"), [(1, 2), (2, 4), (3, 8), (4, 10)])
def test_no_arm_is_timed_twice(count, arms):
    assert len(subsets([f"s{i}" for i in range(count)])) == arms


def test_the_arms_between_stock_and_fused():
    slots = ("attention", "mlp")
    stock, fused = operator_set("native", slots), operator_set("fused", slots)
    arms = {subset: arm_of(subset, stock, fused) for subset in subsets(slots)}
    assert [arm.name for arm in arms.values()] == ["native", "native,attention=fused", "native,mlp=fused", "fused"]
    for subset, arm in arms.items():
        assert {i.slot for i in arm.implementations if i.name == "fused"} == subset


# ---------------------------------------------------------------------------------------------------------------------
# Its uncertainty


def rounds_of(saved: dict[str, float], count: int, noise: float, drift: float) -> dict:
    """Times of 20 ms steps: independent noise of every sample, and a factor that all samples of a round share."""
    generator = np.random.default_rng()
    shared = np.exp(generator.normal(0, drift, count))
    return {
        subset: (0.020 - sum(saved[s] for s in subset)) * shared * np.exp(generator.normal(0, noise, count))
        for subset in subsets(list(saved))
    }


SAVED = {"attention": 0.003, "mlp": -0.001}


def test_parts_are_found_under_a_drift_much_larger_than_they():
    found = statistics(rounds_of(SAVED, 45, noise=0.004, drift=0.5), list(SAVED))
    for slot, saved in SAVED.items():
        part = found["slots"][slot]
        assert part["share_of_step"]["value"] == pytest.approx(saved / 0.020, abs=0.006)
        assert part["share_of_step"]["low"] <= part["share_of_step"]["value"] <= part["share_of_step"]["high"]
        assert part["ms"]["value"] == pytest.approx(part["share_of_step"]["value"] * found["step_ms"]["value"])
    assert found["slots"]["attention"]["verdict"] == "faster" and found["slots"]["mlp"]["verdict"] == "slower"
    assert found["slots"]["attention"]["share_of_gain"]["value"] == pytest.approx(1.5, abs=0.15)
    assert found["narrow_enough"] and found["widest"] <= 0.02 and found["rounds"] == 45


def test_the_printed_parts_sum_to_the_printed_whole():
    found = statistics(rounds_of(SAVED, 11, noise=0.05, drift=0.1), list(SAVED))
    for unit in ("ms", "share_of_step"):
        parts = sum(part[unit]["value"] for part in found["slots"].values())
        assert parts + found["residual"][unit]["value"] == pytest.approx(found["total"][unit]["value"], abs=1e-12)


def test_the_interval_covers_the_part_about_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(timing, "RESAMPLES", 400)
    covered = []
    for _ in range(250):
        found = statistics(rounds_of(SAVED, 27, noise=0.02, drift=0.1), list(SAVED))
        covered += [
            part["share_of_step"]["low"] <= SAVED[slot] / 0.020 <= part["share_of_step"]["high"]
            for slot, part in found["slots"].items()
        ]
    assert 0.90 <= np.mean(covered) <= 1.0  # a bootstrap of a median is conservative


def test_a_gain_that_is_not_resolved_is_not_divided_by():
    found = statistics(rounds_of({"attention": 0.0, "mlp": 0.0}, 9, noise=0.05, drift=0), ["attention", "mlp"])
    if found["total"]["ms"]["low"] <= 0 <= found["total"]["ms"]["high"]:
        assert all(part["share_of_gain"] is None for part in found["slots"].values())
    exact = {subset: np.full(9, 0.02) for subset in subsets(["mlp"])}
    assert statistics(exact, ["mlp"])["slots"]["mlp"]["share_of_gain"] is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.001, 0.012, "faster"),
        (-0.3, -0.001, "slower"),
        (-0.015, 0.019, "tie"),
        (-0.015, 0.030, "not resolved"),
        (-0.100, 0.001, "not resolved"),
    ],
)
def test_a_verdict_claims_no_more_than_the_interval(low, high, expected):
    assert verdict({"low": low, "high": high}).startswith(expected)


@pytest.mark.parametrize(("noise", "batches"), [(0.001, 1), (0.5, attribution.MOST_BATCHES)])
def test_rounds_are_added_until_the_intervals_are_narrow_or_the_limit_is_reached(monkeypatch, noise, batches):
    asked = []

    def time_steps(steps, rounds, device, stop, *, seed, shortest, close):
        asked.append((rounds, seed))
        assert (shortest, close) == (attribution.SHORTEST_SAMPLE, True)
        times = rounds_of(SAVED, rounds, noise, drift=0.1)
        return {name: times[subset] for name, subset in zip(steps, times, strict=True)}

    monkeypatch.setattr(timing, "time_steps", time_steps)
    steps = {subset: lambda: None for subset in subsets(list(SAVED))}
    found = attribution.measure(steps, list(SAVED), 9, CPU, StopSignal(), Console(quiet=True))
    assert asked == [(9, seed) for seed in range(batches)] and found["rounds"] == 9 * batches
    assert found["narrow_enough"] == (batches == 1)
    assert {len(samples) for samples in found["samples_ms"].values()} == {9 * batches}


# ---------------------------------------------------------------------------------------------------------------------
# Where a step's time goes


class Heavy(torch.autograd.Function):
    """The identity, with `work` products in forward and twice as many in backward."""

    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        spend(work)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        spend(2 * ctx.work)
        return grad, None


def spend(work: int) -> None:
    a = torch.ones(128, 128)
    for _ in range(work):
        a @ a


def test_a_slots_own_time_has_its_forward_and_its_backward():
    def implementation(slot: str, work: int) -> Implementation:
        return Implementation(slot, "heavy", lambda x: Heavy.apply(x, work), ("aten::mm",))

    arm = replace(operator_set("native", ()), implementations=(implementation("small", 30), implementation("big", 90)))
    profile = SlotProfile()
    functions = profile.labelled(arm).functions
    x = torch.randn(4, 4, requires_grad=True)

    def step() -> None:
        y = functions["small"](functions["big"](x * 2).sin())
        spend(120)  # of no slot
        backward(y.square().sum())

    shares = profile.shares(step, CPU)
    small, big = (shares["slots"][slot]["share_of_step"] for slot in ("small", "big"))
    assert shares["clock"] == "CPU" and 0 < small < big < 1
    assert big / small == pytest.approx(3, rel=0.5)
    assert small + big == pytest.approx(360 / 480, abs=0.15)


# ---------------------------------------------------------------------------------------------------------------------
# The whole


@pytest.fixture
def summary(compare, toy_task, tmp_path, monkeypatch):
    comparison, console = compare(toy_task(5)), Console(file=io.StringIO(), width=240)
    monkeypatch.setattr(attribution, "MOST_BATCHES", 2)
    monkeypatch.setattr(attribution, "SHORTEST_SAMPLE", 0.0)
    stop, tracker = StopSignal(), Recorder()
    found = attribution.run(comparison, RESOLVED, tmp_path, console, tracker, stop)
    found["shown"], found["recorded"] = console.file.getvalue(), tracker.recorded
    return found


class Recorder:
    """A tracker that keeps the final figures."""

    def __init__(self) -> None:
        self.recorded: dict = {}

    def start(self, arm: str) -> None:
        pass

    def summarize(self, arm: str, figures: dict) -> None:
        self.recorded[arm] = figures


def test_files_terminal_tracker_and_published_table_agree(summary, tmp_path):
    shown, recorded = summary.pop("shown"), summary.pop("recorded")
    assert json.loads((tmp_path / "attribution.json").read_text()) == summary
    assert (tmp_path / "attribution.png").read_bytes().startswith(b"\x89PNG")
    assert recorded["attribution"]["measures"] == summary["measures"]
    page, wall = (tmp_path / "attribution.md").read_text(), summary["measures"]["wall"]
    part = wall["slots"]["activation"]
    line = f"{part['ms']['value']:+.3f} [{part['ms']['low']:+.3f}, {part['ms']['high']:+.3f}]"
    assert line in page and line in shown and part["verdict"] in page
    assert part["share_of_step"]["value"] == pytest.approx(wall["total"]["share_of_step"]["value"])
    assert wall["residual"]["ms"]["value"] == 0
    assert set(wall["samples_ms"]) == {"none", "activation"} and len(wall["samples_ms"]["none"]) == wall["rounds"]
    assert ("the limit" in page) == (not wall["narrow_enough"])
    assert summary["graph_not_measured"] == "this runs on a CPU" and "this runs on a CPU" in page
    assert set(summary["profile"]) == {"native", "fused"}
    assert 0 < summary["profile"]["native"]["slots"]["activation"]["share_of_step"] < 1
    assert {row["path"] for row in summary["operators"]["fused"]} == {"cpu"}

    path = script.keep(tmp_path, tmp_path / "results", "toy", "python train.py experiment=toy ablate=true")
    assert path.name == "attribution_toy.json" and path.parent.name == "cpu"
    published = tables.table("cpu/attribution", tmp_path / "results")
    assert f"| toy | wall | activation=fused | {line} |" in published
    assert "`python train.py experiment=toy ablate=true`" in published


def test_the_picture_has_both_clocks(summary, tmp_path):
    both = summary["measures"] | {"graph": summary["measures"]["wall"]}
    figures.attribution(tmp_path / "both.png", summary | {"measures": both})
    assert (tmp_path / "both.png").stat().st_size > 1000


@pytest.mark.gpu
def test_on_a_gpu_steps_are_captured_too_and_still_train(tmp_path):
    settings = TrainConfig(steps=50, batch_size=4, precision="bf16", device="cuda", learning_rate=1e-3, warmup_steps=1)
    task = Task(
        ModelConfig(preset="tiny", dropout=0.1),
        StdlibConfig(validation_fraction=0.0005),
        steps=settings.steps,
        batch_size=settings.batch_size,
        eval_batch_size=64,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_steps,
        min_lr_ratio=settings.min_lr_ratio,
        seed=0,
    )
    arms = [operator_set(name, task.slots) for name in ("native", "fused")]
    console, stop, tracker, device = Console(quiet=True), StopSignal(), Recorder(), torch.device("cuda")
    comparison = Comparison(task, arms, settings, device, tmp_path, tracker, console, stop)
    phase = attribution.capturable(task.phases()[0])
    for arm in arms:
        model = comparison.build(arm)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comparison, "build", lambda *_, model=model: model)
            replay = attribution.capture(comparison.step_of(arm, phase=phase), device)
        batch = {name: tensor.cuda() for name, tensor in task.batch(0).items()}
        losses = []
        for _ in range(3):
            with torch.no_grad():
                losses.append(float(task.loss(model, batch)[0]))
            for _ in range(30):
                replay()
        assert losses[0] > losses[1] + 0.05 > losses[2] + 0.1, losses

    summary = attribution.run(comparison, RESOLVED, tmp_path, console, tracker, stop)
    assert summary["graph_not_measured"] is None and set(summary["measures"]) == {"wall", "graph"}
    graph, wall = (summary["measures"][clock] for clock in ("graph", "wall"))
    assert graph["step_ms"]["value"] < wall["step_ms"]["value"]  # so small a model is bound by the host
    assert set(graph["slots"]) == {"attention", "mlp"}
    assert summary["profile"]["native"]["clock"] == "GPU"
    for profile in summary["profile"].values():
        assert 0 < sum(slot["share_of_step"] for slot in profile["slots"].values()) < 1
