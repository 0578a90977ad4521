"""A mixing hash of 64-bit integers, and normal numbers made from hashes instead of being stored."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Unsigned = NDArray[np.uint64]


def mix64(keys: NDArray[Any]) -> Unsigned:
    """A bijection of 64-bit integers whose output bits each depend on all input bits: the finalizer of SplitMix64.

    keys: int64 or uint64, of any shape.
    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014.
    """
    x = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


NORMALS = 4
"""Normal numbers that one hash gives."""
_LEVELS = 1 << 16
_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / _LEVELS) for i in range(_LEVELS)], dtype=np.float32)


def normals(hashes: Unsigned) -> NDArray[np.float32]:
    """[n, 4] standard normal numbers of n hashes: each 16 bits of a hash choose one of 65,536 quantiles."""
    return _QUANTILES[hashes.view(np.uint16).reshape(-1, NORMALS)]
