"""What the pointwise kernels share: one flat pass over dense tensors of equal strides."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.launching import ceil_div, launch

BLOCK = 1024
NUM_WARPS = 4  # 8 elements a thread: 16 bytes of a half type, and one call of Philox


def launch_flat(
    kernel: Any, first: Tensor, *others: Tensor | None, numbers: tuple[float, ...] = (), **constants: Any
) -> None:
    """Launch over dense tensors of equal strides; the kernel's last number is how many elements the first has."""
    elements = first.numel()
    if elements:
        programs, numbers = ceil_div(elements, BLOCK), (*numbers, elements)
        launch(kernel, programs, (first, *others), numbers, NUM_WARPS, BLOCK=BLOCK, **constants)


@triton.jit
def flat_offsets(elements, BLOCK: tl.constexpr):
    """This program's offsets, 64-bit since a tensor may pass 2^31 elements, and which of them exist."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < elements


@triton.jit
def load_computing(pointer, offsets, mask):
    """Loads into the dtype of the arithmetic: float64 stays, all others become float32."""
    value = tl.load(pointer + offsets, mask=mask, other=0.0)
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    return value


@triton.jit
def exp(x, HALF: tl.constexpr):
    """e^x, to a few ulp of float32 unless HALF: Triton's own rounds x log2(e) first, an error that grows with |x|."""
    if HALF or x.dtype == tl.float64:
        return tl.exp(x)
    else:
        # x = n ln 2 + r. ln 2 in two parts, the first of so few bits that n times it is exact; the bounds keep infinity
        # out of n, and 2^n finite where e^x is.
        n = tl.minimum(tl.maximum(tl.floor(x * 1.4426950408889634 + 0.5), -151.0), 127.0)
        r = (x - n * 0.693359375) - n * -2.12194440e-4
        return tl.exp2(n) * tl.exp(r)


@triton.jit
def sigmoid(x, HALF: tl.constexpr):
    return 1.0 / (1.0 + exp(-x, HALF))


@triton.jit
def scalar(value, dtype: tl.constexpr):
    """A number as a tensor of one element. Its parameter is annotated `tl.float64`: a float would arrive as fp32."""
    return tl.full((1,), value, dtype)
