"""SIGINT and SIGTERM: the first ends the run after the step under way, a second one leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from engine.errors import Interrupted


class StopSignal:
    """While entered, takes the signals and remembers the first; `check` raises Interrupted once there was one."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.received is not None:
            raise Interrupted(self.received)

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + signum)
        self.received = signum
