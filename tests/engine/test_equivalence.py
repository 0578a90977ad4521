from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import tables
from engine import equivalence, figures
from engine.arms import operator_set
from engine.comparison import Comparison
from engine.config import TrainConfig
from engine.equivalence import Outcome, Study, differences, summarize, verdict
from engine.errors import ConfigError, Interrupted
from engine.signals import StopSignal
from engine.statistics import MeanInterval, mean_interval, t_critical
from engine.tracking import NullTracker

RESOLVED = {"train": {"precision": "fp32", "seed": 0}, "model": {"name": "toy"}, "tracker": {"name": "none"}}


# ---------------------------------------------------------------------------------------------------------------------
# The interval


@pytest.mark.parametrize(
    ("freedom", "expected"),  # from a table of Student's t
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (121, 1.9798)],
)
def test_critical_values_are_those_of_the_tables(freedom, expected):
    assert t_critical(freedom) == pytest.approx(expected, abs=6e-5)


def test_other_confidences_and_too_few_values():
    assert t_critical(4, 0.90) == pytest.approx(2.1318, abs=6e-5)
    with pytest.raises(ValueError, match="freedom=0"):
        t_critical(0)
    assert mean_interval([]) == MeanInterval(0, None, None, None, None, None)
    assert mean_interval([0.5]) == MeanInterval(1, 0.5, None, None, None, None)


def test_an_interval_by_hand():
    interval = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 3.1824463 * math.sqrt(5 / 3) / 2
    assert (interval.count, interval.mean, interval.deviation) == (4, 2.5, pytest.approx(math.sqrt(5 / 3)))
    assert (interval.low, interval.high, interval.half_width) == pytest.approx((2.5 - half, 2.5 + half, half))


@pytest.mark.parametrize("count", [2, 5])
def test_the_interval_covers_the_mean_as_often_as_it_says(count):
    values = np.random.default_rng().normal(0.3, 1.7, (6000, count))
    intervals = [mean_interval(row) for row in values]
    covered = np.mean([i.low <= 0.3 <= i.high for i in intervals])
    assert covered == pytest.approx(0.95, abs=5 * math.sqrt(0.95 * 0.05 / 6000))


def test_a_difference_as_large_as_the_half_width_is_seen_in_half_of_the_studies():
    """And the noise of the stock trainings alone tells it beforehand."""
    deviation, pairs = 0.008, 6
    drawn = np.random.default_rng().normal(0, deviation, (800, pairs, 3))
    noise_only = [summary_of(study) for study in drawn]
    half = np.mean([s["comparisons"]["fused"]["half_width"] for s in noise_only])
    told = np.mean([s["noise"]["smallest_difference"] for s in noise_only])
    assert half == pytest.approx(t_critical(pairs - 1) * deviation * math.sqrt(1.5 / pairs), rel=0.1)
    assert told == pytest.approx(half, rel=0.1)
    drawn[:, :, 0] += half
    seen = np.mean([s["comparisons"]["fused"]["low"] > 0 for s in map(summary_of, drawn)])
    assert 0.4 < seen < 0.6


def outcome(seed: int, training: str, loss: float) -> Outcome:
    return Outcome(seed, training, {"loss": loss}, loss, 5, 0, 30, 1.0, "c0ffee", "conditions")


def summary_of(losses: np.ndarray, margin: float = 0.01) -> dict:
    """Of an array [pairs, (fused, native, native')]."""
    names = ("fused", "native", "native'")
    outcomes = [
        outcome(k, name, float(loss)) for k, row in enumerate(losses) for name, loss in zip(names, row, strict=True)
    ]
    return summarize(outcomes, ["fused"], "native", margin)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.004, 0.009, "equivalent"),
        (-0.010, 0.010, "equivalent"),
        (0.002, 0.009, "equivalent"),  # a difference that is there, and smaller than matters
        (0.002, 0.012, "different"),
        (-0.020, -0.005, "different"),
        (-0.011, 0.004, "not resolved"),
        (-0.030, 0.050, "not resolved"),
        (None, None, "not resolved"),
    ],
)
def test_a_verdict_claims_no_more_than_the_interval(low, high, expected):
    half = None if low is None else (high - low) / 2
    mean = 0.0 if low is None else (high + low) / 2
    assert verdict(MeanInterval(5, mean, low, high, half, half), 0.01) == expected


def test_only_whole_pairs_count():
    outcomes = [
        outcome(0, "fused", 1.5),
        outcome(0, "native", 1.0),
        outcome(0, "native'", 1.2),
        outcome(1, "fused", 2.0),
        outcome(1, "native", 1.9),
        outcome(2, "native", 1.0),
    ]
    assert differences(outcomes, "fused", ("native", "native'")) == {0: pytest.approx(0.4)}
    assert differences(outcomes, "fused", ("native",)) == pytest.approx({0: 0.5, 1: 0.1})
    summary = summarize(outcomes, ["fused"], "native", 0.01)
    fused = summary["comparisons"]["fused"]
    assert (fused["count"], fused["verdict"], fused["half_width"]) == (1, "not resolved", None)
    assert fused["against_stock_alone"]["count"] == 2 and summary["noise"]["count"] == 1
    assert len(summary["trainings"]) == 6


# ---------------------------------------------------------------------------------------------------------------------
# Trainings


@pytest.fixture
def make_study(toy_task, tmp_path):
    """A study of a toy whose pairs are made once a seed; and a list of the seeds that were asked for."""

    def make(dropout: float = 0.5, stop: StopSignal | None = None, resolved=RESOLVED) -> tuple[Study, list[int]]:
        stop, asked = stop or StopSignal(), []
        train = TrainConfig(log_every=2, eval_every=2, early_stop=1, device="cpu")
        arms = [operator_set(name, toy_task.slots) for name in ("native", "fused")]

        def pair(seed: int) -> Comparison:
            asked.append(seed)
            task, console = toy_task(6, dropout=dropout), Console(quiet=True)
            settings = replace(train, seed=seed)
            return Comparison(task, arms, settings, torch.device("cpu"), tmp_path, NullTracker(), console, stop)

        console = Console(file=io.StringIO(), width=200)
        return Study(pair, [arm.name for arm in arms], torch.device("cpu"), resolved, console, stop), asked

    return make


def test_a_pair_shares_weights_and_batches_and_stock_is_trained_with_two_dropout_seeds(make_study):
    study, asked = make_study(dropout=0.0)
    losses = {name: study.train(7, name).metrics["loss"] for name in study.trainings}
    assert list(losses) == ["fused", "native", "native'"] and asked == [7]
    assert losses["native"] == losses["native'"] == pytest.approx(losses["fused"], rel=1e-5)
    assert study.train(8, "native").metrics["loss"] != losses["native"]  # other weights

    study, _ = make_study(dropout=0.5)
    dropped = {name: study.train(7, name).metrics["loss"] for name in study.trainings}
    assert dropped["native"] != dropped["native'"]
    assert dropped["fused"] == pytest.approx(dropped["native"], rel=1e-5)  # the toy's dropout is stock in both
    assert study.train(7, "native'").metrics["loss"] == dropped["native'"]


def test_a_training_is_evaluated_once_and_runs_to_its_end(make_study, toy_task, monkeypatch):
    evaluations = []
    validation = toy_task.validation
    monkeypatch.setattr(toy_task, "validation", lambda self: evaluations.append(1) or validation(self))
    study, _ = make_study()
    trained = study.train(0, "fused")
    assert (trained.steps, trained.units, len(evaluations)) == (6, 36, 1)


def test_operators_are_checked_once_an_arm(make_study, monkeypatch):
    checked = []
    real = Comparison.operators_of
    monkeypatch.setattr(Comparison, "operators_of", lambda self, arm: checked.append(arm.name) or real(self, arm))
    study, _ = make_study()
    for seed in (0, 1):
        for name in study.trainings:
            study.train(seed, name)
    assert checked == ["fused", "native"]


# ---------------------------------------------------------------------------------------------------------------------
# A study in a run directory


class Stopping(StopSignal):
    """Stops within a training: at the check of that number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def check(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.received = 2
        super().check()


def test_a_study_that_was_stopped_goes_on_with_what_is_missing(make_study, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "equivalence", lambda *_: None)
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = equivalence.run(make_study()[0], range(3), 0.01, tmp_path / "whole", NullTracker())

    trained = []
    real = Study.train
    monkeypatch.setattr(Study, "train", lambda self, seed, name: trained.append((seed, name)) or real(self, seed, name))
    with pytest.raises(Interrupted):
        equivalence.run(make_study(stop=Stopping(30))[0], range(3), 0.01, tmp_path / "parts", NullTracker())
    kept = (tmp_path / "parts" / "equivalence.jsonl").read_text().splitlines()
    assert 3 <= len(kept) < 9 and len(trained) == len(kept) + 1
    halfway = json.loads((tmp_path / "parts" / "equivalence.json").read_text())
    assert halfway["comparisons"]["fused"]["count"] == len(kept) // 3

    trained.clear()
    parts = equivalence.run(make_study()[0], range(3), 0.01, tmp_path / "parts", NullTracker())
    assert len(trained) == 9 - len(kept)
    assert parts["comparisons"] == whole["comparisons"] and parts["noise"] == whole["noise"]
    assert (tmp_path / "parts" / "equivalence.jsonl").read_text().splitlines()[: len(kept)] == kept

    trained.clear()
    more = equivalence.run(make_study()[0], range(4), 0.01, tmp_path / "parts", NullTracker())
    assert [seed for seed, _ in trained] == [3, 3, 3] and more["comparisons"]["fused"]["count"] == 4


def test_trainings_of_another_configuration_are_not_mixed_in(make_study, tmp_path):
    equivalence.run(make_study()[0], range(1), 0.01, tmp_path, NullTracker())
    kept = (tmp_path / "equivalence.jsonl").read_text()
    other = RESOLVED | {"model": {"name": "toy", "width": 3}}
    with pytest.raises(ConfigError, match=r"equivalence\.jsonl: its trainings are of another configuration"):
        equivalence.run(make_study(resolved=other)[0], range(1), 0.01, tmp_path, NullTracker())
    assert (tmp_path / "equivalence.jsonl").read_text() == kept


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"tracker": {"name": "wandb"}}, True),
        ({"equivalence": 7, "equivalence_margin": 0.1, "resume": "a"}, True),
        ({"train": {"precision": "fp32", "seed": 5, "log_every": 1}}, True),
        ({"train": {"precision": "bf16", "seed": 0}}, False),
        ({"compile": {"mode": "default"}}, False),
    ],
)
def test_what_the_losses_depend_on_is_told_from_what_they_do_not(changed, same):
    device = torch.device("cpu")
    hashes = {equivalence.conditions(resolved, device) for resolved in (RESOLVED, RESOLVED | changed)}
    assert len(hashes) == (1 if same else 2)


def test_files_and_tables_agree(make_study, tmp_path):
    class Recorder(NullTracker):
        def summarize(self, arm, figures):
            recorded[arm] = figures

    recorded: dict = {}
    study, _ = make_study()
    summary = equivalence.run(study, range(3), 0.02, tmp_path, Recorder())
    assert json.loads((tmp_path / "equivalence.json").read_text()) == summary
    assert (tmp_path / "equivalence.png").read_bytes().startswith(b"\x89PNG")
    assert recorded["equivalence"]["comparisons"] == summary["comparisons"]
    fused, page = summary["comparisons"]["fused"], (tmp_path / "equivalence.md").read_text()
    shown = study.console.file.getvalue()
    line = f"{fused['mean']:+.4f} [{fused['low']:+.4f}, {fused['high']:+.4f}]"
    assert line in page and line in shown and f"| {fused['half_width']:.4f} |" in page and fused["verdict"] in page
    for training in summary["trainings"]:
        assert f"{training['metrics']['loss']:.4f}" in page

    folder = tmp_path / "some-gpu"
    folder.mkdir()
    equivalence.write(folder, summary, "equivalence_toy")
    assert f"| toy | fused - mean of native, native' | 3 | {line} |" in tables.equivalence_table(folder)
    assert "No result is there yet" in tables.table("some-gpu/faults", tmp_path)
