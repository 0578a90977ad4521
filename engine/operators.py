"""Which operators an arm's slots ran in a training step, how often, and by which path.

Two witnesses must agree: the count that every operator of ours keeps where it runs (`fusedops.counting`), and a profile
of a step. A fused slot that shows neither our operator nor an announced fallback swapped nothing, which is an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from engine.arms import Arm
from engine.errors import RunError
from fusedops import counting

NAMESPACE = "fusedops::"


def operator_table(arm: Arm, step: Callable[[], object]) -> list[dict[str, Any]]:
    """A row for each operator of each slot: slot, implementation, operator, path, calls_per_step.

    step: one training step of the arm, run three times. Raises RunError where the two witnesses disagree, or where a
    slot ran none of its operators.
    """
    step()  # compiles kernels, allocates optimizer state
    before = counting.executed()
    step()
    counted = counting.executed() - before
    profiled = _profile(step)
    rows = []
    for implementation in arm.implementations:
        found = []
        for operator in implementation.operators:
            if operator.startswith(NAMESPACE):
                calls = _calls_by_path(operator, counted, profiled)
            else:
                calls = {"stock": profiled[operator]}
            found += [
                {
                    "slot": implementation.slot,
                    "implementation": implementation.name,
                    "operator": operator,
                    "path": path,
                    "calls_per_step": n,
                }
                for path, n in calls.items()
                if n
            ]
        if not found:
            raise RunError(
                f"slot {implementation.slot}: {implementation.name} ran none of its operators "
                f"({', '.join(implementation.operators)}) in a training step, and announced no fallback"
            )
        rows += found
    return rows


def _calls_by_path(operator: str, counted: Counter[tuple[str, str]], profiled: Counter[str]) -> dict[str, int]:
    name = operator.removeprefix(NAMESPACE)
    calls = {path: n for (counted_name, path), n in counted.items() if counted_name == name}
    ran = sum(n for path, n in calls.items() if path != "stock")
    if ran != profiled[operator]:
        raise RunError(
            f"{operator} counted {ran} calls in a training step; the profile of one shows {profiled[operator]}"
        )
    return calls


def _profile(step: Callable[[], object]) -> Counter[str]:
    """How often each operator was called in a step. A call inside a call of the same name is its redispatch."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with _stderr_closed():
        profile.start()
    try:
        step()
    finally:
        with _stderr_closed():
            profile.stop()
    events: list[FunctionEvent] = list(profile.events() or ())
    return Counter(event.name for event in events if not _within(event.name, event.cpu_parent))


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
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
