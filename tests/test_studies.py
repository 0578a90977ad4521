"""The commands: equivalence=N and ablate=true of train.py, benchmarks/equivalence.py and the faults it plants."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from benchmarks import equivalence as benchmark
from benchmarks.equivalence import Job, Pace, Request
from benchmarks.faults import FAULTS, faulty_arms
from engine import attribution, equivalence
from engine.arms import operator_set
from fusedops.slots import SLOTS

ROOT = Path(train.__file__).parent
SMALL = [
    "train.device=cpu",
    "model.n_layer=1",
    "model.n_head=2",
    "model.d_model=12",
    "model.d_ff=20",
    "model.context=16",
    "model.dropout=0.2",
    "data.validation_fraction=0.0005",
    "train.steps=4",
    "train.warmup_steps=2",
    "train.batch_size=3",
]

OUTCOME = {
    "seed": 0,
    "training": "native",
    "metrics": {"loss": 1.0},
    "final_loss": 1.0,
    "steps": 4,
    "skipped_steps": 0,
    "units": 192,
    "seconds": 1.0,
    "commit": None,
    "conditions": "others",
}
"""A line of equivalence.jsonl."""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )


# ---------------------------------------------------------------------------------------------------------------------
# train.py


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["equivalence=-1"], ["equivalence=-1", "at least 0"]),
        (["equivalence=some"], ["equivalence=some", "expected int"]),
        (["equivalence_margin=-0.1"], ["equivalence_margin=-0.1", "at least 0"]),
        (["ablate=perhaps"], ["ablate=perhaps", "expected bool"]),
        (["equivalence=2", "ablate=true"], ["equivalence=2", "ablate=true"]),
        (["equivalence=2", "profile=true"], ["profile=true", "equivalence=2"]),
        (["ablate=true", "profile=true"], ["profile=true", "ablate=true"]),
        (["equivalence=2", "baseline=none"], ["equivalence=2", "baseline=none", "baseline=native"]),
        (["ablate=true", "ops=native"], ["ablate=true", "ops=native", "ops=fused"]),
        (["ablate=true", "compile=default", "compile.arms=both"], ["ablate=true", "compile.arms=both"]),
    ],
    ids=" ".join,
)
def test_what_cannot_be_compared_is_refused(monkeypatch, capfd, tmp_path, overrides, named):
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *overrides, "tracker=none", f"hydra.run.dir={tmp_path}"])
    assert train.main() == 2
    error = capfd.readouterr().err
    assert all(text in error for text in named), error
    assert not {path.name for path in tmp_path.iterdir()} & {"equivalence.jsonl", "attribution.json"}


def test_equivalence_from_the_command_line_goes_on_in_the_same_directory(monkeypatch, tmp_path):
    overrides = [*SMALL, "tracker=none", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides, "equivalence=1"])
    assert train.main() == 0
    done = run("train.py", f"resume={tmp_path}", "equivalence=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": validation loss") == 3 and "seed 0," not in done.stdout
    summary = json.loads((tmp_path / "equivalence.json").read_text())
    assert summary["comparisons"]["fused"]["count"] == summary["noise"]["count"] == 2
    assert len(summary["trainings"]) == 6 and {t["steps"] for t in summary["trainings"]} == {4}
    assert {t["units"] for t in summary["trainings"]} == {4 * 3 * 16}
    assert "fused - mean of native, native'" in done.stdout.replace("\n", " ")
    files = {"equivalence.jsonl", "equivalence.md", "equivalence.png", "config.yaml"}
    assert files <= {path.name for path in tmp_path.iterdir()}


def test_a_study_that_cannot_go_on_leaves_the_directory_as_it_is(monkeypatch, capfd, tmp_path):
    kept = {"equivalence.jsonl": json.dumps(OUTCOME) + "\n", "config.yaml": "of: that study\n", "summary.json": "{}\n"}
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, "tracker=none", f"hydra.run.dir={tmp_path}", "equivalence=1"])
    assert train.main() == 2
    assert "of another configuration" in capfd.readouterr().err
    assert {name: (tmp_path / name).read_text() for name in kept} == kept


def test_a_tracker_gets_the_final_figures_of_both(monkeypatch, tmp_path):
    monkeypatch.setattr(attribution, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(attribution, "MOST_BATCHES", 1)
    for name, asked in (("equivalence", "equivalence=2"), ("attribution", "ablate=true")):
        directory = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, asked, "tracker=wandb", f"hydra.run.dir={directory}"])
        assert train.main() == 0
        assert (directory / f"{name}.json").exists()
        assert len(list(directory.glob("wandb/offline-run-*/run-*.wandb"))) == 1


def test_ablate_from_the_command_line(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(attribution, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(attribution, "MOST_BATCHES", 1)
    overrides = [*SMALL, "ablate=true", "tracker=none", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    assert train.main() == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "native; native,attention=fused; native,mlp=fused; fused" in shown
    summary = json.loads((tmp_path / "attribution.json").read_text())
    wall = summary["measures"]["wall"]
    assert set(wall["slots"]) == {"attention", "mlp"} and wall["rounds"] == 9
    parts = sum(part["ms"]["value"] for part in wall["slots"].values())
    assert parts + wall["residual"]["ms"]["value"] == pytest.approx(wall["total"]["ms"]["value"], abs=1e-9)
    for profile in summary["profile"].values():
        assert all(0 < slot["share_of_step"] < 1 for slot in profile["slots"].values())
    assert not (tmp_path / "summary.json").exists()


# ---------------------------------------------------------------------------------------------------------------------
# benchmarks/equivalence.py


def test_jobs_are_estimated_from_their_like():
    small, large = Request("small", (), False), Request("large", (), False)
    job = Job(small, 3, "fused", cost=10.0)
    pace = Pace()
    assert pace.estimate(job) == 0.0
    pace.ended.append((Job(large, 0, "native", cost=40.0), 80.0, True))
    assert pace.estimate(job) == pytest.approx(20.0)
    pace.ended.append((Job(small, 0, "native", cost=10.0), 50.0, False))  # the first of its process
    assert pace.estimate(job) == pytest.approx(50.0)
    pace.ended.append((Job(small, 1, "native", cost=10.0), 24.0, True))
    assert pace.estimate(job) == pytest.approx(24.0)
    pace.ended.append((Job(small, 1, "fused", cost=10.0), 34.0, True))
    assert pace.estimate(job) == pytest.approx(34.0)


@pytest.mark.slow
def test_the_benchmark_trains_what_train_py_does_and_goes_on(monkeypatch, capsys, tmp_path):
    command = ["benchmarks/equivalence.py", "transformer_cpu", "--out", str(tmp_path / "results")]
    done = run(*command, "--pairs", "1", "--", *SMALL)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "results" / "cpu" / "equivalence_transformer_cpu.json"
    first = json.loads(path.read_text())
    assert {t["training"] for t in first["trainings"]} == {"fused", "native", "native'"}

    overrides = ["experiment=transformer_cpu", *SMALL, "equivalence=1", "tracker=none", f"hydra.run.dir={tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    assert train.main() == 0
    same = json.loads((tmp_path / "run" / "equivalence.json").read_text())
    for one, other in zip(same["trainings"], first["trainings"], strict=True):
        for key in ("seed", "training", "steps", "units", "conditions"):
            assert one[key] == other[key]
        assert one["metrics"]["loss"] == pytest.approx(other["metrics"]["loss"], rel=1e-5)  # other numbers of threads

    def script(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [*command, *arguments])
        return benchmark.main()

    assert script("--pairs", "2", "--budget-seconds", "0", "--", *SMALL) == 0  # no time for anything
    assert "3 trainings were not started" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["trainings"]) == 3
    assert script("--pairs", "1", "--", *SMALL, "train.batch_size=4") == 2
    assert "another configuration" in capsys.readouterr().err

    done = run(*command, "--pairs", "1", "--faults", "--", *SMALL)  # the stock trainings are there
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": validation loss") == len(FAULTS)
    faults = json.loads((path.parent / "faults_transformer_cpu.json").read_text())
    assert list(faults["comparisons"]) == [fault.name for fault in FAULTS]


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults


def attention_inputs(length: int) -> list[torch.Tensor]:
    return [torch.randn(2, 3, length, 8, dtype=torch.float64) for _ in range(3)]


def test_each_fault_is_the_fault_it_says():
    faults = {fault.name: fault.function for fault in FAULTS}
    attention = SLOTS["attention"].implementation("native").function
    q, k, v = attention_inputs(7)
    right = attention(q, k, v, True, None)
    ahead = faults["attention mask one ahead"](q, k, v, True, None)
    assert not torch.allclose(ahead, right) and torch.allclose(ahead[:, :, -1], right[:, :, -1])
    changed = k.clone()
    changed[:, :, 4] += 1
    moved = (faults["attention mask one ahead"](q, changed, v, True, None) - ahead).abs().amax((0, 1, 3))
    assert moved[2] == 0 and moved[3] > 0
    behind = faults["attention mask one behind"](q, k, v, True, None)
    moved = (faults["attention mask one behind"](q, changed, v, True, None) - behind).abs().amax((0, 1, 3))
    assert moved[4] == 0 and moved[5] > 0 and torch.isfinite(behind).all()

    x, w1, b1, w2, b2 = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 4), (6, 4), (6,), (4, 6), (4,)))
    native = SLOTS["mlp"].implementation("native").function
    gradients = {}
    for name, function in (("right", native), ("half", faults["half the bias gradient"])):
        leaves = [t.clone().requires_grad_() for t in (x, w1, b1, w2, b2)]
        y = function(*leaves, 0.0, "none", True)
        gradients[name] = [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
    for i, (right, half) in enumerate(zip(gradients["right"], gradients["half"], strict=True)):
        torch.testing.assert_close(half, right / 2 if i == 3 else right)
    arguments = (x, w1, b1, w2, torch.zeros(4, dtype=torch.float64))
    scaled = faults["dropout's scale 2 % off"]
    torch.testing.assert_close(scaled(*arguments, 0.0, "none", True), 1.02 * native(*arguments, 0.0, "none", True))
    torch.testing.assert_close(scaled(*arguments, 0.5, "none", False), native(*arguments, 0.5, "none", False))


def test_a_fault_replaces_its_slot_and_no_other():
    stock = operator_set("native", ("attention", "mlp"))
    for arm in faulty_arms(stock, ("attention", "mlp")):
        assert sum(a != b for a, b in zip(arm.implementations, stock.implementations, strict=True)) == 1
    assert not faulty_arms(operator_set("native", ("activation",)), ("activation",))
    assert not any(fault.name in SLOTS[fault.slot].implementations for fault in FAULTS)  # no choice of a configuration


@pytest.mark.slow
def test_a_blatant_fault_is_seen_and_a_subtle_one_is_not_larger_than_what_is_resolved():
    """Two layers for 100 steps: what each fault does to the loss of a run at this size."""
    small = ("train.device=cpu", "train.steps=100", "train.batch_size=4", "data.validation_fraction=0.002")
    request = Request("transformer_cpu", small, faults=True)
    settings, task, arms = request.prepare()
    study = request.study(settings, task, arms)
    names = ["attention mask one ahead", "half the bias gradient"]
    kept = [name for name in study.trainings if name in names or name.startswith("native")]
    outcomes = [study.train(seed, name) for seed in range(3) for name in kept]
    found = equivalence.summarize(outcomes, names, "native", 0.01)["comparisons"]
    ahead, half = (found[name] for name in names)
    assert ahead["verdict"] == "different" and ahead["high"] < -0.1  # it reads what it is to predict
    assert abs(half["mean"]) < 0.2 * abs(ahead["mean"]) and math.isfinite(half["half_width"])
