"""Trackers: Weights & Biases, or none. One that fails says why, once, and costs the run nothing but its record.

A run of W&B is reopened when the run it records is resumed: tracker.json in the run directory keeps the ids. An offline
file cannot be appended to, so there is one more then, of the same id; as each line has its training step, `wandb sync`
makes one run of them, in order.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from engine.config import TrackerConfig
from engine.files import write_atomically

TRACKER_FILE = "tracker.json"
STEP = "step"
"""The metric that every other is drawn over."""
METRICS = ("train/*", "val/*", "perf/*")
INIT_SECONDS, FINISH_SECONDS = 30.0, 60.0
"""How long W&B may try to open a run, and to upload the rest of it at the end; `wandb sync` can do that later."""
LIMIT_SECONDS = 90.0
"""How long a call of a tracker may take before it is given up."""

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
        os.environ.setdefault("WANDB_SILENT", "true")  # without an account it raises, too, instead of asking for one
        import wandb

        self._wandb, self._settings, self._directory, self._config = wandb, settings, directory, config
        self._runs: dict[str, Any] = {}
        self._file = directory / TRACKER_FILE
        self._ids: dict[str, str] = {}
        if self._file.exists():  # of the run that is resumed
            self._ids = json.loads(self._file.read_text(encoding="utf-8"))["runs"]

    def start(self, arm: str) -> None:
        """Open the arm's run, or reopen it where tracker.json has its id."""
        if arm not in self._ids:
            self._ids[arm] = secrets.token_hex(4)
            write_atomically(
                self._file, json.dumps({"project": self._settings.project, "runs": self._ids}, indent=2) + "\n"
            )
        # No copy of the output, and no sampling of the machine while steps are timed.
        options: dict[str, Any] = {"console": "off", "x_disable_stats": True, "init_timeout": INIT_SECONDS}
        if "finish_timeout" in self._wandb.Settings.model_fields:  # older versions wait as long as it takes
            options["finish_timeout"] = FINISH_SECONDS
        run = self._wandb.init(
            project=self._settings.project,
            group=self._directory.name,
            name=arm,
            id=self._ids[arm],
            resume="allow",
            dir=self._directory,
            config={**self._config, "arm": arm},
            mode=self._settings.mode,  # type: ignore[arg-type]
            reinit="create_new",
            settings=self._wandb.Settings(**options),
        )
        run.define_metric(STEP)
        for metric in METRICS:
            run.define_metric(metric, step_metric=STEP)
        self._runs[arm] = run

    def log(self, arm: str, step: int, values: Mapping[str, float]) -> None:
        """Log to the arm's run."""
        self._runs[arm].log({STEP: step, **values}, step=step)

    def image(self, arm: str, name: str, path: Path) -> None:
        """Log it to the arm's run."""
        self._runs[arm].log({name: self._wandb.Image(str(path))})

    def summarize(self, arm: str, figures: Mapping[str, Any]) -> None:
        """Put the figures in the summary of the arm's run, which is opened if it has not been."""
        if arm not in self._runs:
            self.start(arm)
        self._runs[arm].summary.update(dict(figures))

    def close(self, exit_code: int) -> None:
        """Finish all runs."""
        for run in self._runs.values():
            run.finish(exit_code=exit_code)


class GuardedTracker:
    """A tracker whose first failure is logged with its reason and ends tracking, not the run.

    Calls are made one after the other in a thread of their own, and waited for at most `limit` seconds each: a tracker
    that hangs is left behind.
    """

    def __init__(self, make: Callable[[], Tracker], limit: float = LIMIT_SECONDS) -> None:
        self._limit = limit
        self._tracker: Tracker | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="tracker", daemon=True).start()
        self._tracker = self._call(make)

    def start(self, arm: str) -> None:
        """See Tracker."""
        self._guarded(lambda tracker: tracker.start(arm))

    def log(self, arm: str, step: int, values: Mapping[str, float]) -> None:
        """See Tracker."""
        self._guarded(lambda tracker: tracker.log(arm, step, values))

    def image(self, arm: str, name: str, path: Path) -> None:
        """See Tracker."""
        self._guarded(lambda tracker: tracker.image(arm, name, path))

    def summarize(self, arm: str, figures: Mapping[str, Any]) -> None:
        """See Tracker."""
        self._guarded(lambda tracker: tracker.summarize(arm, figures))

    def close(self, exit_code: int) -> None:
        """See Tracker."""
        self._guarded(lambda tracker: tracker.close(exit_code))
        self._tracker = None
        self._calls.put(None)  # the thread ends

    def _guarded(self, call: Callable[[Tracker], None]) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._call(lambda: call(tracker))

    def _call(self, call: Callable[[], Any]) -> Any:
        """The result of a call in the tracker's thread; None, and tracking ends, if it fails or takes too long."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((call, answer))
        try:
            result, error = answer.get(timeout=self._limit)
        except queue.Empty:
            result, error = None, TimeoutError(f"no answer within {self._limit:g} s")
        if error is not None:
            self._tracker = None
            _log.warning("tracking ends, the run goes on: %s: %s", type(error).__name__, error)
        return result

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.put((call(), None))
            except Exception as error:  # noqa: BLE001 - a tracker may raise anything, and none of it may end a training
                answer.put((None, error))


def make_tracker(settings: TrackerConfig, directory: Path, config: Mapping[str, Any]) -> Tracker:
    """The tracker that a configuration names, recording into the run directory."""
    if settings.name == "none":
        return NullTracker()
    return GuardedTracker(lambda: WandbTracker(settings, directory, config))
