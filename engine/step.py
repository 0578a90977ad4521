"""One training step: forward under autocast, backward, clipping, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

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
        for values in sparse:
            values.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class StepResult(NamedTuple):
    """A step's loss and its gradient's norm before clipping, both on the device, and whether fp16 skipped the step."""

    loss: Tensor
    gradient_norm: Tensor
    skipped: bool


class Stepper:
    """Trains a model by one step a call, in one phase.

    A step whose fp16 gradients are not finite is skipped: neither the weights nor the schedule move, and the loss is
    scaled less from then on.
    """

    def __init__(self, task: Task, model: nn.Module, phase: Phase, train: TrainConfig, device: torch.device) -> None:
        self.model = model.train()
        self.taken = 0
        """Steps that moved the weights: the schedule's position."""
        self._task, self._phase, self._train, self._device = task, phase, train, device
        self._optimizers = phase.optimizers(model)
        self._groups = [(group, group["lr"]) for optimizer in self._optimizers for group in optimizer.param_groups]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._scaler = torch.amp.GradScaler(device.type) if train.precision == "fp16" else None

    @property
    def learning_rate(self) -> float:
        """The first parameter group's, in the latest step."""
        return float(self._groups[0][0]["lr"])

    def __call__(self, batch: Batch) -> StepResult:
        """One step on a batch that is on the device."""
        factor = self._phase.schedule(self.taken)
        for group, peak in self._groups:
            group["lr"] = peak * factor
        with autocast(self._device, self._train.precision):
            loss, _ = self._task.loss(self.model, batch)
        if self._scaler is None:
            backward(loss)
            norm = clip_gradients(self._parameters, self._train.grad_clip)
            for optimizer in self._optimizers:
                optimizer.step()
            skipped = False
        else:
            norm, skipped = self._scaled_step(self._scaler, loss)
        self.taken += not skipped
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return StepResult(loss.detach(), norm, skipped)

    def _scaled_step(self, scaler: torch.amp.GradScaler, loss: Tensor) -> tuple[Tensor, bool]:
        backward(scaler.scale(loss))
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
