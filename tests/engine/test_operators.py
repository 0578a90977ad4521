from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedops
from engine.arms import Arm, operator_set
from engine.errors import RunError
from engine.operators import operator_table
from fusedops import counting
from fusedops.slots import Implementation

SILU_MUL = ("fusedops::silu_mul", "fusedops::silu_mul_backward")


def arm_of(function, operators=SILU_MUL, name="fused"):
    return Arm(name, (Implementation("activation", name, function, operators),))


def step_of(function, calls=1):
    """A training step that calls the slot some times."""
    gate, up = (torch.randn(3, 4, requires_grad=True) for _ in range(2))

    def step():
        sum(function(gate, up).sum() for _ in range(calls)).backward()

    return step


def test_a_stock_slot_shows_its_operators():
    arm = operator_set("native", ("activation",))
    assert operator_table(arm, step_of(arm.functions["activation"], calls=2)) == [
        {"slot": "activation", "implementation": "native", "operator": name, "path": "stock", "calls_per_step": 2}
        for name in ("aten::silu", "aten::silu_backward")
    ]


def test_a_fused_slot_shows_ours_and_the_path_taken():
    arm = operator_set("fused", ("activation",))
    assert operator_table(arm, step_of(arm.functions["activation"], calls=3)) == [
        {"slot": "activation", "implementation": "fused", "operator": name, "path": "cpu", "calls_per_step": 3}
        for name in SILU_MUL
    ]


def test_an_announced_fallback_is_shown_as_stock():
    def function(gate, up):
        counting.announce_fallback("activation", "silu_mul", "made up by a test")
        return F.silu(gate) * up

    rows = operator_table(arm_of(function), step_of(function))
    assert [(row["operator"], row["path"], row["calls_per_step"]) for row in rows] == [
        ("fusedops::silu_mul", "stock", 1)
    ]


def test_a_partial_fallback_shows_both_paths():
    def function(gate, up):
        counting.announce_fallback("activation", "silu_mul", "made up by a test")
        return F.silu(gate) * up + fusedops.silu_mul(gate, up)

    rows = operator_table(arm_of(function), step_of(function))
    assert {(row["operator"], row["path"]) for row in rows} == {
        ("fusedops::silu_mul", "stock"),
        ("fusedops::silu_mul", "cpu"),
        ("fusedops::silu_mul_backward", "cpu"),
    }


def test_a_swap_that_swapped_nothing_is_an_error():
    def function(gate, up):
        return F.silu(gate) * up

    with pytest.raises(RunError, match="slot activation: fused ran none of its operators"):
        operator_table(arm_of(function), step_of(function))


def test_a_count_without_a_call_is_an_error():
    def function(gate, up):
        counting.record("silu_mul", "triton")
        return F.silu(gate) * up

    with pytest.raises(RunError, match=r"fusedops::silu_mul counted 1 calls .* shows 0"):
        operator_table(arm_of(function), step_of(function))


def test_the_profiler_leaves_stderr_alone(capfd):
    arm = operator_set("fused", ("activation",))
    operator_table(arm, step_of(arm.functions["activation"]))
    assert capfd.readouterr().err == ""
