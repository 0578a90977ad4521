"""row_update_ beside the stock optimizers, its rules as published, and what a mutating operator owes autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fusedops import row_update_
from fusedops.operators.row_update import STATES

STEPS, ROWS, WIDTH = 50, 23, 9


def zero_states(rule: str, table: Tensor) -> list[list[Tensor]]:
    shape = table.shape[:1] if rule == "rowwise_adagrad" else table.shape
    return [[table.new_zeros(shape)] for _ in range(STATES[rule])]


def repeated_gradients(dtype: torch.dtype) -> list[Tensor]:
    """A sparse gradient a step, of ids of which some come several times."""
    drawn = []
    for _ in range(STEPS):
        ids = torch.randint(0, ROWS // 2, (1, 15))
        values = torch.randn(15, WIDTH, dtype=torch.float64)
        drawn.append(torch.sparse_coo_tensor(ids, values, (ROWS, WIDTH)).to(dtype))
    return drawn


def ours(rule: str, start: Tensor, gradients: Sequence[Tensor], device: torch.device, lr: float) -> Tensor:
    table = start.clone().to(device)
    states = zero_states(rule, table)
    for step, gradient in enumerate(gradients, start=1):
        gradient = gradient.coalesce().to(device)
        row_update_(
            [table],
            [gradient._indices()[0]],
            [gradient._values()],
            rule=rule,
            lr=lr,
            states=states,
            eps=1e-8 if rule == "sparse_adam" else 1e-10,
            step=step,
        )
    return table.cpu()


def by_optimizer(make: Callable[[Tensor], torch.optim.Optimizer], start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    table = torch.nn.Parameter(start.clone())
    optimizer = make(table)
    for gradient in gradients:
        table.grad = gradient.clone()
        optimizer.step()
    return table.detach()


def published_rowwise_adagrad(start: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Rows' sums of mean squared gradients, as FBGEMM and torchrec define exact row-wise Adagrad."""
    table, sums = start.clone(), start.new_zeros(len(start))
    for gradient in gradients:
        dense = gradient.to_dense()
        sums += dense.square().mean(1)
        table -= 0.05 * dense / (sums.sqrt()[:, None] + 1e-10)
    return table


STOCK: dict[str, Callable[[Tensor, Sequence[Tensor]], Tensor]] = {
    "sgd": lambda start, gradients: by_optimizer(lambda t: torch.optim.SGD([t], lr=0.05), start, gradients),
    "adagrad": lambda start, gradients: by_optimizer(lambda t: torch.optim.Adagrad([t], lr=0.05), start, gradients),
    "sparse_adam": lambda start, gradients: by_optimizer(
        lambda t: torch.optim.SparseAdam([t], lr=0.05), start, gradients
    ),
    "rowwise_adagrad": published_rowwise_adagrad,
}


@pytest.mark.parametrize("rule", STATES)
def test_fifty_steps_beside_stock(device: torch.device, rule: str) -> None:
    """In fp32 at most twice as far from fp64's result as stock in fp32; in fp64 the same."""
    start, drawn = torch.randn(ROWS, WIDTH, dtype=torch.float64), repeated_gradients(torch.float64)
    exact = STOCK[rule](start, drawn)
    torch.testing.assert_close(ours(rule, start, drawn, device, 0.05), exact, rtol=1e-12, atol=1e-12)
    single = [gradient.float() for gradient in drawn]
    stock_error = (STOCK[rule](start.float(), single) - exact).abs().max()
    error = (ours(rule, start.float(), single, device, 0.05) - exact).abs().max()
    assert error <= 2 * stock_error


@pytest.mark.parametrize("rule", STATES)
def test_no_other_row_is_touched(device: torch.device, rule: str) -> None:
    """Nor what lies between the rows of a table that is part of a wider tensor."""
    wide = torch.full((8, 12), 7.0, device=device)
    table = wide[:, 2:7]
    states = [[torch.ones_like(s[0])] for s in zero_states(rule, table)]
    rows = torch.tensor([1, 6], device=device)
    row_update_([table], [rows], [torch.ones(2, 5, device=device)], rule=rule, lr=0.5, states=states)
    changed = wide != 7.0
    expected = torch.zeros_like(changed)
    expected[rows, 2:7] = True
    assert torch.equal(changed, expected)
    for (state,) in states:
        assert (state != 1).reshape(8, -1).any(1).nonzero().flatten().tolist() in ([1, 6], [])


def test_all_tables_in_one_call(device: torch.device) -> None:
    """Tables of other rows and widths, a learning rate each, one without a row: as one call a table."""
    tables = [torch.randn(n, d, device=device) for n, d in ((5, 3), (1000, 3), (4, 17), (9, 3))]
    touched = [
        torch.randperm(len(t), device=device)[:k].sort().values for t, k in zip(tables, (2, 777, 4, 0), strict=True)
    ]
    grads = [torch.randn(len(r), t.shape[1], device=device) for r, t in zip(touched, tables, strict=True)]
    sums = [torch.rand_like(t) for t in tables]
    rates = [0.1, 0.2, 0.3, 0.4]
    one_by_one = [(t.clone(), s.clone()) for t, s in zip(tables, sums, strict=True)]
    for (table, state), rows, grad, rate in zip(one_by_one, touched, grads, rates, strict=True):
        row_update_([table], [rows], [grad], rule="adagrad", lr=rate, states=[[state]])
    row_update_(tables, touched, grads, rule="adagrad", lr=rates, states=[sums])
    for (table, state), t, s in zip(one_by_one, tables, sums, strict=True):
        assert torch.equal(table, t) and torch.equal(state, s)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_tables_with_float32_state(device: torch.device, dtype: torch.dtype) -> None:
    """The sum of squares keeps growing where a state in the half type would stall."""
    table = torch.zeros(2, 8, device=device, dtype=dtype)
    state = torch.full((2,), 4096.0, device=device)
    rows, grad = torch.tensor([1], device=device), torch.ones(1, 8, device=device, dtype=dtype)
    for _ in range(5):
        row_update_([table], [rows], [grad], rule="rowwise_adagrad", lr=1.0, states=[[state]])
    assert state.tolist() == [4096.0, 4101.0]
    assert table[0].eq(0).all() and table[1].lt(0).all()


def test_versions_and_stale_tensors() -> None:
    """What autograd has saved before the update is not used after it."""
    table = torch.nn.Parameter(torch.randn(3, 2))
    state = torch.zeros(3, 2)
    loss = table.square().sum()
    with torch.no_grad():
        row_update_([table], [torch.tensor([1])], [torch.ones(1, 2)], rule="adagrad", lr=0.1, states=[[state]])
    assert (table._version, state._version) == (1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_refuses_tensors_whose_gradient_is_recorded() -> None:
    table, rows, grad = torch.nn.Parameter(torch.zeros(3, 2)), torch.tensor([1]), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=r"row_update_ writes to its arguments .* torch\.no_grad"):
        row_update_([table], [rows], [grad], rule="sgd", lr=0.1)
    with pytest.raises(RuntimeError, match="row_update_ writes to its arguments"):
        row_update_([table.detach()], [rows], [grad.requires_grad_()], rule="sgd", lr=0.1)
    with pytest.raises(NotImplementedError, match="row_update_ writes to its arguments and runs under no transform"):
        torch.func.grad(lambda t: row_update_([t], [rows], [grad.detach()], rule="sgd", lr=0.1))(table.detach())
    assert table.eq(0).all()


def test_under_compile() -> None:
    """A compiled step writes to the table it was given."""
    torch._dynamo.reset()
    table, rows, grad = torch.zeros(4, 2), torch.tensor([0, 3]), torch.ones(2, 2)

    def step(grad: Tensor) -> Tensor:
        row_update_([table], [rows], [grad * 2], rule="sgd", lr=0.5)
        return table.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert compiled(grad) == -4
    assert table[:, 0].tolist() == [-1.0, 0.0, 0.0, -1.0]


def test_indices_as_a_gradient_has_them_and_tables_without_any(device: torch.device) -> None:
    counts = (2, 0, 5, 0)
    tables = [torch.randn(9, width, device=device) for width in (3, 3, 4, 3)]
    rows = [torch.randperm(9, device=device)[None, :n] for n in counts]
    grads = [torch.randn(n, table.shape[1], device=device) for n, table in zip(counts, tables, strict=True)]
    expected = [table.index_add(0, own[0], -0.5 * grad) for table, own, grad in zip(tables, rows, grads, strict=True)]
    row_update_(tables, rows, grads, rule="sgd", lr=0.5)
    torch.testing.assert_close(tables, expected)


TABLE, ONE, GRAD = torch.zeros(3, 2), torch.tensor([1]), torch.ones(1, 2)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"rule": "adam"}, ValueError, r"rule is 'adam'; allowed: sgd, adagrad, rowwise_adagrad, sparse_adam"),
        ({"rule": "adagrad"}, ValueError, r"states has 0 lists; rule 'adagrad' has 1"),
        ({"rows": [torch.tensor([3])]}, ValueError, r"rows\[0\] has rows from 3 to 3; allowed: 0 to 2"),
        ({"rows": [torch.tensor([-1])]}, ValueError, r"rows\[0\] has rows from -1 to -1"),
        ({"rows": [ONE.int()]}, TypeError, r"rows\[0\] is torch.int32; allowed: int64"),
        ({"rows": [ONE.view(1, 1, 1)]}, ValueError, r"rows\[0\] has shape \(1, 1, 1\); allowed: \(n,\) and \(1, n\)"),
        ({"row_grads": [torch.ones(2, 2)]}, ValueError, r"row_grads\[0\] has shape \(2, 2\)"),
        ({"row_grads": [GRAD.double()]}, TypeError, r"row_grads\[0\] is torch.float64, tables\[0\] is torch.float32"),
        ({"row_grads": []}, ValueError, "row_grads has 0 entries"),
        ({"lr": [0.1, 0.2]}, ValueError, "lr has 2 entries"),
        ({"lr": torch.tensor(0.1)}, TypeError, "lr is a tensor"),
        ({"tables": []}, ValueError, "tables is empty"),
        ({"tables": [TABLE.t().contiguous().t()]}, ValueError, r"tables\[0\] has shape \(3, 2\) and strides \(1, 3\)"),
        ({"rule": "adagrad", "states": [[torch.zeros(3)]]}, ValueError, r"states\[0\] has shape \(3,\)"),
        ({"rule": "adagrad", "states": [[TABLE.half()]]}, TypeError, r"states\[0\] is torch.float16"),
    ],
)
def test_errors(given: dict[str, object], error: type[Exception], message: str) -> None:
    """Before anything is written."""
    arguments = {"tables": [TABLE], "rows": [ONE], "row_grads": [GRAD], "rule": "sgd", "lr": 0.1} | given
    with pytest.raises(error, match=message):
        row_update_(**arguments)
    assert TABLE.eq(0).all()


@pytest.mark.gpu
def test_table_past_2_31_elements() -> None:
    rows, width = 2**25 + 5, 64
    table = torch.zeros(rows, width, device="cuda", dtype=torch.float16)
    touched = torch.tensor([0, rows - 1], device="cuda")
    row_update_([table], [touched], [torch.ones(2, width, device="cuda").half()], rule="sgd", lr=0.5)
    assert table[touched].eq(-0.5).all() and table[1].eq(0).all() and table[-2].eq(0).all()
