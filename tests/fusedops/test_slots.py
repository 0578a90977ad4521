"""The slots: look-up, and that every implementation of a slot takes the same arguments and computes the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fusedops import counting, registry
from fusedops.slots import SLOTS, Implementation
from fusedops.slots.embedding import EmbeddingSpec, table_optimizers
from fusedops.slots.laplacian import Grid, Points


def attention_arguments(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    def heads(count: int, length: int) -> Tensor:
        return torch.randn(2, count, length, 8, dtype=dtype, requires_grad=True)

    yield heads(4, 5), heads(4, 5), heads(4, 5), True, None
    yield heads(4, 5), heads(2, 7), heads(2, 7), False, 0.3


def mlp_arguments(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    yield randn(2, 3, 7), randn(11, 7), randn(11), randn(7, 11), randn(7), 0.0, "tanh", True
    yield randn(2, 3, 7), randn(11, 7), None, randn(7, 11), None, 0.1, "none", False


def activation_arguments(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    yield tuple(torch.randn(3, 5, dtype=dtype, requires_grad=True) for _ in range(2))


class Perceptron(nn.Module):
    """A network as the slot laplacian asks for it."""

    activation, spatial, transform = "tanh", 3, None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m, n, dtype=dtype) for m, n in pairwise((3, 7, 5, 6, 1)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x).squeeze(-1)


def laplacian_arguments(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    grid = Grid((3, 4, 5), (1e-3,) * 3, (0.0,) * 3, order=4)
    yield Perceptron(dtype), Points(grid.nodes(3, torch.device("cpu"), dtype), grid)


def embedding_arguments(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    tables = [torch.randn(rows, 5, dtype=dtype, requires_grad=True) for rows in (7, 11)]
    dense = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 3, 6, 7, 9, 9, 9, 12])
    ids = torch.randint(-(2**62), 2**62, (12,))
    yield tables, ids, offsets, dense, EmbeddingSpec((0, 1, 1), cross="dot")
    yield tables, ids, offsets, dense, EmbeddingSpec((0, 1, 1), "mean", "mix64", "fm")
    yield tables, ids, offsets, dense, EmbeddingSpec((1, 0, 1), "mean", "mix32", "none")


ARGUMENTS: dict[str, Callable[[torch.dtype], Iterator[tuple[Any, ...]]]] = {
    "attention": attention_arguments,
    "mlp": mlp_arguments,
    "activation": activation_arguments,
    "laplacian": laplacian_arguments,
    "embedding": embedding_arguments,
}
IMPLEMENTATIONS = [
    implementation
    for slot in SLOTS.values()
    for name, implementation in slot.implementations.items()
    if name == implementation.name  # an alias is no further one
]

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: f"{i.slot}-{i.name}")


def test_every_slot_has_arguments_here() -> None:
    assert ARGUMENTS.keys() == SLOTS.keys()


def test_look_up() -> None:
    for name, slot in SLOTS.items():
        assert slot.name == name
        assert {"native", "fused"} <= slot.implementations.keys()
        assert slot.implementation("native").function is slot.implementations["native"].function
        assert slot.implementation("fused").fused
        assert not slot.implementation("native").fused
    with pytest.raises(
        KeyError, match=r"ops\.attention=flesh: no such implementation; there are native, fused, unfused"
    ):
        SLOTS["attention"].implementation("flesh")


@implementations
def test_signature(implementation: Implementation) -> None:
    """The slot's, so far as arguments are positional: a model calls every implementation alike."""
    native = inspect.signature(SLOTS[implementation.slot].implementation("native").function).parameters
    parameters = inspect.signature(implementation.function).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(native)
    inside = SLOTS[implementation.slot].signature.split("->")[0].strip(" ()")
    assert [argument.split("=")[0].strip() for argument in inside.split(",")] == list(native)


def leaves_of(args: tuple[Any, ...]) -> list[Tensor]:
    """What gradients are taken of: tensors, those of lists, and parameters of modules."""
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    leaves += [t for a in args if isinstance(a, list) for t in a]
    return leaves + [p for a in args if isinstance(a, nn.Module) for p in a.parameters()]


def update(implementation: Implementation, args: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    """What belongs to a slot after backward: the step of the tables' optimizer."""
    if implementation.slot != "embedding":
        return
    for leaf, gradient in zip(leaves_of(args), gradients, strict=True):
        leaf.grad = gradient
    table_optimizers(implementation.function)["sgd"](args[0], lr=0.1).step()


def run(implementation: Implementation, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    leaves = leaves_of(args)
    outputs = implementation.function(*args)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return (*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs]))


def to_dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


@implementations
def test_computes_what_native_does(implementation: Implementation) -> None:
    """Outputs and gradients in float64; differences, of an order of their own, as far as rounding lets them."""
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if implementation.name.startswith("stencil") else {}
    for args in ARGUMENTS[implementation.slot](torch.float64):
        native = SLOTS[implementation.slot].implementation("native")
        ours, expected = ([to_dense(t) for t in run(i, args)] for i in (implementation, native))
        torch.testing.assert_close(ours, expected, **tolerance)


@implementations
def test_declared_operators_run(implementation: Implementation) -> None:
    """What an implementation says a profile shows, it shows; those of ours are counted."""
    args = next(ARGUMENTS[implementation.slot](torch.float32))
    before = counting.executed()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        results = run(implementation, args)
        update(implementation, args, results[-len(leaves_of(args)) :])
    shown = {event.name for event in profiled.events()}
    assert set(implementation.operators) <= shown
    counted = {name for name, _ in counting.executed() - before}
    declared = {name.removeprefix("fusedops::") for name in implementation.operators if name.startswith("fusedops::")}
    assert declared <= registry.OPERATORS.keys()
    assert counted == declared
