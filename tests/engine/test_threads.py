"""Threads that wait by spinning make a training on busy cores many times slower: torch is told before it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("torch is imported with", os.environ.get("OMP_WAIT_POLICY"))
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Watch())
sys.path.insert(0, ".")
import {module}
"""


@pytest.mark.parametrize("module", ["train", "benchmarks.pinn"])
def test_the_wait_policy_is_set_before_torch_is_imported(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", SCRIPT.format(module=module)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "torch is imported with PASSIVE", done.stderr
