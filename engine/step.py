"""One training step: forward under autocast, backward, clipping, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine import compilation
from engine.config import TrainConfig
from engine.errors import RunError
from engine.task import Batch, Phase, Task

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_LOSS_SCALE = 2.0**-14
"""Gradients that overflow fp16 even at this scale are not a matter of scale."""


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """The autocast of a precision: none for fp32."""
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES.get(precision), enabled=precision in AUTOCAST_DTYPES)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, without waiting for the copy where the batch is in pinned memory."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def backward(loss: Tensor) -> None:
    """Gradients, in the calling thread.

    By default autograd has a thread for each GPU. With one GPU it gains nothing, and gradients that are Python
    functions, as those of every operator registered from Python, run slower in it.
    """
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients by one factor such that their joint 2-norm is at most max_norm (0 scales nothing).

    Returns the norm before that, on the gradients' device. A sparse gradient is coalesced, and counts by its coalesced
    values: entries of one row are summed before they are squared.
    """
    dense, sparse = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            sparse.append(parameter.grad.values())
        else:
            dense.append(parameter)
    norm = torch.nn.utils.get_total_norm([*(p.grad for p in dense if p.grad is not None), *sparse])
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)
        if sparse:
            torch._foreach_mul_(sparse, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class StepResult(NamedTuple):
    """A step's loss and its gradient's norm before clipping, both on the device, and whether fp16 skipped the step.

    terms: what the loss was the sum of, by name, where the task tells; of several batches, the last one's.
    """

    loss: Tensor
    gradient_norm: Tensor
    skipped: bool
    terms: Mapping[str, Tensor]


class TrainingStep(Protocol):
    """Trains a model by one step a call, in one phase."""

    taken: int
    """Steps that moved the weights: the schedule's position."""
    finished: str | None
    """Why the phase ends before its last step, or None while it goes on."""

    @property
    def learning_rate(self) -> float:
        """The first parameter group's, in the latest step."""

    def __call__(self, *batches: Batch) -> StepResult:
        """One step on the batches, which are on the device."""

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on besides the model and the batches."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


def make_stepper(task: Task, model: nn.Module, phase: Phase, train: TrainConfig, device: torch.device) -> TrainingStep:
    """What takes the steps of a phase. The model's parameters get the dtype that the phase asks for."""
    if phase.dtype is not None:
        model.to(phase.dtype)
    if phase.closure:
        from engine.closure import ClosureStepper  # which is a Stepper

        return ClosureStepper(task, model, phase, train, device)
    return Stepper(task, model, phase, train, device)


class Stepper:
    """The step of optimizers that are given a gradient: forward and backward once a batch, then one update.

    Of several batches (gradient accumulation) each counts by what its loss is averaged over, so that loss and gradient
    are those of one batch made of them all. A step whose fp16 gradients are not finite is skipped: neither the weights
    nor the schedule move, and the loss is scaled less from then on.
    """

    def __init__(self, task: Task, model: nn.Module, phase: Phase, train: TrainConfig, device: torch.device) -> None:
        self.model = model.train()
        self.taken = 0
        """Steps that moved the weights: the schedule's position."""
        self.finished: str | None = None
        self._task, self._phase, self._train, self._device = task, phase, train, device
        self._optimizers = phase.optimizers(model)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._scaler = torch.amp.GradScaler(device.type) if train.precision == "fp16" else None

    @property
    def learning_rate(self) -> float:
        """The first parameter group's, in the latest step."""
        return float(self._optimizers[0].param_groups[0]["lr"])

    def __call__(self, *batches: Batch) -> StepResult:
        """One step on the batches, which are on the device."""
        factor = self._phase.schedule(self.taken)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        loss = self._accumulate(batches)
        if self._scaler is None:
            norm = clip_gradients(self._parameters, self._train.grad_clip)
            for optimizer in self._optimizers:
                optimizer.step()
            skipped = False
        else:
            norm, skipped = self._scaled_step(self._scaler)
        self.taken += not skipped
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm, skipped, self._task.terms())

    def state_dict(self) -> dict[str, Any]:
        """The schedule's position, the optimizers' states and the scaler's."""
        return {
            "taken": self.taken,
            "finished": self.finished,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.taken, self.finished = state["taken"], state["finished"]
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])

    def _accumulate(self, batches: Sequence[Batch]) -> Tensor:
        """Leave the gradient of all batches in the parameters, scaled for fp16; returns their mean loss."""
        losses: list[Tensor] = []
        graphed = compilation.is_graphed(self.model)
        for batch, weight in self._weighted(batches):
            if graphed and len(losses) == 1:
                compilation.own_gradients(self._parameters)
            compilation.begin_step(self.model)
            with autocast(self._device, self._train.precision):
                loss, _ = self._task.loss(self.model, batch)
            if weight != 1:
                loss = loss * weight
            backward(loss if self._scaler is None else self._scaler.scale(loss))
            losses.append(loss.detach().clone() if graphed else loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _weighted(self, batches: Sequence[Batch]) -> list[tuple[Batch, float]]:
        """Each batch with its share of what the step is averaged over, those without any left out."""
        if len(batches) == 1:
            return [(batches[0], 1.0)]
        counts = [self._task.count(batch) for batch in batches]
        if not any(counts):
            raise RunError(f"none of the {len(batches)} batches of a step has anything that counts")
        return [(batch, count / sum(counts)) for batch, count in zip(batches, counts, strict=True) if count]

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> tuple[Tensor, bool]:
        for optimizer in self._optimizers:
            scaler.unscale_(optimizer)
        norm = clip_gradients(self._parameters, self._train.grad_clip)
        before = scaler.get_scale()
        for optimizer in self._optimizers:
            scaler.step(optimizer)
        scaler.update()
        after = scaler.get_scale()
        if after < SMALLEST_LOSS_SCALE:
            raise RunError(f"gradients are not finite in fp16 even with the loss scaled by {before:g}")
        return norm, after < before
