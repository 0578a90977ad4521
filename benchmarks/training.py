"""Train the published experiments and keep their results: python benchmarks/training.py [EXPERIMENT ...] [-- OVERRIDE]

Each runs `python train.py experiment=EXPERIMENT tracker=none OVERRIDE`; its summary.json, comparison.md and figures go
to benchmarks/results/<gpu>/EXPERIMENT/. Where the sources are a copy without their repository, the environment
variable FUSEDOPS_COMMIT names the commit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENTS = ("transformer_d512", "transformer_d768")
Keep = Callable[[Path, Path, str, str], Path]
"""Copies what is published of a run directory into the results: of the experiment and command. Returns where."""
KEPT = ("summary.json", "comparison.md", "loss.png", "throughput.png", "relative_l2.png", "solution-*.png")
"""Files of a run, some as patterns; those that a model does not have are none."""


def main() -> int:
    """Train the experiments that the command line names."""
    return run_experiments(__doc__.splitlines()[0], [], keep)


def run_experiments(description: str, asked: list[str], keep: Keep) -> int:
    """Run train.py with the overrides asked for, once for each experiment of the command line, and keep the files.

    Returns 1 where one failed; the others are kept.
    """
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"default: {' '.join(EXPERIMENTS)}")
    arguments.add_argument("--out", type=Path, default=RESULTS, help="default: benchmarks/results")
    own, overrides = split_overrides(sys.argv[1:])
    options = arguments.parse_args(own)
    overrides = [*asked, "tracker=none", *overrides]
    failed = [name for name in options.experiments or EXPERIMENTS if not run(name, overrides, options.out, keep)]
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


def split_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after "--"."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def run(experiment: str, overrides: list[str], results: Path, keep: Keep) -> bool:
    """Run one experiment and keep its files. Returns whether it succeeded."""
    asked = ["train.py", f"experiment={experiment}", *overrides]
    print(f"python {shlex.join(asked)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *asked, f"hydra.run.dir={directory}"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            return False
        keep(Path(directory), results, experiment, f"python {shlex.join(asked)}")
    return True


def folder_of(device: str) -> str:
    """The folder of a device's results: nvidia-h200; of a CPU without its model and threads."""
    return "-".join(device.split(" (")[0].lower().split())


def keep(directory: Path, results: Path, experiment: str, command: str) -> Path:
    """Copy a run's files into the results; summary.json gets its command."""
    summary = json.loads((directory / "summary.json").read_text())
    summary["command"] = command
    target = results / folder_of(summary["device"]) / experiment
    target.mkdir(parents=True, exist_ok=True)
    for pattern in KEPT:
        for path in directory.glob(pattern):
            shutil.copyfile(path, target / path.name)
    (target / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"written to {target}")
    return target


if __name__ == "__main__":
    sys.exit(main())
