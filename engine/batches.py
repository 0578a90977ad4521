"""The batches that training takes, on the device, each with what a run needs to go on after it."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from engine.errors import RunError
from engine.step import to_device
from engine.task import Batch, StreamState, Task


class StepBatches(NamedTuple):
    """What one step takes: its batches on the device, their units, and where their stream stands after them."""

    batches: list[Batch]
    units: int
    stream: StreamState | None


def training_batches(
    task: Task, accumulation: int, steps: range, device: torch.device, stream: StreamState | None = None
) -> Generator[StepBatches, None, None]:
    """What each of these steps, counted from 0, takes; for a GPU, prepared a step ahead.

    stream: where the stream stood before them. Raises RunError naming the step for which there are too few batches.
    """
    source = task.batches(steps.start * accumulation, stream)

    def prepare(step: int) -> StepBatches:
        taken = list(itertools.islice(source, accumulation))
        if len(taken) < accumulation:
            raise RunError(f"step {step + 1}: the training data ended")
        batches = [batch for batch, _ in taken]
        units = sum(task.units(batch) for batch in batches)
        if device.type == "cuda":
            batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches]
        return StepBatches(batches, units, taken[-1][1])

    def on_device(prepared: StepBatches) -> StepBatches:
        return prepared._replace(batches=[to_device(batch, device) for batch in prepared.batches])

    if device.type != "cuda":
        for step in steps:
            yield on_device(prepare(step))
        return
    with ThreadPoolExecutor(1) as worker:
        ahead = worker.submit(prepare, steps.start) if steps else None
        for step in steps:
            assert ahead is not None
            prepared = ahead.result()
            if step + 1 < steps.stop:
                ahead = worker.submit(prepare, step + 1)
            yield on_device(prepared)
