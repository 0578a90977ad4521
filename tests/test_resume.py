"""resume=PATH as a user meets it: runs that were stopped or killed go on, and what does not fit is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from engine import timing
from engine.checkpoint import read
from models.transformer import Task

ROOT = Path(train.__file__).parent
SETTINGS = [
    "train.device=cpu",
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=12",
    "model.d_ff=20",
    "model.context=16",
    "model.dropout=0.1",
    "data.validation_fraction=0.0005",
    "train.warmup_steps=2",
    "train.batch_size=3",
    "train.accumulation=2",
    "train.steps=16",
    "train.log_every=3",
    "train.eval_every=5",
    "train.checkpoint_every=1",
    "train.sample_tokens=0",
]


@pytest.fixture(autouse=True)
def short_run(monkeypatch):
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(Task, "references", lambda self: {})


def run_main(monkeypatch, *overrides: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    return train.main()


def start(*overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "train.py", *overrides]
    # W&B's service of this process, named in the environment, would keep a run open whose process was killed.
    own = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(process: subprocess.Popen[str], directory: Path, step: int) -> None:
    """Until a checkpoint of this step or a later one is there."""
    deadline = time.monotonic() + 120
    while not any(int(path.stem.partition("-")[2]) >= step for path in directory.glob("checkpoint-*.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.002)


def lines(directory: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what depends on time."""
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in found]


def test_a_run_killed_and_stopped_and_resumed_is_the_uninterrupted_one(monkeypatch, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "a run's directory"
    quoted = str(run).replace("'", "\\'")
    assert run_main(monkeypatch, *SETTINGS, "tracker=none", f"hydra.run.dir={whole}") == 0

    with start(*SETTINGS, f"hydra.run.dir='{quoted}'") as process:
        wait_for_step(process, run / "native", 5)
        process.kill()
    with start(f"resume='{quoted}'") as process:
        wait_for_step(process, run / "fused", 3)
        process.send_signal(signal.SIGTERM)
        shown, error = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM and error.splitlines()[-1] == "the run was stopped by SIGTERM"
    assert f"resume={run}" in shown.replace("\n", " ")
    (kept,) = (run / "fused").glob("checkpoint-*.safetensors")
    assert not read(kept)["state"]["finished"] and not (run / "summary.json").exists()
    composed = (run / ".hydra/config.yaml").read_bytes()

    assert run_main(monkeypatch, f"resume='{quoted}'") == 0
    assert lines(run) == lines(whole)
    for arm in ("native", "fused"):
        for path in (whole / arm / "model").iterdir():
            assert path.read_bytes() == (run / arm / "model" / path.name).read_bytes()
        states = [read(directory / arm / "checkpoint-16.safetensors")["state"] for directory in (whole, run)]
        assert states[0]["training"]["losses"].tolist() == states[1]["training"]["losses"].tolist()
    summaries = [json.loads((directory / "summary.json").read_text()) for directory in (whole, run)]
    for arm in ("native", "fused"):
        assert summaries[0]["arms"][arm]["metrics"] == summaries[1]["arms"][arm]["metrics"]
    assert (run / ".hydra/config.yaml").read_bytes() == composed

    # A run of W&B an arm, each opened as often as the arm was trained at or summarized.
    directories = [path.name.rpartition("-")[2] for path in run.glob("wandb/offline-run-*")]
    assert set(directories) == set(json.loads((run / "tracker.json").read_text())["runs"].values())
    assert len(set(directories)) == 2 < len(directories)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
        monkeypatch.setattr(Task, "references", lambda self: {})
        settings = [*SETTINGS, "train.steps=3", "ops=native", "tracker=none", f"hydra.run.dir={directory}"]
        assert run_main(monkeypatch, *settings) == 0
    return directory


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["train.steps=4"], ["train.steps: 3 in the run, 4 now"]),
        (["train.precision=bf16", "train.seed=9"], ["train.precision: fp32", "bf16 now", "train.seed: 0", "9 now"]),
        (["ops=fused"], ["ops.set: native in the run, fused now"]),
        (["ops.mlp=fused"], ["ops.mlp: None in the run, fused now"]),
        (["model.n_layer=1"], ["model.n_layer: 2 in the run, 1 now"]),
        (["experiment=transformer_d512"], ["train.precision: fp32 in the run, bf16 now"]),
        (["train.early_stop=1"], ["train.early_stop: 0 in the run, 1 now"]),
        (["train.stepps=4"], ["train.stepps", "did you mean steps?"]),
        (["-m"], ["-m: does not go with resume="]),
        (["hydra.run.dir=elsewhere"], ["hydra.run.dir=elsewhere: does not go with resume="]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_changes_the_training_is_refused_by_name(monkeypatch, capfd, finished, overrides, named):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file() and path.name != "train.log"}
    assert run_main(monkeypatch, f"resume={finished}", *overrides) == 2
    error = capfd.readouterr().err
    assert all(text in error for text in named) and "Traceback" not in error and len(error.splitlines()) <= 15, error
    assert {path: path.read_bytes() for path in before} == before


def test_what_does_not_change_the_training_may_be_set_anew(monkeypatch, finished):
    log = lines(finished)
    settings = ["train.timing_rounds=11", "train.checkpoint_every=2", "train.steps=3", "tracker=none"]
    assert run_main(monkeypatch, f"resume={finished}", *settings) == 0
    assert lines(finished) == log


@pytest.mark.parametrize("missing", ["config.yaml", ".hydra/overrides.yaml"])
def test_a_directory_that_holds_no_run_is_named(monkeypatch, capfd, finished, tmp_path, missing):
    for name in {"config.yaml", ".hydra/overrides.yaml"} - {missing}:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    for path in (tmp_path, tmp_path / "nowhere"):
        assert run_main(monkeypatch, f"resume={path}") == 2
        error = capfd.readouterr().err
        assert f"resume={path}: there is no run to resume" in error and len(error.splitlines()) == 1


def test_a_checkpoint_that_is_another_runs_or_damaged_is_named(monkeypatch, capfd, finished, tmp_path):
    for path in ("config.yaml", ".hydra/overrides.yaml", "metrics.jsonl"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes((finished / path).read_bytes())
    target = tmp_path / "native/checkpoint-3.safetensors"
    target.parent.mkdir()
    whole = (finished / "native/checkpoint-3.safetensors").read_bytes()
    target.write_bytes(whole[:-1])
    assert run_main(monkeypatch, f"resume={tmp_path}") == 2
    assert f"{target}: is no checkpoint, or not a whole one" in capfd.readouterr().err
    target.write_bytes(whole.replace(b'\\"batch_size\\": 3', b'\\"batch_size\\": 4'))
    assert run_main(monkeypatch, f"resume={tmp_path}") == 2
    error = capfd.readouterr().err
    assert str(target) in error and "configuration.train.batch_size: 4 in the run, 3 now" in error


def test_resume_null_begins_a_run(monkeypatch, tmp_path):
    settings = [*SETTINGS, "train.steps=2", "ops=native", "tracker=none", "resume=null", f"hydra.run.dir={tmp_path}"]
    assert run_main(monkeypatch, *settings) == 0
    assert (tmp_path / ".hydra/overrides.yaml").exists()


def test_a_run_that_begins_anew_in_the_same_directory_goes_on_from_nothing(monkeypatch, tmp_path):
    settings = [*SETTINGS, "ops=native", "tracker=none", f"hydra.run.dir={tmp_path}"]
    assert run_main(monkeypatch, *settings, "train.steps=3") == 0
    assert run_main(monkeypatch, *settings, "train.steps=2") == 0
    assert [path.name for path in (tmp_path / "native").glob("*.safetensors")] == ["checkpoint-2.safetensors"]
    assert max(line["step"] for line in lines(tmp_path)) == 2
