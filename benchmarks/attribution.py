"""Measure what each operator brings and keep the results: python benchmarks/attribution.py [EXPERIMENT] [-- OVERRIDE]

Each runs `python train.py experiment=EXPERIMENT ablate=true tracker=none OVERRIDE`; its attribution.json, .md and .png
go to benchmarks/results/<gpu>/attribution_EXPERIMENT.*.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's path is its folder

from benchmarks.training import folder_of, run_experiments  # noqa: E402


def main() -> int:
    """Measure the experiments that the command line names."""
    return run_experiments(__doc__.splitlines()[0], ["ablate=true"], keep)


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
