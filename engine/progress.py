"""What a run shows while it trains: a progress bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

REFRESH_SECONDS = 0.2
PLAIN_SECONDS = 10.0


def make_console() -> Console:
    """The console of a run; wide enough for its tables where there is no terminal to fit."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def quantity(value: float) -> str:
    """A number with at most three or four digits and a prefix: 812, 45.3k, 1.21M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


class TrainingProgress:
    """The progress of one arm's training, of which `done` steps are done: step, loss, throughput, time left."""

    def __init__(self, console: Console, arm: str, steps: int, unit: str, done: int = 0) -> None:
        self._console, self._arm, self._steps, self._unit, self._done = console, arm, steps, unit, done
        self._status = ""
        self._started = self._shown = time.perf_counter()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console)
            self._row = self._bar.add_task(arm, total=steps, completed=done, status="")

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int) -> None:
        """`step` steps are done."""
        now, last = time.perf_counter(), step == self._steps
        if self._bar is not None:
            if last or now - self._shown >= REFRESH_SECONDS:
                self._shown = now
                self._bar.update(self._row, completed=step, status=self._status)
        elif last or now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            left = (now - self._started) / (step - self._done) * (self._steps - step)
            self._console.print(f"{self._arm}: step {step}/{self._steps}  {self._status}  {left:.0f} s left")

    def measured(self, loss: float, throughput: float | None) -> None:
        """The latest loss, and units a second where they are known."""
        rate = "" if throughput is None else f"  {quantity(throughput)} {self._unit}/s"
        self._status = f"loss {loss:.4f}{rate}" if abs(loss) >= 0.1 else f"loss {loss:.3g}{rate}"
