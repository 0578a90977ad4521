"""What becomes of a sample's vectors, [B, n, D]: crosses of features, and the gradient of each, in stock PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

CROSSES = ("none", "dot", "fm")


def crossed_shape(batch: int, vectors: int, width: int, has_dense: bool, cross: str) -> tuple[int, ...]:
    """The shape of what `crossed` returns."""
    if cross == "dot":
        return batch, (width if has_dense else 0) + vectors * (vectors - 1) // 2
    return (batch, width) if cross == "fm" else (batch, vectors, width)


def pairs_of(vectors: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pairs (i, j) with j < i, in the order of the rows of a lower triangle: (1, 0), (2, 0), (2, 1), ..."""
    i, j = torch.tril_indices(vectors, vectors, -1, device=device)
    return i, j


def crossed(vectors: Tensor, has_dense: bool, cross: str) -> Tensor:
    """The features of vectors [B, n, D], the first of which is the dense one if there is one.

    none  the vectors, [B, n, D].
    dot   the dense vector, then the products of all pairs (Naumov et al. 2019, DLRM), [B, D + n (n - 1) / 2].
    fm    the products of all pairs before the sum over D, half of (sum v)^2 - sum v^2 (Rendle 2010), [B, D].
    """
    if cross == "none":
        return vectors
    if cross == "fm":
        return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))
    i, j = pairs_of(vectors.shape[1], vectors.device)
    products = torch.bmm(vectors, vectors.transpose(1, 2))[:, i, j]
    return torch.cat([vectors[:, 0], products], 1) if has_dense else products


def crossed_gradient(grad: Tensor, vectors: Tensor, has_dense: bool, cross: str) -> Tensor:
    """The gradient with respect to the vectors, [B, n, D]."""
    if cross == "none":
        return grad
    if cross == "fm":
        return grad[:, None] * (vectors.sum(1, keepdim=True) - vectors)
    count, width = vectors.shape[1:]
    i, j = pairs_of(count, vectors.device)
    flat = torch.zeros(len(vectors), count * count, dtype=vectors.dtype, device=vectors.device)
    flat = flat.index_copy(1, i * count + j, grad[:, width * has_dense :])
    weights = flat.view(-1, count, count)
    gradient = torch.bmm(weights + weights.transpose(1, 2), vectors)
    if not has_dense:
        return gradient
    first = gradient[:, :1] + grad[:, None, :width]
    return torch.cat([first, gradient[:, 1:]], 1)
