"""Takes samples of a contender: on a GPU by CUDA events and by the host's clock, on a CPU by the host's clock."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

Call = Callable[[], Any]


class Sample(NamedTuple):
    """One sample in milliseconds; gpu is None on a CPU."""

    gpu: float | None
    wall: float


class Timer(Protocol):
    """Times calls on one kind of device."""

    def sampler(self, call: Call, prepare: Call | None) -> Callable[[], Sample]:
        """What takes a sample: the median over repeats of `call`, each after an untimed `prepare`.

        The number of repeats is settled here, from a few calls.
        """


@contextmanager
def _without_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _nothing() -> None:
    pass


class CpuTimer:
    """Wall time on the CPU."""

    MOST_REPEATS = 50

    def __init__(self, window_ms: float) -> None:
        self.window_ms = window_ms

    def sampler(self, call: Call, prepare: Call | None) -> Callable[[], Sample]:
        def once() -> float:
            if prepare is not None:
                prepare()
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3

        repeats = _between(1, self.window_ms / min(once() for _ in range(2)), self.MOST_REPEATS)

        def sample() -> Sample:
            with _without_collection():
                return Sample(None, statistics.median(once() for _ in range(repeats)))

        return sample


class CudaTimer:
    """GPU time between events and wall time of single calls, both with a cold L2.

    Before each call a buffer of twice the L2 is overwritten. For GPU time the device first spins for as long as the
    host needs to queue the repeats, so that no gap between kernels is the host's: what a captured graph would take.
    Wall time starts with an idle device and ends when the call's work is done.
    """

    FEWEST_REPEATS, MOST_REPEATS = 3, 50
    FEWEST_WALL_REPEATS, MOST_WALL_REPEATS = 3, 10
    UNTIMED = 2  # calls at the head of a sample, which bring the clocks to their running state
    LONGEST_LEAD_MS = 20.0

    def __init__(self, window_ms: float, device: torch.device) -> None:
        self.window_ms = window_ms
        self.device = device
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.buffer = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)
        self.flush_ms = self._gpu_ms(_nothing, self.flush, repeats=10)
        cycles = 10_000_000
        self.cycles_per_ms = cycles / self._gpu_ms(_nothing, lambda: torch.cuda._sleep(cycles), repeats=3)

    def flush(self) -> None:
        """Overwrite twice the L2, so that no input of the next call is in it."""
        self.buffer.zero_()

    def sampler(self, call: Call, prepare: Call | None) -> Callable[[], Sample]:
        def before() -> None:
            if prepare is not None:
                prepare()
            self.flush()

        gpu_ms = self._gpu_ms(before, call, repeats=3)
        wall_ms = min(self._wall_ms(before, call) for _ in range(2))
        start = time.perf_counter()
        before()
        call()
        host_ms = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize(self.device)

        repeats = _between(self.FEWEST_REPEATS, self.window_ms / (gpu_ms + self.flush_ms), self.MOST_REPEATS)
        wall_repeats = _between(self.FEWEST_WALL_REPEATS, self.window_ms / 4 / wall_ms, self.MOST_WALL_REPEATS)
        lead_ms = min(1.2 * host_ms * (repeats + self.UNTIMED), self.LONGEST_LEAD_MS)

        def sample() -> Sample:
            with _without_collection():
                gpu = self._gpu_ms(before, call, repeats, lead_ms)
                return Sample(gpu, statistics.median(self._wall_ms(before, call) for _ in range(wall_repeats)))

        return sample

    def _gpu_ms(self, before: Call, call: Call, repeats: int, lead_ms: float = 0.0) -> float:
        """The median over the repeats, the untimed head left out."""
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats + self.UNTIMED)
        ]
        torch.cuda.synchronize(self.device)
        if lead_ms > 0:
            torch.cuda._sleep(int(lead_ms * self.cycles_per_ms))
        for start, end in pairs:
            before()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in pairs[self.UNTIMED :])

    def _wall_ms(self, before: Call, call: Call) -> float:
        before()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) * 1e3


def _between(least: int, wanted: float, most: int) -> int:
    return max(least, min(most, math.floor(wanted)))


def timer(device: torch.device, window_ms: float) -> Timer:
    """The timer of a device. Raises ValueError for a device that is neither a CUDA GPU nor the CPU."""
    if device.type == "cuda":
        return CudaTimer(window_ms, device)
    if device.type == "cpu":
        return CpuTimer(window_ms)
    raise ValueError(f"device is {device}; allowed: cpu, cuda")
