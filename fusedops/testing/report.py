"""The outcome of the checks, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple


class Check(NamedTuple):
    """The outcome of one check: its name, whether it passed, and what was wrong or why it does not apply."""

    name: str
    status: Literal["passed", "failed", "not applicable"]
    reason: str
    seconds: float


def table(title: str, report: Sequence[Check]) -> str:
    """The report as lines of text: one a check, a summary last."""
    width = max((len(check.name) for check in report), default=0)
    lines = [title]
    for check in report:
        lines.append(f"  {check.name:{width}}  {check.status:14}  {check.seconds:5.1f} s  {check.reason}".rstrip())
    counts = [f"{sum(c.status == s for c in report)} {s}" for s in ("passed", "failed", "not applicable")]
    return "\n".join([*lines, "  " + ", ".join(counts)])
