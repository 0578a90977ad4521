"""Attribution: which operator brought what, from the steps of every slot swapped alone and every slot left out.

With T(S) the time of a training step in which the slots S are swapped, `all` every swapped slot and {} none (stock), a
slot s brings

    alone(s)    = T({}) - T({s})            what it saves as the only one swapped
    left out(s) = T(all - {s}) - T(all)     what is lost when it alone is swapped back
    part(s)     = (alone(s) + left out(s)) / 2

and the whole is T({}) - T(all) = the sum of the parts + the residual, which is what slots do to each other beyond pairs
(clocks, caches, a host that runs ahead). With one or two slots the part is the Shapley value and the residual is 0; how
far alone and left out lie apart shows what two slots do to each other.

In each round of an interleaved timing pass (`engine.timing`) every arm is timed once, in random order. T(S) / T({}) is
the median over the rounds of the ratio within a round, so that what hits a whole round cancels, and T({}) the median of
the stock step: parts and residual then sum to the whole exactly. 95 % intervals are by bootstrap over rounds, all arms
of a round together. Rounds are added until every interval is at most 2 % of the stock step wide, or the limit is
reached, which the result then says.

Two clocks. `wall` is what a user waits for: whole steps from Python. Where the host cannot keep up with the GPU, a
faster kernel shows nothing in it, so on a GPU the same steps are also captured as CUDA graphs and replayed: `graph` has
the GPU's time alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from engine import figures, timing
from engine.arms import Arm
from engine.comparison import Comparison, device_name
from engine.compilation import compiling
from engine.loop import matmul_precision
from engine.report import Table, page, write_atomically
from engine.signals import StopSignal
from engine.slot_times import SlotProfile
from engine.task import Phase
from engine.tracking import Tracker
from fusedops.benchmark.environment import versions

Subset = frozenset[str]
"""The slots that are swapped."""

WIDEST = 0.02
"""The width of every interval, as a share of the stock step, at which no more rounds are needed."""
SHORTEST_SAMPLE = 0.05
"""Seconds that samples take at least: rounds are short and many, since a host's speed may change within seconds."""
MOST_BATCHES = 40
"""Batches of train.timing_rounds rounds after which the pass ends all the same."""
TIE = 0.02
"""A part whose interval lies within this share of the stock step is called a tie."""


@dataclass(frozen=True)
class Parts:
    """What the swapped slots bring, in the unit of the times it is made of; positive is time saved."""

    alone: dict[str, Any]
    left_out: dict[str, Any]
    part: dict[str, Any]
    total: Any
    residual: Any


def decompose(times: Mapping[Subset, Any], slots: Sequence[str]) -> Parts:
    """The formula above, of numbers or arrays: part of every slot and residual sum to the total.

    times: T for {}, each single slot, all without each single slot, and all.
    """
    none, full = frozenset[str](), frozenset(slots)
    alone = {slot: times[none] - times[frozenset((slot,))] for slot in slots}
    left_out = {slot: times[full - {slot}] - times[full] for slot in slots}
    part = {slot: (alone[slot] + left_out[slot]) / 2 for slot in slots}
    total = times[none] - times[full]
    return Parts(alone, left_out, part, total, total - sum(part.values()))


def subsets(slots: Sequence[str]) -> list[Subset]:
    """The sets of swapped slots that are timed: none, each alone, each left out, all."""
    full = frozenset(slots)
    return list(dict.fromkeys([frozenset(), *(frozenset((s,)) for s in slots), *(full - {s} for s in slots), full]))


def arm_of(subset: Subset, stock: Arm, arm: Arm) -> Arm:
    """The arm that has the slots of the subset as `arm` has them, and the others as `stock` has them."""
    chosen = [
        swapped if swapped.slot in subset else plain
        for plain, swapped in zip(stock.implementations, arm.implementations, strict=True)
    ]
    if tuple(chosen) == arm.implementations:
        return arm
    departures = [
        f"{implementation.slot}={implementation.name}" for implementation in chosen if implementation.slot in subset
    ]
    return replace(arm, name=",".join([stock.name, *departures]), implementations=tuple(chosen))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def measure(
    steps: Mapping[Subset, Callable[[], object]],
    slots: Sequence[str],
    rounds: int,
    device: torch.device,
    stop: StopSignal,
    console: Console,
) -> dict[str, Any]:
    """The statistics of the subsets' steps, `rounds` at a time until the intervals are narrow enough; and samples_ms.

    samples_ms has each subset's milliseconds a step, one figure a round, by the names of the slots swapped.
    """
    named = {"+".join(sorted(subset)) or "none": subset for subset in steps}
    seconds: dict[Subset, NDArray[np.float64]] = {subset: np.empty(0) for subset in steps}
    found: dict[str, Any] = {}
    for batch in range(MOST_BATCHES):
        calls = {name: steps[subset] for name, subset in named.items()}
        timed = timing.time_steps(calls, rounds, device, stop, seed=batch, shortest=SHORTEST_SAMPLE, close=True)
        seconds = {subset: np.concatenate([seconds[subset], timed[name]]) for name, subset in named.items()}
        found = statistics(seconds, slots)
        ends = found["narrow_enough"] or batch + 1 == MOST_BATCHES
        if ends or (batch + 1).bit_count() == 1:
            console.print(f"{found['rounds']} rounds: the widest interval is {found['widest']:.1%} of the step")
        if ends:
            break
    return {**found, "samples_ms": {name: (seconds[subset] * 1e3).tolist() for name, subset in named.items()}}


@dataclass(frozen=True)
class CapturedStep:
    """A training step as a CUDA graph, and the step it was captured of, whose memory the graph works in."""

    step: Callable[[], object]
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()


def capture(step: Callable[[], object], device: torch.device) -> CapturedStep:
    """Capture a training step. Raises RuntimeError for one that waits for the GPU."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # the first steps compile kernels and allocate the optimizer's state
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return CapturedStep(step, graph)


def capturable(phase: Phase) -> Phase:
    """The phase with optimizers that keep on the GPU what a captured step needs there."""

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        made = phase.optimizers(model)
        for optimizer in made:
            for group in optimizer.param_groups:
                group["capturable"] = True
        return made

    return replace(phase, optimizers=optimizers)


def statistics(seconds: Mapping[Subset, NDArray[np.float64]], slots: Sequence[str]) -> dict[str, Any]:
    """Times, parts, total and residual with their 95 % intervals, as shares of the stock step and in ms.

    share_of_gain of a slot is its part over the total, None where the total's interval contains 0. widest is the width
    of the widest interval of a part, the total or the residual, as a share of the stock step.
    """
    none, full = frozenset[str](), frozenset(slots)
    relative = {subset: values / seconds[none] for subset, values in seconds.items()}
    count = len(seconds[none])
    picks = np.random.default_rng(0).integers(0, count, (timing.RESAMPLES, count))
    parts = decompose({subset: np.median(values) for subset, values in relative.items()}, slots)
    spread = decompose({subset: np.median(values[picks], axis=1) for subset, values in relative.items()}, slots)
    step_ms = timing.median_interval(seconds[none] * 1e3)

    def interval(value: Any, samples: Any) -> dict[str, float]:
        low, high = np.quantile(samples, (0.025, 0.975))
        return {"value": float(value), "low": float(low), "high": float(high)}

    def both(value: Any, samples: Any) -> dict[str, Any]:
        share = interval(value, samples)
        return {"share_of_step": share, "ms": {key: number * step_ms.value for key, number in share.items()}}

    total, residual = both(parts.total, spread.total), both(parts.residual, spread.residual)
    resolved = total["ms"]["low"] > 0 or total["ms"]["high"] < 0
    found = {}
    for slot in slots:
        part = both(parts.part[slot], spread.part[slot])
        gained = interval(parts.part[slot] / parts.total, spread.part[slot] / spread.total) if resolved else None
        found[slot] = {
            **part,
            "alone": both(parts.alone[slot], spread.alone[slot]),
            "left_out": both(parts.left_out[slot], spread.left_out[slot]),
            "share_of_gain": gained,
            "verdict": verdict(part["share_of_step"]),
        }
    widths = [row["share_of_step"]["high"] - row["share_of_step"]["low"] for row in (*found.values(), total, residual)]
    return {
        "rounds": count,
        "step_ms": step_ms.as_dict(),
        "swapped_step_ms": timing.median_interval(seconds[full] * 1e3).as_dict(),
        "slots": found,
        "total": total,
        "residual": residual,
        "widest": max(widths),
        "narrow_enough": max(widths) <= WIDEST,
    }


def verdict(share: Mapping[str, float]) -> str:
    """What a slot's part shows: faster or slower (0 is excluded), a tie (within 2 % of the step), or not resolved."""
    if share["low"] > 0:
        return "faster"
    if share["high"] < 0:
        return "slower"
    return "tie (within 2 %)" if share["low"] >= -TIE and share["high"] <= TIE else "not resolved"


# ---------------------------------------------------------------------------------------------------------------------
# The result


def run(
    comparison: Comparison,
    resolved: Mapping[str, Any],
    directory: Path,
    console: Console,
    tracker: Tracker,
    stop: StopSignal,
) -> dict[str, Any]:
    """Measure, leave and print the attribution of a comparison of two arms, stock first.

    Every arm's operators are checked before it is timed; the files are written after each clock. Returns what
    attribution.json has. Raises RunError for a slot that ran none of its operators.
    """
    stock, arm = comparison.arms
    both = zip(stock.implementations, arm.implementations, strict=True)
    swapped = {chosen.slot: chosen.name for plain, chosen in both if plain != chosen}
    slots = list(swapped)
    arms = {subset: arm_of(subset, stock, arm) for subset in subsets(slots)}
    console.print(f"timing {len(arms)} arms in turn: {'; '.join(each.name for each in arms.values())}")
    tracker.start("attribution")
    device, rounds = comparison.device, comparison.train.timing_rounds
    summary: dict[str, Any] = {
        "model": comparison.task.name,
        "device": device_name(device),
        "versions": versions(),
        "precision": comparison.train.precision,
        "description": comparison.description,
        "stock": stock.name,
        "arm": arm.name,
        "slots": swapped,
        "measures": {},
        "graph_not_measured": why_not_captured(comparison, arm),
        "profile": {},
        "config": dict(resolved),
    }

    def add(clock: str, steps: Mapping[Subset, Callable[[], object]]) -> None:
        console.print(f"{CLOCKS[clock]}:")
        summary["measures"][clock] = measure(steps, slots, rounds, device, stop, console)
        _write(directory, summary)

    with matmul_precision(comparison.train.tf32), compiling(list(arms.values())):
        summary["operators"] = {each.name: comparison.operators_of(each) for each in arms.values()}
        comparison.release()
        if arm.compile_mode == "none":
            summary["profile"] = {each.name: _profile(comparison, each) for each in (stock, arm)}
        add("wall", {subset: comparison.step_of(each) for subset, each in arms.items()})
        comparison.release()
        if summary["graph_not_measured"] is None:
            try:
                phase = capturable(comparison.task.phases()[0])
                captured = {
                    subset: capture(comparison.step_of(each, phase=phase), device) for subset, each in arms.items()
                }
            except RuntimeError as error:
                summary["graph_not_measured"] = f"a step could not be captured: {str(error).splitlines()[0]}"
                _write(directory, summary)
            else:
                add("graph", captured)
    tracker.summarize("attribution", {key: summary[key] for key in ("measures", "profile")})
    console.print()
    for table in tables(summary):
        table.print(console)
    for note in notes(summary):
        console.print(note)
    console.print(f"written to {directory}: attribution.json, attribution.md, attribution.png, config.yaml")
    return summary


def _write(directory: Path, summary: Mapping[str, Any]) -> None:
    write_atomically(directory / "attribution.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(directory / "attribution.md", markdown(summary))
    figures.attribution(directory / "attribution.png", summary)


def _profile(comparison: Comparison, arm: Arm) -> dict[str, Any]:
    profile = SlotProfile()
    shares = profile.shares(comparison.step_of(profile.labelled(arm)), comparison.device)
    comparison.release()
    return shares


def why_not_captured(comparison: Comparison, arm: Arm) -> str | None:
    """Why steps are not captured as CUDA graphs, or None where they are."""
    if comparison.device.type != "cuda":
        return "this runs on a CPU"
    if comparison.train.precision == "fp16":
        return "scaling the loss for fp16 waits for the GPU in every step"
    if arm.compile_mode != "none":
        return "the arms are compiled"
    return None


CLOCKS = {"wall": "wall time", "graph": "GPU time (CUDA graphs)"}


def _percent(share: Mapping[str, float]) -> str:
    """A share of the step with its interval."""
    return f"{share['value']:+.1%} [{share['low']:+.1%}, {share['high']:+.1%}]"


def part_rows(summary: Mapping[str, Any], measured: str) -> list[tuple[str, ...]]:
    """A line a slot, one of the residual and one of the sum; `PART_HEADER` says of what."""
    found = summary["measures"][measured]
    gain = found["total"]["ms"]["value"]
    own = summary["profile"].get(summary["stock"], {}).get("slots", {})

    def ms(interval: Mapping[str, float]) -> str:
        return f"{interval['value']:+.3f} [{interval['low']:+.3f}, {interval['high']:+.3f}]"

    rows: list[tuple[str, ...]] = []
    for slot, part in found["slots"].items():
        gained = part["share_of_gain"]
        rows.append(
            (
                f"{slot}={summary['slots'][slot]}",
                ms(part["ms"]),
                _percent(part["share_of_step"]),
                "-" if gained is None else _percent(gained),
                f"{part['alone']['ms']['value']:+.3f}",
                f"{part['left_out']['ms']['value']:+.3f}",
                f"{own[slot]['share_of_step']:.1%}" if slot in own else "-",
                part["verdict"],
            )
        )
    share = f"{found['residual']['ms']['value'] / gain:+.1%}" if found["slots"] and gain else "-"
    rows.append(("residual", ms(found["residual"]["ms"]), _percent(found["residual"]["share_of_step"]), share, *"----"))
    rows.append(
        ("sum = all swapped", ms(found["total"]["ms"]), _percent(found["total"]["share_of_step"]), "+100.0%", *"----")
    )
    return rows


PART_HEADER = (
    "slot",
    "part, ms a step saved [95 %]",
    "of the stock step",
    "of the whole",
    "alone, ms",
    "left out, ms",
    "own time in the stock step",
    "verdict",
)


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """A table a clock."""
    result = []
    for measured, found in summary["measures"].items():
        step, swapped = found["step_ms"], found["swapped_step_ms"]
        title = (
            f"{CLOCKS[measured]}: {summary['stock']} {step['value']:.3f} ms a step, {summary['arm']} "
            f"{swapped['value']:.3f} ms, {found['rounds']} rounds"
        )
        result.append(Table(title, PART_HEADER, part_rows(summary, measured)))
    return result


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What a reader of the tables must know."""
    lines = [
        "A part is the mean of what a slot saves swapped alone and of what is lost when it alone is swapped back; "
        "positive is time saved. The parts and the residual sum to what all slots together save. Times are medians "
        "over the rounds of an interleaved timing pass, intervals 95 % by bootstrap over rounds; faster and slower are "
        f"parts whose interval excludes 0, a tie one whose interval lies within {TIE:.0%} of the step.",
    ]
    for measured, found in summary["measures"].items():
        if not found["narrow_enough"]:
            lines.append(
                f"{CLOCKS[measured]}: after {found['rounds']} rounds, the limit, the widest interval is still "
                f"{found['widest']:.1%} of the step, not {WIDEST:.0%}; a larger train.timing_rounds goes on for longer."
            )
    if summary["graph_not_measured"] is not None:
        lines.append(f"GPU time was not measured apart: {summary['graph_not_measured']}.")
    for name, profile in summary["profile"].items():
        shares = ", ".join(f"{slot} {own['share_of_step']:.1%}" for slot, own in profile["slots"].items())
        lines.append(f"{profile['clock']} time of the slots in a profiled step of {name}: {shares}.")
    return lines


def markdown(summary: Mapping[str, Any]) -> str:
    """attribution.md."""
    title = f"what each operator brings to {summary['arm']}"
    return page(title, summary, summary["versions"]["git"], tables(summary), notes(summary))
