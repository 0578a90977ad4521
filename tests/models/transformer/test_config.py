"""Presets, overrides, and what is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from models.transformer.config import PRESETS, ModelConfig, StdlibConfig

ARCHITECTURE = {f.name for f in fields(ModelConfig)} - {"name", "preset"}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_every_key_and_is_valid(preset: str) -> None:
    assert set(ModelConfig(preset=preset).architecture()) == ARCHITECTURE


def test_an_override_replaces_the_value_of_the_preset_and_no_other() -> None:
    changed = ModelConfig(preset="gpt_d512", n_layer=3, dropout=0.0, bias=False).architecture()
    assert changed == PRESETS["gpt_d512"] | {"n_layer": 3, "dropout": 0.0, "bias": False}


def test_query_heads_alone_bring_as_many_key_and_value_heads() -> None:
    assert ModelConfig(preset="tiny_swiglu", n_head=8).architecture()["n_kv_head"] == 8
    assert ModelConfig(preset="tiny_swiglu", n_head=8, n_kv_head=4).architecture()["n_kv_head"] == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"name": "transformr"}, "model.name=transformr: allowed: transformer"),
        ({"preset": "huge"}, r"model.preset=huge: allowed: tiny, .*gpt2"),
        ({"n_layer": 0}, "model.n_layer=0: must be at least 1"),
        ({"context": -5}, "model.context=-5: must be at least 1"),
        ({"d_model": 97}, "model.d_model=97: must be a multiple of n_head=4"),
        ({"n_kv_head": 3}, "model.n_kv_head=3: must divide n_head=4"),
        ({"mlp": "relu"}, "model.mlp=relu: allowed: gelu, gelu_tanh, swiglu"),
        ({"norm": "batchnorm"}, "model.norm=batchnorm: allowed: layernorm, rmsnorm"),
        ({"positions": "alibi"}, "model.positions=alibi: allowed: learned, rotary"),
        (
            {"d_model": 60, "positions": "rotary"},
            "model.d_model=60: rotary positions need an even d_model / n_head, not 15",
        ),
        ({"init_std": 0.0}, "model.init_std=0.0: must be above 0"),
        ({"dropout": 1.0}, "model.dropout=1.0: must be at least 0 and below 1"),
        ({"dropout": -0.1}, "model.dropout=-0.1: must be at least 0 and below 1"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(override: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**override)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 0.51])
def test_a_validation_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"data.validation_fraction={fraction}: must be above 0 and at most 0.5"):
        StdlibConfig(validation_fraction=fraction)


def test_data_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.name=clicks: allowed: stdlib"):
        StdlibConfig(name="clicks")
