"""The one schema of benchmark results: what the JSON files under benchmarks/results/ hold, field by field.

Times are in milliseconds, memory in bytes. Every ratio is a time over a time, so that above 1 is faster; it counts with
the lower end of its 95 % interval, and within 2 % is a tie.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
TIE = 0.02
"""Two times within this share of each other are a tie."""


@dataclass(frozen=True)
class Method:
    """How a run measures."""

    rounds: int = 9
    """Samples of each contender; in every round each contender is sampled once, in a fresh random order."""
    idle_s: float = 0.2
    """Seconds of idle before each sample: under back-to-back kernels a GPU throttles, and the next one looks slow."""
    window_ms: float = 20.0
    """GPU time (on a CPU: wall time) that the repeats of one sample fill; a sample is the median of its repeats."""
    seed: int = 0
    """Seeds the inputs, the orders and the bootstrap."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; at least 1 is needed (9 for a result that counts)")
        if not 0 <= self.idle_s < math.inf:
            raise ValueError(f"idle_s is {self.idle_s}; it must not be negative, and finite")
        if not 0 < self.window_ms < math.inf:
            raise ValueError(f"window_ms is {self.window_ms}; it must be positive and finite")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")


@dataclass(frozen=True)
class Timing:
    """The samples of one contender, one a round, in the rounds' order."""

    median: float
    lowest: float
    highest: float
    samples: list[float]


@dataclass(frozen=True)
class Interval:
    """A ratio of medians with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """faster, slower, tie, or unclear where the interval is too wide to tell."""
        if self.low > 1 + TIE:
            return "faster"
        if self.high < 1 - TIE:
            return "slower"
        return "tie" if abs(self.value - 1) <= TIE else "unclear"


@dataclass(frozen=True)
class Requirement:
    """A ratio that the fused contender is to reach: `over`'s time over its time, by the interval's lower end.

    over: a contender's name, or "best": the fastest contender that computes the same function, our own left out.
    """

    over: str
    ratio: float


@dataclass
class RequirementResult:
    """A requirement and what was measured.

    `against` is the contender that `over` named; `met` is None where that one or the fused contender has no time.
    """

    kind: str
    """gate (must hold) or goal (is aimed at)."""
    over: str
    ratio: float
    against: str | None = None
    measured: Interval | None = None
    met: bool | None = None


@dataclass
class ContenderResult:
    """One contender of a row."""

    name: str
    role: str
    """fused (ours), baseline (stock PyTorch), peer (computes the same) or bound (computes less: a ceiling)."""
    path: str
    """What really ran: triton, gluon, cublas+triton, cublas, inductor, cpu, triton-interpreter, stock."""
    status: str = "ok"
    """ok; wrong: its error is NaN or over three times the baseline's, so it gets no time; unavailable: it raised."""
    reason: str | None = None
    """Why it is wrong or unavailable."""
    errors: dict[str, float | None] = field(default_factory=dict)
    """||out - ref|| / ||ref|| against float64, of each output; None: not a number. Empty for a bound."""
    gpu_ms: Timing | None = None
    """Time on the GPU, L2 cold, the host running ahead (what a captured graph would take); None on a CPU."""
    wall_ms: Timing | None = None
    """Time of one call from an idle GPU until it is done, L2 cold: host time counts."""
    ratio: Interval | None = None
    """The baseline's time over this one's: GPU time, on a CPU wall time."""
    wall_ratio: Interval | None = None
    peak_memory_bytes: int | None = None
    """Most memory allocated during one call over what was allocated before it, outputs included; None on a CPU."""
    floor_share: float | None = None
    """The row's floor over this contender's time: the share of the ceiling that binds."""


@dataclass
class Comparison:
    """What `compare` measured: the contenders of one row in one run."""

    contenders: list[ContenderResult]
    requirements: list[RequirementResult] = field(default_factory=list)

    def contender(self, name: str) -> ContenderResult:
        """The contender `name`. Raises KeyError naming those that exist."""
        for contender in self.contenders:
            if contender.name == name:
                return contender
        raise KeyError(f"no contender {name!r}; there are {', '.join(c.name for c in self.contenders)}")

    def of_role(self, role: str) -> list[ContenderResult]:
        """The contenders of a role, in order."""
        return [contender for contender in self.contenders if contender.role == role]


@dataclass
class Floor:
    """What the work must cost at least, by the operator's own count, and its time at the measured ceilings."""

    flops: int
    bytes: int
    ms: float
    limit: str
    """memory or compute: which of the two ceilings binds."""


@dataclass
class RowResult:
    """One row: one piece of work, all contenders of which were measured in one run."""

    id: str
    operator: str
    work: str
    """The work in words, for tables."""
    shape: dict[str, int]
    dtype: str
    direction: str
    """forward (no gradient recorded), training forward (recorded) or forward + backward."""
    options: dict[str, Any]
    floor: Floor | None = None
    comparison: Comparison | None = None
    error: str | None = None
    """The text of what the row, its baseline or our contender raised; no comparison counts then."""
    seconds: float = 0.0
    """How long the row took, compilation and checks included."""


@dataclass
class Ceilings:
    """What this machine reached in the same run."""

    copy_gb_s: float
    """A large device copy, bytes read plus bytes written."""
    gemm_tflop_s: dict[str, float]
    """A large square matrix product through the stock library, of each dtype measured."""


@dataclass
class Report:
    """One run of the benchmark: the content of a results file."""

    environment: dict[str, Any]
    """GPU (None on a CPU), date, command, commit, versions, precision settings."""
    method: Method
    ceilings: Ceilings | None = None
    quick: bool = False
    """Small shapes and few rounds: shows that the benchmark works, its figures mean nothing."""
    rows: list[RowResult] = field(default_factory=list)
    schema: int = SCHEMA_VERSION

    def write(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_finite(dataclasses.asdict(self)), indent=1, allow_nan=False)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
        temporary.write_text(text + "\n")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a file. Raises ValueError, naming it, for another schema or a field missing or unknown."""
        data = json.loads(path.read_text())
        version = data.get("schema") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path}: schema {version!r}; this version reads schema {SCHEMA_VERSION}")
        try:
            report: Report = _build(cls, data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not a benchmark report: {error}") from error
        return report


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _build(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `dataclasses.asdict` and JSON turned into `data`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not types.NoneType)
        return _build(kind, data)
    if origin is list:
        return [_build(arguments[0], item) for item in data]
    if origin is dict:
        return {key: _build(arguments[1], item) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        unknown = set(data) - set(hints)
        if unknown:
            raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")  # type: ignore[union-attr]
        return kind(**{key: _build(hints[key], item) for key, item in data.items()})  # type: ignore[operator]
    return data
