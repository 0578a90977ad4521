"""Measure what each operator brings and keep the results: python benchmarks/attribution.py [EXPERIMENT] [-- OVERRIDE]

Each runs `python train.py experiment=EXPERIMENT ablate=true tracker=none OVERRIDE`; its attribution.json, .md and .png
go to benchmarks/results/<gpu>/attribution_EXPERIMENT.*.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's path is its folder

from benchmarks.training import EXPERIMENTS, RESULTS, folder_of, split_overrides  # noqa: E402


def main() -> int:
    """Measure the experiments one after the other. Returns 1 where one failed; the others are kept."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"default: {' '.join(EXPERIMENTS)}")
    arguments.add_argument("--out", type=Path, default=RESULTS, help="default: benchmarks/results")
    own, overrides = split_overrides(sys.argv[1:])
    options = arguments.parse_args(own)
    failed = [name for name in options.experiments or EXPERIMENTS if not run(name, overrides, options.out)]
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


def run(experiment: str, overrides: list[str], results: Path) -> bool:
    """Measure one experiment and keep its files. Returns whether it succeeded."""
    asked = ["train.py", f"experiment={experiment}", "ablate=true", "tracker=none", *overrides]
    print(f"python {shlex.join(asked)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *asked, f"hydra.run.dir={directory}"]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            return False
        keep(Path(directory), results, experiment, f"python {shlex.join(asked)}")
    return True


def keep(directory: Path, results: Path, experiment: str, command: str) -> Path:
    """Copy a run's files into the results; the .json gets its command. Returns its path."""
    summary = json.loads((directory / "attribution.json").read_text(encoding="utf-8"))
    folder = results / folder_of(summary["device"])
    folder.mkdir(parents=True, exist_ok=True)
    for extension in ("md", "png"):
        (folder / f"attribution_{experiment}.{extension}").write_bytes(
            (directory / f"attribution.{extension}").read_bytes()
        )
    path = folder / f"attribution_{experiment}.json"
    path.write_text(json.dumps({**summary, "command": command}, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return path


if __name__ == "__main__":
    sys.exit(main())
