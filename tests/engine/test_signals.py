from __future__ import annotations

import signal
import subprocess
import sys
import time

from engine.signals import StopSignal

SCRIPT = """
import time
from engine.signals import StopSignal
with StopSignal():
    print("ready", flush=True)
    while True:  # a step that never ends
        time.sleep(0.05)
"""


def test_a_second_signal_leaves_at_once():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 128 + signal.SIGINT


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) is before
