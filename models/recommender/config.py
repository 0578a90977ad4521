"""Configuration of the recommender: the network, its tables, and how these are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

CROSSES = {"dlrm": ("dot", "none"), "deepfm": ("fm", "none")}
"""The feature crosses of each network, its own first."""
HASHES = ("modulo", "mix32", "mix64")
POOLINGS = ("sum", "mean")
TABLE_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "sparse_adam")

_TABLES: dict[str, Any] = {
    "embeddings": True,
    "hash": "modulo",
    "pooling": "sum",
    "table_optimizer": "sparse_adam",
    "table_learning_rate": 0.02,
}
# Products of small rows pass on small gradients, and pairs of ids are learnt late; but a factorization machine adds its
# products up, and would begin far from the base rate with rows as large as DLRM's.
_DLRM: dict[str, Any] = {"network": "dlrm", "cross": "dot", "table_scale": 2.0} | _TABLES
_DEEPFM: dict[str, Any] = {"network": "deepfm", "cross": "fm", "table_scale": 0.5, "bottom": []} | _TABLES
PRESETS: dict[str, dict[str, Any]] = {
    # A minute a training on two CPU cores.
    "tiny": _DLRM | {"embedding_dim": 16, "max_rows": 100_000, "bottom": [64], "top": [64, 32]},
    "tiny_deepfm": _DEEPFM | {"embedding_dim": 16, "max_rows": 100_000, "top": [64, 32]},
    # 26 tables of 200k rows x 64 are 1.3 GB; of 1M rows x 128, 13 GB.
    "criteo": _DLRM | {"embedding_dim": 64, "max_rows": 200_000, "bottom": [512, 256], "top": [512, 256]},
    "criteo_d128": _DLRM | {"embedding_dim": 128, "max_rows": 1_000_000, "bottom": [512, 256], "top": [512, 256]},
    # The perceptron is that of the DeepFM paper.
    "criteo_deepfm": _DEEPFM | {"embedding_dim": 64, "max_rows": 200_000, "top": [400, 400, 400]},
}


def check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of allowed."""
    if value not in allowed:
        raise ValueError(f"{key}={value}: allowed: {', '.join(allowed)}")


@dataclass
class ModelConfig:
    """The network: a preset, and what differs from it."""

    name: str = "recommender"
    """The model's name; fixed."""
    preset: str = "tiny"
    """Where keys left null take their values from: tiny, tiny_deepfm, criteo, criteo_d128, criteo_deepfm."""
    network: str | None = None
    """dlrm (Naumov et al. 2019, arXiv:1906.00091) or deepfm (Guo et al. 2017, arXiv:1703.04247)."""
    cross: str | None = None
    """How features meet: dot (dlrm: the products of all pairs), fm (deepfm: a factorization machine), or none."""
    embeddings: bool | None = None
    """Whether the model sees the categorical features at all."""
    embedding_dim: int | None = None
    """Width of every table's rows."""
    max_rows: int | None = None
    """Rows of a table at most; where a feature has more ids, these share rows by the hash."""
    hash: str | None = None
    """How a raw id becomes a row: modulo (floor modulo), mix32 or mix64 (its bits are mixed first)."""
    pooling: str | None = None
    """How the rows of a multi-valued feature become one: sum or mean."""
    bottom: list[int] | None = None
    """Widths of the hidden layers from the dense features to a vector of embedding_dim."""
    top: list[int] | None = None
    """Widths of the hidden layers from all features to the logit."""
    table_scale: float | None = None
    """Tables start uniform within +- this / sqrt(embedding_dim), so that products of rows are alike for any width."""
    table_optimizer: str | None = None
    """The tables' rule, of the rows touched: sgd, adagrad, rowwise_adagrad, sparse_adam. Everything else has AdamW."""
    table_learning_rate: float | None = None
    """The tables' learning rate at the schedule's peak; train.learning_rate is that of everything else."""

    def __post_init__(self) -> None:
        check_choice("model.name", self.name, ("recommender",))
        check_choice("model.preset", self.preset, tuple(PRESETS))
        if self.network is not None:
            check_choice("model.network", self.network, tuple(CROSSES))
        values = self.architecture()
        check_choice("model.cross", values["cross"], CROSSES[values["network"]])
        check_choice("model.hash", values["hash"], HASHES)
        check_choice("model.pooling", values["pooling"], POOLINGS)
        check_choice("model.table_optimizer", values["table_optimizer"], TABLE_OPTIMIZERS)
        for key in ("embedding_dim", "max_rows"):
            if values[key] < 1:
                raise ValueError(f"model.{key}={values[key]}: must be at least 1")
        for key in ("bottom", "top"):
            if any(width < 1 for width in values[key]):
                raise ValueError(f"model.{key}={values[key]}: every width must be at least 1")
        for key in ("table_learning_rate", "table_scale"):
            if not 0 <= values[key] < math.inf:
                raise ValueError(f"model.{key}={values[key]}: must be at least 0 and finite")

    def architecture(self) -> dict[str, Any]:
        """Every key with its value: the override where there is one, otherwise the preset's.

        A network other than the preset's has its own cross and scale of the tables unless they are asked for.
        """
        overrides = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "preset")}
        values = PRESETS[self.preset] | {key: value for key, value in overrides.items() if value is not None}
        if values["network"] != PRESETS[self.preset]["network"]:
            own = _DLRM if values["network"] == "dlrm" else _DEEPFM
            values |= {key: own[key] for key in ("cross", "table_scale") if getattr(self, key) is None}
        return values
