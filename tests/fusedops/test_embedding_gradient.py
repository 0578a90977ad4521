"""Gradients of embedding tables: each row once, summed in fp32, repeatable, and of no table's size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedops import embedding_aggregation
from tests.fusedops.embedding import random_bags, random_tables


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_id_thousands_of_times(device: torch.device, dtype: torch.dtype) -> None:
    """A sum of 6000 ones in float16 stalls at 2048; a run of that length crosses many chunks of the kernels."""
    count = 1500 if device.type == "cpu" else 60_000
    ids = torch.randint(0, 7, (count,), device=device)
    ids[: count // 2] = 3
    ids = ids[torch.randperm(count, device=device)]
    offsets = torch.arange(count + 1, device=device)
    table = torch.zeros(7, 8, device=device, dtype=dtype, requires_grad=True)
    grad = torch.rand(count, 1, 8, device=device).to(dtype)
    embedding_aggregation([table], ids, offsets).backward(grad)
    exact = torch.zeros(7, 8, dtype=torch.float64, device=device).index_add_(0, ids, grad[:, 0].double())
    assert exact.max() > count / 5
    ulps = 2 if dtype == torch.float16 else 64  # of a sum of thousands in float32
    torch.testing.assert_close(table.grad.to_dense().double(), exact, rtol=ulps * torch.finfo(dtype).eps, atol=0.0)


def test_long_runs_at_every_place(device: torch.device) -> None:
    """Runs around the lengths at which the kernels cut them, weighted, next to one another."""
    lengths = [63, 64, 65, 1, 127, 128, 129, 2, 192, 1, 64, 66]
    ids = torch.cat([torch.full((n,), row) for row, n in enumerate(lengths)]).to(device)
    ids = ids[torch.randperm(len(ids), device=device)]
    offsets = torch.arange(len(ids) + 1, device=device)
    weights = torch.randn(len(ids), device=device, dtype=torch.float64)
    table = torch.zeros(len(lengths), 5, device=device, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(len(ids), 1, 5, device=device, dtype=torch.float64)
    embedding_aggregation([table], ids, offsets, weights=weights).backward(grad)
    exact = torch.zeros_like(table).index_add_(0, ids, grad[:, 0] * weights[:, None])
    torch.testing.assert_close(table.grad.to_dense(), exact)


def test_results_are_bitwise_repeatable(device: torch.device) -> None:
    """Always, and so under torch.use_deterministic_algorithms, which raises nothing."""
    tables = random_tables([20, 3], 16, device, torch.float32)
    ids, offsets = random_bags(2, 60, 7, device)
    dense = torch.randn(60, 16, device=device, requires_grad=True)
    grad: Tensor | None = None
    results = []
    for deterministic in (False, False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            out = embedding_aggregation(tables, ids, offsets, dense, cross="dot")
            grad = torch.randn_like(out) if grad is None else grad
            results.append((out, *(g.to_dense() for g in torch.autograd.grad(out, (*tables, dense), grad))))
        finally:
            torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_sparse_gradients_accumulate() -> None:
    """`.grad` of one backward is coalesced; of two it is their sum."""
    tables = random_tables([9, 4], 3, torch.device("cpu"), torch.float64)
    total = [torch.zeros_like(table) for table in tables]
    for i in range(2):
        ids, offsets = random_bags(2, 5, 3, torch.device("cpu"))
        out = embedding_aggregation(tables, ids, offsets)
        grad = torch.randn_like(out)
        for whole, g in zip(total, torch.autograd.grad(out, tables, grad, retain_graph=True), strict=True):
            whole += g.to_dense()
        out.backward(grad)
        assert i == 1 or all(table.grad.is_coalesced() for table in tables)
    for table, whole in zip(tables, total, strict=True):
        torch.testing.assert_close(table.grad.to_dense(), whole)


def test_nothing_of_table_size_is_made(device: torch.device) -> None:
    """The gradient of a table of a million rows, of which three are touched, has three rows."""
    table = torch.zeros(1_000_000, 4, device=device, requires_grad=True)
    ids = torch.tensor([999_999, 5, 5, 70], device=device)
    embedding_aggregation([table], ids, torch.arange(5, device=device)).sum().backward()
    assert table.grad._indices()[0].tolist() == [5, 70, 999_999]
    assert table.grad._values().untyped_storage().nbytes() == 3 * 4 * 4


def test_some_tables_are_frozen() -> None:
    tables = random_tables([5, 6, 7], 3, torch.device("cpu"), torch.float32)
    tables[1].requires_grad_(False)
    ids, offsets = random_bags(3, 4, 3, torch.device("cpu"))
    embedding_aggregation(tables, ids, offsets).sum().backward()
    assert [table.grad is not None for table in tables] == [True, False, True]


def test_sparse_gradient_has_no_derivative() -> None:
    """Second order: right with sparse=False (the generic checks), an error otherwise, and never zero in silence."""
    tables = random_tables([5], 3, torch.device("cpu"), torch.float32)
    dense = torch.randn(2, 3, requires_grad=True)
    out = embedding_aggregation(tables, torch.arange(2), torch.arange(3), dense, cross="dot")
    with pytest.raises(RuntimeError, match=r"sparse gradient of tables has no derivative; .* sparse=False"):
        torch.autograd.grad(out.sum(), tables, create_graph=True)


def test_tables_changed_before_a_backward_that_needs_them() -> None:
    """Stale values are noticed; a bare look-up, which is linear in the tables, does not need them."""
    tables = random_tables([5, 5], 3, torch.device("cpu"), torch.float32)
    for cross, noticed in (("none", False), ("dot", True)):
        out = embedding_aggregation(tables, torch.arange(2), torch.arange(3), cross=cross)
        with torch.no_grad():
            tables[0].add_(1)
        if noticed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()
