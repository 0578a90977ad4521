"""The network: its values, its first weights, the boundary conditions it cannot miss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusedops.operators.smooth_activations import ACTIVATIONS
from fusedops.slots.laplacian import Points, Transform, autograd_jet, laplacian_native
from models.pinn import data, problems
from models.pinn.model import PINN, HardBoundary, PINNOps

NAMES = ("allen_cahn", "heat", "helmholtz", "poisson", "screened_poisson")


def network(name: str = "poisson", activation: str = "tanh", hard: bool = True) -> PINN:
    return PINN(problems.load(name), 7, 2, activation, hard, PINNOps(laplacian_native)).double()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hard", [True, False])
def test_values_are_those_of_the_formula(activation: str, hard: bool) -> None:
    model, problem = network("heat", activation, hard), problems.load("heat")
    x = torch.rand(11, 4, dtype=torch.float64)
    function = {"tanh": torch.tanh, "sin": torch.sin, "silu": F.silu, "gelu": F.gelu}[activation]
    w = [layer.weight for layer in model.layers]
    b = [layer.bias for layer in model.layers]
    output = (function(function(x @ w[0].T + b[0]) @ w[1].T + b[1]) @ w[2].T + b[2])[:, 0]
    expected = problem.offset(x) + problem.factor(x) * output if hard else output
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_hard_boundary_conditions_hold_for_any_weights(name: str) -> None:
    model, problem = network(name), problems.load(name)
    x = data.boundary(problem, 70, seed=3, step=0)
    torch.testing.assert_close(model(x), problem.exact(x), rtol=0, atol=1e-13)
    assert (model(data.interior(problem, "uniform", 50, 1, 0)) - network(name, hard=False)(x[:50])).abs().max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_transforms_derivatives_are_those_of_autograd(name: str) -> None:
    problem = problems.load(name)
    x = data.interior(problem, "uniform", 90, seed=8, step=0)
    hard = HardBoundary(problem)
    for ours, expected in zip(hard.jets(x, problem.spatial), Transform.jets(hard, x, problem.spatial), strict=True):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_first_layer_sees_every_coordinate_from_minus_one_to_one() -> None:
    class Wide(type(problems.load("poisson"))):  # type: ignore[misc]
        lower, upper = (-3.0, 0.0, 5.0), (1.0, 10.0, 7.0)

    torch.manual_seed(1)
    model = PINN(Wide(), 7, 2, "tanh", False, PINNOps(laplacian_native)).double()
    torch.manual_seed(1)
    expected = PINN(problems.load("poisson"), 7, 2, "tanh", False, PINNOps(laplacian_native)).double()
    unit = torch.rand(9, 3, dtype=torch.float64)
    low, high = torch.tensor(Wide.lower, dtype=torch.float64), torch.tensor(Wide.upper, dtype=torch.float64)
    torch.testing.assert_close(model(low + unit * (high - low)), expected(unit), rtol=1e-5, atol=1e-6)
    assert expected.layers[0](torch.full((1, 3), 0.5, dtype=torch.float64)).abs().max() < 1e-6


def test_the_jet_is_the_slots() -> None:
    model = network("heat")
    x = data.interior(problems.load("heat"), "sobol", 20, seed=1, step=0)
    for ours, expected in zip(model.jet(Points(x)), autograd_jet(model, x, 3, True), strict=True):
        assert torch.equal(ours, expected)
