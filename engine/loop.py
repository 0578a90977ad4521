"""The loop: trains one arm, evaluates it, and measures what that took."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.config import TrainConfig
from engine.errors import RunError
from engine.progress import TrainingProgress
from engine.signals import StopSignal
from engine.step import StepResult, TrainingStep, autocast, make_stepper, to_device
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
    """fp32 products on a GPU with or without TF32, as before on leaving."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training_batches(task: Task, steps: int, device: torch.device) -> Generator[tuple[Batch, int], None, None]:
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
    """The metrics of a model in training over the whole validation set. Raises RunError for one that is not finite."""

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
    model.train()
    return metrics


def train_arm(
    task: Task,
    model: nn.Module,
    train: TrainConfig,
    device: torch.device,
    log: Log,
    progress: TrainingProgress,
    stop: StopSignal,
) -> Training:
    """Train a model that is on the device through the task's phases, and evaluate it.

    Steps are counted from 1 in logs and messages. Raises RunError naming step and term when a loss or a gradient's norm
    is not finite, Interrupted after the step during which a signal came.
    """
    return _ArmTraining(task, model, train, device, log, progress, stop).run()


class _ArmTraining:
    """The state of `train_arm`: the step, the clock, and the steps since the last log, still on the device."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        train: TrainConfig,
        device: torch.device,
        log: Log,
        progress: TrainingProgress,
        stop: StopSignal,
    ) -> None:
        self._task, self._model, self._train, self._device = task, model, train, device
        self._log, self._progress, self._stop = log, progress, stop
        self._result, self._clock = Training(), _Clock(device)
        self._window: list[StepResult] = []
        self._step = 0

    def run(self) -> Training:
        torch.manual_seed(self._train.seed)  # dropout's
        phases = self._task.phases()
        steps = sum(phase.steps for phase in phases)
        with contextlib.closing(training_batches(self._task, steps, self._device)) as batches:
            self._clock.restart()
            for phase in phases:
                stepper = make_stepper(self._task, self._model, phase, self._train, self._device)
                for batch, units in itertools.islice(batches, phase.steps):
                    self._take(stepper, batch, units, last=self._step + 1 == steps)
        self._validate()
        self._result.peak_memory_bytes = self._clock.peak_memory
        return self._result

    def _take(self, stepper: TrainingStep, batch: Batch, units: int, last: bool) -> None:
        self._window.append(stepper(batch))
        self._step += 1
        if self._step == WARMUP_STEPS:
            self._clock.restart()
        elif self._step > WARMUP_STEPS:
            self._clock.units += units
        if last or self._step % self._train.log_every == 0 or self._stop.received is not None:
            self._close_window(stepper.learning_rate)
        self._progress.step(self._step)
        self._stop.check()
        if self._train.eval_every and self._step % self._train.eval_every == 0 and not last:
            self._validate()

    def _close_window(self, learning_rate: float) -> None:
        """Bring losses and norms to the host, which waits for the device; check and log them."""
        window, self._window = self._window, []
        losses = _to_host([result.loss for result in window])
        norms = _to_host([result.gradient_norm for result in window])
        self._clock.lap()
        for step, loss, norm, result in zip(itertools.count(len(self._result.losses) + 1), losses, norms, window):
            if not math.isfinite(loss):
                raise RunError(f"step {step}: the training loss is {loss}")
            if not math.isfinite(norm) and not result.skipped:
                raise RunError(f"step {step}: the norm of the gradient is {norm}")
        self._result.losses += losses
        self._result.skipped_steps += sum(result.skipped for result in window)

        values = {"train/loss": sum(losses) / len(losses), "train/learning_rate": learning_rate}
        if math.isfinite(norms[-1]):
            values["train/gradient_norm"] = norms[-1]
        throughput = self._clock.units / self._clock.seconds if self._clock.units else None
        if throughput is not None:
            values[f"perf/{self._task.unit}_per_s"] = throughput
            self._result.seconds += self._clock.seconds
            self._result.units += self._clock.units
        self._log(self._step, values)
        self._progress.measured(values["train/loss"], throughput)
        self._clock.restart()

    def _validate(self) -> None:
        self._clock.pause()
        metrics = evaluate(self._task, self._model, self._train, self._device, self._stop)
        self._result.validation.append((self._step, metrics))
        self._log(self._step, {f"val/{name}": value for name, value in metrics.items()})
        self._clock.resume()


def _to_host(scalars: list[Tensor]) -> list[float]:
    return torch.stack([scalar.float() for scalar in scalars]).tolist()


class _Clock:
    """Wall time, units of work and peak memory of training steps, from the latest restart on, evaluations left out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.units = 0
        self.seconds = 0.0
        self.peak_memory = 0 if device.type == "cuda" else None
        self.resume()

    def restart(self) -> None:
        """Measure time and units from here."""
        synchronize(self._device)
        self.units, self.seconds, self._started = 0, 0.0, time.perf_counter()

    def lap(self) -> None:
        """Add the time since the start, or since the last lap."""
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
