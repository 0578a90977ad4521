"""Trackers: Weights & Biases, or none. One that fails says why, once, and costs the run nothing but its record."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from engine.config import TrackerConfig

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Records the runs of a comparison, one an arm."""

    def start(self, arm: str) -> None:
        """The training of an arm begins."""

    def log(self, arm: str, step: int, values: Mapping[str, float]) -> None:
        """Values measured at a step of it."""

    def image(self, arm: str, name: str, path: Path) -> None:
        """A picture of it, a PNG file."""

    def summarize(self, arm: str, figures: Mapping[str, Any]) -> None:
        """Its final figures."""

    def close(self, exit_code: int) -> None:
        """The comparison is over."""


class NullTracker:
    """Records nothing."""

    def start(self, arm: str) -> None:
        """Nothing."""

    def log(self, arm: str, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def image(self, arm: str, name: str, path: Path) -> None:
        """Nothing."""

    def summarize(self, arm: str, figures: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self, exit_code: int) -> None:
        """Nothing."""


class WandbTracker:
    """Weights & Biases: one group a comparison, one run an arm, open side by side until the final figures are there."""

    def __init__(self, settings: TrackerConfig, directory: Path, config: Mapping[str, Any]) -> None:
        # Its caches go to the run directory too: the home directory may be missing or read-only.
        for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(variable, str(directory / "wandb"))
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb, self._settings, self._directory, self._config = wandb, settings, directory, config
        self._runs: dict[str, Any] = {}

    def start(self, arm: str) -> None:
        """Open the arm's run."""
        self._runs[arm] = self._wandb.init(
            project=self._settings.project,
            group=self._directory.name,
            name=arm,
            dir=self._directory,
            config={**self._config, "arm": arm},
            mode=self._settings.mode,  # type: ignore[arg-type]
            reinit="create_new",
            # No copy of the output, and no sampling of the machine while steps are timed.
            settings=self._wandb.Settings(console="off", x_disable_stats=True),
        )

    def log(self, arm: str, step: int, values: Mapping[str, float]) -> None:
        """Log to the arm's run."""
        self._runs[arm].log(dict(values), step=step)

    def image(self, arm: str, name: str, path: Path) -> None:
        """Log it to the arm's run."""
        self._runs[arm].log({name: self._wandb.Image(str(path))})

    def summarize(self, arm: str, figures: Mapping[str, Any]) -> None:
        """Put the figures in the summary of the arm's run."""
        self._runs[arm].summary.update(dict(figures))

    def close(self, exit_code: int) -> None:
        """Finish all runs."""
        for run in self._runs.values():
            run.finish(exit_code=exit_code)


class GuardedTracker:
    """A tracker whose first failure is logged with its reason and ends tracking, not the run."""

    def __init__(self, make: Callable[[], Tracker]) -> None:
        self._tracker: Tracker | None = None
        with self._guard():
            self._tracker = make()

    def start(self, arm: str) -> None:
        """See Tracker."""
        if self._tracker is not None:
            with self._guard():
                self._tracker.start(arm)

    def log(self, arm: str, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        if self._tracker is not None:
            with self._guard():
                self._tracker.log(arm, step, values)

    def image(self, arm: str, name: str, path: Path) -> None:
        """See Tracker."""
        if self._tracker is not None:
            with self._guard():
                self._tracker.image(arm, name, path)

    def summarize(self, arm: str, figures: Mapping[str, Any]) -> None:
        """See Tracker."""
        if self._tracker is not None:
            with self._guard():
                self._tracker.summarize(arm, figures)

    def close(self, exit_code: int) -> None:
        """See Tracker."""
        if self._tracker is not None:
            with self._guard():
                self._tracker.close(exit_code)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and none of it may end a training
            self._tracker = None
            _log.warning("tracking ends, the run goes on: %s: %s", type(error).__name__, error)


def make_tracker(settings: TrackerConfig, directory: Path, config: Mapping[str, Any]) -> Tracker:
    """The tracker that a configuration names, recording into the run directory."""
    if settings.name == "none":
        return NullTracker()
    return GuardedTracker(lambda: WandbTracker(settings, directory, config))
