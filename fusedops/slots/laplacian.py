"""Slot laplacian: (network, points) -> (u, du, lap), of a network of points, an output transform included."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops.operators.forward_laplacian import Jet, forward_laplacian, forward_laplacian_stock
from fusedops.operators.laplacian3d import laplacian3d
from fusedops.operators.smooth_activations import check_activation

# ---------------------------------------------------------------------------------------------------------------------
# What the slot's functions take and return


@dataclass(frozen=True)
class Grid:
    """A regular grid of points, and the order of the differences to be taken on it.

    shape, spacing, origin: nodes, distance between two of them and coordinate of the first, an entry an axis. The axes
    are the columns of the points that take no part in the Laplacian (time), if any, then the spatial ones: (T, X, Y, Z)
    for points (x, y, z, t). order: 2 or 4. Raises ValueError for another order and lengths that differ.
    """

    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    origin: tuple[float, ...]
    order: int = 2

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.spacing) == len(self.origin):
            raise ValueError(
                f"grid: shape {self.shape}, spacing {self.spacing} and origin {self.origin} must have an entry an axis"
            )
        if self.order not in (2, 4):
            raise ValueError(f"grid: order is {self.order}; allowed: 2, 4")
        if any(n < 1 for n in self.shape):
            raise ValueError(f"grid: shape is {self.shape}; every axis needs a node")
        if not all(0 < h < math.inf for h in self.spacing):
            raise ValueError(f"grid: spacing is {self.spacing}; allowed: positive finite numbers")

    def nodes(self, spatial: int, device: torch.device, dtype: torch.dtype, halo: int = 0) -> Tensor:
        """The nodes in row-major order, [N, D], their columns the `spatial` axes, then the others.

        halo: so many further nodes are added at both ends of every axis.
        """
        ends = [n + halo for n in self.shape]
        axes = [
            torch.arange(-halo, end, device=device, dtype=dtype) * h + start
            for end, h, start in zip(ends, self.spacing, self.origin, strict=True)
        ]
        columns = [column.reshape(-1) for column in torch.meshgrid(*axes, indexing="ij")]
        others = len(columns) - spatial
        return torch.stack(columns[others:] + columns[:others], dim=1)


@dataclass(frozen=True)
class Points:
    """Points x, [N, D]: the spatial coordinates, then those that take no part in the Laplacian (time).

    grid: where x are the nodes of one, in row-major order (`Grid.nodes`); None for scattered points.
    """

    x: Tensor
    grid: Grid | None = None


class Transform:
    """An output transform u(x) = a(x) + b(x) N(x) of a network N, which imposes boundary conditions exactly.

    function: x [N, D] -> (a, b), both [N], twice differentiable and without parameters. A subclass that knows the
    derivatives in closed form overrides `jets`.
    """

    def __init__(self, function: Callable[[Tensor], tuple[Tensor, Tensor]]):
        self.function = function

    def __call__(self, x: Tensor, output: Tensor) -> Tensor:
        """u at x [N, D], where the network's output is N(x), [N]."""
        a, b = self.function(x)
        return a + b * output

    def jets(self, x: Tensor, spatial: int) -> tuple[Jet, Jet]:
        """a and b at x with their derivatives; here by nested autograd."""
        keep_graph = torch.is_grad_enabled() and x.requires_grad
        a = autograd_jet(lambda x: self.function(x)[0], x, spatial, keep_graph)
        return a, autograd_jet(lambda x: self.function(x)[1], x, spatial, keep_graph)


class Network(Protocol):
    """A multilayer perceptron as the slot sees it: an nn.Module that has these."""

    layers: nn.ModuleList
    """nn.Linear, two at least, the last one with one output; `activation` is applied between them."""
    activation: str
    """One of `fusedops.operators.smooth_activations.ACTIVATIONS`, which has a stock function for each."""
    spatial: int
    """How many of the inputs, the first ones, take part in the Laplacian."""
    transform: Transform | None
    """What makes u of the last layer's output; None: u is that output."""

    def __call__(self, x: Tensor) -> Tensor:
        """u at x [N, D], as [N]: the layers, the activation between them, the transform."""


# ---------------------------------------------------------------------------------------------------------------------
# Implementations


def autograd_jet(function: Callable[[Tensor], Tensor], x: Tensor, spatial: int, keep_graph: bool) -> Jet:
    """A function of x [N, D], [N], with its derivatives by nested autograd: a backward pass a spatial coordinate.

    Those of a function that autograd sees no x in, as of a constant, are 0.

    keep_graph: whether the results are to be differentiated further; they are detached where not.
    """
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        value = function(x)
        if not value.requires_grad:
            return Jet(value, torch.zeros_like(x), torch.zeros_like(value))
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True, materialize_grads=True)
        laplacian = torch.zeros_like(value)
        if gradient.requires_grad:  # it does not where the function is linear
            for i in range(spatial):
                (second,) = torch.autograd.grad(
                    gradient[:, i].sum(), x, create_graph=keep_graph, retain_graph=True, materialize_grads=True
                )
                laplacian = laplacian + second[:, i]
    jet = Jet(value, gradient, laplacian)
    return jet if keep_graph else Jet(*(part.detach() for part in jet))


def laplacian_native(network: Network, points: Points) -> Jet:
    """Nested torch.autograd.grad. Raises ValueError for a network whose forward hides its points from autograd."""
    check_case("laplacian", network, points)

    def value(x: Tensor) -> Tensor:
        u = network(x)
        if not u.requires_grad:
            raise ValueError(
                "laplacian=native: the network's output has no gradient; its forward detaches or no_grad's it"
            )
        return u

    return autograd_jet(value, points.x, network.spatial, torch.is_grad_enabled())


def laplacian_forward(network: Network, points: Points) -> Jet:
    """The forward Laplacian on operators of this library."""
    return _forward(forward_laplacian, network, points)


def laplacian_forward_native(network: Network, points: Points) -> Jet:
    """The forward Laplacian in stock PyTorch."""
    return _forward(forward_laplacian_stock, network, points)


def _forward(sweep: Callable[..., Jet], network: Network, points: Points) -> Jet:
    check_case("laplacian", network, points)
    weights = [layer.weight for layer in network.layers]
    biases = [layer.bias for layer in network.layers]
    output = sweep(points.x, weights, biases, network.activation, network.spatial)
    if network.transform is None:
        return output
    a, b = network.transform.jets(points.x, network.spatial)
    return _transformed(a, b, output, network.spatial)


def _transformed(a: Jet, b: Jet, output: Jet, spatial: int) -> Jet:
    """a + b N by the product rule."""
    across = (b.gradient[:, :spatial] * output.gradient[:, :spatial]).sum(1)
    return Jet(
        a.value + b.value * output.value,
        a.gradient + b.gradient * output.value[:, None] + b.value[:, None] * output.gradient,
        a.laplacian + b.laplacian * output.value + 2.0 * across + b.value * output.laplacian,
    )


def laplacian_stencil(network: Network, points: Points) -> Jet:
    """Differences on the points' grid: the network at the nodes and a halo around them, then `fusedops.laplacian3d`.

    Three spatial axes. Raises ValueError for scattered points, and for points that are to be differentiated.
    """
    grid = _grid("laplacian=stencil", network, points)
    if network.spatial != 3:
        raise ValueError(f"laplacian=stencil: the network has {network.spatial} spatial coordinates; allowed: 3")
    return _differences(network, grid, points.x, lambda u, spacing: laplacian3d(u, spacing, "valid", grid.order))


def laplacian_stencil_native(network: Network, points: Points) -> Jet:
    """The same by slices in stock PyTorch, of any number of spatial axes."""
    grid = _grid("laplacian=stencil_native", network, points)

    def laplacian(u: Tensor, spacing: tuple[float, ...]) -> Tensor:
        first = u.dim() - len(spacing)
        terms = [_second_difference(u, first, first + k, h, grid.order) for k, h in enumerate(spacing)]
        return sum(terms[1:], start=terms[0])

    return _differences(network, grid, points.x, laplacian)


# Central differences (Fornberg 1988): the weights of the nodes at distances 0, 1, 2, of the nodes behind with the sign
# changed where the derivative is the first.
_FIRST = {2: (0.0, 1 / 2), 4: (0.0, 2 / 3, -1 / 12)}
_SECOND = {2: (-2.0, 1.0), 4: (-5 / 2, 4 / 3, -1 / 12)}


def _shifted(u: Tensor, first_axis: int, axis: int, shift: int, halo: int) -> Tensor:
    """u without its halo along the axes from `first_axis` on, moved by `shift` nodes along `axis`."""
    index: list[slice] = [slice(None)] * u.dim()
    for k in range(first_axis, u.dim()):
        start = halo + (shift if k == axis else 0)
        index[k] = slice(start, start + u.shape[k] - 2 * halo)
    return u[tuple(index)]


def _first_difference(u: Tensor, axis: int, h: float, order: int) -> Tensor:
    terms = [
        (_shifted(u, 0, axis, k, order // 2) - _shifted(u, 0, axis, -k, order // 2)) * (weight / h)
        for k, weight in enumerate(_FIRST[order])
        if k
    ]
    return sum(terms[1:], start=terms[0])


def _second_difference(u: Tensor, first_axis: int, axis: int, h: float, order: int) -> Tensor:
    halo, weights = order // 2, _SECOND[order]
    total = _shifted(u, first_axis, axis, 0, halo) * weights[0]
    for k, weight in enumerate(weights[1:], start=1):
        total = total + weight * (_shifted(u, first_axis, axis, k, halo) + _shifted(u, first_axis, axis, -k, halo))
    return total / h**2


_around: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The nodes of points' grids with their halo, beside what they follow from: training takes the same ones every step."""


def _nodes_around(grid: Grid, spatial: int, x: Tensor) -> Tensor:
    """The nodes x of a grid and the halo around them, remembered as long as x lives."""
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return grid.nodes(spatial, x.device, x.dtype, grid.order // 2)
    known, origin = _around.get(x), (grid, spatial, x.device, x.dtype)
    if known is None or known[0] != origin:
        with torch.inference_mode(False):  # a later step may need a gradient
            known = _around[x] = origin, grid.nodes(spatial, x.device, x.dtype, grid.order // 2)
    return known[1]


def _differences(
    network: Network, grid: Grid, x: Tensor, laplacian: Callable[[Tensor, tuple[float, ...]], Tensor]
) -> Jet:
    """laplacian: (u [others..., spatial..., a halo around the latter], spacing) -> the Laplacian without the halo."""
    halo, others = grid.order // 2, len(grid.shape) - network.spatial
    u = network(_nodes_around(grid, network.spatial, x)).view([n + 2 * halo for n in grid.shape])
    gradient = [_first_difference(u, axis, h, grid.order) for axis, h in enumerate(grid.spacing)]
    inside = u[tuple(slice(halo, n + halo) for n in grid.shape[:others])]
    return Jet(
        _shifted(u, 0, 0, 0, halo).reshape(-1),
        torch.stack([part.reshape(-1) for part in gradient[others:] + gradient[:others]], dim=1),
        laplacian(inside, grid.spacing[others:]).reshape(-1),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def check_case(where: str, network: Network, points: Points) -> None:
    """Raise ValueError, beginning with `where`, for a network or points that the slot is not made for."""
    check_activation(where, network.activation)
    x, layers = points.x, network.layers
    if len(layers) < 2 or layers[-1].out_features != 1:
        raise ValueError(
            f"{where}: the network has {len(layers)} layers, the last one of {layers[-1].out_features} outputs; "
            "allowed: two layers or more, the last one of one output"
        )
    if x.dim() != 2 or x.shape[1] != layers[0].in_features:
        raise ValueError(
            f"{where}: points.x has shape {tuple(x.shape)}; allowed: (N, {layers[0].in_features}), the network's inputs"
        )
    if not 1 <= network.spatial <= x.shape[1]:
        raise ValueError(f"{where}: network.spatial is {network.spatial}; allowed: 1 to {x.shape[1]}, its inputs")


def _grid(where: str, network: Network, points: Points) -> Grid:
    """The points' grid. Raises ValueError where there is none, or one that does not go with points or network."""
    check_case(where, network, points)
    grid, x = points.grid, points.x
    if grid is None:
        raise ValueError(
            f"{where}: points.grid is None, the points are scattered; differences need the nodes of a grid"
        )
    if len(grid.shape) != x.shape[1] or math.prod(grid.shape) != x.shape[0]:
        raise ValueError(
            f"{where}: points.grid has shape {grid.shape}, points.x {tuple(x.shape)}; x must be the grid's nodes"
        )
    if x.requires_grad:
        raise ValueError(f"{where}: points.x requires a gradient; differences are taken at fixed nodes and give none")
    return grid
