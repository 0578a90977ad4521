"""Which tiles the kernels of flash_attention run with: a table, no tuning at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fusedops.kernels import launching
from fusedops.registration import INTERPRETING


class Tile(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys a step, and how a program is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By kernel, arithmetic and head dim padded: what to try, best first; the first that fits the GPU's shared memory stays.
#
# "half" (float16, bfloat16) was timed on an H200: sequences of 1,024 and 4,096, head dims 64 and 128, causal and full.
# It has two stages at least: without a pipeline operands pass through registers, and spill. "tf32" is the same in four
# bytes. "single" (float32 in IEEE precision) and, on some GPUs, "double" have no tensor core products: threads hold
# operands in registers, larger tiles spill.
_TILES: dict[str, dict[str, dict[int, tuple[Tile, ...]]]] = {
    "forward": {
        "half": {
            64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
            128: (Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
            256: (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
        },
        "half, causal": {
            64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
            128: (Tile(128, 128, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
            256: (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
        },
        "tf32": {
            64: (Tile(64, 64, 4, 2), Tile(32, 32, 4, 1)),
            128: (Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
            256: (Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
        },
        "single": {
            64: (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1)),
            128: (Tile(32, 32, 8, 1), Tile(32, 16, 4, 1)),
            256: (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
        },
        "double": {
            64: (Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
            128: (Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
            256: (Tile(16, 16, 4, 1),),
        },
    },
    # The gradient of k and v: a program owns BLOCK_N keys and steps through the queries.
    "keys": {
        "half": {
            64: (Tile(64, 64, 4, 3), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1)),
            128: (Tile(64, 128, 8, 3), Tile(64, 64, 4, 2), Tile(32, 128, 8, 2), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1)),
            256: (Tile(32, 64, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 8, 1)),
        },
        "tf32": {
            64: (Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)),
            128: (Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
            256: (Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)),
        },
        "single": {
            64: (Tile(32, 32, 8, 1), Tile(16, 32, 4, 1)),
            128: (Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)),
            256: (Tile(16, 16, 8, 1),),
        },
        "double": {64: (Tile(16, 16, 4, 1),), 128: (Tile(16, 16, 4, 1),), 256: (Tile(16, 16, 8, 1),)},
    },
    # The gradient of q: a program owns BLOCK_M queries and steps through the keys.
    "queries": {
        "half": {
            64: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
            128: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
            256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 1)),
        },
        "tf32": {
            64: (Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
            128: (Tile(32, 32, 4, 1), Tile(32, 16, 4, 1)),
            256: (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
        },
        "single": {
            64: (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1)),
            128: (Tile(32, 32, 8, 1), Tile(32, 16, 4, 1)),
            256: (Tile(16, 16, 4, 1),),
        },
        "double": {64: (Tile(16, 16, 4, 1),), 128: (Tile(16, 16, 4, 1),), 256: (Tile(16, 16, 8, 1),)},
    },
}
# In the interpreter small inputs are to cross the edges of tiles.
_INTERPRETED = Tile(32, 32, 4, 1)


@functools.cache
def tiles(
    kernel: str, itemsize: int, tf32: bool, block_d: int, causal: bool, few_queries: bool, device: int | None
) -> list[Tile]:
    """The tiles left to try on a device, best first: the same list at each call, from which `launch` drops what fails.

    kernel: "forward", "keys" or "queries"; itemsize: bytes of an element; few_queries: at most 16, as in decoding.
    """
    if INTERPRETING:
        return [_INTERPRETED]
    by_arithmetic = _TILES[kernel]
    arithmetic = {2: "half", 4: "tf32" if tf32 else "single", 8: "double"}[itemsize]
    if causal and f"{arithmetic}, causal" in by_arithmetic:
        arithmetic += ", causal"
    chosen = by_arithmetic[arithmetic][max(block_d, 64)]
    if few_queries and itemsize == 2:  # rather than compute rows that do not exist
        chosen = tuple(Tile(16, tile.block_n, 4, tile.num_stages) for tile in chosen)
    return list(chosen)


def launch(
    choice: list[Tile],
    programs: Callable[[Tile], int],
    kernel: Any,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    **constants: Any,
) -> None:
    """Launch with the first tile that fits the GPU; those that do not are dropped from `choice` for good."""
    while True:
        block_m, block_n, num_warps, num_stages = tile = choice[0]
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
        try:
            launching.launch(kernel, programs(tile), tensors, numbers, num_warps, num_stages, **blocks, **constants)
            return
        except triton.runtime.OutOfResources:
            if len(choice) == 1:
                raise
            choice.pop(0)


def tf32_allowed(dtype: torch.dtype) -> bool:
    """Whether products of this dtype may be rounded to TF32: as the user told PyTorch to do its own."""
    # The older allow_tf32 raises once the newer settings were used; this reads both.
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
