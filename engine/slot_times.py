"""How much of a training step each slot takes, from a profile: what an operator could save at most.

A slot's function runs inside a labelled range. Backward nodes have no range, but autograd numbers its nodes in the
order in which forward made them, and a profile shows each backward node by its number: those made inside the range are
the slot's. On a GPU the time is that of the kernels that were launched there, on a CPU that of the calls themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from engine.arms import Arm
from engine.operators import stderr_closed
from fusedops.slots import Implementation

STEP, FORWARD = "fusedops step", "fusedops slot "
BACKWARD = "autograd::engine::evaluate_function: "


class SlotProfile:
    """Labels the slots of an arm: train a model of `labelled(arm)`, then `shares` has what a step of it shows."""

    def __init__(self) -> None:
        self._made: list[tuple[str, range]] = []
        """For each call of a slot, the numbers of the autograd nodes it made."""

    def labelled(self, arm: Arm) -> Arm:
        """The same arm with its slots in ranges."""
        return replace(arm, implementations=tuple(self._labelled(i) for i in arm.implementations))

    def _labelled(self, implementation: Implementation) -> Implementation:
        @functools.wraps(implementation.function)  # by which a model may tell what it was given
        def call(*args: Any, **kwargs: Any) -> Any:
            first = torch.autograd._get_sequence_nr()
            with torch.profiler.record_function(FORWARD + implementation.slot):
                result = implementation.function(*args, **kwargs)
            self._made.append((implementation.slot, range(first, torch.autograd._get_sequence_nr())))
            return result

        return replace(implementation, function=call)

    def shares(self, step: Callable[[], object], device: torch.device) -> dict[str, Any]:
        """The profile of one step: clock ("GPU" or "CPU"), its milliseconds, and those of each slot and their share.

        step: a training step of a labelled arm that runs backward in the calling thread; it is run twice.
        """
        on_gpu = device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        step()  # compiles kernels, allocates optimizer state
        self._made.clear()
        profile = torch.profiler.profile(activities=activities)
        with stderr_closed():
            profile.start()
        try:
            with torch.profiler.record_function(STEP):
                step()
                if on_gpu:
                    torch.cuda.synchronize(device)
        finally:
            with stderr_closed():
                profile.stop()
        return self._read(list(profile.events() or ()), on_gpu)

    def _read(self, events: list[FunctionEvent], on_gpu: bool) -> dict[str, Any]:
        owner = {number: slot for slot, numbers in self._made for number in numbers}
        spent = dict.fromkeys((slot for slot, _ in self._made), 0.0)
        total = 0.0
        for event in events:
            if event.device_type != torch.autograd.DeviceType.CPU:
                continue  # on a GPU, a range's span there
            if event.name == STEP:
                total = _microseconds(event, on_gpu)
            elif event.name.startswith(FORWARD):
                spent[event.name.removeprefix(FORWARD)] += _microseconds(event, on_gpu)
            elif event.name.startswith(BACKWARD) and event.sequence_nr in owner:
                spent[owner[event.sequence_nr]] += _microseconds(event, on_gpu)
        return {
            "clock": "GPU" if on_gpu else "CPU",
            "step_ms": total / 1e3,
            "slots": {slot: {"ms": us / 1e3, "share_of_step": us / total} for slot, us in spent.items()},
        }


def _microseconds(event: FunctionEvent, on_gpu: bool) -> float:
    """Time of an event: on a GPU that of the kernels it launched, without what a range spans there besides."""
    if not on_gpu:
        return float(event.cpu_time_total)
    own = 0.0 if event.is_user_annotation else sum(kernel.duration for kernel in event.kernels)
    return own + sum(_microseconds(child, on_gpu) for child in event.cpu_children)
