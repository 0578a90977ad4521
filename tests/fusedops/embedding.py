"""Random tables and bags of ids, which the tests of embedding_aggregation and of its gradient share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def random_bags(features: int, batch: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Raw ids over the whole of int64 and offsets of bags, empty ones among them."""
    lengths = torch.randint(0, most + 1, (features * batch,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(INT64_MIN, INT64_MAX, (int(offsets[-1]),))
    return ids.to(device), offsets.to(device)


def random_tables(rows: Sequence[int], width: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Tables of so many rows each, which require a gradient."""
    return [torch.randn(n, width, device=device, dtype=dtype).requires_grad_() for n in rows]
