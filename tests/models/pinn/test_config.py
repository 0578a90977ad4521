"""Configuration of the PINN: presets, ranges, activations that have a second derivative."""

from __future__ import annotations

from typing import Any

import pytest

from fusedops.operators.smooth_activations import WITHOUT_CURVATURE
from models.pinn import DATA, PRESETS, PROBLEMS, ModelConfig, ProblemConfig


def test_the_package_exports_what_the_engine_looks_up() -> None:
    assert {"tiny", "small", "wide"} <= set(PRESETS)
    assert {"poisson", "helmholtz", "screened_poisson", "allen_cahn", "heat"} <= set(PROBLEMS)
    assert DATA == {} and set(PROBLEMS.values()) == {ProblemConfig}


def test_keys_that_are_given_depart_from_the_preset() -> None:
    assert ModelConfig().architecture() == PRESETS["tiny"]
    given = ModelConfig(preset="wide", depth=5, activation="sin", lbfgs_float64=False).architecture()
    assert given == PRESETS["wide"] | {"depth": 5, "activation": "sin", "lbfgs_float64": False}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"preset": "huge"}, "model.preset=huge: allowed: tiny, small, wide"),
        ({"width": 0}, "model.width=0: must be at least 1"),
        ({"depth": 0}, "model.depth=0: must be at least 1"),
        ({"dtype": "float16"}, "model.dtype=float16: allowed: float32, float64"),
        ({"lbfgs_steps": -1}, "model.lbfgs_steps=-1: must be at least 0"),
        ({"activation": "softplux"}, "model.activation=softplux: allowed: tanh, sin, silu, gelu"),
    ],
)
def test_other_values_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**keys)


@pytest.mark.parametrize("activation", WITHOUT_CURVATURE)
def test_an_activation_without_a_second_derivative_is_refused_by_name(activation: str) -> None:
    with pytest.raises(ValueError, match=f"model.activation={activation}: its second derivative is zero"):
        ModelConfig(activation=activation)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "poison"}, "problem=poison: allowed: allen_cahn, heat"),
        ({"sampling": "halton"}, "problem.sampling=halton: allowed: sobol, uniform, grid"),
        ({"sampling": "grid", "resample": True}, "problem.resample=true: the nodes of problem.sampling=grid stay"),
        ({"order": 3}, "problem.order=3: allowed: 2, 4"),
        ({"boundary": "none"}, "problem.boundary=none: allowed: hard, soft"),
        ({"boundary_weight": -1.0}, "problem.boundary_weight=-1.0: must be at least 0"),
        ({"boundary_points": -1}, "problem.boundary_points=-1: must be at least 0"),
        ({"validation_points": 2}, "problem.validation_points=2: must be at least 3"),
        ({"target": -0.1}, "problem.target=-0.1: must be at least 0"),
        ({"target": float("nan")}, "problem.target=nan: must be at least 0"),
    ],
)
def test_other_values_of_the_problem_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProblemConfig(**keys)
