"""Checks that any operator registered through fusedops.registration can be put to.

    from fusedops import registry, testing
    testing.check_operator(registry.operator("silu"))

or, as a table, `python -m fusedops.testing silu`.
"""

from fusedops.testing.checks import CHECKS, check_operator
from fusedops.testing.report import Check, table

__all__ = ["CHECKS", "Check", "check_operator", "table"]
