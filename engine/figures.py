"""loss.png, throughput.png, equivalence.png, attribution.png, and a picture a metric with targets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.loop import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTHING = 50
"""A training curve is the mean over about this many points of it."""


def _new_figure() -> Figure:
    # Not pyplot, which would look for a display and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def _smooth(losses: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """The steps and means of stretches of losses."""
    length = max(1, len(losses) // SMOOTHING)
    count = len(losses) // length
    means = np.array(losses[: count * length]).reshape(count, length).mean(axis=1)
    return np.arange(1, count + 1) * length, means


def loss(path: Path, trainings: Mapping[str, Training], summary: Mapping[str, Any]) -> None:
    """Training loss, smoothed, and validation points of each arm, over steps; simple predictors as lines."""
    figure = _new_figure()
    axes = figure.add_subplot()
    for i, (arm, training) in enumerate(trainings.items()):
        # Curves of arms that agree lie on each other: the later are dashed, so that the earlier stay visible.
        steps, means = _smooth(training.losses)
        style = "-" if i == 0 else "--"
        axes.plot(steps, means, style, color=f"C{i}", linewidth=2 - i * 0.5, label=f"{arm}, training")
        points = [(step, metrics["loss"]) for step, metrics in training.validation]
        (dots,) = axes.plot(*zip(*points, strict=True), "os^Dv"[i % 5], color=f"C{i}", label=f"{arm}, validation")
        dots.set(markersize=11 - 3 * min(i, 2))
    for name, reached in summary["references"].items():
        axes.axhline(
            reached["loss"] if isinstance(reached, Mapping) else reached,
            color="gray",
            linestyle=":",
            label=f"{name}, validation",
        )
    axes.set_xlabel("step")
    if summary["targets"]:  # a loss that is to vanish
        axes.set_yscale("log")
    axes.set_ylabel("loss")
    axes.set_title(f"{summary['model']} on {summary['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def throughput(path: Path, summary: Mapping[str, Any]) -> None:
    """Throughput of each arm in the timing pass, with its 95 % interval."""
    figure = _new_figure()
    axes = figure.add_subplot()
    speeds = {arm: values["throughput"] for arm, values in summary["arms"].items()}
    values = [speed["value"] for speed in speeds.values()]
    errors = [
        [speed["value"] - speed["low"] for speed in speeds.values()],
        [speed["high"] - speed["value"] for speed in speeds.values()],
    ]
    bars = axes.barh(
        list(speeds), values, xerr=errors, capsize=4, height=0.5, color=[f"C{i}" for i in range(len(speeds))]
    )
    axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], label_type="center", color="white")
    axes.set_xlabel(f"{next(iter(speeds.values()))['unit']} (median and 95 % interval)")
    axes.set_title(f"{summary['model']} on {summary['device']}")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    save(figure, path)


def equivalence(path: Path, summary: Mapping[str, Any]) -> None:
    """Each pair's difference in final validation loss as a point, means with their intervals, and the margin's band."""
    figure = _new_figure()
    axes = figure.add_subplot()
    stock, margin = summary["stock"], summary["margin"]
    rows = {f"{arm}\n- mean of {stock}, {stock}'": found for arm, found in summary["comparisons"].items()}
    rows[f"{stock}' - {stock}"] = summary["noise"]
    axes.axvspan(-margin, margin, color="C2", alpha=0.12, label=f"within {margin:g} nats")
    axes.axvline(0, color="gray", linewidth=1)
    for i, row in enumerate(rows.values()):
        values = list(row["differences"].values())
        axes.plot(values, [i - 0.15] * len(values), "o", color=f"C{i}", alpha=0.5, markersize=5)
        if row["half_width"] is not None:
            axes.errorbar(row["mean"], i + 0.15, xerr=row["half_width"], fmt="D", color=f"C{i}", capsize=5)
    if max((abs(value) for row in rows.values() for value in row["differences"].values()), default=0) > 20 * margin > 0:
        axes.set_xscale("symlog", linthresh=2 * margin)  # a blatant difference leaves the others to be seen
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("difference in final validation loss, nats (pairs; mean and its 95 % interval)")
    axes.set_title(f"{summary['model']} on {summary['device']}")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    save(figure, path)


def attribution(path: Path, summary: Mapping[str, Any]) -> None:
    """What each slot saves, as a share of the stock step, with its interval; the residual, and the sum of all."""
    figure = _new_figure()
    axes = figure.add_subplot()
    names = [*(f"{slot}={chosen}" for slot, chosen in summary["slots"].items()), "residual", "sum = all swapped"]
    height = 0.8 / len(summary["measures"])
    for i, (clock, found) in enumerate(summary["measures"].items()):
        parts = [part["share_of_step"] for part in (*found["slots"].values(), found["residual"], found["total"])]
        values = [100 * part["value"] for part in parts]
        errors = [
            [100 * (part["value"] - part["low"]) for part in parts],
            [100 * (part["high"] - part["value"]) for part in parts],
        ]
        places = [row + (i - (len(summary["measures"]) - 1) / 2) * height for row in range(len(names))]
        label = f"{clock}: {found['step_ms']['value']:.2f} to {found['swapped_step_ms']['value']:.2f} ms a step"
        axes.barh(places, values, height=height * 0.9, xerr=errors, capsize=4, color=f"C{i}", label=label)
    axes.axvline(0, color="gray", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time saved, % of the stock step (95 % interval)")
    axes.set_title(f"{summary['model']} on {summary['device']}")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    save(figure, path)


def metric(path: Path, trainings: Mapping[str, Training], name: str, summary: Mapping[str, Any]) -> None:
    """A validation metric of each arm over steps and over seconds of training, and the values that are looked for."""
    figure = _new_figure()
    panels = figure.subplots(1, 2, sharey=True)
    for i, (arm, training) in enumerate(trainings.items()):
        values = [metrics[name] for _, metrics in training.validation]
        steps = [step for step, _ in training.validation]
        for axes, places in zip(panels, (steps, training.elapsed), strict=True):
            axes.plot(places, values, "-" if i == 0 else "--", marker="os^Dv"[i % 5], markersize=4, label=arm)
    for axes, label in zip(panels, ("step", "seconds of training"), strict=True):
        for target in summary["targets"][name]:
            axes.axhline(target, color="gray", linestyle=":")
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"{name.replace('_', ' ')} on the validation set")
    panels[0].legend()
    figure.suptitle(f"{summary['model']} on {summary['device']}")
    save(figure, path)
