"""The list of operators, and that each is whole."""

from __future__ import annotations

import inspect

import pytest
import torch

from fusedops import counting, registry
from fusedops.registration import FLOATING, Operator
from fusedops.tensor_lists import tensors_in
from fusedops.testing import CHECKS

PATHS = ("triton", "gluon", "cublas+triton", "cublas")

operators = pytest.mark.parametrize("operator", registry.OPERATORS.values(), ids=list(registry.OPERATORS))


def test_look_up() -> None:
    assert registry.operator("silu") is registry.OPERATORS["silu"]
    with pytest.raises(KeyError, match="no operator 'sliu'; there are silu, silu_backward"):
        registry.operator("sliu")


@operators
def test_fields(operator: Operator) -> None:
    """Named as its schema says; arguments of check, shape, reference and implementation are the schema's."""
    assert str(operator.op) == f"fusedops.{operator.name}.default"
    names = [argument.name for argument in operator.op._schema.arguments]
    assert not any(argument.kwarg_only for argument in operator.op._schema.arguments)
    for rule in (operator.check, operator.shape, operator.cpu, operator.reference, operator.cost):
        parameters = inspect.signature(rule).parameters.values()
        if rule.__module__.startswith("fusedops.") and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
            taken = [p.name for p in parameters]
            assert len(taken) == len(names), f"{rule} takes {taken}, the schema has {names}"
    assert operator.stock
    assert set(operator.interpreted_dtypes) <= set(FLOATING)
    assert operator.exempt.keys() <= CHECKS.keys()
    assert all(operator.exempt.values())


@operators
def test_samples(operator: Operator) -> None:
    """Named apart, the same names and shapes at each call with other values, and among them an empty tensor."""
    device = torch.device("cpu")
    first, second = (list(operator.samples(device, torch.float32)) for _ in range(2))
    assert [s.name for s in first] == [s.name for s in second]
    assert len({s.name for s in first}) == len(first)
    drawn = zip(
        (t for s in first for t in tensors_in(s.args)), (t for s in second for t in tensors_in(s.args)), strict=True
    )
    pairs = [
        (a, b) for a, b in drawn if a.is_floating_point() or operator.name == "embedding_rows"
    ]  # of integers alone
    assert all(a.shape == b.shape and a.stride() == b.stride() for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert any(a.numel() == 0 for a, _ in pairs)
    assert any(not a.is_contiguous() for a, _ in pairs)
    assert not any(a.requires_grad for a, _ in pairs)


@operators
def test_cost(operator: Operator) -> None:
    """At least the bytes of what comes in, whole numbers, zero work only for empty tensors."""
    defaults = tuple(argument.default_value for argument in operator.op._schema.arguments)
    for sample in operator.samples(torch.device("cpu"), torch.float32):
        cost = operator.cost(*sample.args, *defaults[len(sample.args) :])
        assert isinstance(cost.flops, int) and isinstance(cost.bytes, int)
        assert cost.flops >= 0 and cost.bytes >= 0
        if all(t.numel() for t in tensors_in(sample.args)):
            assert cost.bytes > 0, sample.name


@pytest.mark.gpu
@operators
def test_path_is_one_of_those_documented(operator: Operator) -> None:
    device = torch.device("cuda")
    sample = next(s for dtype in (torch.float16, torch.float32) for s in operator.samples(device, dtype))
    before = counting.executed()
    operator(*sample.args)
    ((_, path),) = (counting.executed() - before).keys()
    assert path in PATHS
