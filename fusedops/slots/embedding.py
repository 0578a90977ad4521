"""Slot embedding: (tables, ids, offsets, dense, spec) -> features, from bags of raw ids to what a perceptron sees.

Gradients of the tables are sparse. What updates the tables belongs to the implementation: `table_optimizer` gives the
stock optimizer with a stock implementation, and that of `fusedops.optim` with a fused one, so that an arm is stock or
ours from the look-up to the update, and arms differ in nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops import counting, optim
from fusedops.operators.embedding_aggregation import embedding_aggregation
from fusedops.operators.embedding_bags import batch_size
from fusedops.operators.embedding_cross import crossed
from fusedops.operators.embedding_hash import rows_of_ids
from fusedops.operators.pointwise import FLOATING


@dataclass(frozen=True)
class EmbeddingSpec:
    """How bags of ids become features.

    feature_tables  for each feature the index of its table; several may share one.
    pooling         "sum" or "mean" of a bag's rows; an empty bag is zero.
    hash            "modulo", "mix32" or "mix64": how an id becomes a row (see `fusedops.operators.embedding_hash`).
    cross           what becomes of a sample's vectors, which are the dense one, if there is one, then one a feature:
                    "none", themselves, [B, vectors, D]; "dot", [B, D + pairs]: the dense vector, then the products of
                    vectors i and j for i = 1, 2, ... and each j < i; "fm", [B, D]: the products of all pairs before
                    the sum over D, half of the square of the sum less the sum of the squares.
    """

    feature_tables: tuple[int, ...]
    pooling: str = "sum"
    hash: str = "modulo"
    cross: str = "none"


def embedding_native(
    tables: list[Tensor], ids: Tensor, offsets: Tensor, dense: Tensor | None, spec: EmbeddingSpec
) -> Tensor:
    """An F.embedding_bag with sparse gradients a feature, then the cross.

    torch.compile, which has no sparse gradients, compiles the cross alone.
    """
    vectors = _bags(tables, ids, offsets, spec)
    if dense is not None:
        vectors = [dense, *vectors]
    return crossed(torch.stack(vectors, dim=1), dense is not None, spec.cross)


def _bags(tables: list[Tensor], ids: Tensor, offsets: Tensor, spec: EmbeddingSpec) -> list[Tensor]:
    """The pooled vectors of each feature, [B, D] each."""
    batch = batch_size(offsets, len(spec.feature_tables))
    ends = offsets[::batch].tolist()  # an embedding_bag wants its own ids
    pooled = []
    for feature, table in enumerate(spec.feature_tables):
        first, last = ends[feature], ends[feature + 1]
        rows = rows_of_ids(ids[first:last], len(tables[table]), spec.hash)
        bags = offsets[feature * batch : (feature + 1) * batch + 1] - first
        pooled.append(
            F.embedding_bag(rows, tables[table], bags, mode=spec.pooling, sparse=True, include_last_offset=True)
        )
    return pooled


# What torch.compiler.disable does, which would import Dynamo here and now.
_bags._torchdynamo_disable = True  # type: ignore[attr-defined]
_bags._torchdynamo_disable_msg = "sparse gradients of embedding_bag"  # type: ignore[attr-defined]


def embedding_unsupported(tables: list[Tensor]) -> str | None:
    """Why embedding_aggregation cannot do a case, or None where it can."""
    if tables[0].dtype not in FLOATING:
        return f"the dtype is {str(tables[0].dtype).removeprefix('torch.')}"
    if tables[0].device.type not in ("cpu", "cuda"):
        return f"the device is {tables[0].device.type}"
    return None


def embedding_fused(
    tables: list[Tensor], ids: Tensor, offsets: Tensor, dense: Tensor | None, spec: EmbeddingSpec
) -> Tensor:
    """embedding_aggregation where it can; `embedding_unsupported` says where not."""
    reason = embedding_unsupported(tables)
    if reason is not None:
        counting.announce_fallback("embedding", "embedding_aggregation", reason)
        return embedding_native(tables, ids, offsets, dense, spec)
    return embedding_aggregation(
        tables,
        ids,
        offsets,
        dense,
        feature_tables=spec.feature_tables,
        pooling=spec.pooling,
        hash=spec.hash,
        cross=spec.cross,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The tables' optimizers

_OPTIMIZERS: Mapping[Callable[..., Tensor], Mapping[str, Callable[..., torch.optim.Optimizer]]] = {
    embedding_native: {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "sparse_adam": torch.optim.SparseAdam,
    },
    embedding_fused: {
        "sgd": optim.SGD,
        "adagrad": optim.Adagrad,
        "rowwise_adagrad": optim.RowWiseAdagrad,
        "sparse_adam": optim.SparseAdam,
    },
}


def table_optimizers(embedding: Callable[..., Any]) -> Mapping[str, Callable[..., torch.optim.Optimizer]]:
    """The optimizers that go with an implementation, by rule, each made of (tables, lr=...)."""
    return _OPTIMIZERS[inspect.unwrap(embedding)]
