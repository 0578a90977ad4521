"""Measure time to accuracy of all ways to take a Laplacian: python benchmarks/pinn.py [PROBLEM ...] [-- OVERRIDE ...]

For each problem, every implementation of the slot laplacian is trained in turn by experiment=pinn_time_to_accuracy,
from the same weights on the same grid, until it reaches the error looked for; then their steps of Adam are timed side
by side. The result goes to benchmarks/results/<gpu>/pinn_PROBLEM.json.

    --implementations A,B   these only; the first is what the others are compared with
    --budget-seconds S      start no problem that would not end in time, as judged by the slowest that has ended
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's path is its folder

from hydra import compose, initialize_config_dir  # noqa: E402

import train  # noqa: E402
from benchmarks.training import RESULTS, folder_of, split_overrides  # noqa: E402
from engine import config, report  # noqa: E402
from engine.arms import operator_set  # noqa: E402
from engine.comparison import Comparison, choose_device  # noqa: E402
from engine.errors import ConfigError, RunError, explain  # noqa: E402
from engine.files import write_atomically  # noqa: E402
from engine.progress import make_console  # noqa: E402
from engine.signals import StopSignal  # noqa: E402
from engine.tracking import NullTracker  # noqa: E402
from fusedops.slots import SLOTS  # noqa: E402
from models.pinn import PROBLEMS  # noqa: E402

EXPERIMENT = "pinn_time_to_accuracy"
SIZES = {"heat": 38416}
"""Points of a problem that needs others than the experiment's: 14^4."""


def main() -> int:
    """Measure the problems one after the other. Returns 1 where one failed, 2 for a configuration error."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("problems", nargs="*", metavar="PROBLEM", help=f"default: {' '.join(PROBLEMS)}")
    arguments.add_argument("--implementations", default=",".join(implementations()), help="default: %(default)s")
    arguments.add_argument("--budget-seconds", type=float, default=float("inf"))
    arguments.add_argument("--out", type=Path, default=RESULTS, help="default: benchmarks/results")
    own, overrides = split_overrides(sys.argv[1:])
    options = arguments.parse_args(own)
    began, slowest, failed = time.monotonic(), 0.0, False
    for problem in options.problems or PROBLEMS:
        started = time.monotonic()
        if started - began + slowest > options.budget_seconds:
            print(f"{problem}: left out, {started - began:.0f} of {options.budget_seconds:g} s are over")
            continue
        try:
            measure(problem, options.implementations.split(","), overrides, options.out)
        except ConfigError as error:
            print(explain(error), file=sys.stderr)
            return 2
        except RunError as error:
            print(f"{problem}: {error}", file=sys.stderr)
            failed = True
        slowest = max(slowest, time.monotonic() - started)
    return int(failed)


def implementations() -> list[str]:
    """The implementations of the slot, the stock one first, without aliases."""
    return [name for name, found in SLOTS["laplacian"].implementations.items() if found.name == name]


def measure(problem: str, names: list[str], overrides: list[str], results: Path) -> Path:
    """Train and time the implementations on one problem and keep the summary. Returns its path.

    Raises ConfigError and RunError as train.py's run does.
    """
    size = [f"train.batch_size={SIZES[problem]}"] if problem in SIZES else []
    given = [f"experiment={EXPERIMENT}", f"problem={problem}", "tracker=none", *size, *overrides]
    with initialize_config_dir(str(train.CONFIGS), version_base="1.3"):
        settings = config.resolve(compose("config", given), train.MODELS)
    task = train.make_task(settings)
    arms = [operator_set(name, task.slots) for name in names]
    device, console = choose_device(settings.values.train.device), make_console()
    with tempfile.TemporaryDirectory() as directory, StopSignal() as stop:
        comparison = Comparison(
            task, arms, settings.values.train, device, Path(directory), NullTracker(), console, stop
        )
        report.introduce(console, comparison, Path(directory))
        comparison.run()
    summary = report.summarize(comparison, names[0], settings.resolved)
    summary["command"] = f"python benchmarks/{shlex.join([Path(__file__).name, *sys.argv[1:]])}"
    report.print_tables(console, summary)
    folder = results / folder_of(summary["device"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"pinn_{problem}.json"
    write_atomically(path, json.dumps(summary, indent=2) + "\n")
    print(f"written to {path}")
    return path


if __name__ == "__main__":
    sys.exit(main())
