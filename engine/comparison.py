"""A comparison: arms trained one after the other from the same weights on the same batches, then timed side by side."""

from __future__ import annotations

import gc
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from engine import timing
from engine.arms import Arm
from engine.config import TrainConfig
from engine.errors import ConfigError
from engine.loop import Training, matmul_precision, train_arm
from engine.operators import operator_table
from engine.progress import TrainingProgress
from engine.signals import StopSignal
from engine.step import make_stepper, to_device
from engine.task import Task
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
    ) -> None:
        self.trainings: dict[str, Training] = {}
        """What each arm's training gave, in the order of the arms."""
        self.operators: dict[str, list[dict[str, Any]]] = {}
        """Each arm's table of operators."""
        self.seconds_per_step: dict[str, NDArray[np.float64]] = {}
        """The timing pass: seconds a step of each arm, one figure a round."""
        self.task, self.arms, self.train, self.device = task, arms, train, device
        self._directory, self._tracker, self._console, self._stop = directory, tracker, console, stop
        self._weights: dict[str, Tensor] | None = None
        self.description = task.describe(self.build(arms[0]))
        """What the task says about itself."""

    def run(self) -> None:
        """Everything, in order. Raises RunError or Interrupted; what was written until then stays."""
        with matmul_precision(self.train.tf32):
            for arm in self.arms:
                self.operators[arm.name] = operator_table(arm, self.step_of(arm))
                self.release()
                self._stop.check()
                self.train_arm(arm)
                self.release()
            self._console.print(f"timing: {self.train.timing_rounds} rounds of training steps, the arms in turn")
            steps = {arm.name: self.step_of(arm) for arm in self.arms}
            self.seconds_per_step = timing.time_steps(steps, self.train.timing_rounds, self.device, self._stop)

    def build(self, arm: Arm) -> nn.Module:
        """The arm's model on the device, with the weights that every arm starts from."""
        torch.manual_seed(self.train.seed)
        model = self.task.build(arm.functions)
        if self._weights is None:
            self._weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(self._weights)
        return model.to(self.device)

    @property
    def units_per_step(self) -> int:
        """How many units of work the steps of the timing pass are."""
        return self.task.units(self.task.batch(0))

    def train_arm(self, arm: Arm) -> None:
        """Train and evaluate one arm."""
        model = self.build(arm)
        self._tracker.start(arm.name)
        steps = sum(phase.steps for phase in self.task.phases())
        with (
            open(self._directory / "metrics.jsonl", "a", encoding="utf-8") as file,
            TrainingProgress(self._console, arm.name, steps, self.task.unit) as progress,
        ):

            def log(step: int, values: Mapping[str, float]) -> None:
                file.write(json.dumps({"arm": arm.name, "step": step, **values}) + "\n")
                file.flush()
                self._tracker.log(arm.name, step, values)

            self.trainings[arm.name] = train_arm(self.task, model, self.train, self.device, log, progress, self._stop)

    def step_of(self, arm: Arm) -> Callable[[], object]:
        """Training steps of the arm on its first batch, on a model of their own."""
        torch.manual_seed(self.train.seed)
        stepper = make_stepper(self.task, self.build(arm), self.task.phases()[0], self.train, self.device)
        batch = to_device(self.task.batch(0), self.device)
        return lambda: stepper(batch)

    def release(self) -> None:
        """Give back the memory of models that are gone, so that the next arm's peak is its own."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
