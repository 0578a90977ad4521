"""The loop: trains one arm, evaluates it, and measures what that took."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.config import TrainConfig
from engine.errors import RunError
from engine.progress import TrainingProgress
from engine.signals import StopSignal
from engine.step import Stepper, StepResult, autocast, to_device
from engine.task import Batch, Task

WARMUP_STEPS = 3
"""First steps of an arm that its training throughput leaves out: allocations, kernel compilation."""

Log = Callable[[int, dict[str, float]], None]
"""Takes a step and the values measured at it, by names such as "train/loss"."""


@dataclass
class Training:
    """What training an arm gave."""

    losses: list[float] = field(default_factory=list)
    """The training loss of every step."""
    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """The validation metrics after a number of steps, the last after all."""
    seconds: float = 0.0
    """Wall time of the steps, without evaluations and the first steps."""
    units: int = 0
    """Units of work done in that time."""
    skipped_steps: int = 0
    """Steps that fp16 skipped since their gradients were not finite."""
    peak_memory_bytes: int | None = None
    """The most GPU memory allocated at once in training steps; None on the CPU."""

    @property
    def throughput(self) -> float | None:
        """Units a second, or None where there were too few steps to tell."""
        return self.units / self.seconds if self.units else None


@contextlib.contextmanager
def matmul_precision(tf32: bool) -> Iterator[None]:
    """fp32 products with or without TF32, as before on leaving."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training_batches(task: Task, steps: int, device: torch.device) -> Iterator[tuple[Batch, int]]:
    """The batches of steps 0 to steps - 1 on the device, each with its units; for a GPU, prepared a step ahead."""
    if device.type != "cuda":
        for step in range(steps):
            batch = task.batch(step)
            yield to_device(batch, device), task.units(batch)
        return

    def prepare(step: int) -> Batch:
        return {name: tensor.pin_memory() for name, tensor in task.batch(step).items()}

    with ThreadPoolExecutor(1) as worker:
        ahead = worker.submit(prepare, 0)
        for step in range(steps):
            batch = ahead.result()
            if step + 1 < steps:
                ahead = worker.submit(prepare, step + 1)
            yield to_device(batch, device), task.units(batch)


def evaluate(
    task: Task, model: nn.Module, train: TrainConfig, device: torch.device, stop: StopSignal
) -> dict[str, float]:
    """The metrics over the whole validation set. Raises RunError for one that is not finite."""

    def batches() -> Iterator[Batch]:
        for batch in task.validation():
            stop.check()
            yield to_device(batch, device)

    model.eval()
    with torch.no_grad(), autocast(device, train.precision):
        metrics = task.evaluate(model, batches())
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise RunError(f"validation {name} is {value}")
    return metrics


class _Window:
    """The steps since the last line of the log, their losses and norms still on the device."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def close(self, first_step: int) -> tuple[list[float], list[float]]:
        """The losses and gradient norms on the host, which waits for the device. Raises RunError if one is not finite."""
        losses = _to_host([result.loss for result in self.results])
        norms = _to_host([result.gradient_norm for result in self.results])
        for i, (loss, norm, result) in enumerate(zip(losses, norms, self.results, strict=True)):
            if not math.isfinite(loss):
                raise RunError(f"step {first_step + i}: the training loss is {loss}")
            if not math.isfinite(norm) and not result.skipped:
                raise RunError(f"step {first_step + i}: the norm of the gradient is {norm}")
        self.results = []
        return losses, norms


def _to_host(scalars: list[Tensor]) -> list[float]:
    return torch.stack([scalar.float() for scalar in scalars]).tolist()


def train_arm(
    task: Task,
    model: nn.Module,
    train: TrainConfig,
    device: torch.device,
    log: Log,
    progress: TrainingProgress,
    stop: StopSignal,
) -> Training:
    """Train a model, on the device already, through the task's phases, and evaluate it.

    Steps are counted from 1 in logs and messages. Raises RunError naming step and term when a loss or a gradient's norm is
    not finite, Interrupted after the step during which a signal came.
    """
    torch.manual_seed(train.seed)  # dropout's
    result, window, clock = Training(), _Window(), _Clock(device)
    phases = task.phases()
    steps = sum(phase.steps for phase in phases)
    batches = training_batches(task, steps, device)
    step = 0

    def close_window() -> None:
        count = len(window.results)
        if not count:
            return
        result.skipped_steps += sum(r.skipped for r in window.results)
        losses, norms = window.close(step - count + 1)
        clock.lap()
        throughput = clock.units / clock.seconds if clock.units else None
        result.losses += losses
        values = {"train/loss": sum(losses) / count, "train/learning_rate": stepper.learning_rate}
        if math.isfinite(norms[-1]):
            values["train/gradient_norm"] = norms[-1]
        if throughput is not None:
            values[f"perf/{task.unit}_per_s"] = throughput
        log(step, values)
        progress.measured(values["train/loss"], throughput)
        result.seconds += clock.seconds
        result.units += clock.units
        clock.restart()

    def validate() -> None:
        clock.pause()
        metrics = evaluate(task, model, train, device, stop)
        result.validation.append((step, metrics))
        log(step, {f"val/{name}": value for name, value in metrics.items()})
        clock.resume()

    with contextlib.closing(batches):
        for phase in phases:
            stepper = Stepper(task, model, phase, train, device)
            for _ in range(phase.steps):
                batch, units = next(batches)
                window.results.append(stepper(batch))
                step += 1
                clock.add(units, warm=step > WARMUP_STEPS)
                if step == WARMUP_STEPS:
                    clock.restart()
                if step % train.log_every == 0 or step == steps or stop.received is not None:
                    close_window()
                progress.step(step)
                stop.check()
                if train.eval_every and step % train.eval_every == 0 and step != steps:
                    validate()
            close_window()
    validate()
    result.peak_memory_bytes = clock.peak_memory
    return result


class _Clock:
    """Wall time and peak memory of training steps: evaluations and the first steps do not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.units = 0
        self.seconds = 0.0
        self.peak_memory = 0 if device.type == "cuda" else None
        self._started = time.perf_counter()

    def add(self, units: int, warm: bool) -> None:
        """A step of so many units was issued."""
        self.units += units if warm else 0

    def restart(self) -> None:
        """Measure from here."""
        synchronize(self._device)
        self.units, self.seconds, self._started = 0, 0.0, time.perf_counter()

    def lap(self) -> None:
        """Add the time since the start, or the last lap."""
        synchronize(self._device)
        now = time.perf_counter()
        self.seconds += now - self._started
        self._started = now

    def pause(self) -> None:
        """An evaluation begins."""
        self.lap()
        if self.peak_memory is not None:
            self.peak_memory = max(self.peak_memory, torch.cuda.max_memory_allocated(self._device))

    def resume(self) -> None:
        """It is over."""
        if self.peak_memory is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._started = time.perf_counter()
