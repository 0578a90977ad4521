"""loss.png and throughput.png."""

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


def _save(figure: Figure, path: Path) -> None:
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
    for name, value in summary["references"].items():
        axes.axhline(value, color="gray", linestyle=":", label=f"{name}, validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(f"{summary['model']} on {summary['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


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
    _save(figure, path)
