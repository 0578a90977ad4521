"""What a comparison leaves: summary.json, comparison.md, loss.png, throughput.png, and the same tables on the terminal.

The tables are made once, as text, and shown twice, so that terminal and file cannot differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table as RichTable

from engine import figures, timing
from engine.arms import Arm
from engine.comparison import Comparison, device_name
from engine.compilation import MODES, WITHOUT_GRAPHS
from engine.files import write_atomically
from engine.loop import Training
from engine.progress import quantity
from engine.tracking import Tracker
from fusedops.benchmark.environment import versions

RESULTS = (
    "metrics.jsonl",
    "summary.json",
    "comparison.md",
    "loss.png",
    "throughput.png",
    "relative_l2.png",
    "solution-*.png",
    "profile-*.txt",
    "trace-*.json.gz",
    "attribution.*",
    "tracker.json",
)
"""Files of a run, some as patterns."""

CPU_NOTE = "This runs on a CPU: fused means the CPU implementations of the operators, made of stock PyTorch operations."
"""Followed by what the task says of them."""


def clear(directory: Path) -> None:
    """Remove the results of an earlier run in the same directory: what stands there is always of the latest run."""
    for pattern in RESULTS:
        for path in directory.glob(pattern):
            path.unlink()


def write_config(directory: Path, resolved: Mapping[str, Any]) -> None:
    """config.yaml: the configuration with every value filled in."""
    write_atomically(directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(dict(resolved))))


def introduce(console: Console, comparison: Comparison, directory: Path) -> None:
    """Print what is about to run."""
    console.print(f"run directory: {directory}")
    console.print(f"device: {device_name(comparison.device)}")
    for key, value in comparison.description.items():
        console.print(f"{key}: {value}")
    console.print(f"arms: {'; '.join(arm.name for arm in comparison.arms)}")
    if comparison.device.type == "cpu":
        console.print(f"{CPU_NOTE} {comparison.task.on_cpu}")
        for mode in {arm.compile_mode for arm in comparison.arms if MODES.get(arm.compile_mode) in WITHOUT_GRAPHS}:
            console.print(f"compile={mode}: a CPU has no CUDA graphs; the rest of the mode is used")


def conclude(
    console: Console,
    comparison: Comparison,
    baseline: str | None,
    resolved: Mapping[str, Any],
    directory: Path,
    tracker: Tracker,
) -> None:
    """Write the files of a comparison that has run, and print its tables."""
    summary = summarize(comparison, baseline, resolved)
    write_atomically(directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(directory / "comparison.md", markdown(summary))
    for arm, figures_of_arm in summary["arms"].items():
        tracker.summarize(
            arm,
            {
                **figures_of_arm,
                "ratios": summary["ratios"].get(arm, {}),
                "device": summary["device"],
                "versions": summary["versions"],
            },
        )
    figures.loss(directory / "loss.png", comparison.trainings, summary)
    figures.throughput(directory / "throughput.png", summary)
    for metric in summary["targets"]:
        figures.metric(directory / f"{metric}.png", comparison.trainings, metric, summary)
    console.print()
    print_tables(console, summary)
    console.print(
        f"written to {directory}: summary.json, comparison.md, loss.png, throughput.png, metrics.jsonl, config.yaml"
    )


# ---------------------------------------------------------------------------------------------------------------------
# summary.json


def summarize(comparison: Comparison, baseline: str | None, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The content of summary.json."""
    arms = {arm.name: _summarize_arm(comparison, arm) for arm in comparison.arms}
    return {
        "model": comparison.task.name,
        "device": device_name(comparison.device),
        "versions": versions(),
        "arms": arms,
        "baseline": baseline,
        "ratios": {
            name: _ratios(comparison, arms, name, baseline)
            for name in arms
            if baseline is not None and name != baseline
        },
        "references": comparison.task.references(),
        "targets": {metric: list(values) for metric, values in comparison.task.targets.items()},
        "description": comparison.description,
        "on_cpu": comparison.task.on_cpu if comparison.device.type == "cpu" else None,
        "precision": comparison.train.precision,
        "config_sha256": hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest(),
    }


def _summarize_arm(comparison: Comparison, arm: Arm) -> dict[str, Any]:
    name = arm.name
    training, seconds = comparison.trainings[name], comparison.seconds_per_step[name]
    step_ms = timing.median_interval(seconds * 1e3).value
    flops, touched = comparison.flops_per_step, comparison.task.bytes_per_step()
    return {
        "metrics": training.reported[1],
        "throughput": {
            **timing.throughput(seconds, comparison.units_per_step).as_dict(),
            "unit": f"{comparison.task.unit}/s",
            "step_ms": step_ms,
        },
        "peak_memory_bytes": training.peak_memory_bytes,
        "operators": comparison.operators[name],
        "samples": [{"prompt": prompt, "text": text} for prompt, text in comparison.samples[name].items()],
        "compile": comparison.compilation[name].as_dict() if arm.compile_mode != "none" else None,
        "training": {
            "steps": len(training.losses),
            "skipped_steps": training.skipped_steps,
            "throughput": training.throughput,
            "final_loss": training.losses[-1],
            "reported_step": training.reported[0],
            "stopped_early": training.stopped_early,
            "unconverged": training.unconverged,
            "reached": {
                metric: [_first_below(training, metric, value) for value in values]
                for metric, values in comparison.task.targets.items()
            },
        },
        "tflops": None if flops is None else flops / step_ms / 1e9,
        "gb_per_s": None if touched is None else touched * comparison.train.accumulation / step_ms / 1e6,
    }


def _first_below(training: Training, metric: str, value: float) -> dict[str, float] | None:
    """The first evaluation at which a metric was at most this: its step, and the seconds of training until then."""
    for (step, metrics), seconds in zip(training.validation, training.elapsed, strict=True):
        if metrics[metric] <= value:
            return {"step": step, "seconds": seconds}
    return None


def _ratios(comparison: Comparison, arms: Mapping[str, Any], name: str, baseline: str) -> dict[str, Any]:
    seconds, arm, base = comparison.seconds_per_step, arms[name], arms[baseline]
    memory, base_memory = arm["peak_memory_bytes"], base["peak_memory_bytes"]
    return {
        "throughput": timing.speed_ratio(seconds[name], seconds[baseline]).as_dict(),
        "peak_memory": memory / base_memory if memory and base_memory else None,
        "loss_difference": arm["metrics"]["loss"] - base["metrics"]["loss"],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tables


@dataclass(frozen=True)
class Table:
    """A table as text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def print(self, console: Console) -> None:
        """Show it on a terminal."""
        shown = RichTable(*self.header, title=self.title, title_justify="left")
        for row in self.rows:
            shown.add_row(*row)
        console.print(shown)

    def markdown(self) -> str:
        """Its lines in Markdown, without the title."""
        lines = [self.header, tuple("---" for _ in self.header), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """The tables of a summary: arms, ratios to the baseline, operators."""
    result = [_arms_table(summary)]
    if summary["targets"]:
        result.append(_targets_table(summary))
    if summary["ratios"]:
        result.append(_ratios_table(summary))
    result.append(_operators_table(summary))
    return result


def _arms_table(summary: Mapping[str, Any]) -> Table:
    arms = summary["arms"]
    metrics = list(next(iter(arms.values()))["metrics"])
    unit = next(iter(arms.values()))["throughput"]["unit"]
    bandwidth = ("GB/s",) if any(arm["gb_per_s"] is not None for arm in arms.values()) else ()
    header = (
        *("arm", *(f"validation {m}" for m in metrics), f"{unit} (95 % interval)", "ms a step"),
        *(*bandwidth, "peak memory"),
    )
    rows: list[tuple[str, ...]] = []
    for name, arm in arms.items():
        speed = arm["throughput"]
        interval = f"{quantity(speed['value'])} ({quantity(speed['low'])} to {quantity(speed['high'])})"
        values = (metric_text(arm["metrics"][m]) for m in metrics)
        touched = (f"{arm['gb_per_s']:.3g}" for _ in bandwidth)
        rows.append((name, *values, interval, f"{speed['step_ms']:.2f}", *touched, _memory(arm["peak_memory_bytes"])))
    for name, reached in summary["references"].items():
        known = reached if isinstance(reached, Mapping) else {"loss": reached}
        values = (metric_text(known[m]) if m in known else "-" for m in metrics)
        rows.append((f"reference: {name}", *values, "-", "-", *("-" for _ in bandwidth), "-"))
    return Table("Arms", header, rows)


def metric_text(value: float) -> str:
    """A metric in a table."""
    return f"{value:.4f}" if abs(value) >= 0.1 else f"{value:.4g}"


def _targets_table(summary: Mapping[str, Any]) -> Table:
    targets = [(metric, i, value) for metric, values in summary["targets"].items() for i, value in enumerate(values)]
    header = ("arm", *(f"seconds to {metric} {value:g} (step)" for metric, _, value in targets))
    rows: list[tuple[str, ...]] = []
    for name, arm in summary["arms"].items():
        found = [arm["training"]["reached"][metric][i] for metric, i, _ in targets]
        rows.append((name, *("-" if at is None else f"{at['seconds']:.2f} ({at['step']})" for at in found)))
    return Table("Time to accuracy", header, rows)


def _ratios_table(summary: Mapping[str, Any]) -> Table:
    header = ("arm", "throughput (95 % interval)", "", "peak memory", "validation loss, difference")
    rows: list[tuple[str, ...]] = []
    for name, ratios in summary["ratios"].items():
        speed = timing.Interval(**ratios["throughput"])
        memory = "-" if ratios["peak_memory"] is None else f"{ratios['peak_memory']:.3f}x"
        interval = f"{speed.value:.3f}x ({speed.low:.3f} to {speed.high:.3f})"
        rows.append((name, interval, timing.verdict(speed), memory, f"{ratios['loss_difference']:+.4g}"))
    return Table(f"Relative to {summary['baseline']}", header, rows)


def _operators_table(summary: Mapping[str, Any]) -> Table:
    header = ("arm", "slot", "implementation", "operator", "path", "calls a step")
    rows = [
        (name, *(str(row[key]) for key in ("slot", "implementation", "operator", "path", "calls_per_step")))
        for name, arm in summary["arms"].items()
        for row in arm["operators"]
    ]
    return Table("Operators that ran", header, rows)


def _memory(n: int | None) -> str:
    return "-" if n is None else f"{n / 2**20:,.0f} MiB"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of the tables must know."""
    result = [
        "Throughput is the median over the rounds of an interleaved timing pass: whole training steps of the arms, "
        "timed in turn in random order. Its ratio is the median of the ratios within rounds; within 2 % is a tie, and "
        "what an interval that contains 1 shows is not resolved.",
    ]
    if any(arm["compile"] for arm in summary["arms"].values()):
        result.append(
            "An operator whose path is the compiler's was left to it, fused or replaced; it is counted as often as an "
            "uncompiled step runs it."
        )
    result += [_compile_note(name, arm["compile"]) for name, arm in summary["arms"].items() if arm["compile"]]
    for name, arm in summary["arms"].items():
        training = arm["training"]
        for reason in (training["stopped_early"], training["unconverged"]):
            if reason is not None:
                result.append(f"{name}: {reason}.")
        if training["reported_step"] != training["steps"]:
            result.append(f"{name}: metrics and saved model are those of step {training['reported_step']}, its best.")
    if summary["on_cpu"] is not None:
        result.append(f"{CPU_NOTE} {summary['on_cpu']}")
    return result


def _compile_note(name: str, log: Mapping[str, Any]) -> str:
    return (
        f"{name}: compiling took {log['seconds']:.1f} s ({log['graphs']} graphs), which no throughput contains; "
        f"recompilations: {log['training_recompiles']} in training, {log['evaluation_recompiles']} in evaluation."
    )


def printable(text: str) -> str:
    """The text with a sign for each character that would do something to a terminal, line ends and tabs excepted."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_tables(console: Console, summary: Mapping[str, Any]) -> None:
    """The tables on a terminal."""
    for table in tables(summary):
        table.print(console)
    for name, arm in summary["arms"].items():
        for sample in arm["samples"]:
            console.print(
                f"\nsample of {name}, which goes on with a prompt from the bar:", markup=False, highlight=False
            )
            console.print(printable(f"{sample['prompt']}|{sample['text']}"), markup=False, highlight=False)
    for note in notes(summary):
        console.print(note)


def page(
    title: str, summary: Mapping[str, Any], commit: str | None, tables: Sequence[Table], notes: Sequence[str]
) -> str:
    """A Markdown page: what ran where, what was trained (a summary's description, if it has one), tables and notes."""
    version = summary["versions"]
    parts = [
        f"# {summary['model']}: {title}",
        f"{summary['device']}, {summary['precision']}, torch {version['torch']}, triton {version['triton']}, "
        f"fusedops {version['fusedops']}, commit {commit}",
    ]
    if "description" in summary:
        parts.append("\n".join(f"- {key}: {value}" for key, value in summary["description"].items()))
    for table in tables:
        parts += [f"## {table.title}", table.markdown()]
    return "\n\n".join([*parts, *notes]) + "\n"


def markdown(summary: Mapping[str, Any]) -> str:
    """The tables as comparison.md."""
    title = " against ".join(reversed(summary["arms"]))
    return page(title, summary, summary["versions"]["git"], tables(summary), notes(summary))
