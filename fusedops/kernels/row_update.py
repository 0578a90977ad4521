"""Triton kernel of row_update_: the rows of all tables in one launch, each read and written once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.embedding_tables import TYPES, block_of_width, on_device, places_of, to_computing
from fusedops.kernels.launching import ceil_div, launch, next_power_of_2
from fusedops.kernels.pointwise import scalar
from fusedops.operators.row_update import STATES, check_rows

RULES = {rule: i for i, rule in enumerate(STATES)}
SGD, ADAGRAD, ROWWISE_ADAGRAD, SPARSE_ADAM = (tl.constexpr(i) for i in RULES.values())

TABLE, TABLE_STRIDE, STATE, STATE_STRIDE, STATE2, STATE2_STRIDE, TABLE_ROWS = (tl.constexpr(i) for i in range(7))
FIELDS = tl.constexpr(7)
"""Of a table, int64: addresses of its tensors and elements from row to row, and its rows."""

FIRST_PROGRAM, ROWS_POINTER, GRADS, COUNT, LR = (tl.constexpr(i) for i in range(5))
"""Of a step, int64, one number a table each: its first program; addresses of the rows to update and of their gradients,
and how many there are; the bits of the float64 learning rate."""

ELEMENTS = 1024
"""Elements of a table that a program updates."""
ELEMENTS_A_WARP = 2048
MOST_ROWS = 32


@triton.jit
def row_update_kernel(
    described,
    steps,
    tables,
    eps: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    RULE: tl.constexpr,
    DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    STATE2_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """ROWS of the rows of one table."""
    table = tl.arange(0, BLOCK_T)
    first = tl.load(steps + FIRST_PROGRAM * tables + table, mask=table < tables, other=2**62)
    own = tl.sum((first <= tl.program_id(0)).to(tl.int32)) - 1
    fields = described + own * FIELDS
    step = steps + own
    block = tl.program_id(0) - tl.load(step + FIRST_PROGRAM * tables)
    place = block * ROWS + tl.arange(0, ROWS)
    exists = place < tl.load(step + COUNT * tables)
    row = tl.load(tl.load(step + ROWS_POINTER * tables).to(tl.pointer_type(tl.int64)) + place, mask=exists, other=0)
    there = (row >= 0) & (row < tl.load(fields + TABLE_ROWS))
    tl.device_assert(there | ~exists, "row_update_: a row is out of range")
    exists = exists & there
    columns = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (columns[None, :] < D)
    lr = tl.load(step + LR * tables).to(tl.float64, bitcast=True)

    grads = tl.load(step + GRADS * tables).to(tl.pointer_type(DTYPE)) + (place[:, None] * D + columns[None, :])
    weights = tl.load(fields + TABLE).to(tl.pointer_type(DTYPE)) + (
        row[:, None] * tl.load(fields + TABLE_STRIDE) + columns[None, :]
    )
    if ALIGNED:
        grads = tl.multiple_of(grads, [16, 16])
        weights = tl.multiple_of(weights, [16, 16])
    grad = to_computing(tl.load(grads, mask=mask, other=0.0))
    weight = to_computing(tl.load(weights, mask=mask, other=0.0))
    lr = lr.to(grad.dtype)
    eps_ = scalar(eps, grad.dtype)
    if RULE == SGD:
        weight = weight - lr * grad
    elif RULE == ROWWISE_ADAGRAD:
        states = tl.load(fields + STATE).to(tl.pointer_type(STATE_DTYPE)) + row * tl.load(fields + STATE_STRIDE)
        state = to_computing(tl.load(states, mask=exists, other=0.0)).to(grad.dtype) + tl.sum(grad * grad, 1) / D
        tl.store(states, state.to(STATE_DTYPE), mask=exists)
        weight = weight - lr * (grad / (root(state) + eps_)[:, None])
    else:
        states = tl.load(fields + STATE).to(tl.pointer_type(STATE_DTYPE)) + (
            row[:, None] * tl.load(fields + STATE_STRIDE) + columns[None, :]
        )
        if ALIGNED:
            states = tl.multiple_of(states, [16, 16])
        state = to_computing(tl.load(states, mask=mask, other=0.0)).to(grad.dtype)
        if RULE == ADAGRAD:
            state = state + grad * grad
            weight = weight - lr * (grad / (root(state) + eps_))
        else:
            states2 = tl.load(fields + STATE2).to(tl.pointer_type(STATE2_DTYPE)) + (
                row[:, None] * tl.load(fields + STATE2_STRIDE) + columns[None, :]
            )
            if ALIGNED:
                states2 = tl.multiple_of(states2, [16, 16])
            state2 = to_computing(tl.load(states2, mask=mask, other=0.0)).to(grad.dtype)
            state = state + scalar(1.0 - beta1, grad.dtype) * (grad - state)
            state2 = state2 + scalar(1.0 - beta2, grad.dtype) * (grad * grad - state2)
            tl.store(states2, state2.to(STATE2_DTYPE), mask=mask)
            weight = weight - lr * (state / (root(state2) + eps_))
        tl.store(states, state.to(STATE_DTYPE), mask=mask)
    tl.store(weights, weight.to(DTYPE), mask=mask)


@triton.jit
def root(x):
    """The square root, rounded right."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


def row_update_(
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
    if tables[0].device.type == "cpu":  # in the interpreter, where assertions on a device do nothing
        check_rows(tables, rows)
    # One launch for tables of one width and kinds of state, which those of a model are.
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, table in enumerate(tables):
        groups.setdefault((table.shape[1], *(group[i].dtype for group in (states, second_states) if group)), []).append(
            i
        )
    for members in groups.values():
        own = (
            group if len(members) == len(tables) or not group else [group[i] for i in members]
            for group in (tables, states, second_states, rows, row_grads, lr)
        )
        _launch(*own, rule, (eps, beta1, beta2))  # type: ignore[arg-type]


def _launch(
    tables: list[Tensor],
    states: list[Tensor],
    second_states: list[Tensor],
    rows: list[Tensor],
    row_grads: list[Tensor],
    lr: list[float],
    rule: str,
    numbers: tuple[float, float, float],
) -> None:
    width, device, itemsize = tables[0].shape[1], tables[0].device, tables[0].itemsize
    block_d = block_of_width(width)
    a_program = max(1, min(MOST_ROWS, ELEMENTS // block_d))
    rows, row_grads = [own.contiguous() for own in rows], [grad.contiguous() for grad in row_grads]
    counts = list(map(Tensor.numel, rows))
    *firsts, programs = accumulate((ceil_div(count, a_program) for count in counts), initial=0)
    if not programs:
        return
    gradients = list(map(Tensor.data_ptr, row_grads))
    steps = array("q", [*firsts, *map(Tensor.data_ptr, rows), *gradients, *counts])
    steps.frombytes(array("d", lr).tobytes())
    sent = _sent(steps, device)
    described, tables_aligned = _describe(tables, states, second_states, device)
    launch(
        row_update_kernel,
        programs,
        (described, sent),
        (len(tables), *numbers),
        max(1, block_d * a_program // ELEMENTS_A_WARP),
        D=width,
        BLOCK_D=block_d,
        ROWS=a_program,
        BLOCK_T=next_power_of_2(len(tables)),
        RULE=RULES[rule],
        DTYPE=TYPES[tables[0].dtype],
        STATE_DTYPE=TYPES[(states or tables)[0].dtype],
        STATE2_DTYPE=TYPES[(second_states or tables)[0].dtype],
        ALIGNED=tables_aligned and width * itemsize % 16 == 0 and not any(address % 16 for address in gradients),
        debug=True,
        sanitize_overflow=False,
    )


def _describe(
    tables: list[Tensor], states: list[Tensor], second_states: list[Tensor], device: torch.device
) -> tuple[Tensor, bool]:
    """The tables' descriptions, [tables, FIELDS], and whether all their rows and those of their states are aligned."""
    table_rows = tuple(table.shape[0] for table in tables)
    groups = [group for group in (tables, states, second_states) if group]
    places = tuple(map(places_of, groups))

    def numbers() -> list[tuple[int, ...]]:
        columns: list[Sequence[int]] = []
        for own in places:
            columns += [own.addresses, [steps[0] for steps in own.strides]]
        columns += [(0,) * len(tables)] * (FIELDS.value - 1 - len(columns))
        return list(zip(*columns, table_rows, strict=True))

    # A state of a number a row is read number by number.
    matrices = [(own, group[0].itemsize) for own, group in zip(places, groups, strict=True) if group[0].dim() == 2]
    return on_device((places, table_rows), numbers, device), all(own.aligned(itemsize) for own, itemsize in matrices)


def _sent(steps: array[int], device: torch.device) -> Tensor:
    """What describes a step, on the device; other numbers at each step, so they go by a copy that no one waits for."""
    host = torch.frombuffer(steps, dtype=torch.int64)
    if device.type != "cuda":
        return host
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("row_update_: a CUDA graph would repeat the update of the rows that it was captured with")
    return host.pin_memory().to(device, non_blocking=True)
