"""The task as the engine sees it: points, loss, error, phases; every implementation trains every problem."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import TrainConfig
from engine.errors import ConfigError
from engine.step import make_stepper
from fusedops.slots import SLOTS
from fusedops.slots.laplacian import Jet, Points, autograd_jet
from models.pinn import ModelConfig, ProblemConfig, Task

CPU = torch.device("cpu")
NAMES = ("allen_cahn", "heat", "helmholtz", "poisson", "screened_poisson")
IMPLEMENTATIONS = tuple(SLOTS["laplacian"].implementations)
ON_A_GRID = ("stencil_native", "stencil")


def task_of(model: dict[str, Any] | None = None, problem: dict[str, Any] | None = None, **train: Any) -> Task:
    numbers = {
        "steps": 20,
        "batch_size": 64,
        "eval_batch_size": 100,
        "learning_rate": 5e-3,
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "min_lr_ratio": 0.01,
        "seed": 3,
    }
    model = {"width": 8, "depth": 2, "lbfgs_steps": 0} | (model or {})
    problem = {"validation_points": 6, "boundary_points": 70} | (problem or {})
    return Task(ModelConfig(**model), ProblemConfig(**problem), **numbers | train)


def model_of(task: Task, implementation: str = "native") -> nn.Module:
    torch.manual_seed(0)
    return task.build({"laplacian": SLOTS["laplacian"].implementation(implementation).function})


class Exact(nn.Module):
    """The exact solution, times `factor`, in the place of a network."""

    def __init__(self, task: Task, factor: float = 1.0) -> None:
        super().__init__()
        self.problem, self.scale = task.problem, nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.problem.exact(x)

    def jet(self, points: Points) -> Jet:
        return autograd_jet(self, points.x, self.problem.spatial, False)


@pytest.mark.parametrize("boundary", ["hard", "soft"])
@pytest.mark.parametrize("sampling", ["sobol", "uniform", "grid"])
@pytest.mark.parametrize("name", NAMES)
def test_the_exact_solution_has_no_loss_and_no_error(name: str, sampling: str, boundary: str) -> None:
    task = task_of(problem={"name": name, "sampling": sampling, "boundary": boundary}, batch_size=100)
    loss, count = task.loss(Exact(task), task.batch(2))
    assert (
        count
        == task.units(task.batch(2))
        == {"grid": {3: 125, 4: 81}}.get(sampling, {}).get(task.problem.dimensions, 100)
    )
    assert float(loss.detach()) < 1e-20
    with torch.no_grad():
        metrics = task.evaluate(Exact(task), task.validation())
    assert metrics["loss"] < 1e-20 and metrics["relative_l2"] == 0


def test_the_error_is_relative_and_over_the_whole_held_out_grid() -> None:
    task = task_of(problem={"validation_points": 7})
    sizes = [len(batch["x"]) for batch in task.validation() if "x" in batch]
    assert sizes == [100, 100, 100, 43]
    with torch.no_grad():
        metrics = task.evaluate(Exact(task, 1.25), task.validation())
    assert metrics["relative_l2"] == pytest.approx(0.25, rel=1e-12)

    model = model_of(task)
    axis = (torch.arange(7, dtype=torch.float64) + 0.5) / 7
    x = torch.cartesian_prod(axis, axis, axis)
    pi = math.pi
    exact = torch.sin(pi * x[:, 0]) * torch.sin(2 * pi * x[:, 1]) * torch.sin(pi * x[:, 2])
    with torch.no_grad():
        expected = (model(x.float()) - exact).norm() / exact.norm()
        metrics = task.evaluate(model, task.validation())
    assert metrics["relative_l2"] == pytest.approx(float(expected), rel=1e-6)


def test_the_loss_is_the_mean_squared_residual_and_the_weighted_boundary() -> None:
    task = task_of(problem={"boundary": "soft", "boundary_weight": 7.0})
    batch, model = task.batch(0), Exact(task, 1.5)
    x = batch["interior"]
    residual = 0.5 * 6 * math.pi**2 * task.problem.exact(x)  # 1.5 lap u + 6 pi^2 u
    loss, _ = task.loss(model, batch)
    torch.testing.assert_close(loss, residual.square().mean())  # u is zero on the boundary, whatever its factor
    network = model_of(task)
    inside, _ = task.loss(network, {"interior": x})
    both, _ = task.loss(network, batch)
    expected = 7 * network(batch["boundary"].float()).square().mean()
    torch.testing.assert_close(both - inside, expected, rtol=1e-4, atol=1e-4)


def test_points_are_new_every_step_of_adam_and_stay_in_lbfgs() -> None:
    task = task_of({"lbfgs_steps": 5}, steps=4)
    batches = [task.batch(step)["interior"] for step in range(9)]
    assert len({float(points[0, 0]) for points in batches[:5]}) == 5
    assert all(torch.equal(points, batches[4]) for points in batches[5:])
    assert torch.equal(batches[2], task_of(steps=4).batch(2)["interior"])
    assert not torch.equal(batches[2], task_of(steps=4, seed=4).batch(2)["interior"])
    assert not torch.equal(batches[2], task.batch(2, rank=1)["interior"])
    fixed = task_of(problem={"resample": False})
    assert torch.equal(fixed.batch(0)["interior"], fixed.batch(11)["interior"])


def test_validation_points_are_not_trained_on() -> None:
    for sampling in ("sobol", "uniform", "grid"):
        task = task_of(problem={"sampling": sampling, "validation_points": 6})
        trained = {tuple(point) for step in range(20) for point in task.batch(step)["interior"].tolist()}
        for batch in task.validation():
            points = batch.get("interior", batch.get("x"))
            assert points is not None and trained.isdisjoint(tuple(point) for point in points.tolist())


def test_the_phases_are_adam_with_decay_then_lbfgs() -> None:
    task = task_of({"lbfgs_steps": 30}, steps=100, warmup_steps=10)
    adam, lbfgs = task.phases()
    assert [(phase.name, phase.steps, phase.closure) for phase in (adam, lbfgs)] == [
        ("adam", 100, False),
        ("lbfgs", 30, True),
    ]
    factors = [adam.schedule(step) for step in range(101)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0 and factors[55] == pytest.approx(0.505) and factors[100] == pytest.approx(0.01)
    assert [lbfgs.schedule(step) for step in (0, 29)] == [1.0, 1.0]
    assert adam.dtype is None and lbfgs.dtype is None  # the preset tiny stays in float32
    assert task_of({"lbfgs_steps": 1, "lbfgs_float64": True}).phases()[1].dtype == torch.float64
    assert [phase.name for phase in task_of().phases()] == ["adam"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_and_points_have_the_models_dtype(dtype: str) -> None:
    task = task_of({"dtype": dtype})
    model = model_of(task)
    loss, _ = task.loss(model, task.batch(0))
    assert {p.dtype for p in model.parameters()} == {loss.dtype} == {getattr(torch, dtype)}


def test_training_ends_at_the_target() -> None:
    task = task_of(problem={"target": 1e-2})
    assert task.finished({"loss": 1.0, "relative_l2": 0.02}) is None
    reason = task.finished({"loss": 1.0, "relative_l2": 0.009})
    assert reason == "the relative L2 error is 0.009, and problem.target=0.01"
    assert task_of().finished({"loss": 1.0, "relative_l2": 1e-9}) is None


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"precision": "bf16"}, r"train.precision=bf16: second derivatives need more digits; .* fp32"),
        ({"accumulation": 2}, r"train.accumulation=2: allowed for model=pinn: 1"),
    ],
)
def test_training_that_a_pinn_has_no_use_for_is_refused(train: dict[str, Any], message: str) -> None:
    ops = {"laplacian": SLOTS["laplacian"].implementation("native").function}
    task_of().check(ops, TrainConfig())
    with pytest.raises(ConfigError, match=message):
        task_of().check(ops, TrainConfig(**train))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_differences_on_scattered_points_are_refused_before_training(name: str) -> None:
    ops = {"laplacian": SLOTS["laplacian"].implementation(name).function}
    task_of(problem={"sampling": "grid"}, batch_size=125).check(ops, TrainConfig())
    for sampling in ("sobol", "uniform"):
        if name in ON_A_GRID:
            with pytest.raises(ConfigError, match=rf"problem.sampling={sampling}: .*; set problem.sampling=grid"):
                task_of(problem={"sampling": sampling}).check(ops, TrainConfig())
        else:
            task_of(problem={"sampling": sampling}).check(ops, TrainConfig())


@pytest.mark.parametrize("problem", NAMES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_trains_every_problem(implementation: str, problem: str) -> None:
    task = task_of(
        {"lbfgs_steps": 8, "lbfgs_float64": True},
        {"name": problem, "sampling": "grid" if implementation in ON_A_GRID else "sobol"},
        batch_size=216 if problem != "heat" else 625,
        steps=25,
    )
    model, step, errors = model_of(task, implementation), 0, []
    for phase in task.phases():
        stepper = make_stepper(task, model, phase, TrainConfig(grad_clip=0.0), CPU)
        with torch.no_grad():
            errors.append(task.evaluate(model, task.validation())["relative_l2"])
        for _ in range(phase.steps):
            result = stepper(task.batch(step))
            assert result.loss.isfinite()
            step += 1
    with torch.no_grad():
        errors.append(task.evaluate(model, task.validation())["relative_l2"])
    assert errors[-1] < 0.5 * errors[0]
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_soft_boundary_conditions_are_learnt() -> None:
    task = task_of({"width": 16}, {"name": "heat", "boundary": "soft"}, steps=150, batch_size=128)
    model = model_of(task, "fused")
    stepper = make_stepper(task, model, task.phases()[0], TrainConfig(grad_clip=0.0), CPU)
    x = task.batch(1000)["boundary"].float()

    def miss() -> float:
        with torch.no_grad():
            return float((model(x) - task.problem.exact(x)).norm() / task.problem.exact(x).norm())

    before = miss()
    for step in range(150):
        stepper(task.batch(step))
    assert miss() < 0.6 * before


@pytest.mark.parametrize("boundary", ["hard", "soft"])
def test_the_description_says_what_is_solved_and_how(boundary: str) -> None:
    task = task_of({"lbfgs_steps": 6, "lbfgs_float64": True}, {"name": "heat", "boundary": boundary})
    described = task.describe(model_of(task))
    assert described["problem"].startswith("heat: du/dt = 0.04 lap u")
    assert "4-8-8-1" in described["model"] and f"{boundary} boundary conditions" in described["model"]
    assert (
        "20 steps of adam, then 6 steps of lbfgs in float64; 64 points a step (sobol, new ones every"
        in (described["training"])
    )
    assert ("70 on the boundary" in described["training"]) == (boundary == "soft")


def test_a_boundary_without_points_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match=r"boundary_points=5: no point lies on the boundary z=1"):
        task_of(problem={"boundary": "soft", "boundary_points": 5})
    task_of(problem={"boundary": "hard", "boundary_points": 0})


@pytest.mark.parametrize("name", ["poisson", "heat"])
def test_the_picture_shows_solution_exact_solution_and_difference(name: str) -> None:
    task = task_of(problem={"name": name})
    (figure,) = task.figures(Exact(task, 1.5)).values()
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title().split(",")[0] for axes in panels] == ["network", "exact solution", "difference"]
    network, exact, difference = (axes.images[0].get_array() for axes in panels)
    assert exact.shape == (101, 101)
    assert abs(network - 1.5 * exact).max() < 1e-12 and abs(difference - 0.5 * exact).max() < 1e-12
    assert abs(exact).max() > 0.5
