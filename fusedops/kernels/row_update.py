"""Triton kernel of row_update_: the rows of all tables in one launch, each read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.embedding_tables import TYPES, aligned, block_of_width, to_computing
from fusedops.kernels.launching import ceil_div, launch, next_power_of_2
from fusedops.kernels.pointwise import scalar
from fusedops.operators.row_update import STATES, check_rows

RULES = {rule: i for i, rule in enumerate(STATES)}
SGD, ADAGRAD, ROWWISE_ADAGRAD, SPARSE_ADAM = (tl.constexpr(i) for i in RULES.values())

FIRST_PROGRAM, TABLE, TABLE_STRIDE, STATE, STATE_STRIDE, STATE2, STATE2_STRIDE = (tl.constexpr(i) for i in range(7))
ROWS_POINTER, GRADS, COUNT, TABLE_ROWS, LR = (tl.constexpr(i) for i in range(7, 12))
FIELDS = tl.constexpr(12)
"""Of a table, all int64: its first program; addresses of its tensors and elements from row to row; how many rows are
updated and how many it has; the bits of its float64 learning rate."""


@triton.jit
def row_update_kernel(
    described,
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
    first = tl.load(described + table * FIELDS + FIRST_PROGRAM, mask=table < tables, other=2**62)
    fields = described + (tl.sum((first <= tl.program_id(0)).to(tl.int32)) - 1) * FIELDS
    block = tl.program_id(0) - tl.load(fields + FIRST_PROGRAM)
    place = block * ROWS + tl.arange(0, ROWS)
    exists = place < tl.load(fields + COUNT)
    row = tl.load(tl.load(fields + ROWS_POINTER).to(tl.pointer_type(tl.int64)) + place, mask=exists, other=0)
    there = (row >= 0) & (row < tl.load(fields + TABLE_ROWS))
    tl.device_assert(there | ~exists, "row_update_: a row is out of range")
    exists = exists & there
    columns = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (columns[None, :] < D)
    lr = tl.load(fields + LR).to(tl.float64, bitcast=True)

    grads = tl.load(fields + GRADS).to(tl.pointer_type(DTYPE)) + (place[:, None] * D + columns[None, :])
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
        kinds = [group[i].dtype for group in (states, second_states) if group]
        if rows[i].numel():
            groups.setdefault((table.shape[1], *kinds), []).append(i)
    for members in groups.values():
        _launch(
            *([group[i] for i in members] if group else [] for group in (tables, states, second_states)),
            [rows[i].contiguous() for i in members],
            [row_grads[i].contiguous() for i in members],
            rule,
            [lr[i] for i in members],
            (eps, beta1, beta2),
        )


def _launch(
    tables: list[Tensor],
    states: list[Tensor],
    second_states: list[Tensor],
    rows: list[Tensor],
    row_grads: list[Tensor],
    rule: str,
    lr: list[float],
    numbers: tuple[float, float, float],
) -> None:
    width, device = tables[0].shape[1], tables[0].device
    block_d = block_of_width(width)
    a_program = max(1, min(32, 1024 // block_d))
    rates = torch.tensor(lr, dtype=torch.float64).view(torch.int64).tolist()
    fields, programs = [], 0
    for i, table in enumerate(tables):
        described = [programs, table.data_ptr(), table.stride(0)]
        for group in (states, second_states):
            described += [group[i].data_ptr(), group[i].stride(0)] if group else [0, 0]
        fields.append([*described, rows[i].data_ptr(), row_grads[i].data_ptr(), len(rows[i]), len(table), rates[i]])
        programs += ceil_div(len(rows[i]), a_program)
    matrices = [*tables, *row_grads, *(state for state in (*states, *second_states) if state.dim() == 2)]
    launch(
        row_update_kernel,
        programs,
        (_on_device(fields, device),),
        (len(tables), *numbers),
        max(1, block_d * a_program // 2048),
        D=width,
        BLOCK_D=block_d,
        ROWS=a_program,
        BLOCK_T=next_power_of_2(len(tables)),
        RULE=RULES[rule],
        DTYPE=TYPES[tables[0].dtype],
        STATE_DTYPE=TYPES[(states or tables)[0].dtype],
        STATE2_DTYPE=TYPES[(second_states or tables)[0].dtype],
        ALIGNED=aligned(*matrices),
        debug=True,
        sanitize_overflow=False,
    )


def _on_device(fields: list[list[int]], device: torch.device) -> Tensor:
    """The descriptions of tables; other ones at each step, so they go by a copy that no one waits for."""
    if device.type != "cuda":
        return torch.tensor(fields, dtype=torch.int64)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("row_update_: a CUDA graph would repeat the update of the rows that it was captured with")
    return torch.tensor(fields, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
