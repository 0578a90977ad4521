"""Which operators really ran, and by which path: counted where they run, read by whoever makes a table.

A path is one of `triton`, `gluon`, `cublas+triton`, `cublas`, `inductor`, `cpu`, `triton-interpreter`, `stock`.
"""

from __future__ import annotations

import logging
from collections import Counter

_executed: Counter[tuple[str, str]] = Counter()
_announced: dict[tuple[str, str], None] = {}  # an ordered set
_log = logging.getLogger("fusedops")


def record(operator: str, path: str) -> None:
    """Count one execution of `operator` (its name without the namespace) by `path`."""
    _executed[operator, path] += 1


def record_hand_over(operator: str) -> None:
    """Count, while a compiler traces it, a call of `operator` that is left to the compiler as stock operations.

    Under the path `inductor`, once a call that is traced and however often the compiled code runs.
    """
    record(operator, "inductor")


def executed() -> Counter[tuple[str, str]]:
    """The executions so far in this process: (operator, path) -> count. A copy: subtract two to count an interval."""
    return Counter(_executed)


def announce_fallback(slot: str, operator: str, reason: str) -> None:
    """Count a fallback of `operator` to stock PyTorch; say that and why once, on the logger `fusedops`."""
    record(operator, "stock")
    if (slot, reason) not in _announced:
        _announced[slot, reason] = None
        _log.warning("%s falls back to stock PyTorch: %s", slot, reason)


# Dynamo calls them once, while tracing. This is all that torch.compiler.assume_constant_result does, which would import
# Dynamo, Inductor and Triton here and now.
announce_fallback._dynamo_marked_constant = True  # type: ignore[attr-defined]
record_hand_over._dynamo_marked_constant = True  # type: ignore[attr-defined]


def announced_fallbacks() -> list[tuple[str, str]]:
    """The (slot, reason) pairs announced so far in this process, in order."""
    return list(_announced)
