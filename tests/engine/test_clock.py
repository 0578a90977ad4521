from __future__ import annotations

import pytest
import torch

from engine import clock
from engine.clock import Clock


@pytest.fixture
def at(monkeypatch):
    """Sets the time."""
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_pauses_are_left_out_whatever_happens_in_them(at):
    at(100)
    measured = Clock(torch.device("cpu"))
    at(103)
    measured.lap()
    at(104)
    measured.pause()  # an evaluation
    at(110)
    measured.lap()
    at(120)
    measured.pause()  # a checkpoint in it
    at(150)
    measured.resume()
    at(152)
    measured.lap()
    assert measured.seconds == measured.total == 6


def test_a_restart_forgets_seconds_and_units_but_not_the_total(at):
    measured = Clock(torch.device("cpu"))
    measured.units = 7
    at(4)
    measured.restart()
    at(5)
    measured.lap()
    assert (measured.seconds, measured.units, measured.total) == (1, 0, 5)
    assert measured.peak_memory is None
