"""Equivalence, measured: how far apart fused and stock operators leave the final validation loss, and what noise does.

A pair is a set of trainings that start from the same weights and see the same batches: each arm, stock, and stock again
with another dropout seed, written stock'. Pairs differ by their seed: other weights, other batches, other dropout. The
masks of a fused dropout are never those of the stock one, so what separates an arm from stock contains the noise of
dropout; stock' shows how much that is.

Method. A pair's difference is the arm's final validation loss minus the mean of its two stock ones, which estimates the
same quantity as the arm minus stock, with three quarters of the variance where arm and stock differ by dropout alone.
Over the N pairs the 95 % interval of the mean difference is Student's: mean +- t(0.975, N - 1) s / sqrt(N), s being the
standard deviation of the differences. The smallest difference resolved is the interval's half-width: a true difference
that large is told from none in about every second repetition of the study, one twice as large nearly always.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from engine import figures
from engine.comparison import Comparison, device_name
from engine.compilation import compiling
from engine.errors import ConfigError
from engine.loop import matmul_precision, train_arm
from engine.progress import TrainingProgress
from engine.report import Table, page, write_atomically
from engine.signals import StopSignal
from engine.statistics import MeanInterval, mean_interval
from engine.task import Task
from engine.tracking import Tracker
from fusedops.benchmark.environment import versions

REDRAWN = 2**31
"""Added to a pair's seed, it is the dropout seed of stock': no pair has it, since train.seed is below."""
OUTCOMES = "equivalence.jsonl"
"""The file of a study's trainings, a line each."""
NO_CONDITIONS = frozenset(
    ("ops", "baseline", "tracker", "equivalence", "equivalence_margin", "ablate", "profile", "resume")
)
NO_TRAIN_CONDITIONS = frozenset(
    (
        "seed",
        "device",
        "eval_every",
        "log_every",
        "timing_rounds",
        "checkpoint_every",
        "early_stop",
        "early_stop_delta",
    )
)
"""Keys of the configuration, and of its `train`, that the losses of an arm with a given seed do not depend on."""


# ---------------------------------------------------------------------------------------------------------------------
# Trainings


@dataclass(frozen=True)
class Outcome:
    """What one training of a pair gave; a line of equivalence.jsonl."""

    seed: int
    """The pair's."""
    training: str
    """The arm's name; with an apostrophe, the stock arm with another dropout seed."""
    metrics: dict[str, float]
    """The validation metrics after the last step, "loss" in nats among them."""
    final_loss: float
    """The training loss of the last step."""
    steps: int
    skipped_steps: int
    units: int
    """Units of work (tokens) of all steps."""
    seconds: float
    """Wall time of the steps; where processes shared a GPU it says nothing about the operators."""
    commit: str | None
    conditions: str
    """A hash of the configuration, the device and the versions: trainings with another one cannot be compared."""


def redrawn(stock: str) -> str:
    """The name of the stock training with another dropout seed."""
    return f"{stock}'"


class Study:
    """Trains the members of pairs, one at a time.

    comparisons  makes, of a pair's seed, the comparison of its arms: with weights and a task of that seed. Its
                 eval_every and early_stop do not count: a training is evaluated at its end alone.
    arms         the names of its arms, that of the stock operators first.
    resolved     the configuration that they come from.
    """

    def __init__(
        self,
        comparisons: Callable[[int], Comparison],
        arms: Sequence[str],
        device: torch.device,
        resolved: Mapping[str, Any],
        console: Console,
        stop: StopSignal,
    ) -> None:
        self.stock, self.device, self.resolved, self.console = arms[0], device, resolved, console
        self.trainings = (*arms[1:], self.stock, redrawn(self.stock))
        """The names of a pair's trainings, in order: the arms, stock the last of them, and stock'."""
        self.conditions = conditions(resolved, device)
        """See `Outcome`."""
        self._comparisons, self._stop = comparisons, stop
        self._seed: int | None = None
        self._checked: set[str] = set()
        self._commit = versions()["git"]

    def comparison(self, seed: int) -> Comparison:
        """The comparison of a pair; the latest is kept."""
        if seed != self._seed:
            self._seed, self._comparison = seed, self._comparisons(seed)
        return self._comparison

    def train(self, seed: int, name: str) -> Outcome:
        """One training of the pair of a seed, by its name.

        The first of an arm in this process is preceded by the check of its operators (`engine.operators`). Raises
        RunError, or Interrupted after the step during which a signal came.
        """
        comparison, again = self.comparison(seed), name == redrawn(self.stock)
        arm = next(arm for arm in comparison.arms if arm.name == (self.stock if again else name))
        task, train = comparison.task, replace(comparison.train, eval_every=0, early_stop=0)
        with matmul_precision(train.tf32), compiling([arm]):
            if arm.name not in self._checked:
                comparison.operators_of(arm)
                self._checked.add(arm.name)
                comparison.release()
            model = comparison.build(arm)
            # From here on the seed is dropout's alone: weights are drawn, and batches are the task's.
            train = replace(train, seed=seed + REDRAWN if again else seed)
            steps = sum(phase.steps for phase in task.phases())
            with TrainingProgress(self.console, f"seed {seed}, {name}", steps, task.unit) as progress:
                result = train_arm(task, model, train, self.device, lambda step, values: None, progress, self._stop)
        del model
        comparison.release()
        return Outcome(
            seed=seed,
            training=name,
            metrics=result.reported[1],
            final_loss=result.losses[-1],
            steps=len(result.losses),
            skipped_steps=result.skipped_steps,
            units=steps * comparison.units_per_step,
            seconds=result.seconds,
            commit=self._commit,
            conditions=self.conditions,
        )


# ---------------------------------------------------------------------------------------------------------------------
# The result


def verdict(interval: MeanInterval, margin: float) -> str:
    """What an interval shows: equivalent (inside +-margin), different (reaches outside, without 0), or not resolved."""
    if interval.low is None or interval.high is None:
        return "not resolved"
    if -margin <= interval.low and interval.high <= margin:
        return "equivalent"
    if interval.low > 0 or interval.high < 0:
        return "different"
    return "not resolved"


def differences(outcomes: Iterable[Outcome], arm: str, references: Sequence[str]) -> dict[int, float]:
    """By seed, the arm's validation loss minus the mean of the references', for the pairs that have all of them."""
    losses: dict[int, dict[str, float]] = {}
    for outcome in outcomes:
        losses.setdefault(outcome.seed, {})[outcome.training] = outcome.metrics["loss"]
    return {
        seed: pair[arm] - sum(pair[name] for name in references) / len(references)
        for seed, pair in sorted(losses.items())
        if arm in pair and all(name in pair for name in references)
    }


def summarize(outcomes: Sequence[Outcome], arms: Sequence[str], stock: str, margin: float) -> dict[str, Any]:
    """The statistics of a study; equivalence.json has them beside what was run.

    comparisons: for each arm its differences from the mean of stock and stock' by seed, their interval and the verdict,
    and the interval of the plain difference from stock. noise: the same of stock' minus stock; its smallest difference
    is the half-width that an arm would have which differs from stock by its dropout alone.
    """
    both = (stock, redrawn(stock))
    comparisons = {}
    for arm in arms:
        values = differences(outcomes, arm, both)
        interval = mean_interval(list(values.values()))
        comparisons[arm] = {
            **asdict(interval),
            "differences": {str(seed): value for seed, value in values.items()},
            "verdict": verdict(interval, margin),
            "against_stock_alone": asdict(mean_interval(list(differences(outcomes, arm, (stock,)).values()))),
        }
    values = differences(outcomes, both[1], (stock,))
    noise = mean_interval(list(values.values()))
    return {
        "stock": stock,
        "margin": margin,
        "comparisons": comparisons,
        "noise": {
            **asdict(noise),
            "differences": {str(seed): value for seed, value in values.items()},
            # A training against the mean of two has 3/2 of a training's variance, one against another twice of it.
            "smallest_difference": None if noise.half_width is None else noise.half_width * math.sqrt(0.75),
        },
        "trainings": [asdict(outcome) for outcome in sorted(outcomes, key=lambda o: (o.seed, o.training))],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Files and tables


def conditions(resolved: Mapping[str, Any], device: torch.device) -> str:
    """A hash of all that the losses of a pair depend on besides its seed, the operators and the commit."""
    kept = {key: value for key, value in resolved.items() if key not in NO_CONDITIONS}
    kept["train"] = {key: value for key, value in resolved["train"].items() if key not in NO_TRAIN_CONDITIONS}
    found = {name: version for name, version in versions().items() if name != "git"}
    text = json.dumps([kept, found, device_name(device).partition(" (")[0]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_outcomes(path: Path, wanted: str) -> list[Outcome]:
    """The trainings that a file of lines has, none where there is no file.

    Raises ConfigError for trainings under other conditions than wanted.
    """
    if not path.exists():
        return []
    outcomes = [Outcome(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    check_conditions(path, outcomes, wanted)
    return outcomes


def check(directory: Path, resolved: Mapping[str, Any], device: torch.device) -> None:
    """Raise ConfigError where the directory has trainings that a study of this configuration cannot continue."""
    read_outcomes(directory / OUTCOMES, conditions(resolved, device))


def check_conditions(path: Path, outcomes: Iterable[Outcome], wanted: str) -> None:
    """Raise ConfigError where the trainings of a file cannot be compared with those to come."""
    if any(outcome.conditions != wanted for outcome in outcomes):
        raise ConfigError(
            f"{path}: its trainings are of another configuration, device or version, and cannot be continued by this "
            "one; choose another directory, or remove the file"
        )


def result(study: Study, task: Task, outcomes: Sequence[Outcome], margin: float) -> dict[str, Any]:
    """The content of equivalence.json, of all trainings given."""
    stocks = (study.stock, redrawn(study.stock))
    arms = [name for name in dict.fromkeys(outcome.training for outcome in outcomes) if name not in stocks]
    return {
        "model": task.name,
        "unit": task.unit,
        "device": device_name(study.device),
        "versions": versions(),
        "commits": sorted({outcome.commit or "unknown" for outcome in outcomes}),
        "precision": study.resolved["train"]["precision"],
        **summarize(outcomes, arms, study.stock, margin),
        "config": dict(study.resolved),
    }


def difference_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line a difference: what, pairs, mean and interval, smallest difference resolved, deviation, verdict."""

    def row(what: str, interval: Mapping[str, Any], shown: str) -> tuple[str, ...]:
        if interval["half_width"] is None:
            mean = "-" if interval["mean"] is None else f"{interval['mean']:+.4f}"
            return (what, str(interval["count"]), f"{mean} (one pair has no interval)", "-", "-", shown)
        span = f"{interval['mean']:+.4f} [{interval['low']:+.4f}, {interval['high']:+.4f}]"
        return (
            what,
            str(interval["count"]),
            span,
            f"{interval['half_width']:.4f}",
            f"{interval['deviation']:.4f}",
            shown,
        )

    stock, rows = summary["stock"], []
    for arm, comparison in summary["comparisons"].items():
        rows.append(row(f"{arm} - mean of {stock}, {redrawn(stock)}", comparison, comparison["verdict"]))
        rows.append(row(f"{arm} - {stock}", comparison["against_stock_alone"], "-"))
    return [*rows, row(f"{redrawn(stock)} - {stock}", summary["noise"], "-")]


DIFFERENCE_HEADER = (
    "difference",
    "pairs",
    "mean, nats [95 %]",
    "smallest difference resolved",
    "deviation of a pair",
    "verdict",
)


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """The tables of a study: the differences, and the losses they come from."""
    names = [*summary["comparisons"], summary["stock"], redrawn(summary["stock"])]
    losses: dict[int, dict[str, float]] = {}
    for outcome in summary["trainings"]:
        losses.setdefault(outcome["seed"], {})[outcome["training"]] = outcome["metrics"]["loss"]
    rows = [
        (str(seed), *(f"{pair[name]:.4f}" if name in pair else "-" for name in names)) for seed, pair in losses.items()
    ]
    return [
        Table("Differences in final validation loss", DIFFERENCE_HEADER, difference_rows(summary)),
        Table("Final validation loss, nats", ("seed", *names), rows),
    ]


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of the tables must know."""
    stock = summary["stock"]
    lines = [
        f"A pair's trainings start from the same weights and see the same batches; {redrawn(stock)} is {stock} with "
        "another dropout seed. Intervals are Student's t of the pairs' differences, 95 %. The verdict is of the "
        f"difference from the mean of {stock} and {redrawn(stock)}: equivalent where its interval lies inside "
        f"+-{summary['margin']:g} nats, different where it reaches outside and excludes 0. The smallest difference "
        "resolved is the interval's half-width.",
    ]
    if summary["noise"]["smallest_difference"] is not None:
        lines.append(
            f"By the noise of the {stock} trainings alone, {summary['noise']['count']} pairs resolve "
            f"{summary['noise']['smallest_difference']:.4f} nats."
        )
    if summary["trainings"]:
        one = summary["trainings"][0]
        lines.append(f"Each training is {one['steps']:,} steps, {one['units'] / 1e6:.2f}M {summary['unit']}.")
    return lines


def markdown(summary: Mapping[str, Any]) -> str:
    """equivalence.md."""
    title = f"is {', '.join(summary['comparisons'])} equivalent to {summary['stock']}?"
    return page(title, summary, ", ".join(summary["commits"]), tables(summary), notes(summary))


def write(directory: Path, summary: Mapping[str, Any], name: str = "equivalence") -> None:
    """NAME.json, NAME.md and NAME.png."""
    write_atomically(directory / f"{name}.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(directory / f"{name}.md", markdown(summary))
    figures.equivalence(directory / f"{name}.png", summary)


def run(study: Study, seeds: Sequence[int], margin: float, directory: Path, tracker: Tracker) -> dict[str, Any]:
    """Train the pairs of the seeds, those that the directory has excepted, and leave and print the result.

    Each training that ends is a line of equivalence.jsonl at once, and the other files are written after each pair: a
    study that was stopped goes on where it was. All pairs of the directory count. Returns what equivalence.json has.
    Raises ConfigError where the directory has trainings that cannot be compared with these.
    """
    path = directory / OUTCOMES
    outcomes = read_outcomes(path, study.conditions)
    tracker.start("equivalence")
    for seed in seeds:
        done = {outcome.training for outcome in outcomes if outcome.seed == seed}
        for name in study.trainings:
            if name not in done:
                outcomes.append(study.train(seed, name))
                write_atomically(path, "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))
                study.console.print(f"seed {seed}, {name}: validation loss {outcomes[-1].metrics['loss']:.4f}")
        summary = result(study, study.comparison(seed).task, outcomes, margin)
        write(directory, summary)
    tracker.summarize("equivalence", {key: summary[key] for key in ("comparisons", "noise", "margin")})
    study.console.print()
    for table in tables(summary):
        table.print(study.console)
    for note in notes(summary):
        study.console.print(note)
    study.console.print(
        f"written to {directory}: equivalence.json, equivalence.md, equivalence.png, equivalence.jsonl, config.yaml"
    )
    return summary
