"""Compares contenders that do the same work: checked first, then timed in one run, interleaved in random order."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusedops import counting
from fusedops.benchmark import statistics
from fusedops.benchmark.schema import (
    Comparison,
    ContenderResult,
    Floor,
    Method,
    Requirement,
    RequirementResult,
)
from fusedops.benchmark.timing import Sample, timer
from fusedops.registry import OPERATORS

ROLES = ("fused", "baseline", "peer", "bound")
ERROR_ALLOWED = 3.0
"""A contender whose error is more than this many times the baseline's computes something else."""

Outputs = tuple[Tensor, ...]
T = TypeVar("T")
_logger = logging.getLogger("fusedops.benchmark")


class WrongResult(Exception):
    """Raised by a check that sees more than an error's size, such as a share dropped that is not p."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a row.

    name      as tables show it, unique in its row.
    function  called without arguments; returns a tensor or a tuple of tensors, the same for every contender.
    path      what runs; None: read from the library's own counts of what executed (see `fusedops.counting`).
    role      "fused": ours; "baseline": what ratios are over; "peer": computes the same; "bound": computes less (a
              copy, a bare product), so it is not checked and only shows what could be reached.
    prepare   called before each call and not timed: restores inputs that the function overwrites.
    """

    name: str
    function: Callable[[], Any]
    path: str | None = "stock"
    role: str = "peer"
    prepare: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"contender {self.name}: role is {self.role!r}; allowed: {', '.join(ROLES)}")

    def call(self) -> Outputs:
        """One call, prepared, its outputs as a tuple."""
        if self.prepare is not None:
            self.prepare()
        outputs = self.function()
        return outputs if isinstance(outputs, tuple) else (outputs,)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in float64 (the norm of out where the reference is zero)."""
    out, reference = out.detach().double(), reference.detach().double()
    scale = torch.linalg.vector_norm(reference)
    return float(torch.linalg.vector_norm(out - reference) / torch.where(scale == 0, torch.ones_like(scale), scale))


def attempt(what: str, function: Callable[[], T]) -> tuple[T | None, str | None]:
    """The function's result, or the text of what it raised.

    A contender is arbitrary code of any library, and one that fails must not take the results of the others with it.
    """
    try:
        return function(), None
    except Exception as error:
        _logger.info("%s raised", what, exc_info=True)
        text = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {text[:300]}"


def interleaved(count: int, rounds: int, seed: int) -> Iterator[list[int]]:
    """For each round the indices of `count` contenders in a fresh random order, a function of the seed."""
    generator = random.Random(seed)
    for _ in range(rounds):
        yield generator.sample(range(count), count)


def compare(
    contenders: Sequence[Contender],
    *,
    errors: Callable[[Outputs], Mapping[str, float]] | None = None,
    requirements: Mapping[str, Sequence[Requirement]] | None = None,
    floor: Floor | None = None,
    method: Method | None = None,
    device: torch.device | str | None = None,
) -> Comparison:
    """Check the contenders, then time them in one run and compare.

    errors        a contender's outputs -> the relative error of each output by its name, against float64 (see
                  `relative_error`); it may raise WrongResult. None: only NaN and Inf are looked for.
    requirements  "gate" and "goal" -> ratios that the fused contender is to reach.
    floor         what the work costs at least, for the share of the ceiling.
    method        rounds, idle, window and seed.
    device        where the contenders run; default: the current GPU, or the CPU where there is none.

    A contender that raises is "unavailable"; one that leaves elements of its outputs unwritten (freed memory is
    poisoned with NaN before the call that is checked), or whose error is NaN or over three times the baseline's, is
    "wrong" and gets no time. Raises ValueError unless there is exactly one baseline, at most one fused contender, and
    no name twice; RuntimeError where the baseline itself fails.
    """
    method = method or Method()
    device = torch.device(device) if device is not None else default_device()
    names = [contender.name for contender in contenders]
    roles = [contender.role for contender in contenders]
    if len(set(names)) != len(names):
        raise ValueError(f"contenders {', '.join(names)}: a name is there twice")
    if roles.count("baseline") != 1 or roles.count("fused") > 1:
        raise ValueError(
            f"{roles.count('baseline')} baselines and {roles.count('fused')} fused contenders; exactly one baseline "
            "and at most one fused contender are needed"
        )

    baseline = contenders[roles.index("baseline")]
    results = {baseline.name: _check(baseline, errors, None, device)}
    if results[baseline.name].status != "ok":
        raise RuntimeError(
            f"the baseline {baseline.name} is {results[baseline.name].status}: {results[baseline.name].reason}"
        )
    for contender in contenders:
        if contender is not baseline:
            results[contender.name] = _check(contender, errors, results[baseline.name].errors, device)

    timed = [contender for contender in contenders if results[contender.name].status == "ok"]
    samples = _time(timed, method, device)
    for contender in timed:
        _summarise(results[contender.name], samples[contender.name], samples[baseline.name], floor, method.seed)
    comparison = Comparison([results[name] for name in names])
    for kind, wanted in (requirements or {}).items():
        comparison.requirements += [_judge(comparison, kind, requirement, method.seed) for requirement in wanted]
    return comparison


def default_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Checking


def _check(
    contender: Contender,
    errors: Callable[[Outputs], Mapping[str, float]] | None,
    baseline_errors: Mapping[str, float | None] | None,
    device: torch.device,
) -> ContenderResult:
    result = ContenderResult(contender.name, contender.role, contender.path or "")
    checked, reason = attempt(contender.name, lambda: _checked_call(contender, device))
    if checked is None:
        result.status, result.reason = "unavailable", reason
        return result
    outputs, result.path, result.peak_memory_bytes = checked
    if contender.role == "bound":
        return result
    if not result.path:
        result.status, result.reason = "wrong", "it ran no operator of this library"
        return result
    if not all(bool(output.isfinite().all()) for output in outputs):
        result.status, result.reason = "wrong", "NaN or Inf in its outputs"
        return result
    try:
        measured = errors(outputs) if errors is not None else {}
    except WrongResult as error:
        result.status, result.reason = "wrong", str(error)
        return result
    # A baseline that happens to be exact still allows for one rounding to the output's dtype.
    rounding = max(torch.finfo(output.dtype).eps for output in outputs)
    for name, value in measured.items():
        result.errors[name] = value if math.isfinite(value) else None
        allowed = math.inf
        if baseline_errors is not None:
            allowed = max(ERROR_ALLOWED * (baseline_errors[name] or 0.0), rounding)
        if not value <= allowed or math.isinf(value):
            result.status = "wrong"
            result.reason = f"error of {name} is {value:.3g}, allowed {allowed:.3g}"
    return result


def _checked_call(contender: Contender, device: torch.device) -> tuple[Outputs, str, int | None]:
    """(outputs, path, peak memory) of a warm call into poisoned memory."""
    sizes = [(output.shape, output.dtype) for output in contender.call()]
    contender.call()  # whatever is built or chosen at a second call (a plan, a recompilation) is behind
    peak: int | None = None
    if device.type == "cuda":
        # What the allocator hands out next for these sizes is what is freed here.
        poison = [torch.full(shape, math.nan, dtype=dtype, device=device) for shape, dtype in sizes * 2]
        del poison
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    before = counting.executed()
    outputs = contender.call()
    executed = counting.executed() - before
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - allocated
    path = contender.path
    if path is None:
        path = ", ".join(dict.fromkeys(path for (operator, path) in executed if operator in OPERATORS))
    return outputs, path, peak


# ---------------------------------------------------------------------------------------------------------------------
# Timing


def _time(contenders: Sequence[Contender], method: Method, device: torch.device) -> dict[str, list[Sample]]:
    clock = timer(device, method.window_ms)
    samplers = [clock.sampler(contender.function, contender.prepare) for contender in contenders]
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for order in interleaved(len(contenders), method.rounds, method.seed):
        for index in order:
            time.sleep(method.idle_s)
            samples[contenders[index].name].append(samplers[index]())
    return samples


def _summarise(
    result: ContenderResult, own: Sequence[Sample], baseline: Sequence[Sample], floor: Floor | None, seed: int
) -> None:
    result.wall_ms = statistics.timing([sample.wall for sample in own])
    result.wall_ratio = statistics.ratio([b.wall for b in baseline], [s.wall for s in own], seed)
    result.ratio = result.wall_ratio
    gpu = [sample.gpu for sample in own if sample.gpu is not None]
    if gpu:
        result.gpu_ms = statistics.timing(gpu)
        result.ratio = statistics.ratio([b.gpu for b in baseline if b.gpu is not None], gpu, seed)
    if floor is not None:
        result.floor_share = floor.ms / decisive(result)


def decisive(result: ContenderResult) -> float:
    """The median that ratios are taken of: GPU time, on a CPU wall time. Raises ValueError where there is none."""
    timing = result.gpu_ms or result.wall_ms
    if timing is None:
        raise ValueError(f"{result.name} is {result.status}: it has no time")
    return timing.median


def _judge(comparison: Comparison, kind: str, requirement: Requirement, seed: int) -> RequirementResult:
    judged = RequirementResult(kind, requirement.over, requirement.ratio)
    fused = next((c for c in comparison.of_role("fused") if c.status == "ok"), None)
    if requirement.over == "best":
        against = fastest_rival(comparison)
    else:
        against = next((c for c in comparison.contenders if c.name == requirement.over and c.status == "ok"), None)
    if fused is None or against is None:
        return judged
    ours, theirs = fused.gpu_ms or fused.wall_ms, against.gpu_ms or against.wall_ms
    if ours is None or theirs is None:
        return judged
    judged.against = against.name
    judged.measured = statistics.ratio(theirs.samples, ours.samples, seed)
    judged.met = judged.measured.low >= requirement.ratio
    return judged


def fastest_rival(comparison: Comparison) -> ContenderResult | None:
    """The fastest contender that computes the same and is not ours; None where none has a time."""
    rivals = [c for c in comparison.contenders if c.role in ("baseline", "peer") and c.status == "ok"]
    return min(rivals, key=decisive, default=None)
