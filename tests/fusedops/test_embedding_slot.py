"""The slot embedding: implementations agree in features, gradients and training; which optimizer goes with which."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedops import counting, optim
from fusedops.slots import SLOTS
from fusedops.slots.embedding import (
    EmbeddingSpec,
    embedding_fused,
    embedding_native,
    embedding_unsupported,
    table_optimizers,
)

FEATURE_TABLES = (0, 1, 1, 2)
ROWS = (13, 7, 101)
WIDTH = 5
LENGTHS = {
    "mixed": [1, 0, 3, 2, 0],
    "first and last empty": [0, 2, 1, 5, 0],
    "one id a bag": [1, 1, 1, 1, 1],
    "all empty": [0, 0, 0, 0, 0],
}
specs = pytest.mark.parametrize(
    ("pooling", "hash", "cross"),
    [*product(("sum", "mean"), ("modulo",), ("none", "dot", "fm")), ("sum", "mix32", "dot"), ("mean", "mix64", "fm")],
)


def tables(dtype: torch.dtype = torch.float64, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)) for rows in ROWS]


def bags(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Raw ids, int64's extremes among them, in bags of these lengths for each feature."""
    every = lengths * len(FEATURE_TABLES)
    offsets = torch.tensor([0, *every]).cumsum(0)
    ids = torch.randint(-(2**63), 2**63 - 1, (sum(every),))
    if len(ids):
        ids[:3] = torch.tensor([-(2**63), 2**63 - 1, -1])
    return ids, offsets


def by_hand(
    params: list[nn.Parameter], ids: Tensor, offsets: Tensor, dense: Tensor | None, spec: EmbeddingSpec
) -> Tensor:
    """The definition, sample by sample, for floor modulo."""
    batch = (len(offsets) - 1) // len(spec.feature_tables)
    samples = []
    for b in range(batch):
        vectors = [] if dense is None else [dense[b]]
        for f, table in enumerate(spec.feature_tables):
            first, last = offsets[f * batch + b], offsets[f * batch + b + 1]
            rows = [params[table][int(i) % len(params[table])] for i in ids[first:last].tolist()]
            total = sum(rows, start=0 * params[table][0])
            vectors.append(total / max(len(rows), 1) if spec.pooling == "mean" else total)
        if spec.cross == "none":
            samples.append(torch.stack(vectors))
            continue
        pairs = [(i, j) for i in range(len(vectors)) for j in range(i)]
        if spec.cross == "fm":
            samples.append(sum((vectors[i] * vectors[j] for i, j in pairs), start=torch.zeros_like(vectors[0])))
        else:
            products = torch.stack([vectors[i] @ vectors[j] for i, j in pairs])
            samples.append(products if dense is None else torch.cat([vectors[0], products]))
    return torch.stack(samples)


def gradients(function: Any, params: list[nn.Parameter], *args: Any) -> tuple[Tensor, ...]:
    """Features, then their gradients with respect to the tables and the dense vector, as dense tensors."""
    ids, offsets, dense, spec = args
    features = function(params, ids, offsets, dense, spec)
    leaves = [*params, *([] if dense is None else [dense])]
    weight = torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)
    found = torch.autograd.grad(features, leaves, weight, materialize_grads=True)
    return features.detach(), *(g.to_dense() if g.is_sparse else g for g in found)


@specs
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("with_dense", [True, False], ids=["dense", "no dense"])
def test_fused_computes_what_native_does(
    pooling: str, hash: str, cross: str, lengths: list[int], with_dense: bool
) -> None:
    spec = EmbeddingSpec(FEATURE_TABLES, pooling, hash, cross)
    dense = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True) if with_dense else None
    args = (*bags(lengths), dense, spec)
    params = tables()
    expected = gradients(embedding_native, params, *args)
    for ours, stock in zip(gradients(embedding_fused, params, *args), expected, strict=True):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, stock)
    if hash == "modulo":
        torch.testing.assert_close(expected, gradients(by_hand, params, *args))


def test_gradients_of_both_are_sparse() -> None:
    for function in (embedding_native, embedding_fused):
        params = tables()
        function(params, *bags(LENGTHS["mixed"]), None, EmbeddingSpec(FEATURE_TABLES)).sum().backward()
        assert all(parameter.grad is not None and parameter.grad.is_sparse for parameter in params)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "sparse_adam"])
def test_training_of_both_arms_agrees(rule: str, device: torch.device) -> None:
    """Ten steps, each implementation with the optimizer that goes with it, in float64."""
    spec = EmbeddingSpec(FEATURE_TABLES, "mean", "modulo", "dot")
    trained = []
    for function in (embedding_native, embedding_fused):
        torch.manual_seed(3)
        params = [nn.Parameter(table.detach().to(device)) for table in tables()]
        optimizer = table_optimizers(function)[rule](params, lr=0.05)
        for _ in range(10):
            inputs = (*bags(LENGTHS["mixed"]), torch.randn(5, WIDTH).double())
            features = function(params, *(tensor.to(device) for tensor in inputs), spec)
            F.mse_loss(features, torch.ones_like(features)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(params)
    for ours, stock, initial in zip(*trained, tables(), strict=True):
        torch.testing.assert_close(ours, stock)
        assert not torch.equal(ours.cpu(), initial)


def test_which_optimizers_go_with_which_implementation() -> None:
    stock, ours = table_optimizers(embedding_native), table_optimizers(embedding_fused)
    assert stock == {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "sparse_adam": torch.optim.SparseAdam,
    }
    assert set(ours) == {*stock, "rowwise_adagrad"}
    assert all(issubclass(made, optim.RowOptimizer) for made in ours.values())  # type: ignore[arg-type]

    @functools.wraps(embedding_fused)
    def labelled(*args: Any) -> Tensor:
        return embedding_fused(*args)

    assert table_optimizers(labelled) is ours
    assert set(SLOTS["embedding"].implementations) == {"native", "fused"}


def test_what_the_operator_cannot_do_falls_back_and_says_why() -> None:
    params = [parameter.detach().to(torch.float32).to("meta") for parameter in tables()]
    assert embedding_unsupported(params) == "the device is meta"
    assert embedding_unsupported([torch.ones(2, 3, dtype=torch.complex64)]) == "the dtype is complex64"
    assert embedding_unsupported(list(tables())) is None
    table = torch.ones(3, 2, dtype=torch.int32)
    before = counting.executed()
    with pytest.raises(RuntimeError):  # stock embedding bags take no integers either
        embedding_fused([table], torch.tensor([1]), torch.tensor([0, 1]), None, EmbeddingSpec((0,)))
    assert (counting.executed() - before)["embedding_aggregation", "stock"] == 1


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 1, 3], "offsets falls from 2 to 1"),
        ([1, 2, 2, 3], "offsets begins with 1"),
        ([0, 1, 2, 4], "offsets ends with 4"),
    ],
)
def test_offsets_that_are_none_are_refused(offsets: list[int], message: str) -> None:
    table = torch.ones(4, 2)
    with pytest.raises(ValueError, match=message):
        embedding_fused([table] * 3, torch.tensor([1, 2, 3]), torch.tensor(offsets), None, EmbeddingSpec((0, 1, 2)))


@pytest.mark.parametrize("function", [embedding_native, embedding_fused], ids=["native", "fused"])
def test_under_compile_the_results_are_those_without(function: Any) -> None:
    """Sparse gradients stay outside of the graph, in both arms."""
    spec, params = EmbeddingSpec(FEATURE_TABLES, cross="dot"), tables()
    args = (*bags(LENGTHS["mixed"]), torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True), spec)
    compiled = torch.compile(function, backend="aot_eager")
    for ours, expected in zip(gradients(compiled, params, *args), gradients(function, params, *args), strict=True):
        torch.testing.assert_close(ours, expected)
    torch.compiler.reset()
