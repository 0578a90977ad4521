"""Dropout's random bits in stock PyTorch: Philox-4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3).

Whether element i of a tensor is kept is a pure function of the seed, i and p, the same bit for bit on every device:

    words  = philox(counter=(low, high 32 bits of i // 8, 0, 0), key=(low, high 32 bits of the seed))
    half   = word (i % 8) // 2 of the four, its low 16 bits where i is even, its high 16 bits where i is odd
    kept   = half >= threshold(p)

i counts the elements in the order of a contiguous tensor. The kernels draw the same bits with `tl.randint4x`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

GROUP = 8
"""Elements that share one call of Philox, 16 bits each."""
LEVELS = 1 << 16

_WORD = 0xFFFFFFFF
# The multipliers less 2^32: the product with a 32-bit word then fits int64, and that word is added to its upper half.
_MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Groups drawn at a time on a CPU, so that the ten rounds' intermediates stay in its cache.
_CPU_CHUNK = 1 << 16

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def threshold(p: float) -> int:
    """The 16-bit number below which an element is dropped: round(65536 p), within [1, 65535] unless p is 0 or 1.

    The share dropped differs from p by at most 2^-17 (by less than 2^-16 where p is that close to 0 or to 1).
    """
    if p in (0.0, 1.0):
        return int(p * LEVELS)
    return min(max(round(p * LEVELS), 1), LEVELS - 1)


def scale(p: float) -> float:
    """What a kept element is multiplied by: 1 / (1 - p), as in F.dropout; 0 for p = 1, which keeps none.

    With `threshold`'s error in the share kept, the mean changes by a factor of at most 1 +- 2^-17 / (1 - p).
    """
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def _multiply(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The upper and lower 32 bits of a * (multiplier + 2^32)."""
    product = a * multiplier
    return ((product >> 32) + a) & _WORD, product & _WORD


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox-4x32. Words are int64 tensors of 32-bit numbers, of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _kept(seed: Tensor, first: int, last: int, limit: int) -> Tensor:
    """Which elements of the groups [first, last) are kept: bool, one row of 8 a group."""
    group = torch.arange(first, last, dtype=torch.int64, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox((group & _WORD, group >> 32, zero, zero), (seed & _WORD, (seed >> 32) & _WORD))
    return torch.stack([half >= limit for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)


def keep_mask(seed: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Which elements dropout keeps: bool, `shape`, on the seed's device. seed: int64, shape (1,); p in [0, 1]."""
    elements = math.prod(shape)
    groups = -(-elements // GROUP)
    chunk = groups
    if type(seed) is Tensor and seed.device.type == "cpu":
        chunk = min(groups, _CPU_CHUNK)
    starts = range(0, groups, chunk) if groups else ()
    parts = [_kept(seed, start, min(start + chunk, groups), threshold(p)) for start in starts]
    if not parts:
        return torch.empty(tuple(shape), dtype=torch.bool, device=seed.device)
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows.flatten()[:elements].reshape(tuple(shape))


def dropout(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """x, what is kept of it times 1 / (1 - p), the rest times 0 (so that NaN stays NaN, as in F.dropout)."""
    if p == 0.0 or seed is None:
        return x
    return x * keep_mask(seed, x.shape, p) * scale(p)
