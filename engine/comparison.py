"""A comparison: arms trained one after the other from the same weights on the same batches, then timed side by side."""

from __future__ import annotations

import gc
import itertools
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from engine import figures, timing
from engine.arms import Arm
from engine.checkpoint import ArmCheckpoints, unwrapped
from engine.compilation import CompileLog, compile_model, compiling, eager, has_graphs
from engine.config import TrainConfig
from engine.errors import ConfigError, RunError
from engine.loop import Training, matmul_precision, train_arm
from engine.metrics import MetricsFile, rewind
from engine.operators import operator_table
from engine.progress import TrainingProgress
from engine.signals import StopSignal
from engine.step import autocast, make_stepper, to_device
from engine.task import Batch, Phase, Task
from engine.tracking import Tracker


def choose_device(name: str) -> torch.device:
    """The device of `train.device`. Raises ConfigError for cuda where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda: PyTorch sees no CUDA device here; cpu and auto work")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """What the device is called in reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({_processor()}, {torch.get_num_threads()} threads)"


def _processor() -> str:
    """The processor's model where Linux tells it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


class Comparison:
    """Trains and times arms of one task.

    For each stretch of steps and each evaluation, metrics.jsonl in the run directory gets a line, the tracker an entry.

    configuration: what a checkpoint depends on, plain values. Given, each arm keeps its newest checkpoint and its
        trained model in a directory of the run directory, named as the arm is.
    resume: go on from the checkpoints there.
    """

    def __init__(
        self,
        task: Task,
        arms: Sequence[Arm],
        train: TrainConfig,
        device: torch.device,
        directory: Path,
        tracker: Tracker,
        console: Console,
        stop: StopSignal,
        configuration: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        self.trainings: dict[str, Training] = {}
        """What each arm's training gave, in the order of the arms."""
        self.operators: dict[str, list[dict[str, Any]]] = {}
        """Each arm's table of operators."""
        self.compilation: dict[str, CompileLog] = {}
        """What compiling each arm took."""
        self.samples: dict[str, dict[str, str]] = {}
        """What each arm's trained model makes of prompts."""
        self.seconds_per_step: dict[str, NDArray[np.float64]] = {}
        """The timing pass: seconds a step of each arm, one figure a round."""
        self.task, self.arms, self.train, self.device = task, arms, train, device
        self._directory, self._tracker, self._console, self._stop = directory, tracker, console, stop
        self._configuration, self._resume = configuration, resume
        self._weights: dict[str, Tensor] | None = None
        for arm in arms:
            task.check(arm.functions, train)

    @cached_property
    def description(self) -> dict[str, str]:
        """What the task says about itself."""
        return self.task.describe(self.build(self.arms[0]), self.train.accumulation)

    def run(self) -> None:
        """Everything, in order. Raises RunError or Interrupted; what was written until then stays.

        Raises ConfigError, before anything runs, naming a checkpoint that is damaged or of another run.
        """
        if self._resume:
            for arm in self.arms:
                if (checkpoints := self._checkpoints(arm)) is not None:
                    checkpoints.check()
        with matmul_precision(self.train.tf32):
            for arm in self.arms:
                with compiling([arm]) as self.compilation[arm.name]:
                    self.operators[arm.name] = self.operators_of(arm)
                    if has_graphs(arm, self.device):
                        self.compilation[arm.name].drop_code()  # it was compiled without them
                    self.release()
                    self._stop.check()
                    self.train_arm(arm)
                self.release()
            self._console.print(f"timing: {self.train.timing_rounds} rounds of training steps, the arms in turn")
            steps = {arm.name: self.step_of(arm) for arm in self.arms}
            with compiling(self.arms):
                self.seconds_per_step = timing.time_steps(steps, self.train.timing_rounds, self.device, self._stop)

    def build(self, arm: Arm, graphs: bool = True) -> nn.Module:
        """The arm's model on the device, with the weights that every arm starts from, to be compiled as the arm says.

        graphs: False leaves out CUDA graphs.
        """
        torch.manual_seed(self.train.seed)
        model = self.task.build(arm.functions)
        if self._weights is None:
            self._weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(self._weights)
        model.to(self.device)
        compile_model(self.task.compile, model, arm, self.device, graphs)
        return model

    @cached_property
    def first_step(self) -> list[Batch]:
        """The batches of the first step, on the CPU."""
        return [batch for batch, _ in itertools.islice(self.task.batches(0), self.train.accumulation)]

    @property
    def units_per_step(self) -> int:
        """How many units of work the steps of the timing pass are."""
        return sum(self.task.units(batch) for batch in self.first_step)

    @property
    def flops_per_step(self) -> int | None:
        """Model FLOPs of a training step, or None where unknown."""
        flops = self.task.flops_per_step()
        return None if flops is None else flops * self.train.accumulation

    def train_arm(self, arm: Arm) -> None:
        """Train and evaluate one arm, from its checkpoint on if it has one and the run is resumed."""
        checkpoints, resumed = self._checkpoints(arm), None
        metrics_path = self._directory / "metrics.jsonl"
        if self._resume and checkpoints is not None:
            resumed = checkpoints.load()
            rewind(metrics_path, arm.name, resumed["lines"] if resumed else 0)
        model = self.build(arm)
        self._tracker.start(arm.name)
        steps = sum(phase.steps for phase in self.task.phases())
        done = len(resumed["training"]["losses"]) if resumed else 0
        with (
            MetricsFile(metrics_path, arm.name) as metrics,
            TrainingProgress(self._console, arm.name, steps, self.task.unit, done) as progress,
        ):

            def log(step: int, values: Mapping[str, float]) -> None:
                metrics.write(step, values)
                self._tracker.log(arm.name, step, values)

            def save(step: int, state: Mapping[str, Any]) -> None:
                assert checkpoints is not None
                metrics.flush_to_disk()  # the lines that the state counts
                checkpoints.save(step, state)

            keep = None if checkpoints is None else save
            try:
                training = train_arm(
                    self.task, model, self.train, self.device, log, progress, self._stop, keep, resumed
                )
            except RunError as error:
                if checkpoints is None or checkpoints.newest is None:
                    raise
                raise RunError(f"{error}\nthe last checkpoint before that is kept: {checkpoints.newest}") from error
        self.trainings[arm.name] = training
        for name, figure in self.task.figures(unwrapped(model)).items():
            path = self._directory / f"{name}-{arm.name}.png"
            figures.save(figure, path)
            self._tracker.image(arm.name, name, path)
        if checkpoints is not None and not (resumed and resumed["finished"] and checkpoints.model.is_dir()):
            self._save_model(model, checkpoints.model)
        self.samples[arm.name] = self._sample(arm, model)

    def operators_of(self, arm: Arm) -> list[dict[str, Any]]:
        """The arm's table of operators."""
        return operator_table(arm, self.step_of(arm, graphs=False))

    def step_of(self, arm: Arm, graphs: bool = True, phase: Phase | None = None) -> Callable[[], object]:
        """Training steps of the arm on its first batch, on a model of their own; graphs as for `build`.

        phase: the rule by which it is trained, instead of the task's first phase.
        """
        torch.manual_seed(self.train.seed)
        model = self.build(arm, graphs)
        stepper = make_stepper(self.task, model, phase or self.task.phases()[0], self.train, self.device)
        batches = [to_device(batch, self.device) for batch in self.first_step]
        return lambda: stepper(*batches)

    def release(self) -> None:
        """Give back the memory of models that are gone, so that the next arm's peak is its own."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _checkpoints(self, arm: Arm) -> ArmCheckpoints | None:
        """Where the arm's are kept; None where they are not."""
        if self._configuration is None:
            return None
        identity = {
            "model": self.task.name,
            "arm": arm.name,
            "device": self.device.type,
            "configuration": self._configuration,
        }
        return ArmCheckpoints(self._directory / arm.name, identity)

    def _sample(self, arm: Arm, model: nn.Module) -> dict[str, str]:
        """What the trained model makes of the task's prompts, as if it had not been compiled: lengths vary."""
        if not self.train.sample_tokens:
            return {}
        model.eval()
        with eager(arm), autocast(self.device, self.train.precision):
            return self.task.samples(unwrapped(model), self.train.sample_tokens)

    def _save_model(self, model: nn.Module, directory: Path) -> None:
        temporary = directory.with_name(f".{directory.name}.tmp")
        for path in (temporary, directory):
            if path.exists():
                shutil.rmtree(path)
        temporary.mkdir(parents=True)
        self.task.save(unwrapped(model), temporary)
        os.replace(temporary, directory)
