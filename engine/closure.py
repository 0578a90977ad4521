"""The step of an optimizer that evaluates the loss itself, several times a step: L-BFGS with a line search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from engine import compilation
from engine.config import TrainConfig
from engine.errors import ConfigError
from engine.step import Stepper, StepResult
from engine.task import Batch, Phase, Task


class _Evaluation(NamedTuple):
    """A loss, the terms it is the sum of, and its gradients at some parameters."""

    parameters: Tensor
    loss: Tensor
    terms: Mapping[str, Tensor]
    gradients: list[Tensor]


class ClosureStepper(Stepper):
    """One iteration of `torch.optim.LBFGS` a call, on batches that should be the same every time.

    The phase's optimizer must be one LBFGS of max_iter 1, whose max_eval bounds the evaluations of an iteration. The
    iteration's first evaluation is that of the accepted point of the line search before, and is not made twice.
    The gradient is not clipped. When an iteration changes nothing, the next begins anew from steepest descent; when
    that changes nothing either, or the gradient is below the optimizer's tolerance_grad, `finished` says so. A line
    search that ends where the loss is not finite, which it cannot compare, is taken back to the lowest loss it saw.

    Raises ConfigError for fp16, whose scaled loss no line search can compare.
    """

    def __init__(self, task: Task, model: nn.Module, phase: Phase, train: TrainConfig, device: torch.device) -> None:
        if train.precision == "fp16":
            raise ConfigError(f"train.precision=fp16: the phase {phase.name} compares losses; fp32 and bf16 work")
        super().__init__(task, model, phase, train, device)
        (optimizer,) = self._optimizers
        if not isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(f"the phase {phase.name} needs torch.optim.LBFGS, not {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._batches: tuple[Batch, ...] = ()
        self._evaluated: list[_Evaluation] = []

    def __call__(self, *batches: Batch) -> StepResult:
        """One iteration; the loss and the gradient's norm are those at its beginning."""
        self._optimizer.param_groups[0]["lr"] = self._peaks[0][0] * self._phase.schedule(self.taken)
        if not _same(batches, self._batches):
            self._batches, self._evaluated = batches, []
        start = self._evaluate()
        self._optimizer.step(self._closure)
        self._leave_non_finite(start)
        now = parameters_to_vector(self._parameters).detach()
        self._evaluated = [known for known in self._evaluated if torch.equal(known.parameters, now)]
        if not torch.equal(now, start.parameters):
            self.taken += 1
        else:
            self._note_standstill(start)
        return StepResult(start.loss, torch.nn.utils.get_total_norm(start.gradients), False, start.terms)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._batches, self._evaluated = (), []

    @torch.no_grad()
    def _leave_non_finite(self, start: _Evaluation) -> None:
        """Where an iteration began at a finite loss and ended at none: go to the lowest loss it saw, and begin anew."""
        now = parameters_to_vector(self._parameters)
        here = [known for known in self._evaluated if torch.equal(known.parameters, now)]
        sound = now.isfinite().all() and all(known.loss.isfinite() for known in here)
        if sound or not start.loss.isfinite():
            return
        finite = [known for known in self._evaluated if known.loss.isfinite()]
        best = min(finite, key=lambda known: float(known.loss))
        values = best.parameters.split([p.numel() for p in self._parameters])
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value.view_as(parameter))
        if best is not start:  # `_note_standstill` decides about the other case
            self._optimizer.state[self._parameters[0]].clear()

    def _note_standstill(self, at: _Evaluation) -> None:
        steepest = max(float(gradient.abs().max()) for gradient in at.gradients)
        tolerance = self._optimizer.param_groups[0]["tolerance_grad"]
        state = self._optimizer.state[self._parameters[0]]
        if steepest <= tolerance:
            self.finished = f"converged: no component of the gradient is above {tolerance:g}"
        elif state.get("n_iter", 0) <= 1:
            self.finished = f"the line search found no lower loss, even along the gradient (largest: {steepest:.3g})"
        else:
            state.clear()

    def _closure(self) -> Tensor:
        evaluation = self._evaluate()
        for parameter, gradient in zip(self._parameters, evaluation.gradients, strict=True):
            parameter.grad = gradient
        return evaluation.loss

    def _evaluate(self) -> _Evaluation:
        """The loss and gradients at the current parameters, from memory where they are known."""
        now = parameters_to_vector(self._parameters).detach()
        for known in self._evaluated:
            if torch.equal(known.parameters, now):
                return known
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(self._batches)
        if compilation.is_graphed(self.model):
            compilation.own_gradients(self._parameters)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self._evaluated.append(_Evaluation(now, loss, self._task.terms(), gradients))
        return self._evaluated[-1]


def _same(batches: Sequence[Batch], others: Sequence[Batch]) -> bool:
    """Whether batches hold the same values."""
    return len(batches) == len(others) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(batches, others, strict=True)
    )
