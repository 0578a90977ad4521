"""Measures operators against everything a user could choose instead, and never shows a time without its error.

`compare` is the method, for any contenders; `python -m fusedops.benchmark` runs this project's own rows with it. The
fields of results are documented in `fusedops.benchmark.schema`, the method in docs/performance.md.
"""

from fusedops.benchmark.comparison import Contender, WrongResult, compare, relative_error
from fusedops.benchmark.schema import (
    Comparison,
    ContenderResult,
    Interval,
    Method,
    Report,
    Requirement,
    RequirementResult,
    RowResult,
    Timing,
)

__all__ = [
    "Comparison",
    "Contender",
    "ContenderResult",
    "Interval",
    "Method",
    "Report",
    "Requirement",
    "RequirementResult",
    "RowResult",
    "Timing",
    "WrongResult",
    "compare",
    "relative_error",
]
