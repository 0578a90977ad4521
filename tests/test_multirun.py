"""Several jobs of one command, and several commands at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train
from engine import config, multirun, timing
from engine.errors import Interrupted
from models.transformer import Task

ROOT = Path(train.__file__).parent
SMALL = [
    "train.device=cpu",
    "model.n_layer=1",
    "model.n_head=2",
    "model.d_model=12",
    "model.d_ff=20",
    "model.context=16",
    "data.validation_fraction=0.0005",
    "train.steps=4",
    "train.warmup_steps=2",
    "train.batch_size=3",
    "train.sample_tokens=0",
    "tracker=none",
]


@pytest.fixture
def run_jobs(monkeypatch, tmp_path):
    """train.py -m in this process, its timing pass cut short; the sweep's directory is tmp_path."""
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(Task, "references", lambda self: {})

    def run(*overrides: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *SMALL, *overrides, f"hydra.sweep.dir={tmp_path}"])
        return train.main()

    return run


def jobs_of(tmp_path):
    return sorted(path for path in tmp_path.iterdir() if path.is_dir())


def test_single_arm_jobs_are_joined_in_one_table(run_jobs, tmp_path):
    assert run_jobs("ops=native,fused", "baseline=none") == 0
    summaries = [json.loads((job / "summary.json").read_text()) for job in jobs_of(tmp_path)]
    assert [list(summary["arms"]) for summary in summaries] == [["native"], ["fused"]]
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    for name, summary, line in zip(("native", "fused"), summaries, lines[4:6], strict=True):
        (arm,) = summary["arms"].values()
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0].endswith(f"ops={name}") and cells[1:3] == ["transformer", name]
        assert f"loss {arm['metrics']['loss']:.4f}" in line and f"{arm['throughput']['step_ms']:.2f}" in line
    text = "\n".join(lines)
    assert "no ratio is given" in text and "Failed" not in text and "x (" not in text
    assert not list(tmp_path.glob("*/error.txt"))


def test_a_job_that_fails_is_told_at_once_and_the_others_go_on(run_jobs, tmp_path, capfd, monkeypatch):
    seen = {}
    build = Task.build

    def watching(self, ops):
        if not seen and len(train.jobs.done) == 2:
            failed = jobs_of(tmp_path)[1]
            seen["at once"] = (failed / "error.txt").read_text(), (failed / "train.log").read_text()
        return build(self, ops)

    monkeypatch.setattr(Task, "build", watching)
    overrides = ["ops=native", "train.grad_clip=0", "train.steps=20", "train.learning_rate=1e-3,1e30,1e-4"]
    assert run_jobs(*overrides) == 1
    first, failed, last = jobs_of(tmp_path)
    assert all((job / "summary.json").exists() for job in (first, last)) and not (failed / "summary.json").exists()
    error, log = seen["at once"]
    assert error.startswith("the run stopped: step ") and len(error.splitlines()) == 1
    assert error.strip() in log and "ERROR" in log
    assert not (first / "error.txt").exists() and (first / "train.log").read_text() == ""
    told = capfd.readouterr().err.splitlines()
    assert told[-2:] == ["1 of 3 jobs failed:", f"  {failed} (train.learning_rate=1e+30): {error.strip()}"]
    assert f"{failed} (train.learning_rate=1e+30)" in (tmp_path / "comparison.md").read_text()


def test_a_job_whose_configuration_does_not_fit_together_is_one_of_them(run_jobs, tmp_path, capfd):
    assert run_jobs("ops=native", "model.preset=tiny,tiny_swiglu", "ops.activation=native") == 1
    wrong, right = jobs_of(tmp_path)
    assert "ops.activation=native" in (wrong / "error.txt").read_text() and (right / "summary.json").exists()
    error = capfd.readouterr().err
    assert "1 of 2 jobs failed:" in error and "attention, mlp" in (wrong / "error.txt").read_text()
    assert "Traceback" not in error


def test_a_fault_of_the_program_leaves_its_traceback(run_jobs, tmp_path, capfd, monkeypatch):
    def broken(self):
        if self.slots[1] == "mlp":
            raise AssertionError("planted")
        return {}

    monkeypatch.setattr(Task, "references", broken)
    assert run_jobs("ops=native", "model.preset=tiny,tiny_swiglu") == 1
    wrong, right = jobs_of(tmp_path)
    text = (wrong / "error.txt").read_text()
    assert text.startswith("Traceback") and text.endswith("AssertionError: planted\n")
    assert (right / "summary.json").exists()
    assert capfd.readouterr().err.splitlines()[-1].endswith("AssertionError: planted")


@pytest.mark.parametrize(
    ("override", "named"),
    [("train.steps=5,abc", "train.steps=abc"), ("ops=native,fuzed", "ops=fuzed"), ("train.stepps=1,2", "stepps")],
)
def test_what_cannot_be_composed_is_refused_before_any_job(run_jobs, tmp_path, capfd, override, named):
    assert run_jobs(override) == 2
    assert named in capfd.readouterr().err and jobs_of(tmp_path) == []


def test_a_signal_ends_all_jobs_and_those_that_ended_before_get_their_table(run_jobs, tmp_path, monkeypatch):
    def stopped(composed):
        if composed.train.seed == 1:
            raise OSError("no space")
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(train, "compare", stopped)
    assert run_jobs("train.seed=1,2,3") == 128 + signal.SIGTERM
    assert len(jobs_of(tmp_path)) == 2
    assert "no space" in (tmp_path / "comparison.md").read_text()


def test_the_jobs_of_one_command_are_not_those_of_the_next(run_jobs, tmp_path, monkeypatch):
    def broken(composed):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(train, "compare", broken)
        assert run_jobs("ops=native", "train.seed=1,2") == 1 and len(train.jobs.failed) == 2
    assert run_jobs("ops=native", "train.seed=1") == 0 and not list(tmp_path.glob("0-*/error.txt"))


def test_the_table_can_be_made_of_any_runs(tmp_path, capsys, monkeypatch):
    row = {
        "metrics": {"loss": 1.5, "auc": 0.75},
        "throughput": {"value": 1200.0, "low": 1100.0, "high": 1300.0, "unit": "samples/s", "step_ms": 2.5},
        "peak_memory_bytes": 3 * 2**20,
    }
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    summary = {"model": "toy", "device": "GPU", "arms": {"native": row, "fused": row}}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    table = multirun.join({tmp_path / "a": "seed=1", tmp_path / "b": ""})
    shown = ("loss 1.5000, auc 0.7500", "1.2k samples/s (1.1k to 1.3k)", "2.50", "3 MiB", "GPU")
    assert table.rows == [("a seed=1", "toy", arm, *shown) for arm in ("native", "fused")]


# ---------------------------------------------------------------------------------------------------------------------
# Directories


def test_runs_that_start_at_once_get_a_directory_each():
    stamps = [config._stamp() for _ in range(2)]
    assert len({stamp[: len("2026-01-01_00-00-00")] for stamp in stamps}) <= 2 and len(set(stamps)) == 2


@pytest.mark.slow
def test_two_processes_that_start_together_get_a_directory_each(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, "ops=native"]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    directories = list((tmp_path / "runs").iterdir())
    assert len(directories) == 2 and all((directory / "summary.json").exists() for directory in directories)
