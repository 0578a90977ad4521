"""The recommender's configuration: presets, overrides, and what is refused, by key."""

from __future__ import annotations

import re
from typing import Any

import pytest

from models.recommender import PRESETS, ModelConfig


def test_every_preset_holds_and_has_every_key() -> None:
    keys = set(PRESETS["tiny"])
    for name in PRESETS:
        assert set(ModelConfig(preset=name).architecture()) == keys


def test_an_override_departs_from_the_preset_and_null_keeps_it() -> None:
    a = ModelConfig(embedding_dim=7, top=[], embeddings=False).architecture()
    assert (a["embedding_dim"], a["top"], a["embeddings"]) == (7, [], False)
    assert a["bottom"] == PRESETS["tiny"]["bottom"]


def test_another_network_brings_its_own_cross() -> None:
    a = ModelConfig(network="deepfm").architecture()
    assert (a["cross"], a["table_scale"]) == ("fm", PRESETS["tiny_deepfm"]["table_scale"])
    assert ModelConfig(network="deepfm", table_scale=3.0).architecture()["table_scale"] == 3.0
    assert ModelConfig(network="deepfm", cross="none").architecture()["cross"] == "none"
    assert ModelConfig(network="dlrm", cross="none").architecture()["cross"] == "none"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"preset": "tinny"}, "model.preset=tinny: allowed: tiny, tiny_deepfm"),
        ({"name": "pinn"}, "model.name=pinn: allowed: recommender"),
        ({"network": "dcn"}, "model.network=dcn: allowed: dlrm, deepfm"),
        ({"cross": "fm"}, "model.cross=fm: allowed: dot, none"),
        ({"preset": "tiny_deepfm", "cross": "dot"}, "model.cross=dot: allowed: fm, none"),
        ({"hash": "none"}, "model.hash=none: allowed: modulo, mix32, mix64"),
        ({"pooling": "max"}, "model.pooling=max: allowed: sum, mean"),
        ({"table_optimizer": "adam"}, "model.table_optimizer=adam: allowed: sgd, adagrad, rowwise_"),
        ({"embedding_dim": 0}, "model.embedding_dim=0: must be at least 1"),
        ({"max_rows": 0}, "model.max_rows=0: must be at least 1"),
        ({"top": [64, 0]}, "model.top=[64, 0]: every width must be at least 1"),
        ({"table_learning_rate": -0.1}, "model.table_learning_rate=-0.1: must be at least 0"),
        ({"table_scale": float("inf")}, "model.table_scale=inf: must be at least 0 and finite"),
        ({"table_learning_rate": float("nan")}, "model.table_learning_rate=nan: must be at least 0"),
    ],
)
def test_what_does_not_exist_or_is_out_of_range_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig(**keys)
