"""A Triton kernel of float32 products on the tensor cores, each as three of TF32 (Ootomo and Yokota 2022).

A float32 number is the sum of two TF32 numbers up to 2^-22 of it; of the four products the one of both small parts is
left out. Sums are in float32. NaN and infinity propagate as in a float32 product: Triton drops the NaN of small parts.
A number below 1e-34 has a subnormal small part, and so fewer digits, down to TF32's 11. One within 2^-12 of the largest
float32 rounds to infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.launching import ceil_div, launch, next_power_of_2

PRODUCT = (64, 4, 3)  # rows of a tile, warps and stages; its columns follow from the operands


@triton.jit
def product_kernel(
    a_pointer, weight_pointer, y_pointer, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    tiles_n = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    columns = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    depths = tl.arange(0, BK)
    a_pointers = a_pointer + rows[:, None] * K + depths[None, :]
    weight_pointers = weight_pointer + columns[None, :] * K + depths[:, None]
    accumulator = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_pointers, mask=(rows < M)[:, None] & (depths < K - k)[None, :], other=0.0)
        weight = tl.load(weight_pointers, mask=(columns < N)[None, :] & (depths < K - k)[:, None], other=0.0)
        accumulator = tl.dot(a, weight, accumulator, input_precision="tf32x3")
        a_pointers += BK
        weight_pointers += BK
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(y_pointer + rows[:, None] * N + columns[None, :], accumulator, mask=mask)


def _block(size: int) -> int:
    return min(max(next_power_of_2(size), 16), 128)


def product(a: Tensor, weight: Tensor) -> Tensor:
    """a weight^T; a: (M, K), weight: (N, K), none of them 0; contiguous, float32."""
    (m, k), n = a.shape, weight.shape[0]
    y = a.new_empty((m, n))
    rows, warps, stages = PRODUCT
    columns = _block(n)
    programs = ceil_div(m, rows) * ceil_div(n, columns)
    launch(product_kernel, programs, (a, weight, y), (m, n, k), warps, stages, BM=rows, BN=columns, BK=32)
    return y
