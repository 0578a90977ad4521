"""Which operators an arm's slots ran in a training step, how often, and by which path.

Two witnesses must agree: the count that every operator of ours keeps where it runs (`fusedops.counting`), and a profile
of a step. A fused slot that shows neither our operator nor an announced fallback swapped nothing, which is an error.

Of a compiled arm a step runs without and one with compilation. What the first shows and the second does not was left to
the compiler, which a profile cannot show: it is fused into other code. Operators of ours that are have said so when
they were traced; if not, that is an error too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from engine.arms import Arm
from engine.compilation import eager
from engine.errors import RunError
from fusedops import counting

NAMESPACE = "fusedops::"


@dataclass(frozen=True)
class _Seen:
    """What a step ran: calls by path of each of our operators, calls of each stock one."""

    ours: dict[str, dict[str, int]]
    profiled: Counter[str]

    def calls(self, operator: str) -> dict[str, int]:
        """Calls by path."""
        if operator.startswith(NAMESPACE):
            return self.ours[operator]
        return {"stock": self.profiled[operator]} if self.profiled[operator] else {}


def operator_table(arm: Arm, step: Callable[[], object]) -> list[dict[str, Any]]:
    """A row for each operator of each slot: slot, implementation, operator, path, calls_per_step.

    step: one training step of the arm, run three times, or six if the arm is compiled; without CUDA graphs, whose
    replays show no operators. Raises RunError where the two witnesses disagree, or where a slot ran none of its
    operators.
    """
    operators = [name for implementation in arm.implementations for name in implementation.operators]
    if arm.compile_mode == "none":
        seen = _observe(step, operators)
        calls = {operator: seen.calls(operator) for operator in operators}
    else:
        with eager(arm):
            uncompiled = _observe(step, operators)
        seen = _observe(step, operators)
        calls = {name: _compiled_calls(name, uncompiled, seen, arm.backend) for name in operators}
    rows = []
    for implementation in arm.implementations:
        found = [
            {
                "slot": implementation.slot,
                "implementation": implementation.name,
                "operator": operator,
                "path": path,
                "calls_per_step": n,
            }
            for operator in implementation.operators
            for path, n in calls[operator].items()
        ]
        if not found:
            raise RunError(
                f"slot {implementation.slot}: {implementation.name} ran none of its operators "
                f"({', '.join(implementation.operators)}) in a training step, and announced no fallback"
            )
        rows += found
    return rows


def _observe(step: Callable[[], object], operators: Iterable[str]) -> _Seen:
    step()  # compiles kernels, allocates optimizer state
    before = counting.executed()
    step()
    counted = counting.executed() - before
    profiled = _profile(step)
    ours = {name: _calls_by_path(name, counted, profiled) for name in operators if name.startswith(NAMESPACE)}
    return _Seen(ours, profiled)


def _calls_by_path(operator: str, counted: Counter[tuple[str, str]], profiled: Counter[str]) -> dict[str, int]:
    name = operator.removeprefix(NAMESPACE)
    calls = {path: n for (counted_name, path), n in counted.items() if counted_name == name}
    ran = sum(n for path, n in calls.items() if path != "stock")
    if ran != profiled[operator]:
        raise RunError(
            f"{operator} counted {ran} calls in a training step; the profile of one shows {profiled[operator]}"
        )
    return calls


def _compiled_calls(operator: str, uncompiled: _Seen, compiled: _Seen, backend: str) -> dict[str, int]:
    """Calls by path of a compiled step; what the compiler took over, under its name and as often as in eager."""
    calls, without = dict(compiled.calls(operator)), uncompiled.calls(operator)
    if not operator.startswith(NAMESPACE):
        if without and not calls:
            calls[backend] = without["stock"]
        return calls
    if "stock" in without:
        calls["stock"] = without["stock"]  # a fallback is announced when it is traced, which was before this step
    ran = sum(n for path, n in without.items() if path != "stock")
    if ran and not calls.keys() - {"stock"}:
        handed_over = {name for name, path in counting.executed() if path == "inductor"}
        name = operator.removeprefix(NAMESPACE)
        if not {name, name.removesuffix("_backward")} & handed_over:  # backward goes with forward
            raise RunError(
                f"{operator} ran {ran} times in a training step and never in a compiled one, and announced no "
                "hand-over to the compiler"
            )
        calls[backend] = ran
    return calls


def _profile(step: Callable[[], object]) -> Counter[str]:
    """How often each operator was called in a step. A call inside a call of the same name is its redispatch."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with stderr_closed():
        profile.start()
    try:
        step()
    finally:
        with stderr_closed():
            profile.stop()
    events: list[FunctionEvent] = list(profile.events() or ())
    return Counter(event.name for event in events if not _within(event.name, event.cpu_parent))


@contextlib.contextmanager
def stderr_closed() -> Iterator[None]:
    """Sends file descriptor 2 nowhere: the profiler's library says there that it starts and stops, at any log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _within(name: str, event: FunctionEvent | None) -> bool:
    while event is not None:
        if event.name == name:
            return True
        event = event.cpu_parent
    return False
