"""From raw 64-bit ids to rows of a table: floor modulo, or a mixing hash whose high bits choose the row.

All of it is integer arithmetic that comes out alike on every device; int64 stands for an unsigned number here, whose
products wrap.
"""

from __future__ import annotations

import torch
from torch import Tensor

HASHES = ("modulo", "mix32", "mix64", "none")
MOST_ROWS = 2**31 - 1
"""Rows of a table: products of 32 bits of a hash by them stay below 2^63."""

_LOW = 0xFFFFFFFF
FOLD = 0x9E3779B1  # 2^32 over the golden ratio, a prime


def signed(number: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    return number - 2**64 if number >= 2**63 else number


# Appleby's finalisers of MurmurHash3: shift, multiply, shift, multiply, shift.
MIX32 = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
MIX64 = (33, signed(0xFF51AFD7ED558CCD), 33, signed(0xC4CEB9FE1A85EC53), 33)


def reciprocal(rows: int) -> int:
    """floor(2^64 / rows), or the largest 64-bit number, as an int64: its high product by y is floor(y / rows), or one
    less."""
    return signed(min(2**64 // rows, 2**64 - 1))


def rows_of_ids(ids: Tensor, rows: Tensor | int, hash: str) -> Tensor:
    """The row that each id has in a table of `rows` rows; with hash "none" the id itself, which may be out of range.

    ids: int64 or int32, any shape. rows: for all, or for each. Returns int64.
    """
    ids = ids.to(torch.int64)
    if hash == "modulo":
        return torch.remainder(ids, rows)
    if hash == "mix32":
        return (_mix32(ids) * rows) >> 32
    if hash == "mix64":
        mixed = _mix64(ids)
        # The high 64 bits of the product, from two products of 32 bits by at most 31.
        return ((_shifted(mixed, 32) * rows) + (((mixed & _LOW) * rows) >> 32)) >> 32
    return ids


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros moving in; torch moves in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix32(ids: Tensor) -> Tensor:
    x = (ids & _LOW) ^ ((_shifted(ids, 32) * FOLD) & _LOW)
    first, a, second, b, third = MIX32
    x = ((x ^ (x >> first)) * a) & _LOW
    x = ((x ^ (x >> second)) * b) & _LOW
    return x ^ (x >> third)


def _mix64(x: Tensor) -> Tensor:
    first, a, second, b, third = MIX64
    x = (x ^ _shifted(x, first)) * a
    x = (x ^ _shifted(x, second)) * b
    return x ^ _shifted(x, third)
