"""A task small enough to train in milliseconds, with one slot, and what a comparison of it needs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from engine import timing
from engine.arms import operator_set
from engine.comparison import Comparison
from engine.config import TrainConfig
from engine.signals import StopSignal
from engine.task import Batch, Phase, Task
from engine.tracking import NullTracker


class Toy(nn.Module):
    """Two layers around the slot `activation`."""

    def __init__(self, ops: Mapping[str, Callable[..., Any]], dropout: float) -> None:
        super().__init__()
        self.ops = ops
        self.dropout = dropout
        self.inner, self.outer = nn.Linear(5, 14), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.inner(x).chunk(2, dim=-1)
        return self.outer(F.dropout(self.ops["activation"](gate, up), self.dropout, self.training))


class ToyTask(Task):
    """Regression on a made-up function; batch number `poisoned` (from 0) has a NaN in its targets."""

    name = "toy"
    unit = "samples"
    slots = ("activation",)

    def __init__(self, steps: int = 5, *, poisoned: int | None = None, dropout: float = 0.0) -> None:
        self.steps, self.poisoned, self.dropout = steps, poisoned, dropout
        self.seen: list[int] = []

    def build(self, ops: Mapping[str, Callable[..., Any]]) -> nn.Module:
        return Toy(ops, self.dropout)

    def _samples(self, seed: int, count: int) -> Batch:
        x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "y": x.sum(-1, keepdim=True).sin()}

    def batch(self, step: int, rank: int = 0) -> Batch:
        self.seen.append(step)
        batch = self._samples(step, 6)
        if step == self.poisoned:
            batch["y"][0] = float("nan")
        return batch

    def units(self, batch: Batch) -> int:
        return len(batch["x"])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return F.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"])

    def validation(self) -> Iterable[Batch]:
        return [self._samples(1000, 9), self._samples(1001, 2)]

    def phases(self) -> list[Phase]:
        return [
            Phase(
                "sgd", self.steps, lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)], lambda step: 0.9**step
            )
        ]

    def flops_per_step(self) -> int:
        return 1000

    def describe(self, model: nn.Module, accumulation: int = 1) -> dict[str, str]:
        return {"model": f"{sum(p.numel() for p in model.parameters())} parameters"}

    def references(self) -> dict[str, float]:
        return {"zero": 0.5}


@pytest.fixture
def toy_task() -> type[ToyTask]:
    return ToyTask


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Comparison]:
    """Makes a comparison of a stock and a fused arm of a task, writing to tmp_path, its timing pass cut short."""
    monkeypatch.setattr(timing, "SHORTEST_SAMPLE", 0.0)

    def make(task: Task, sets: tuple[str, ...] = ("native", "fused"), **kwargs: Any) -> Comparison:
        train = kwargs.pop("train", TrainConfig(log_every=2, device="cpu"))
        tracker = kwargs.pop("tracker", NullTracker())
        arms = [operator_set(name, task.slots) for name in sets]
        console = Console(file=io.StringIO(), width=200)
        stop = kwargs.pop("stop", StopSignal())
        device = torch.device(train.device)
        return Comparison(task, arms, train, device, tmp_path, tracker, console, stop)

    return make
