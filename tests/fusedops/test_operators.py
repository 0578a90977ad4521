"""Every check of fusedops.testing on every operator: CPU implementations, kernels interpreted, kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

from fusedops import registry
from fusedops.registration import FLOATING
from fusedops.testing import CHECKS, check_operator

SLOW = {"compile_inductor"}
ABOVE_DISPATCH = {"opcheck_aot", "compile_dynamic", "compile_transforms", "compile_inductor"}
"""Checks of what happens above the dispatcher, where it is the same whatever runs below: not repeated interpreted."""
PRODUCTS = {"linear_gelu_dropout", "flash_attention", "flash_attention_backward"}
"""The operators whose kernels multiply matrices: `tl.dot` of bfloat16 is wrong in the interpreter."""


WHERE = {"cpu": ("cpu",), "interpreter": ("cpu", pytest.mark.interpreter), "cuda": ("cuda", pytest.mark.gpu)}


@pytest.mark.parametrize(
    ("device", "check"),
    [
        pytest.param(device, check, marks=(*marks, pytest.mark.slow) if check in SLOW else marks, id=f"{where}-{check}")
        for where, (device, *marks) in WHERE.items()
        for check in CHECKS
        if where != "interpreter" or check not in ABOVE_DISPATCH
    ],
)
@pytest.mark.parametrize("name", registry.OPERATORS)
def test_operator(name: str, device: str, check: str) -> None:
    """One check of one operator; skipped, with the reason, where the check does not apply."""
    (outcome,) = check_operator(registry.operator(name), device, checks=[check])
    if outcome.status == "not applicable":
        pytest.skip(outcome.reason)


def test_what_the_interpreter_cannot_run() -> None:
    """Products of bfloat16, and nothing else: every other kernel is checked there in every dtype."""
    missing = {name: set(FLOATING) - set(o.interpreted_dtypes) for name, o in registry.OPERATORS.items()}
    assert {name: dtypes for name, dtypes in missing.items() if dtypes} == {n: {torch.bfloat16} for n in PRODUCTS}
