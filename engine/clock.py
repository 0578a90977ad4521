"""The clock of a training: what its steps took, and nothing else."""

from __future__ import annotations

import time

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Wall time, units of work and peak memory of training steps, from the latest restart on, pauses left out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started, self._paused = 0.0, True
        self.units = 0
        self.seconds = 0.0
        self.total = 0.0
        """Seconds of all steps, whatever was restarted."""
        self.peak_memory = 0 if device.type == "cuda" else None
        """The most bytes allocated at once before the latest pause; None on the CPU."""
        self.resume()

    def restart(self) -> None:
        """Measure time and units from here."""
        self.lap()
        self.units, self.seconds = 0, 0.0

    def forget_peak_memory(self) -> None:
        """Measure the peak from here: what compilers and their tuning needed is no step's."""
        if self.peak_memory is not None:
            self.peak_memory = 0
            torch.cuda.reset_peak_memory_stats(self._device)

    def lap(self) -> None:
        """Add the time since the start, or since the last lap; none in a pause."""
        synchronize(self._device)
        now = time.perf_counter()
        if not self._paused:
            self.seconds += now - self._started
            self.total += now - self._started
        self._started = now

    def pause(self) -> None:
        """Something begins that is no step: an evaluation, a checkpoint."""
        self.lap()
        if self.peak_memory is not None and not self._paused:
            self.peak_memory = max(self.peak_memory, torch.cuda.max_memory_allocated(self._device))
        self._paused = True

    def resume(self) -> None:
        """It is over."""
        if self.peak_memory is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._started, self._paused = time.perf_counter(), False
