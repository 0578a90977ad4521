from __future__ import annotations

import logging
import os
import time

import pytest

from engine.config import TrackerConfig
from engine.tracking import GuardedTracker, NullTracker, make_tracker


class Failing(NullTracker):
    """Fails at its `fails`th call."""

    def __init__(self, fails: int) -> None:
        self.calls, self.fails = 0, fails

    def start(self, arm):
        self.log(arm, 0, {})

    def log(self, arm, step, values):
        self.calls += 1
        if self.calls >= self.fails:
            raise OSError("the disk is full")


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_tracker_that_fails_is_named_once_and_costs_nothing_else(toy_task, compare, caplog, fails):
    tracker = Failing(fails)
    comparison = compare(toy_task(steps=20), tracker=GuardedTracker(lambda: tracker))
    with caplog.at_level(logging.WARNING):
        comparison.run()
    assert [r.getMessage() for r in caplog.records] == ["tracking ends, the run goes on: OSError: the disk is full"]
    assert len(comparison.trainings["fused"].losses) == 20 and tracker.calls == fails


def test_a_tracker_that_cannot_be_made_is_named(caplog):
    def make():
        raise ImportError("No module named 'wandb'")

    tracker = GuardedTracker(make)
    tracker.start("native")
    tracker.close(0)
    assert len(caplog.records) == 1 and "No module named 'wandb'" in caplog.text


def test_an_error_of_the_run_is_not_swallowed(toy_task, compare):
    from engine.errors import RunError

    with pytest.raises(RunError):
        compare(toy_task(poisoned=1), tracker=GuardedTracker(NullTracker)).run()


def test_none_records_nothing(tmp_path):
    assert isinstance(make_tracker(TrackerConfig(name="none"), tmp_path, {}), NullTracker)


def test_wandb_offline_keeps_one_run_an_arm_in_one_group(toy_task, compare, tmp_path, monkeypatch):
    for variable in list(os.environ):
        if variable.startswith("WANDB_"):
            monkeypatch.delenv(variable)
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_SILENT"):
        monkeypatch.setenv(variable, "")  # restored afterwards
        monkeypatch.delenv(variable)
    tracker = make_tracker(TrackerConfig(), tmp_path, {"train": {"steps": 6}})
    comparison = compare(toy_task(steps=6), tracker=tracker)
    comparison.run()
    for arm in comparison.trainings:
        tracker.summarize(arm, {"metrics": {"loss": 0.25}})
    tracker.close(0)
    # The service writes the last of it after finish has returned. The configuration's values are JSON in there.
    deadline = time.monotonic() + 20
    while not (
        texts := [record.read_bytes() for record in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    ) or not all(b"train/loss" in text and b"metrics" in text for text in texts):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(texts) == 2 and all(tmp_path.name.encode() in text for text in texts)
    assert [sum(f'"{arm}"'.encode() in text for text in texts) for arm in ("native", "fused")] == [1, 1]
