"""The loop: trains one arm, evaluates it, and measures what that took."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine import compilation
from engine.batches import StepBatches, training_batches
from engine.checkpoint import load_weights, unwrapped
from engine.clock import Clock
from engine.config import TrainConfig
from engine.errors import Interrupted, RunError
from engine.progress import TrainingProgress
from engine.signals import StopSignal
from engine.step import StepResult, TrainingStep, autocast, make_stepper, to_device
from engine.task import Batch, StreamState, Task

WARMUP_STEPS = 3
"""First steps of a training, or of its resumption, that its throughput leaves out: allocations, kernel compilation."""

Log = Callable[[int, dict[str, float]], None]
"""Takes a step and the values measured at it, by names such as "train/loss"."""
Save = Callable[[int, dict[str, Any]], None]
"""Takes a step and the state after it, from which training goes on; keeps it."""


@dataclass
class Training:
    """What training an arm gave."""

    losses: list[float] = field(default_factory=list)
    """The training loss of every step."""
    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """The validation metrics after a number of steps, the last after all."""
    elapsed: list[float] = field(default_factory=list)
    """Seconds of training before each entry of `validation`: of all steps, evaluations and checkpoints left out."""
    seconds: float = 0.0
    """Wall time of the steps, without evaluations and the first steps."""
    units: int = 0
    """Units of work done in that time."""
    skipped_steps: int = 0
    """Steps that fp16 skipped since their gradients were not finite."""
    peak_memory_bytes: int | None = None
    """The most GPU memory allocated at once in training steps; None on the CPU."""
    stopped_early: str | None = None
    """Why training ended before its last step; None where it did not."""
    unconverged: str | None = None
    """That the last phase could have converged before its last step, and did not; None for phases that cannot."""
    best: int | None = None
    """With early stop: which entry of `validation` is the best, whose weights are the trained model's."""

    @property
    def reported(self) -> tuple[int, dict[str, float]]:
        """The step whose weights are the trained model's, and their validation metrics: the last, or the best."""
        return self.validation[-1 if self.best is None else self.best]

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


def evaluate(
    task: Task, model: nn.Module, train: TrainConfig, device: torch.device, stop: StopSignal
) -> dict[str, float]:
    """The metrics of a model in training over the whole validation set. Raises RunError for one that is not finite."""

    def batches() -> Iterator[Batch]:
        for batch in task.validation():
            stop.check()
            compilation.begin_step(model)
            yield to_device(batch, device)

    model.eval()
    with torch.no_grad(), autocast(device, train.precision):
        metrics = task.evaluate(model, batches())
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise RunError(f"validation {name} is {value}")
    model.train()
    return metrics


def best_evaluation(losses: Sequence[float], delta: float) -> int:
    """The index of the last loss that was lower by more than delta than the best before it."""
    best = 0
    for index, loss in enumerate(losses):
        if loss < losses[best] - delta:
            best = index
    return best


def train_arm(
    task: Task,
    model: nn.Module,
    train: TrainConfig,
    device: torch.device,
    log: Log,
    progress: TrainingProgress,
    stop: StopSignal,
    save: Save | None = None,
    resumed: Mapping[str, Any] | None = None,
) -> Training:
    """Train a model that is on the device through the task's phases, and evaluate it.

    Steps are counted from 1 in logs and messages. Afterwards the model has the weights that `Training.reported` is of.

    save: takes the state after every `train.checkpoint_every` steps, after the last, and where a signal stops the run.
    resumed: such a state, from which to go on: a state after the last step trains nothing.
    Raises RunError naming step and term when a loss or a gradient's norm is not finite, Interrupted after the step
    during which a signal came.
    """
    return _ArmTraining(task, model, train, device, log, progress, stop, save).run(resumed)


class _ArmTraining:
    """The state of `train_arm`: the step, the clock, and the steps whose results are still on the device."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        train: TrainConfig,
        device: torch.device,
        log: Log,
        progress: TrainingProgress,
        stop: StopSignal,
        save: Save | None,
    ) -> None:
        self._task, self._model, self._train, self._device = task, model, train, device
        self._log, self._progress, self._stop, self._save = log, progress, stop, save
        self._result, self._clock = Training(), Clock(device)
        self._phases = task.phases()
        self._steps = sum(phase.steps for phase in self._phases)
        self._step = self._first = 0
        self._phase = 0
        self._stepper: TrainingStep | None = None
        self._stream: StreamState | None = None
        self._on_device: list[StepResult] = []
        self._logged = self._lines = 0  # steps that a line of the log covers; lines
        self._norm = 0.0  # of the latest step's gradient
        self._best_weights: dict[str, Tensor] | None = None
        self._saved: tuple[int, int, bool] | None = None

    def run(self, resumed: Mapping[str, Any] | None) -> Training:
        torch.manual_seed(self._train.seed)  # dropout's
        if resumed is not None:
            self._restore(resumed)
        if resumed is None or not resumed["finished"]:
            try:
                self._take_steps(resumed)
                self._finish()
            except Interrupted:
                self._checkpoint()
                raise
        if self._best_weights is not None:
            load_weights(self._model, self._best_weights, "the best evaluation")
        return self._result

    def _take_steps(self, resumed: Mapping[str, Any] | None) -> None:
        steps = range(self._step, self._steps)
        ends = list(itertools.accumulate(phase.steps for phase in self._phases))
        batches = training_batches(self._task, self._train.accumulation, steps, self._device, self._stream)
        with contextlib.closing(batches):
            for index in range(self._phase, len(self._phases)):
                self._phase, phase = index, self._phases[index]
                if self._stepper is not None:
                    self._clock.pause()
                self._stepper = make_stepper(self._task, self._model, phase, self._train, self._device)
                if resumed is not None and resumed["phase"] == index:
                    self._stepper.load_state_dict(resumed["stepper"])
                    _set_generators(resumed["generators"], self._device)
                    if self._between_steps():  # an evaluation that a signal broke off
                        return
                self._clock.resume()
                self._clock.restart()
                for taken in itertools.islice(batches, ends[index] - self._step):
                    self._take(self._stepper, taken)
                    if self._between_steps():
                        return

    def _take(self, stepper: TrainingStep, taken: StepBatches) -> None:
        if self._step - self._first == 1:  # CUDA graphs are recorded in the second, and replays show no allocations
            self._clock.forget_peak_memory()
        self._on_device.append(stepper(*taken.batches))
        self._step += 1
        self._stream = taken.stream
        if self._step - self._first == WARMUP_STEPS:
            self._clock.restart()
        elif self._step - self._first > WARMUP_STEPS:
            self._clock.units += taken.units
        if self._step % self._train.log_every == 0:
            self._log_stretch()
        self._progress.step(self._step)
        self._stop.check()

    def _between_steps(self) -> bool:
        """Evaluate and keep the state where either is due. Returns whether training is over."""
        if self._step == self._steps:
            return True
        assert self._stepper is not None
        if self._stepper.finished is not None:
            self._end_early(self._stepper.finished)
            return True
        if _due(self._step, self._train.eval_every) and not self._validated:
            self._validate()
            if self._result.stopped_early is not None:
                return True
        if _due(self._step, self._train.checkpoint_every):
            self._checkpoint()
        return False

    def _finish(self) -> None:
        if self._logged < self._step:
            self._log_stretch()
        if not self._validated:
            self._validate()
        last = self._phases[-1]
        if last.closure and self._result.stopped_early is None:
            self._result.unconverged = f"{last.name} took all its {last.steps:,} steps without converging"
        self._note_peak_memory(last=True)
        self._checkpoint(finished=True)

    # -----------------------------------------------------------------------------------------------------------------
    # What steps gave

    def _collect(self) -> None:
        """Bring losses and norms to the host, which waits for the device, and check them."""
        if not self._on_device:
            return
        results, self._on_device = self._on_device, []
        losses = _to_host([result.loss for result in results])
        norms = _to_host([result.gradient_norm for result in results])
        self._clock.lap()
        for step, loss, norm, result in zip(itertools.count(len(self._result.losses) + 1), losses, norms, results):
            if not math.isfinite(loss):
                raise RunError(f"step {step}: the training loss is {loss}{_told(result.terms)}")
            if not math.isfinite(norm) and not result.skipped:
                raise RunError(f"step {step}: the norm of the gradient is {norm}")
        self._result.losses += losses
        self._result.skipped_steps += sum(result.skipped for result in results)
        self._norm = norms[-1]

    def _log_stretch(self) -> None:
        """Log the steps since the last line."""
        self._collect()
        stretch = self._result.losses[self._logged :]
        self._logged = self._step
        assert self._stepper is not None
        values = {"train/loss": sum(stretch) / len(stretch), "train/learning_rate": self._stepper.learning_rate}
        if math.isfinite(self._norm):
            values["train/gradient_norm"] = self._norm
        throughput = self._clock.units / self._clock.seconds if self._clock.units else None
        if throughput is not None:
            values[f"perf/{self._task.unit}_per_s"] = throughput
            self._result.seconds += self._clock.seconds
            self._result.units += self._clock.units
        self._write(values)
        self._progress.measured(values["train/loss"], throughput)
        self._clock.restart()

    @property
    def _validated(self) -> bool:
        return bool(self._result.validation) and self._result.validation[-1][0] == self._step

    def _validate(self) -> None:
        """Evaluate; with early stop, keep the best weights and see whether it is time."""
        self._clock.pause()
        metrics = evaluate(self._task, self._model, self._train, self._device, self._stop)
        self._result.validation.append((self._step, metrics))
        self._result.elapsed.append(self._clock.total)
        self._write({f"val/{name}": value for name, value in metrics.items()} | {"perf/seconds": self._clock.total})
        if self._train.early_stop:
            self._judge()
        reason = self._task.finished(metrics)
        if reason is not None and self._step < self._steps:
            self._end_early(reason)
        self._clock.resume()

    def _judge(self) -> None:
        patience, delta = self._train.early_stop, self._train.early_stop_delta
        steps, losses = zip(*((step, metrics["loss"]) for step, metrics in self._result.validation), strict=True)
        self._result.best = best = best_evaluation(losses, delta)
        since = len(losses) - 1 - best
        if since == 0:
            self._best_weights = {
                name: tensor.to("cpu", copy=True) for name, tensor in unwrapped(self._model).state_dict().items()
            }
        if since >= patience and self._step < self._steps:
            margin = f" by more than {delta:g}" if delta else ""
            self._end_early(
                f"in {since} evaluations the validation loss did not fall{margin} below the {losses[best]:.4f} of "
                f"step {steps[best]}"
            )

    def _end_early(self, reason: str) -> None:
        self._result.stopped_early = f"stopped at step {self._step} of {self._steps}: {reason}"

    def _write(self, values: dict[str, float]) -> None:
        self._log(self._step, values)
        self._lines += 1

    # -----------------------------------------------------------------------------------------------------------------
    # The state between two steps

    def _checkpoint(self, finished: bool = False) -> None:
        """Have the state kept, unless nothing has changed since it last was."""
        self._collect()
        position = (self._step, len(self._result.validation), finished)
        if self._save is None or position == self._saved:
            return
        assert self._stepper is not None
        self._clock.pause()
        self._note_peak_memory()
        training = dataclasses.asdict(self._result)
        state = {
            "finished": finished,
            "model": unwrapped(self._model).state_dict(),
            "best_weights": self._best_weights,
            "phase": self._phase,
            "stepper": self._stepper.state_dict(),
            "generators": _generators(self._device),
            "stream": self._stream,
            "training": training | {"losses": torch.tensor(training["losses"], dtype=torch.float64)},
            "logged": self._logged,
            "norm": self._norm,
            "lines": self._lines,
            "elapsed": self._clock.total,
        }
        self._save(self._step, state)
        self._saved = position
        self._clock.resume()

    def _restore(self, state: Mapping[str, Any]) -> None:
        """All of such a state but the stepper and the generators, which are the last to be set."""
        for phase in self._phases[: state["phase"] + 1]:
            if phase.dtype is not None:
                self._model.to(phase.dtype)
        load_weights(self._model, state["model"], "the checkpoint")
        training = state["training"]
        self._result = Training(**training | {"losses": training["losses"].tolist()})
        self._step = self._first = len(self._result.losses)
        self._phase, self._stream, self._best_weights = state["phase"], state["stream"], state["best_weights"]
        self._logged, self._lines, self._norm = state["logged"], state["lines"], state["norm"]
        self._saved = (self._step, len(self._result.validation), state["finished"])
        self._clock.total = state["elapsed"]

    def _note_peak_memory(self, last: bool = False) -> None:
        """Take over the clock's, which compilation is still part of in the first steps, unless there are no others."""
        peak, known = self._clock.peak_memory, self._result.peak_memory_bytes
        if peak is not None and (self._step - self._first > WARMUP_STEPS or (last and known is None)):
            self._result.peak_memory_bytes = max(peak, known or 0)


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def _generators(device: torch.device) -> dict[str, Tensor]:
    """The states of the random number generators that training draws from: PyTorch's own."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _told(terms: Mapping[str, Tensor]) -> str:
    """The terms of a loss, to be appended to what is said of it."""
    listed = ", ".join(f"{name} {float(term):.4g}" for name, term in terms.items())
    return f" ({listed})" if listed else ""


def _to_host(scalars: list[Tensor]) -> list[float]:
    return torch.stack([scalar.float() for scalar in scalars]).tolist()
