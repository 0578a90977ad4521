"""What a model gives the engine: all that the loop needs to train, evaluate and count, nothing about how it loops."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from engine.config import TrainConfig

Batch = Mapping[str, Tensor]
StreamState = dict[str, Any]
"""Where a stream of batches stands: nested dicts, lists, tuples, tensors and what JSON has, keys being strings."""


@dataclass(frozen=True)
class Phase:
    """A stretch of training under one rule: the transformer has one, a PINN has Adam, then L-BFGS.

    optimizers  makes the optimizers of a model's parameters; their learning rates are the peaks of the schedule.
    steps       how many steps it lasts.
    schedule    the factor on the learning rates at a step counted from the phase's start (warm-up, cosine).
    closure     whether the optimizer is L-BFGS, which evaluates the loss itself (see engine.closure).
    dtype       what the parameters are converted to when it begins; None keeps theirs.
    """

    name: str
    steps: int
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]
    schedule: Callable[[int], float]
    closure: bool = False
    dtype: torch.dtype | None = None


def warmup_cosine(step: int, steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """The factor on learning rates: linear up over the warm-up, then a cosine down to min_lr_ratio at the last step."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Task(ABC):
    """One model on one set of data, the same for every arm."""

    name: str
    """The model's name: "transformer"."""
    unit: str
    """What throughput counts: "tokens"."""
    slots: tuple[str, ...]
    """The slots of the model as configured, in the order tables show them."""
    on_cpu: str = "Expect no gain in speed or memory from them here; that is what the GPU kernels are for."
    """What to expect of the operators' CPU implementations, told beside their figures."""
    loss_in_nats: bool = True
    """Whether the loss is a cross-entropy, as `equivalence` takes it to be."""
    targets: Mapping[str, tuple[float, ...]] = {}
    """Values of metrics, the lower the better, of which reports say when they were first reached."""

    chosen: Mapping[str, Mapping[str, Any]] = {}
    """What the data decided, by group and key of config.yaml: sizes of the model; a digest of the data itself, by which
    a resumed run can tell that it has changed."""

    @abstractmethod
    def build(self, ops: Mapping[str, Callable[..., Any]]) -> nn.Module:
        """The model with these functions in its slots, on the CPU in fp32, its weights from the current generator."""

    @abstractmethod
    def batch(self, step: int, rank: int = 0) -> Batch:
        """The training batch of an index: a pure function of (seed, index, rank), tensors on the CPU.

        A step takes one batch, or as many as `train.accumulation` says: those of step s are s * n to s * n + n - 1.
        """

    def batches(self, start: int, state: StreamState | None = None) -> Iterator[tuple[Batch, StreamState | None]]:
        """The training batches from an index on, each with the state from which they go on after it.

        state: what stood beside the batch before `start`; None at the beginning, and for batches that are a function of
        their index, as they are unless a task overrides this. A state is kept while the iterator goes on: each is an
        object of its own, never changed afterwards. Batches that end before the training does end it with an error.
        """
        for index in itertools.count(start):
            yield self.batch(index), None

    @abstractmethod
    def units(self, batch: Batch) -> int:
        """How many units of work a batch is."""

    def count(self, batch: Batch) -> int:
        """What `loss` of this batch is averaged over, known before the loss: its weight among those of one step."""
        return self.units(batch)

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The mean loss of a batch on the model's device, and the count it was averaged over."""

    def terms(self) -> Mapping[str, Tensor]:
        """What the latest `loss` was the sum of, by name, detached; none for a loss of one term.

        A run that stops at a loss that is not finite shows them.
        """
        return {}

    @abstractmethod
    def validation(self) -> Iterable[Batch]:
        """The whole validation set, in batches whose sizes may differ."""

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics over validation batches that are on the device, "loss" among them, each weighted by its count."""
        total, count = 0.0, 0
        for batch in batches:
            loss, n = self.loss(model, batch)
            total += float(loss) * n
            count += n
        return {"loss": total / count}

    def finished(self, metrics: Mapping[str, float]) -> str | None:
        """Why an arm with these validation metrics needs no further training, or None where it goes on."""
        return None

    def figures(self, model: nn.Module) -> dict[str, Figure]:
        """Pictures of what a model learnt, by name, drawn after its training."""
        return {}

    def check(self, ops: Mapping[str, Callable[..., Any]], train: TrainConfig) -> None:
        """Raise ConfigError where the task cannot be trained so with these functions; before anything is."""
        return None

    @abstractmethod
    def phases(self) -> list[Phase]:
        """The phases of training, in order."""

    @abstractmethod
    def flops_per_step(self) -> int | None:
        """Model FLOPs of one training step (forward and backward, without recomputation), or None where unknown.

        Of a step that takes one batch; the engine multiplies by `train.accumulation`.
        """

    def bytes_per_step(self) -> int | None:
        """Bytes of memory that a training step of one batch must touch, where they are what bounds it; None elsewhere.

        What they are counted of is said in `describe`.
        """
        return None

    def compile(self, model: nn.Module, **options: Any) -> None:
        """Compile, in place, what `loss` calls of a model; options are torch.compile's. By default it calls forward."""
        model.compile(**options)

    def save(self, model: nn.Module, directory: Path) -> None:
        """Write a trained model, which is not compiled, into a directory that exists and is empty.

        By default model.safetensors, the state_dict by its names; of parameters that are one tensor, one name is kept.
        `safetensors.torch.load_model` reads it.
        """
        save_model(model, str(directory / "model.safetensors"))

    def samples(self, model: nn.Module, length: int) -> dict[str, str]:
        """What a trained model in evaluation makes of a prompt, by the prompt; about `length` of whatever it writes.

        A model that writes nothing has none. Moves no generator of random numbers.
        """
        return {}

    def describe(self, model: nn.Module, accumulation: int = 1) -> dict[str, str]:
        """What to print before training, of steps of so many batches: parameters, data, the split and its sizes."""
        return {}

    def references(self) -> Mapping[str, float | Mapping[str, float]]:
        """What other predictors reach on the same validation set, by name, to print beside the model's own metrics.

        A number is a loss; a predictor of several metrics has them by the names that `evaluate` gives them.
        """
        return {}
