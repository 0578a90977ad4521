from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine import report
from engine.config import TrackerConfig, TrainConfig
from engine.tracking import GuardedTracker, NullTracker, make_tracker

ROOT = Path(__file__).parents[2]


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


def test_a_tracker_that_hangs_is_left_behind(toy_task, compare, caplog):
    hanging, released = threading.Event(), threading.Event()

    class Hanging(NullTracker):
        def log(self, arm, step, values):
            hanging.set()
            released.wait(60)

    comparison = compare(toy_task(steps=6), tracker=GuardedTracker(Hanging, limit=0.5))
    started = time.monotonic()
    comparison.run()
    released.set()
    assert hanging.is_set() and time.monotonic() - started < 30
    assert [r.getMessage() for r in caplog.records] == [
        "tracking ends, the run goes on: TimeoutError: no answer within 0.5 s"
    ]
    assert len(comparison.trainings["fused"].losses) == 6


# ---------------------------------------------------------------------------------------------------------------------
# Weights & Biases


@pytest.fixture
def environment(monkeypatch):
    """No setting of the user's, and none left behind."""
    for variable in list(os.environ):
        if variable.startswith("WANDB_"):
            monkeypatch.delenv(variable)
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_SILENT"):
        monkeypatch.setenv(variable, "")  # restored afterwards
        monkeypatch.delenv(variable)


def records(path):
    """The records of a run file: a header, then LevelDB's log format, whose blocks hold pieces of protobuf messages."""
    from wandb.proto import wandb_internal_pb2

    data, position, message = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            yield record


def values(items):
    """Keys and values of a config, history or summary record."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


class RunFile:
    """What one run file says."""

    def __init__(self, path):
        found = list(records(path))
        kinds = [record.WhichOneof("record_type") for record in found]
        self.complete = "exit" in kinds
        if self.complete:
            run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
            self.id, self.name, self.group, self.project = run.run_id, run.display_name, run.run_group, run.project
            self.config = values(run.config.update)
            history = [record.history.item for record in found if record.WhichOneof("record_type") == "history"]
            self.history = [values(items) for items in history]
            self.summary = {}
            for record in found:
                if record.WhichOneof("record_type") == "summary":
                    self.summary |= values(record.summary.update)
            metrics = [record.metric for record in found if record.WhichOneof("record_type") == "metric"]
            self.metrics = {metric.name or metric.glob_name: metric.step_metric for metric in metrics}
            self.exit_code = next(r.exit.exit_code for r in found if r.WhichOneof("record_type") == "exit")


def run_files(directory, count):
    """The run files of a run directory, in the order they were begun; the service writes after finish has returned."""
    deadline = time.monotonic() + 30
    while True:
        paths = sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime_ns)
        files = [RunFile(path) for path in paths]
        if len(files) == count and all(file.complete for file in files):
            return files
        assert time.monotonic() < deadline, paths
        time.sleep(0.1)


def test_an_offline_run_file_has_everything(toy_task, compare, tmp_path, environment):
    config = {"train": {"steps": 6, "seed": 0}, "ops": {"set": "fused", "activation": None}}
    tracker = make_tracker(TrackerConfig(project="toys"), tmp_path, config)
    comparison = compare(toy_task(steps=6), tracker=tracker, train=TrainConfig(log_every=2, eval_every=3, device="cpu"))
    comparison.run()
    report.conclude(comparison._console, comparison, "native", config, tmp_path, tracker)
    tracker.close(0)
    files = {file.name: file for file in run_files(tmp_path, 2)}
    ids = json.loads((tmp_path / "tracker.json").read_text())
    assert ids == {"project": "toys", "runs": {name: file.id for name, file in files.items()}}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "summary.json").read_text())
    for arm, file in files.items():
        assert file.group == tmp_path.name and file.project == "toys" and file.exit_code == 0
        assert {key: file.config[key] for key in config} == config and file.config["arm"] == arm
        assert file.metrics == {"step": "", "train/*": "step", "val/*": "step", "perf/*": "step"}
        # Lines of one step are one row there, whose own step is the training's.
        expected = {}
        for line in lines:
            if line["arm"] == arm:
                expected.setdefault(line["step"], {}).update(line)
        found = {row["step"]: row for row in file.history}
        assert list(found) == [2, 3, 4, 6] and all(row["_step"] == step for step, row in found.items())
        for step, row in expected.items():
            assert {key: found[step][key] for key in row if key != "arm"} == {
                key: value for key, value in row.items() if key != "arm"
            }
        figures = summary["arms"][arm]
        for key in ("metrics", "throughput", "operators", "peak_memory_bytes", "training"):
            assert file.summary[key] == figures[key]
        assert file.summary["versions"] == summary["versions"] and file.summary["device"] == summary["device"]
        assert {"git", "torch", "triton", "fusedops", "python"} <= file.summary["versions"].keys()
    assert files["fused"].summary["ratios"] == summary["ratios"]["fused"]


def test_a_resumed_run_is_the_same_one(tmp_path, environment):
    """What an offline file misses is in a second one, of the same id and of later steps, which wandb sync appends."""
    for step in (1, 2):
        tracker = make_tracker(TrackerConfig(), tmp_path, {"train": {"steps": 2}})
        tracker.start("native")
        tracker.log("native", step, {"train/loss": 1.0 / step})
        tracker.close(0)
        time.sleep(1)  # W&B names its directories by the second
    first, second = run_files(tmp_path, 2)
    assert first.id == second.id == json.loads((tmp_path / "tracker.json").read_text())["runs"]["native"]
    assert [row["_step"] for file in (first, second) for row in file.history] == [1, 2]
    report.clear(tmp_path)  # another run in this directory is another one
    tracker = make_tracker(TrackerConfig(), tmp_path, {})
    tracker.start("native")
    tracker.close(0)
    assert json.loads((tmp_path / "tracker.json").read_text())["runs"]["native"] != first.id


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True], ids=["hangs", "refuses"])
def test_online_without_a_server_the_run_ends_in_time(tmp_path, answers):
    """A network that swallows everything, or a server that is none: training is done, files are there."""
    code = """
import sys, torch
from pathlib import Path
from engine import tracking
from engine.config import TrackerConfig
tracking.INIT_SECONDS = 3.0
tracker = tracking.make_tracker(TrackerConfig(mode="online"), Path(sys.argv[1]), {})
tracker.start("native")
tracker.log("native", 1, {"train/loss": 1.0})
tracker.close(0)
print("trained")
"""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if not answers:
            server.listen(50)  # connections are accepted by the system, and never answered
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        environment |= {
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "WANDB_API_KEY": "0123456789" * 4,
        }
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert result.returncode == 0 and result.stdout.strip().endswith("trained"), result.stderr
    assert "tracking ends, the run goes on" in result.stderr and "Traceback" not in result.stderr


def test_online_without_an_account_is_told_not_asked(tmp_path, environment, monkeypatch, caplog):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    tracker = make_tracker(TrackerConfig(mode="online"), tmp_path, {})
    tracker.start("native")
    said = [record.getMessage() for record in caplog.records if record.name == "engine.tracking"]
    assert len(said) == 1 and said[0].startswith("tracking ends, the run goes on: ")
