from __future__ import annotations

import pytest

from engine.arms import arms_of, operator_set
from engine.config import OpsConfig
from engine.errors import ConfigError
from fusedops.slots import SLOTS

GPT = ("attention", "mlp")


def test_a_set_fills_every_slot():
    arm = operator_set("fused", GPT)
    assert arm.name == "fused"
    assert arm.functions == {slot: SLOTS[slot].implementations["fused"].function for slot in GPT}


def test_the_name_tells_what_departs_from_the_set():
    arm = operator_set("fused", GPT, {"attention": "native", "mlp": None})
    assert arm.name == "fused,attention=native"
    assert [i.name for i in arm.implementations] == ["native", "fused"]
    assert operator_set("fused", GPT, {"attention": "fused"}).name == "fused"


def test_the_baseline_comes_first():
    arms, baseline = arms_of(OpsConfig(set="fused"), "native", GPT)
    assert [arm.name for arm in arms] == ["native", "fused"] and baseline == "native"
    arms, baseline = arms_of(OpsConfig(set="fused"), "none", GPT)
    assert [arm.name for arm in arms] == ["fused"] and baseline is None


@pytest.mark.parametrize("ops", [OpsConfig(set="native"), OpsConfig(set="fused", attention="native", mlp="native")])
def test_what_equals_the_baseline_is_not_trained_twice(ops):
    arms, baseline = arms_of(ops, "native", GPT)
    assert [arm.name for arm in arms] == ["native"] and baseline == "native"


def test_an_alias_is_shown_as_what_it_stands_for():
    arm = operator_set("fused", ("laplacian",))
    assert [i.name for i in arm.implementations] == ["forward"]
    arms, _ = arms_of(OpsConfig(set="native", laplacian="fused"), "none", ("laplacian",))
    assert arms[0].implementations == arm.implementations


@pytest.mark.parametrize(
    ("ops", "named"),
    [
        (OpsConfig(set="fuzed"), ("ops=fuzed", "did you mean fused", "native")),
        (OpsConfig(set="fused", attention="flesh"), ("ops.attention=flesh", "native", "fused", "unfused")),
        (OpsConfig(set="fused", activation="native"), ("ops.activation=native", "attention, mlp")),
    ],
)
def test_what_does_not_exist_is_refused_naming_what_does(ops, named):
    with pytest.raises(ConfigError) as error:
        arms_of(ops, "native", GPT)
    assert all(text in str(error.value) for text in named)
