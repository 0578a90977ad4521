"""Triton kernel of gelu(x @ weight.T + bias) for half types: a product that finishes its tiles before it stores them.

The product, the bias's sum and GELU are in fp32, and only the result is rounded.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.gelu_dropout import gelu
from fusedops.kernels.launching import ceil_div, launch, next_power_of_2


class Tile(NamedTuple):
    """How the product is cut up: a program's tile of y, its step along K, and how many rows of tiles share columns."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8

    @property
    def shared_memory(self) -> int:
        """Bytes of the operands' pipeline."""
        return (self.rows + self.columns) * self.depth * 2 * self.stages


# From the most work a program to the least.
TILES = (
    Tile(128, 256, 64, warps=8, stages=3),
    Tile(128, 128, 64, warps=4, stages=3),
    Tile(64, 128, 64, warps=4, stages=4),
    Tile(64, 64, 64, warps=4, stages=4),
    Tile(64, 32, 128, warps=4, stages=4),
    Tile(32, 32, 128, warps=4, stages=4),
    Tile(16, 32, 128, warps=4, stages=4),
    Tile(16, 32, 32, warps=4, stages=2),
)


@functools.cache
def device_limits(index: int) -> tuple[int, int]:
    """Multiprocessors of a GPU, and the shared memory a program may have there."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


@functools.lru_cache(maxsize=1024)
def choose_tile(rows: int, columns: int, multiprocessors: int, shared_memory: int) -> Tile:
    """The largest tile that fits the shared memory, is no taller than the rows and keeps most multiprocessors busy.

    Where none keeps three quarters of them busy, the tile with the most programs.
    """
    fitting = [tile for tile in TILES if tile.shared_memory <= shared_memory]
    tallest = max(16, next_power_of_2(rows))
    candidates = [tile for tile in fitting if tile.rows <= tallest] or fitting[-1:]

    def programs(tile: Tile) -> int:
        return ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns)

    return next(
        (tile for tile in candidates if programs(tile) >= 0.75 * multiprocessors), max(candidates, key=programs)
    )


@triton.jit
def linear_gelu_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    y_pointer,
    M,
    N,
    K,
    x_row_stride,
    x_column_stride,
    weight_row_stride,
    weight_column_stride,
    HAS_BIAS: tl.constexpr,
    TANH: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run together work on GROUP rows of tiles, so that their operands are found in the L2 cache.
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    first_m = program // (GROUP * tiles_n) * GROUP
    group_rows = min(tiles_m - first_m, GROUP)
    in_group = program % (GROUP * tiles_n)
    rows = (first_m + in_group % group_rows).to(tl.int64) * BM + tl.arange(0, BM)
    columns = (in_group // group_rows).to(tl.int64) * BN + tl.arange(0, BN)
    depths = tl.arange(0, BK).to(tl.int64)

    x_pointers = x_pointer + rows[:, None] * x_row_stride + depths[None, :] * x_column_stride
    weight_pointers = weight_pointer + depths[:, None] * weight_column_stride + columns[None, :] * weight_row_stride
    x_step = tl.full((), BK, tl.int64) * x_column_stride
    weight_step = tl.full((), BK, tl.int64) * weight_column_stride
    x_mask = rows[:, None] < M
    weight_mask = columns[None, :] < N
    accumulator = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if WHOLE_STEPS:
            x = tl.load(x_pointers, mask=x_mask, other=0.0)
            weight = tl.load(weight_pointers, mask=weight_mask, other=0.0)
        else:
            x = tl.load(x_pointers, mask=x_mask & (depths[None, :] < K - k), other=0.0)
            weight = tl.load(weight_pointers, mask=weight_mask & (depths[:, None] < K - k), other=0.0)
        accumulator = tl.dot(x, weight, accumulator)
        x_pointers += x_step
        weight_pointers += weight_step

    if HAS_BIAS:
        accumulator += tl.load(bias_pointer + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    y = gelu(accumulator, TANH, HALF=True).to(y_pointer.dtype.element_ty)
    tl.store(y_pointer + rows[:, None] * N + columns[None, :], y, mask=x_mask & weight_mask)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, approximate: str) -> None:
    """Write gelu(x weight^T + bias) into y: (M, N), contiguous. x: (M, K), weight: (N, K), bias: (N,); any strides."""
    (M, K), N = x.shape, weight.shape[0]
    if not (M and N):
        return
    # Triton's interpreter, which runs on CPU tensors, has the limits of a large GPU.
    multiprocessors, shared_memory = device_limits(x.device.index) if x.is_cuda else (132, 232448)
    tile = choose_tile(M, N, multiprocessors, shared_memory)
    launch(
        linear_gelu_kernel,
        ceil_div(M, tile.rows) * ceil_div(N, tile.columns),
        (x, weight, None if bias is None else bias.contiguous(), y),
        (M, N, K, *x.stride(), *weight.stride()),
        tile.warps,
        tile.stages,
        HAS_BIAS=bias is not None,
        TANH=approximate == "tanh",
        WHOLE_STEPS=K % tile.depth == 0,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GROUP=tile.group,
    )
