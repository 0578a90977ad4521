"""row_update_: an optimizer's step on those rows of tables that a coalesced sparse gradient has, in place, in one pass.

    fusedops.row_update_(tables, rows, row_grads, rule="adagrad", lr=0.05, states=[sums])

What a `torch.optim.Optimizer` calls in its `step()`: gradients are accumulated, clipped, scaled and dropped before, as
in any PyTorch program. Nothing but those rows is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fusedops.operators.checked_once import checked_once, kinds, strides
from fusedops.operators.pointwise import check_number, computing
from fusedops.registration import FLOATING, Cost, Kernel, Sample, register

STATES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "sparse_adam": 2}
"""The rules, and how many tensors of state a table has by each."""


def row_update_(
    tables: Sequence[Tensor],
    rows: Sequence[Tensor],
    row_grads: Sequence[Tensor],
    *,
    rule: str,
    lr: float | Sequence[float],
    states: Sequence[Sequence[Tensor]] = (),
    eps: float = 1e-10,
    betas: tuple[float, float] = (0.9, 0.999),
    step: int | Sequence[int] = 1,
) -> None:
    """Update the given rows of each table, and of its state, in place.

    tables: T of them, [rows, D], of one dtype and device, each with its own D. rows: int64 [n] each, or [1, n] as the
    indices of a coalesced gradient are, every row once; row_grads: [n, D] each, of the tables' dtype: its values.
    states: as many lists of T tensors as the rule has, of the tables' dtype or float32 (float64 of float64 tables).
    lr and step: for all tables, or one each; step counts a table's updates from 1.

    For each of the rows, with w of the table, g of row_grads:
        sgd              w -= lr g
        adagrad          s += g^2;  w -= lr g / (sqrt(s) + eps); states [s], like the tables (Duchi et al. 2011)
        rowwise_adagrad  s += mean(g^2);  w -= lr g / (sqrt(s) + eps); states [s], [rows] (torchrec, FBGEMM)
        sparse_adam      m += (1 - beta1)(g - m);  v += (1 - beta2)(g^2 - v);
                         w -= lr sqrt(1 - beta2^step) / (1 - beta1^step) m / (sqrt(v) + eps); states [m, v], like the
                         tables (torch.optim.SparseAdam, after Kingma and Ba 2015)
    all in fp32 (fp64 of fp64 tables), rounded once when stored. A row that is given twice has no defined result.

    Bumps the version counters of what it writes to. Raises RuntimeError where one of the tensors requires a gradient
    and gradients are recorded (call it under torch.no_grad(), as optimizers do), and in the capture of a CUDA graph;
    TypeError for dtypes that are not allowed or differ; ValueError for a rule that does not exist, shapes, devices and
    strides that do not match, and on a CPU for rows that the table has not (on a GPU a device-side assertion).
    """
    tables = list(tables)
    check_number("row_update_", "lr", lr)
    rates = [float(lr)] * len(tables) if isinstance(lr, int | float) else [float(rate) for rate in lr]
    steps = [step] * len(tables) if isinstance(step, int) else list(step)
    if rule not in STATES:
        raise ValueError(f"row_update_: rule is {rule!r}; allowed: {', '.join(STATES)}")
    if len(states) != STATES[rule]:
        raise ValueError(f"row_update_: states has {len(states)} lists; rule {rule!r} has {STATES[rule]}")
    if rule == "sparse_adam":
        for name, values in (("lr", rates), ("step", steps)):
            if len(values) != len(tables):
                raise ValueError(f"row_update_: {name} has {len(values)} entries, tables {len(tables)}; one each")
        rates = [
            rate * math.sqrt(1 - betas[1] ** count) / (1 - betas[0] ** count)
            for rate, count in zip(rates, steps, strict=True)
        ]
    first, second = (list(states[i]) if i < len(states) else [] for i in range(2))
    row_update_operator(tables, first, second, list(rows), list(row_grads), rule, rates, eps, *betas)


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def _check(
    tables: list[Tensor],
    states: list[Tensor],
    second_states: list[Tensor],
    rows: list[Tensor],
    row_grads: list[Tensor],
    rule: str,
    lr: list[float],
    eps: float,
    beta1: float,
    beta2: float,
) -> None:
    if rule not in STATES:
        raise ValueError(f"row_update_: rule is {rule!r}; allowed: {', '.join(STATES)}")
    if not tables:
        raise ValueError("row_update_: tables is empty; there must be a table")
    expected = [len(tables) if i < STATES[rule] else 0 for i in range(2)]
    for name, values, count in (
        ("states", states, expected[0]),
        ("second_states", second_states, expected[1]),
        ("rows", rows, len(tables)),
        ("row_grads", row_grads, len(tables)),
        ("lr", lr, len(tables)),
    ):
        if len(values) != count:
            raise ValueError(f"row_update_: {name} has {len(values)} entries; by rule {rule!r} it must have {count}")
    groups = (tables, states, second_states)
    of_tables = kinds(tables)
    _check_tables(rule, of_tables, kinds(states), kinds(second_states), *(strides(group) for group in groups))
    # These are other ones at each step.
    dtype, device, _ = of_tables[0]
    for i, (own, grad, (_, _, table)) in enumerate(zip(kinds(rows), kinds(row_grads), of_tables, strict=True)):
        kind, place, shape = own
        n = shape[-1] if len(shape) else -1
        if kind != torch.int64 or place != device or (shape != (n,) and shape != (1, n)):
            _refuse_rows(i, own, device)
        if grad != (dtype, device, (n, table[1])):
            _refuse_gradients(i, grad, own, table, dtype, device)


def _refuse_rows(i: int, rows: tuple[Any, ...], device: torch.device) -> NoReturn:
    if rows[0] != torch.int64:
        raise TypeError(f"row_update_: rows[{i}] is {rows[0]}; allowed: int64")
    if rows[1] != device:
        raise ValueError(f"row_update_: rows[{i}] is on {rows[1]}, tables[0] on {device}; they must be on one device")
    raise ValueError(f"row_update_: rows[{i}] has shape {tuple(rows[2])}; allowed: (n,) and (1, n)")


def _refuse_gradients(
    i: int, grad: tuple[Any, ...], rows: tuple[Any, ...], table: torch.Size, dtype: torch.dtype, device: torch.device
) -> NoReturn:
    _check_alike(f"row_grads[{i}]", grad, dtype, device)
    raise ValueError(
        f"row_update_: row_grads[{i}] has shape {tuple(grad[2])}, rows[{i}] {tuple(rows[2])} and tables[{i}] "
        f"{tuple(table)}; allowed: (n, D), (n,) and (rows, D)"
    )


@checked_once
def _check_tables(
    rule: str,
    tables: tuple[Any, ...],
    states: tuple[Any, ...],
    second_states: tuple[Any, ...],
    table_strides: tuple[Any, ...],
    state_strides: tuple[Any, ...],
    second_strides: tuple[Any, ...],
) -> None:
    first_dtype, first_device, _ = tables[0]
    if first_dtype not in FLOATING:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        raise TypeError(f"row_update_: tables[0] is {first_dtype}; allowed: {allowed}")
    for i, table in enumerate(tables):
        _check_alike(f"tables[{i}]", table, first_dtype, first_device)
        shape = table[2]
        if len(shape) != 2 or (shape[1] > 1 and table_strides[i][1] != 1):
            raise ValueError(
                f"row_update_: tables[{i}] has shape {tuple(shape)} and strides {table_strides[i]}; allowed: two "
                "dimensions, the elements of a row side by side"
            )
        if states:
            _check_state(f"states[{i}]", states[i], state_strides[i], table, shape[: 1 if "row" in rule else 2])
        if second_states:
            _check_state(f"second_states[{i}]", second_states[i], second_strides[i], table, shape)


def _check_alike(name: str, tensor: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tensor[0] != dtype:
        raise TypeError(f"row_update_: {name} is {tensor[0]}, tables[0] is {dtype}; they must be of one dtype")
    if tensor[1] != device:
        raise ValueError(f"row_update_: {name} is on {tensor[1]}, tables[0] on {device}; they must be on one device")


def _check_state(
    name: str, state: tuple[Any, ...], steps: tuple[int, ...], table: tuple[Any, ...], allowed: torch.Size
) -> None:
    dtype, device, shape = state
    if dtype not in (table[0], computing_dtype_of_state(table[0])):
        raise TypeError(f"row_update_: {name} is {dtype}, its table {table[0]}; allowed: that, or float32")
    if device != table[1]:
        raise ValueError(f"row_update_: {name} is on {device}, its table on {table[1]}")
    if shape != allowed or (len(shape) == 2 and shape[1] > 1 and steps[1] != 1):
        raise ValueError(
            f"row_update_: {name} has shape {tuple(shape)}, strides {steps}; allowed: {tuple(allowed)}, "
            "the elements of a row side by side"
        )


def computing_dtype_of_state(dtype: torch.dtype) -> torch.dtype:
    """What a state may be besides the table's own dtype."""
    return dtype if dtype == torch.float64 else torch.float32


def check_rows(tables: list[Tensor], rows: list[Tensor]) -> None:
    """Raise ValueError for rows that a table has not, on a CPU."""
    for i, (table, own) in enumerate(zip(tables, rows, strict=True)):
        if own.numel() and (int(own.min()) < 0 or int(own.max()) >= table.shape[0]):
            raise ValueError(
                f"row_update_: rows[{i}] has rows from {int(own.min())} to {int(own.max())}; allowed: 0 to "
                f"{table.shape[0] - 1}, the rows of tables[{i}]"
            )


# ---------------------------------------------------------------------------------------------------------------------
# The rules


def updated(
    rule: str,
    weight: Tensor,
    states: Sequence[Tensor],
    grad: Tensor,
    lr: float,
    eps: float,
    beta1: float,
    beta2: float,
) -> tuple[Tensor, list[Tensor]]:
    """The new rows [n, D] and their new states, of the old ones, by a rule, in the arguments' dtype."""
    if rule == "sgd":
        return weight - lr * grad, []
    if rule == "sparse_adam":
        first, second = states
        first = first + (1 - beta1) * (grad - first)
        second = second + (1 - beta2) * (grad * grad - second)
        return weight - lr * (first / (second.sqrt() + eps)), [first, second]
    (state,) = states
    square = grad * grad
    state = state + (square.mean(1) if rule == "rowwise_adagrad" else square)
    root = state.sqrt() + eps
    return weight - lr * (grad / (root[:, None] if rule == "rowwise_adagrad" else root)), [state]


def _update_rows(
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    second_states: Sequence[Tensor],
    rows: Sequence[Tensor],
    row_grads: Sequence[Tensor],
    rule: str,
    lr: Sequence[float],
    *numbers: float,
) -> None:
    for i, (table, own) in enumerate(zip(tables, (own.reshape(-1) for own in rows), strict=True)):
        kept = [group[i] for group in (states, second_states) if group]
        old = [computing(state[own]) for state in kept]
        new, new_states = updated(rule, computing(table[own]), old, computing(row_grads[i]), lr[i], *numbers)
        table.index_copy_(0, own, new.to(table.dtype))
        for state, value in zip(kept, new_states, strict=True):
            state.index_copy_(0, own, value.to(state.dtype))


def _cpu(
    tables: list[Tensor],
    states: list[Tensor],
    second_states: list[Tensor],
    rows: list[Tensor],
    row_grads: list[Tensor],
    rule: str,
    lr: list[float],
    eps: float,
    beta1: float,
    beta2: float,
) -> None:
    check_rows(tables, rows)
    _update_rows(tables, states, second_states, rows, row_grads, rule, lr, eps, beta1, beta2)


def _reference(
    tables: list[Tensor],
    states: list[Tensor],
    second_states: list[Tensor],
    rows: list[Tensor],
    row_grads: list[Tensor],
    rule: str,
    lr: list[float],
    eps: float,
    beta1: float,
    beta2: float,
) -> tuple[Tensor, ...]:
    """What tables and states then hold."""
    new_tables, new_states, new_second = ([t.clone() for t in group] for group in (tables, states, second_states))
    _update_rows(new_tables, new_states, new_second, rows, row_grads, rule, lr, eps, beta1, beta2)
    return (*new_tables, *new_states, *new_second)


# ---------------------------------------------------------------------------------------------------------------------
# Registration


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def some_rows(count: int, n: int) -> Tensor:
        return torch.randperm(count, device=device)[:n].sort().values

    for rule, count in STATES.items():
        for name, tables, touched in (
            ("two tables", [randn(7, 5), randn(40, 5)], (3, 37)),
            ("one row", [randn(1, 3)], (1,)),
            ("no row", [randn(4, 3), randn(3, 7)], (0, 2)),
            ("wide", [randn(50, 130)], (41,)),
            ("strided", [randn(9, 14)[:, 3:10]], (4,)),
        ):
            rows = [some_rows(len(table), n) for table, n in zip(tables, touched, strict=True)]
            grads = [randn(n, table.shape[1]) for table, n in zip(tables, touched, strict=True)]
            states = [
                [randn(*table.shape[: 1 if "row" in rule else 2]).square() for table in tables] if i < count else []
                for i in range(2)
            ]
            rates = [0.1 + 0.3 * i for i in range(len(tables))]
            yield Sample(f"{rule}, {name}", (tables, *states, rows, grads, rule, rates, 1e-3, 0.75, 0.9))


def _cost(
    tables: list[Tensor],
    states: list[Tensor],
    second_states: list[Tensor],
    rows: list[Tensor],
    row_grads: list[Tensor],
    rule: str,
    *_: Any,
) -> Cost:
    """Rows of tables and states are read and written, gradients read."""
    elements = sum(grad.numel() for grad in row_grads)
    moved = 3 * elements * tables[0].itemsize + sum(own.nbytes for own in rows)
    for group in (states, second_states):
        moved += sum(2 * own.numel() * s[:1].numel() * s.itemsize for own, s in zip(rows, group, strict=False))
    return Cost(flops=elements * {"sgd": 2, "adagrad": 6, "rowwise_adagrad": 5, "sparse_adam": 11}[rule], bytes=moved)


def _no_vmap(*_: Any) -> NoReturn:
    raise NotImplementedError("fusedops::row_update_ writes to its arguments and has no rule for vmap")


row_update_operator = register(
    schema=(
        "row_update_(Tensor(a!)[] tables, Tensor(b!)[] states, Tensor(c!)[] second_states, Tensor[] rows, "
        "Tensor[] row_grads, str rule, float[] lr, float eps, float beta1, float beta2) -> ()"
    ),
    check=_check,
    shape=lambda *_: None,
    cpu=_cpu,
    kernel=Kernel("row_update", "row_update_"),
    reference=_reference,
    samples=_samples,
    cost=_cost,
    stock="the step of torch.optim.SGD, Adagrad or SparseAdam on a sparse gradient",
    vmap=_no_vmap,
    exempt={"autocast": "it writes to its arguments, which casts would be copies of"},
)
