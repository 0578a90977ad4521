"""The networks: perceptrons around embedding tables, given the function that looks up, pools and crosses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.slots.embedding import EmbeddingSpec

Embedding = Callable[[list[Tensor], Tensor, Tensor, Tensor | None, EmbeddingSpec], Tensor]


@dataclass(frozen=True)
class RecommenderOps:
    """The function of each slot of a recommender; fusedops.slots.SLOTS has the signature."""

    embedding: Embedding


class Recommender(nn.Module):
    """The logit of a click, [B], of dense features [B, n_dense] and bags of categorical ids.

    dlrm: a perceptron makes a vector of the dense features; it and the pooled rows of every categorical feature meet as
    the products of all pairs; a second perceptron sees the vector and the products. (Naumov et al. 2019, "Deep Learning
    Recommendation Model for Personalization and Recommendation Systems", arXiv:1906.00091.)

    deepfm: the sum of a linear term (a weight an id), a factorization machine's (the products of all pairs, summed) and
    a perceptron's of all vectors side by side. (Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network
    for CTR Prediction", arXiv:1703.04247.)

    Without a cross the perceptron sees all vectors side by side, and nothing is multiplied; without embeddings it sees
    the dense features' vector alone.

    architecture   as `ModelConfig.architecture()` has it.
    n_dense        dense features; of none, the vector is a learnt constant.
    rows           rows of each table.
    ops            the function of the slot; None for a model without embeddings.
    feature_tables of each categorical feature the index of its table; by default there is one a feature.
    """

    def __init__(
        self,
        architecture: dict[str, Any],
        n_dense: int,
        rows: Sequence[int],
        ops: RecommenderOps | None,
        feature_tables: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        a, width = architecture, architecture["embedding_dim"]
        self.ops = ops
        self.n_dense = n_dense
        self.network, self.cross = a["network"], a["cross"]
        self.bottom = perceptron([n_dense, *a["bottom"], width]) if n_dense else None
        self.constant = None if n_dense else nn.Parameter(torch.zeros(width))
        self.tables = nn.ParameterList()
        self.linear_tables = nn.ParameterList()
        if ops is not None:
            self.tables.extend(table(count, width, a["table_scale"]) for count in rows)
            if self.network == "deepfm":
                self.linear_tables.extend(nn.Parameter(torch.zeros(count, 1)) for count in rows)
        chosen = tuple(range(len(rows)) if feature_tables is None else feature_tables)
        self.crossed = EmbeddingSpec(chosen, a["pooling"], a["hash"], self.cross)
        self.apart = EmbeddingSpec(chosen, a["pooling"], a["hash"], "none")
        self.top = perceptron([_seen(a, len(chosen) + 1 if ops is not None else 1), *a["top"], 1])

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        if self.bottom is not None:
            vector = self.bottom(dense)
        else:
            assert self.constant is not None
            vector = self.constant.expand(len(dense), -1)
        if self.ops is None:
            return self.top(vector).squeeze(-1)
        # Iterating over a ParameterList costs the host a third of a look-up.
        look_up = self.ops.embedding
        tables: list[Tensor] = list(self.tables.parameters())
        if self.network == "dlrm":
            return self.top(look_up(tables, ids, offsets, vector, self.crossed).flatten(1)).squeeze(-1)
        logit = self.top(look_up(tables, ids, offsets, vector, self.apart).flatten(1)).squeeze(-1)
        weights: list[Tensor] = list(self.linear_tables.parameters())
        logit = logit + look_up(weights, ids, offsets, None, self.apart).flatten(1).sum(-1)
        if self.cross == "fm":
            logit = logit + look_up(tables, ids, offsets, vector, self.crossed).sum(-1)
        return logit


def table(rows: int, width: int, scale: float) -> nn.Parameter:
    """Uniform within +-scale / sqrt(width)."""
    bound = scale * width**-0.5
    return nn.Parameter(torch.empty(rows, width).uniform_(-bound, bound))


def _seen(architecture: dict[str, Any], vectors: int) -> int:
    """How many numbers of a sample the second perceptron sees, where so many vectors are there."""
    width: int = architecture["embedding_dim"]
    if architecture["network"] == "dlrm" and architecture["cross"] == "dot":
        return width + vectors * (vectors - 1) // 2
    return width * vectors


def perceptron(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths with a ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
