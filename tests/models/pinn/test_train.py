"""The PINN through the engine: what a run leaves, phases that end early, a run that goes on where it stopped."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from engine.config import TrainConfig
from engine.errors import RunError
from engine.loop import Training, train_arm
from engine.progress import TrainingProgress
from engine.signals import StopSignal
from fusedops.slots import SLOTS
from models.pinn import ModelConfig, ProblemConfig, Task

ROOT = Path(__file__).resolve().parents[3]
TINY = ["model.width=8", "model.depth=2", "train.batch_size=64", "train.timing_rounds=9", "tracker=none"]


def train(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", "model=pinn", *TINY, *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def train_task(
    task: Task, train: TrainConfig, save: Any = None, resumed: Any = None
) -> tuple[Training, torch.nn.Module]:
    torch.manual_seed(train.seed)
    model = task.build({"laplacian": SLOTS["laplacian"].implementation("fused").function})
    steps = sum(phase.steps for phase in task.phases())
    progress = TrainingProgress(Console(quiet=True), "fused", steps, "points")
    lines: list[dict[str, float]] = []

    def log(step: int, values: dict[str, float]) -> None:
        lines.append(values)

    return train_arm(task, model, train, torch.device("cpu"), log, progress, StopSignal(), save, resumed), model


def task_of(model: dict[str, Any] | None = None, problem: dict[str, Any] | None = None) -> Task:
    return Task(
        ModelConfig(**{"width": 8, "depth": 2, "lbfgs_steps": 8, "lbfgs_float64": True} | (model or {})),
        ProblemConfig(**{"validation_points": 6} | (problem or {})),
        steps=12,
        batch_size=64,
        eval_batch_size=1000,
        learning_rate=5e-3,
        weight_decay=0.0,
        warmup_steps=0,
        min_lr_ratio=0.01,
        seed=0,
    )


def test_a_run_leaves_errors_over_steps_and_time_and_pictures(tmp_path: Path) -> None:
    done = train(
        "ops=fused", "train.steps=12", "model.lbfgs_steps=6", "train.eval_every=4", f"hydra.run.dir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    assert {"solution-native.png", "solution-fused.png", "relative_l2.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["arms"]) == ["native", "fused"]
    for arm in summary["arms"].values():
        assert set(arm["metrics"]) == {"loss", "relative_l2"}
        assert arm["training"]["steps"] == 18 and arm["throughput"]["unit"] == "points/s"
        assert arm["training"]["unconverged"] == "lbfgs took all its 6 steps without converging"
        assert arm["training"]["reached"] == {"relative_l2": [None, None, None]}
    assert summary["arms"]["native"]["metrics"]["relative_l2"] == pytest.approx(
        summary["arms"]["fused"]["metrics"]["relative_l2"], rel=1e-2
    )
    assert {row["implementation"] for row in summary["arms"]["fused"]["operators"]} == {"forward"}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "val/relative_l2" in line and line["arm"] == "fused"]
    assert [line["step"] for line in evaluations] == [4, 8, 12, 16, 18]
    seconds = [line["perf/seconds"] for line in evaluations]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert "lbfgs took all its 6 steps without converging" in (tmp_path / "comparison.md").read_text()
    assert "Time to accuracy" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.activation=relu"], "model.activation=relu: its second derivative is zero"),
        (["ops.laplacian=stencil"], "problem.sampling=sobol: laplacian=stencil: points.grid is None"),
        (["problem=poison"], "did you mean poisson?"),
        (["problem.boundary=soft", "problem.boundary_points=3"], "no point lies on the boundary y=1"),
        (["train.precision=bf16"], "train.precision=bf16"),
        (["compile=default"], "compile: laplacian=native nests gradients"),
        (["equivalence=2"], "equivalence=2 with model=pinn: its margin is of losses in nats"),
        (["+data=stdlib"], "data=stdlib: model=pinn has no data, it has a problem"),
        (["problem=null"], "problem=null: there is no option of problem"),
    ],
)
def test_what_cannot_be_solved_is_refused_before_training(overrides: list[str], message: str, tmp_path: Path) -> None:
    done = train(*overrides, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("term", ["residual", "boundary"])
@pytest.mark.parametrize("step", [7, 13], ids=["adam", "lbfgs"])
def test_a_loss_that_is_not_finite_stops_training_with_its_step_and_term(
    monkeypatch: pytest.MonkeyPatch, term: str, step: int
) -> None:
    task = task_of({"lbfgs_float64": False}, {"boundary": "soft"})
    name = {"residual": "residual", "boundary": "exact"}[term]
    sound, calls = getattr(task.problem, name), itertools.count(1)

    def broken(*args: torch.Tensor) -> torch.Tensor:
        """Infinite from the loss of that step on, one call a step."""
        value: torch.Tensor = sound(*args)
        in_a_loss = args[-1].dtype == torch.float32
        return value + float("inf") if in_a_loss and next(calls) >= step else value

    monkeypatch.setattr(task.problem, name, broken)
    with pytest.raises(RunError) as caught:
        train_task(task, TrainConfig(log_every=5, grad_clip=0.0))
    assert f"step {step}: the training loss is inf (residual " in str(caught.value)
    assert f"{term} inf" in str(caught.value) and str(caught.value).count("inf") == 2


def test_training_ends_where_the_target_is_reached() -> None:
    training, _ = train_task(task_of(problem={"target": 0.9}), TrainConfig(eval_every=2, grad_clip=0.0))
    step, metrics = training.validation[-1]
    assert metrics["relative_l2"] <= 0.9 < 1 and len(training.losses) == step < 20
    assert training.stopped_early is not None and "problem.target=0.9" in training.stopped_early
    assert training.unconverged is None and len(training.elapsed) == len(training.validation)


def test_a_phase_that_converges_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.pinn.task.GRADIENT_TOLERANCE", 1e9)
    training, _ = train_task(task_of(), TrainConfig(grad_clip=0.0))
    assert len(training.losses) == 13
    assert training.stopped_early == (
        "stopped at step 13 of 20: converged: no component of the gradient is above 1e+09"
    )


@pytest.mark.parametrize("at", [5, 12, 15])
def test_a_resumed_training_is_bit_equal_in_every_phase(at: int) -> None:
    train = TrainConfig(checkpoint_every=1, eval_every=5, grad_clip=0.0)
    states: dict[int, Any] = {}
    whole, trained = train_task(task_of(), train, lambda step, state: states.setdefault(step, copy.deepcopy(state)))
    again, resumed = train_task(task_of(), train, None, states[at])
    assert again.losses == whole.losses and again.validation == whole.validation
    for a, b in zip(trained.parameters(), resumed.parameters(), strict=True):
        assert a.dtype == b.dtype == torch.float64 and torch.equal(a, b)
    assert again.elapsed[-1] >= states[at]["elapsed"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", tuple(SLOTS["laplacian"].implementations))
def test_every_implementation_trains_on_a_gpu_in_both_phases(implementation: str) -> None:
    task = task_of({"width": 32}, {"sampling": "grid"})
    torch.manual_seed(0)
    model = task.build({"laplacian": SLOTS["laplacian"].implementation(implementation).function}).cuda()
    steps = sum(phase.steps for phase in task.phases())
    progress = TrainingProgress(Console(quiet=True), implementation, steps, "points")
    training = train_arm(
        task,
        model,
        TrainConfig(eval_every=10, grad_clip=0.0),
        torch.device("cuda"),
        lambda step, values: None,
        progress,
        StopSignal(),
    )
    errors = [metrics["relative_l2"] for _, metrics in training.validation]
    assert errors[-1] < errors[0] and {p.dtype for p in model.parameters()} == {torch.float64}
    assert task.figures(model)["solution"].axes
