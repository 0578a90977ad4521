"""The count of executions, and the announcement of fallbacks."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch

import fusedops
from fusedops import counting
from fusedops.registration import INTERPRETING

PATH = "triton-interpreter" if INTERPRETING else "cpu"


def count(path: str) -> None:
    before = counting.executed()
    x = torch.randn(7, requires_grad=True)
    for _ in range(3):
        fusedops.silu(x).sum().backward()
    with torch.no_grad():
        fusedops.silu(x)
    assert counting.executed() - before == Counter({("silu", path): 4, ("silu_backward", path): 3})


def test_executions_are_counted_by_path() -> None:
    count("cpu")


@pytest.mark.interpreter
def test_interpreted_kernels_are_counted_as_such() -> None:
    count("triton-interpreter")


def test_executed_is_a_copy() -> None:
    counted = counting.executed()
    counted["silu", "cpu"] += 100
    assert counting.executed()["silu", "cpu"] == counted["silu", "cpu"] - 100


def test_what_raises_is_not_counted() -> None:
    before = counting.executed()
    with pytest.raises(TypeError):
        fusedops.silu(torch.ones(3, dtype=torch.int32))
    assert counting.executed() == before


def test_shape_rule_is_not_counted() -> None:
    """Tracing runs the shape rule, not the operator."""
    before = counting.executed()
    torch.ops.fusedops.silu(torch.empty(3, device="meta"))
    assert counting.executed() == before


def test_fallback_is_counted_each_time_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    before, announced = counting.executed(), len(counting.announced_fallbacks())
    with caplog.at_level(logging.WARNING, logger="fusedops"):
        for _ in range(3):
            counting.announce_fallback("activation", "silu_mul", "a test says so")
        counting.announce_fallback("activation", "silu_mul", "another reason")
    assert counting.executed() - before == Counter({("silu_mul", "stock"): 4})
    assert counting.announced_fallbacks()[announced:] == [
        ("activation", "a test says so"),
        ("activation", "another reason"),
    ]
    assert caplog.messages == [
        "activation falls back to stock PyTorch: a test says so",
        "activation falls back to stock PyTorch: another reason",
    ]


def test_fallback_does_not_break_the_graph() -> None:
    """Under fullgraph compilation it is announced while tracing."""

    def function(x: torch.Tensor) -> torch.Tensor:
        counting.announce_fallback("activation", "silu_mul", "compiled")
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.zeros(3)), torch.ones(3))
    assert ("activation", "compiled") in counting.announced_fallbacks()
