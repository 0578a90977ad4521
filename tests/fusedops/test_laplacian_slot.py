"""The laplacian slot: its implementations agree, transforms and time included, and refuse what they cannot do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fusedops.operators.smooth_activations import ACTIVATIONS
from fusedops.slots import SLOTS, laplacian
from fusedops.slots.laplacian import Grid, Jet, Points, Transform

SLOT = SLOTS["laplacian"]
EXACT = ("forward_native", "forward")
DIFFERENCES = ("stencil_native", "stencil")
CPU = torch.device("cpu")

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
exact = pytest.mark.parametrize("name", EXACT)
differences = pytest.mark.parametrize("name", DIFFERENCES)


class Perceptron(nn.Module):
    """What the slot asks of a network, in float64."""

    def __init__(self, inputs: int, spatial: int, activation: str = "tanh", transform: Transform | None = None) -> None:
        super().__init__()
        sizes = (inputs, 13, 7, 9, 1)
        self.layers = nn.ModuleList(nn.Linear(m, n, dtype=torch.float64) for m, n in pairwise(sizes))
        self.activation, self.spatial, self.transform = activation, spatial, transform

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers[:-1]:
            h = ACTIVATIONS[self.activation](layer(h))
        output = self.layers[-1](h).squeeze(-1)
        return output if self.transform is None else self.transform(x, output)


class Polynomial(Perceptron):
    """u = x^2 + 2 y^2 + 3 z^2 (+ 5 t), which no perceptron is: for differences, which ask for values alone."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)
        return (x[:, :3].square() @ weights) + 5.0 * x[:, 3:].sum(1)


def boundary(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values on the boundary, and a factor that is zero there and at t = 0."""
    return x[:, 0] * x[:, -1], (x[:, :3] * (1.0 - x[:, :3])).prod(1) * x[:, 3:].prod(1)


class InClosedForm(Transform):
    """The same function, its derivatives given."""

    def jets(self, x: Tensor, spatial: int) -> tuple[Jet, Jet]:
        self.used = True
        return super().jets(x, spatial)


def call(name: str) -> Callable[[nn.Module, Points], Jet]:
    return SLOT.implementation(name).function


def loss(jet: Jet) -> Tensor:
    """The residual of a heat equation with a reaction."""
    u, du, lap = jet
    return (du[:, -1] - lap + u.sin()).square().mean()


def error(ours: Tensor, expected: Tensor) -> float:
    return float(((ours - expected).norm() / expected.norm()).detach())


def assert_equal_to(network: nn.Module, points: Points, name: str, other: str, allowed: float) -> None:
    jets = call(name)(network, points), call(other)(network, points)
    for what, ours, expected in zip(Jet._fields, *jets, strict=True):
        assert ours.shape == expected.shape
        assert error(ours, expected) < allowed, what
    ours, expected = (torch.autograd.grad(loss(jet), list(network.parameters())) for jet in jets)
    assert error(*(torch.cat([g.reshape(-1) for g in gs]) for gs in (ours, expected))) < allowed


# ---------------------------------------------------------------------------------------------------------------------
# The exact ones


@activations
@exact
@pytest.mark.parametrize(("inputs", "spatial"), [(3, 3), (4, 3), (1, 1), (5, 3)])
def test_equals_nested_autograd(activation: str, name: str, inputs: int, spatial: int) -> None:
    network = Perceptron(inputs, spatial, activation)
    assert_equal_to(network, Points(torch.rand(31, inputs, dtype=torch.float64)), name, "native", 1e-12)


@exact
@pytest.mark.parametrize("inputs", [3, 4])
def test_output_transforms_are_included(name: str, inputs: int) -> None:
    transform = InClosedForm(boundary)
    network = Perceptron(inputs, 3, "sin", transform)
    assert_equal_to(network, Points(torch.rand(31, inputs, dtype=torch.float64)), name, "native", 1e-12)
    assert transform.used


@pytest.mark.parametrize("name", ["native", *EXACT])
def test_points_may_be_differentiated(name: str) -> None:
    """The residual's derivative with respect to the points, as adaptive sampling asks for."""
    network = Perceptron(4, 3, "silu", Transform(boundary))
    x = torch.rand(7, 4, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(loss(call(name)(network, Points(x))), x)
    h = 1e-5
    for i in range(4):
        step = h * torch.eye(4, dtype=torch.float64)[i]
        ahead, behind = (loss(call(name)(network, Points(x.detach() + s))) for s in (step, -step))
        torch.testing.assert_close(ours[:, i].sum(), ((ahead - behind) / (2 * h)).detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", SLOT.implementations)
def test_nothing_is_recorded_without_gradients(name: str) -> None:
    network = Perceptron(3, 3, "tanh", Transform(boundary))
    grid = Grid((4, 5, 6), (0.1,) * 3, (0.0,) * 3)
    points = Points(grid.nodes(3, CPU, torch.float64), grid)
    with torch.no_grad():
        jet = call(name)(network, points)
    assert not any(part.requires_grad for part in jet)
    for ours, expected in zip(jet, call(name)(network, points), strict=True):
        torch.testing.assert_close(ours, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Differences


def test_nodes_are_row_major_and_time_is_the_last_column() -> None:
    grid = Grid((2, 3, 4, 5), (0.5, 0.1, 0.2, 0.3), (10.0, 0.0, 1.0, 2.0))
    x = grid.nodes(3, CPU, torch.float64)
    torch.testing.assert_close(x[0], torch.tensor([0.0, 1.0, 2.0, 10.0], dtype=torch.float64))
    torch.testing.assert_close(x[1], torch.tensor([0.0, 1.0, 2.3, 10.0], dtype=torch.float64))
    torch.testing.assert_close(x[-1], torch.tensor([0.2, 1.6, 3.2, 10.5], dtype=torch.float64))
    around = grid.nodes(3, CPU, torch.float64, halo=1).view(4, 5, 6, 7, 4)
    torch.testing.assert_close(around[1:-1, 1:-1, 1:-1, 1:-1].reshape(-1, 4), x)


@differences
@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("time", [False, True])
def test_a_polynomial_has_no_error(name: str, order: int, time: bool) -> None:
    """A different spacing on each axis; one node along an axis is enough, since the halo is evaluated too."""
    shape, spacing, origin = (3, 1, 4), (0.1, 0.2, 0.3), (-0.3, 0.1, 0.7)
    grid = Grid((2, *shape), (0.25, *spacing), (1.0, *origin), order) if time else Grid(shape, spacing, origin, order)
    x = grid.nodes(3, CPU, torch.float64)
    network = Polynomial(3 + time, 3)
    u, du, lap = call(name)(network, Points(x, grid))
    torch.testing.assert_close(u, network(x))
    torch.testing.assert_close(lap, torch.full_like(lap, 12.0), rtol=1e-11, atol=0)
    expected = torch.cat([x[:, :3] * torch.tensor([2.0, 4.0, 6.0]).double(), torch.full_like(x[:, 3:], 5.0)], dim=1)
    torch.testing.assert_close(du, expected, rtol=1e-11, atol=1e-11)


@differences
@pytest.mark.parametrize("order", [2, 4])
def test_errors_fall_with_the_order(name: str, order: int) -> None:
    network = Perceptron(4, 3, "sin", Transform(boundary))
    errors = []
    for h in (0.2, 0.1):
        grid = Grid((2, 2, 2, 2), (h,) * 4, (0.3, 0.2, 0.1, 0.4), order)
        points = Points(grid.nodes(3, CPU, torch.float64), grid)
        first, exact = call(name)(network, points), call("native")(network, points)
        errors.append([float((a - b).detach()[0].abs().max()) for a, b in zip(first[1:], exact[1:], strict=True)])
    for coarse, fine in zip(*errors, strict=True):
        assert 0.6 * 2**order < coarse / fine < 1.7 * 2**order


def test_the_operator_computes_what_the_slices_do() -> None:
    grid = Grid((3, 5, 4, 6), (0.3, 0.1, 0.2, 0.15), (0.0,) * 4, order=4)
    network = Perceptron(4, 3, "gelu", Transform(boundary))
    points = Points(grid.nodes(3, CPU, torch.float64), grid)
    u, _, laplacian = call("stencil_native")(network, points)
    # Both round sums of terms up to 4/3 of 2 |u| / h^2 an axis, and the Laplacian of a random network may be small.
    terms = u.norm() * sum(8 / 3 / h**2 for h in grid.spacing[1:])
    allowed = 8 * torch.finfo(torch.float64).eps * float((terms / laplacian.norm()).detach())
    assert_equal_to(network, points, "stencil", "stencil_native", max(allowed, 1e-12))


@differences
def test_training_goes_on_after_inference(name: str) -> None:
    grid = Grid((3, 4, 5), (0.1, 0.2, 0.3), (0.0, 0.5, 1.0))
    network, points = Perceptron(3, 3), Points(grid.nodes(3, CPU, torch.float64), grid)
    with torch.inference_mode():
        call(name)(network, points)
    call(name)(network, points).laplacian.sum().backward()
    assert network.layers[0].weight.grad is not None


@differences
@torch.no_grad()  # a graph would keep the nodes
def test_points_may_be_another_grids_next(name: str) -> None:
    """The nodes around points are remembered: not beyond the grid that they were given with, nor beyond the points."""
    network = Perceptron(3, 3)
    grid = Grid((3, 4, 5), (0.1, 0.2, 0.3), (0.0, 0.5, 1.0))
    x = grid.nodes(3, CPU, torch.float64)
    first = call(name)(network, Points(x, grid))
    other = Grid((3, 4, 5), (0.1, 0.2, 0.3), (0.0, 0.5, 1.0), order=4)
    assert not torch.equal(call(name)(network, Points(x, other)).laplacian, first.laplacian)
    for part, expected in zip(call(name)(network, Points(x, grid)), first, strict=True):
        assert torch.equal(part, expected)
    assert not torch.equal(laplacian._nodes_around(grid, 2, x), laplacian._nodes_around(grid, 3, x))
    of_points = weakref.ref(laplacian._around[x][1])
    del x
    assert of_points() is None


@pytest.mark.parametrize("spatial", [1, 2])
def test_slices_take_any_number_of_axes(spatial: int) -> None:
    grid = Grid((7,) * spatial, (1e-3,) * spatial, (0.2,) * spatial, order=4)
    network = Perceptron(spatial, spatial)
    points = Points(grid.nodes(spatial, CPU, torch.float64), grid)
    assert error(call("stencil_native")(network, points).laplacian, call("native")(network, points).laplacian) < 1e-6
    with pytest.raises(
        ValueError, match=rf"laplacian=stencil: the network has {spatial} spatial coordinates; allowed: 3"
    ):
        call("stencil")(network, points)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@differences
def test_scattered_points_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"laplacian={name}: points.grid is None, the points are scattered"):
        call(name)(Perceptron(3, 3), Points(torch.rand(8, 3, dtype=torch.float64)))


@differences
def test_points_that_are_not_the_grids_are_refused(name: str) -> None:
    grid = Grid((2, 3, 4), (0.1,) * 3, (0.0,) * 3)
    with pytest.raises(ValueError, match=r"points.grid has shape \(2, 3, 4\), points.x \(23, 3\)"):
        call(name)(Perceptron(3, 3), Points(torch.rand(23, 3, dtype=torch.float64), grid))
    x = grid.nodes(3, CPU, torch.float64).requires_grad_()
    with pytest.raises(ValueError, match=r"points.x requires a gradient"):
        call(name)(Perceptron(3, 3), Points(x, grid))


@pytest.mark.parametrize("name", SLOT.implementations)
def test_a_network_the_slot_is_not_made_for_is_refused(name: str) -> None:
    grid = Grid((2, 3, 4), (0.1,) * 3, (0.0,) * 3)
    points = Points(grid.nodes(3, CPU, torch.float64), grid)
    with pytest.raises(ValueError, match="activation is 'relu', whose second derivative is zero; allowed: 'tanh'"):
        call(name)(Perceptron(3, 3, "relu"), points)
    with pytest.raises(ValueError, match=r"points.x has shape \(24, 3\); allowed: \(N, 4\)"):
        call(name)(Perceptron(4, 3), points)
    with pytest.raises(ValueError, match=r"network.spatial is 0; allowed: 1 to 3"):
        call(name)(Perceptron(3, 0), points)


def test_a_network_that_hides_its_points_is_refused_by_nested_autograd() -> None:
    """Whose derivatives would be 0 without a word."""

    class Hidden(Perceptron):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    with pytest.raises(ValueError, match="laplacian=native: the network's output has no gradient"):
        call("native")(Hidden(3, 3), Points(torch.rand(5, 3, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 3), (0.1,), (0.0, 0.0)), "must have an entry an axis"),
        (((2, 3), (0.1, 0.1), (0.0, 0.0), 3), "order is 3; allowed: 2, 4"),
        (((2, 0), (0.1, 0.1), (0.0, 0.0)), r"shape is \(2, 0\)"),
        (((2, 3), (0.1, 0.0), (0.0, 0.0)), r"spacing is \(0.1, 0.0\)"),
    ],
)
def test_a_grid_that_is_none_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(*arguments)


# ---------------------------------------------------------------------------------------------------------------------
# The alias


def test_fused_is_an_alias_and_tables_show_what_it_stands_for() -> None:
    assert SLOT.implementation("fused") is SLOT.implementation("forward")
    assert SLOT.implementation("fused").name == "forward"
