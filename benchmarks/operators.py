"""Measure every row of the operators and keep the report: python benchmarks/operators.py [OPTION ...]

Writes benchmarks/results/<gpu>/operators.json. The options are those of `python -m fusedops.benchmark`, whose --help
lists them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = "benchmarks/results/{gpu}/operators.json"


def main() -> int:
    """Run the benchmark from the repository's root. Returns its exit status."""
    command = [sys.executable, "-m", "fusedops.benchmark", "--out", REPORT, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
