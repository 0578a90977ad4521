"""L-BFGS as a phase: the iterations of torch.optim.LBFGS, their evaluations, and why they end."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.closure import ClosureStepper
from engine.config import TrainConfig
from engine.errors import ConfigError
from engine.step import make_stepper
from engine.task import Batch, Phase, Task

CPU = torch.device("cpu")


class Reversed(torch.autograd.Function):
    """The identity with a gradient of the wrong sign: no step along it lowers a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class FitTask(Task):
    """A small network fitted to sine, in float64; `evaluations` counts calls of the loss."""

    name = "fit"
    unit = "points"
    slots = ("activation",)
    reverse = False
    fixed = True

    def __init__(self, steps: int = 10, dtype: torch.dtype | None = torch.float64, **lbfgs: Any) -> None:
        self.steps, self.dtype, self.lbfgs = steps, dtype, {"max_iter": 1, "max_eval": 25, "tolerance_grad": 0} | lbfgs
        self.evaluations = 0

    def build(self, ops: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def batch(self, step: int, rank: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(0 if self.fixed else step)
        return {"x": torch.rand(40, 1, generator=generator, dtype=torch.float64)}

    def units(self, batch: Batch) -> int:
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        self.evaluations += 1
        x = batch["x"].to(next(model.parameters()).dtype)
        loss = (model(x) - torch.sin(6 * x)).square().mean()
        return (Reversed.apply(loss) if self.reverse else loss), len(x)

    def validation(self) -> Iterable[Batch]:
        return [self.batch(1000)]

    def phases(self) -> list[Phase]:
        return [Phase("lbfgs", self.steps, self.optimizers, lambda step: 1.0, closure=True, dtype=self.dtype)]

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        settings = {"tolerance_change": 0, "line_search_fn": "strong_wolfe"} | self.lbfgs
        return [torch.optim.LBFGS(model.parameters(), **settings)]

    def flops_per_step(self) -> None:
        return None


def stepper_of(task: FitTask, **train: Any) -> ClosureStepper:
    torch.manual_seed(2)
    stepper = make_stepper(task, task.build({}), task.phases()[0], TrainConfig(**train), CPU)
    assert isinstance(stepper, ClosureStepper)
    return stepper


def flat(stepper: ClosureStepper) -> Tensor:
    return nn.utils.parameters_to_vector(stepper.model.parameters()).detach()


def test_steps_are_the_iterations_of_one_call_of_lbfgs_without_its_evaluations_made_twice() -> None:
    task = FitTask()
    stepper = stepper_of(task)
    losses = [float(stepper(task.batch(step)).loss) for step in range(30)]

    reference = FitTask(max_iter=30, max_eval=1000)
    torch.manual_seed(2)
    model = reference.build({}).double()
    (optimizer,) = reference.optimizers(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss, _ = reference.loss(model, reference.batch(0))
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(flat(stepper), nn.utils.parameters_to_vector(model.parameters()).detach())
    assert task.evaluations == reference.evaluations
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.05 * losses[0]
    assert stepper.taken == 30 and stepper.finished is None and stepper.learning_rate == 1.0


def test_the_loss_and_the_norm_are_those_before_the_iteration() -> None:
    task = FitTask()
    stepper = stepper_of(task)
    loss, _ = task.loss(stepper.model, task.batch(0))
    gradients = torch.autograd.grad(loss, list(stepper.model.parameters()))
    loss = loss.detach()
    result = stepper(task.batch(0))
    assert float(result.loss) == float(loss.detach()) and not result.skipped
    torch.testing.assert_close(result.gradient_norm, torch.cat([g.flatten() for g in gradients]).norm())


@pytest.mark.parametrize("unsound", [float("nan"), float("inf")])
@pytest.mark.parametrize("iteration", [0, 4])
def test_a_line_search_that_ends_at_no_finite_loss_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, unsound: float, iteration: int
) -> None:
    """Some trials of one iteration overflow; the losses go on falling, and no weight is lost."""
    task = FitTask()
    stepper = stepper_of(task)
    losses, sound = [float(stepper(task.batch(0)).loss) for _ in range(iteration)], task.loss

    def overflowing(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        loss, count = sound(model, batch)
        return loss * unsound, count

    stepper._batches = (task.batch(0),)
    start = stepper._evaluate()  # known from here on: what overflows are the trials
    monkeypatch.setattr(task, "loss", overflowing)
    losses.append(float(stepper(task.batch(0)).loss))
    monkeypatch.setattr(task, "loss", sound)
    assert torch.equal(flat(stepper), start.parameters)
    if iteration == 0:
        assert stepper.finished is not None and "found no lower loss" in stepper.finished
    else:
        assert stepper.finished is None
        losses += [float(stepper(task.batch(0)).loss) for _ in range(10)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[iteration]


def test_other_points_are_evaluated_anew() -> None:
    task = FitTask()
    task.fixed = False
    stepper = stepper_of(task)
    for step in range(3):
        expected, _ = task.loss(stepper.model, task.batch(step))
        assert float(stepper(task.batch(step)).loss) == float(expected.detach())


def test_several_batches_are_one_of_them_all() -> None:
    whole, parts = stepper_of(FitTask()), stepper_of(FitTask())
    x = FitTask().batch(0)["x"]
    for _ in range(5):
        a, b = whole({"x": x}), parts({"x": x[:30]}, {"x": x[30:]})
        torch.testing.assert_close(a.loss, b.loss)
    torch.testing.assert_close(flat(whole), flat(parts), rtol=1e-6, atol=1e-8)


def test_parameters_are_converted_where_the_phase_says_so() -> None:
    assert flat(stepper_of(FitTask())).dtype == torch.float64
    assert flat(stepper_of(FitTask(dtype=None))).dtype == torch.float32


def test_convergence_is_the_reason() -> None:
    task = FitTask(tolerance_grad=1e-2)
    stepper = stepper_of(task)
    for _ in range(200):
        result = stepper(task.batch(0))
        if stepper.finished:
            break
    assert stepper.finished == "converged: no component of the gradient is above 0.01"
    loss, _ = task.loss(stepper.model, task.batch(0))
    gradients = torch.autograd.grad(loss, list(stepper.model.parameters()))
    assert max(float(g.abs().max()) for g in gradients) <= 1e-2
    assert float(result.loss) == float(loss.detach())


def test_a_line_search_that_finds_nothing_is_the_reason() -> None:
    task = FitTask()
    stepper = stepper_of(task)
    for _ in range(5):
        stepper(task.batch(0))
    before, task.reverse = flat(stepper), True
    stepper._evaluated.clear()
    for _ in range(5):
        stepper(task.batch(0))
        if stepper.finished:
            break
    assert stepper.finished is not None and "line search found no lower loss" in stepper.finished
    assert torch.equal(flat(stepper), before)


def test_going_on_from_a_state_gives_the_same_iterations() -> None:
    task = FitTask()
    stepper = stepper_of(task)
    for _ in range(7):
        stepper(task.batch(0))
    other = stepper_of(FitTask())
    other.model.load_state_dict(stepper.model.state_dict())
    other.load_state_dict(copy.deepcopy(stepper.state_dict()))
    for _ in range(7):
        assert float(stepper(task.batch(0)).loss) == float(other(task.batch(0)).loss)
    assert torch.equal(flat(stepper), flat(other)) and stepper.taken == other.taken == 14


def test_fp16_and_other_optimizers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.precision=fp16: the phase lbfgs compares losses"):
        stepper_of(FitTask(), precision="fp16")
    task = FitTask()
    phase = Phase("adam", 1, lambda m: [torch.optim.Adam(m.parameters())], lambda step: 1.0, closure=True)
    with pytest.raises(TypeError, match=r"the phase adam needs torch.optim.LBFGS, not Adam"):
        make_stepper(task, task.build({}), phase, TrainConfig(), CPU)
