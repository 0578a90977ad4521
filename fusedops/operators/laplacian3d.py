"""laplacian3d(u): the Laplacian on a regular grid by central differences (Fornberg 1988), and its adjoint.

It is linear, so all its derivatives are itself and its adjoint, each of which has the other one as its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.operators.pointwise import check_floating, check_number, computing
from fusedops.registration import Cost, Kernel, Operator, Sample, register

BOUNDARIES = ("dirichlet", "neumann", "periodic", "valid")
ORDERS = {2: BOUNDARIES, 4: ("periodic", "valid")}
"""The boundaries of each order."""
AXES = (-3, -2, -1)


def laplacian3d(u: Tensor, spacing: float | Sequence[float], boundary: str = "dirichlet", order: int = 2) -> Tensor:
    """u_xx + u_yy + u_zz by central differences, of values at the nodes of a regular grid.

    u: [..., X, Y, Z], any strides; float16, bfloat16, float32 or float64, with sums at least in fp32.
    spacing: distance of neighbouring nodes, one number or one for each of X, Y, Z.
    order: 2, or 4 with the boundaries that allow it. Returns a contiguous tensor of u's dtype and shape, except for
    boundary "valid". What lies outside the grid:

        dirichlet  0 at one spacing before the first node and behind the last. Order 2.
        neumann    first and last node lie on the boundary, u is mirrored there. Order 2, in the row on the boundary 1
                   where the normal derivative is not 0; along an axis of one node nothing varies. Order 2 only.
        periodic   the first node follows the last. Order 2 or 4.
        valid      nothing: the result is where the stencil fits, `order` nodes less along each axis. Order 2 or 4.

    Differentiable to any order, in forward mode too.
    Raises TypeError for another dtype, and for a spacing other than numbers, tensors included; ValueError for less than
    three dimensions, a spacing that is not positive and finite or whose inverse square is too large for the arithmetic,
    a boundary or an order other than these, and for "valid" where the stencil does not fit.
    """
    return laplacian3d_operator(u, spacing_of_axes("laplacian3d", spacing), boundary, order)


def laplacian3d_adjoint(
    v: Tensor, spacing: float | Sequence[float], boundary: str = "dirichlet", order: int = 2
) -> Tensor:
    """The adjoint of `laplacian3d` with the same arguments: <laplacian3d(u), v> = <u, laplacian3d_adjoint(v)>.

    v: [..., X, Y, Z] of the shape that `laplacian3d` returns; for boundary "valid" the result has `order` nodes more
    along each axis. With dirichlet and periodic boundaries it is `laplacian3d` itself. Raises what that raises.
    """
    return laplacian3d_adjoint_operator(v, spacing_of_axes("laplacian3d_adjoint", spacing), boundary, order)


# ---------------------------------------------------------------------------------------------------------------------
# What the checks, the stencil and the outputs are; the kernel uses these too


def spacing_of_axes(operator: str, spacing: float | Sequence[float]) -> tuple[float, ...]:
    """The spacing of each axis. Raises TypeError for what is neither a number nor a sequence of numbers."""
    check_number(operator, "spacing", spacing)
    numbers: list[Any] = list(spacing) if isinstance(spacing, Iterable) else [spacing] * 3
    for number in numbers:
        check_number(operator, "spacing", number)
        if not isinstance(number, Real) or isinstance(number, bool):
            raise TypeError(f"{operator}: spacing is {spacing!r}; allowed: a number, or one for each of X, Y, Z")
    return tuple(float(number) for number in numbers)


def half_width(order: int) -> int:
    """How many nodes the stencil reaches to each side."""
    return order // 2


def margin(boundary: str, order: int) -> int:
    """How many nodes at each end of an axis have no result."""
    return half_width(order) if boundary == "valid" else 0


def empty_output(u: Tensor, boundary: str, order: int, *, adjoint: bool) -> Tensor:
    """The contiguous output, not filled."""
    grown = 2 * margin(boundary, order) * (1 if adjoint else -1)
    return u.new_empty((*u.shape[:-3], *(n + grown for n in u.shape[-3:])))


def _check(operator: str, name: str, u: Tensor, spacing: Sequence[float], boundary: str, order: int) -> None:
    check_floating(operator, **{name: u})
    if u.dim() < 3:
        raise ValueError(
            f"{operator}: {name} has shape {tuple(u.shape)}; it must have at least three dimensions, (..., X, Y, Z)"
        )
    dtype = torch.promote_types(u.dtype, torch.float32)
    least = 1 / torch.finfo(dtype).max ** 0.5
    if len(spacing) != 3 or not all(least < h and h * h < float("inf") for h in spacing):  # nor NaN
        raise ValueError(
            f"{operator}: spacing is {tuple(spacing)}; allowed: a positive finite number, or one for each of X, Y, Z, "
            f"above {least:.2g} for arithmetic in {str(dtype).removeprefix('torch.')}"
        )
    if boundary not in BOUNDARIES:
        raise ValueError(f"{operator}: boundary is {boundary!r}; allowed: {', '.join(BOUNDARIES)}")
    if order not in ORDERS:
        raise ValueError(f"{operator}: order is {order}; allowed: {', '.join(map(str, ORDERS))}")
    if boundary not in ORDERS[order]:
        raise ValueError(
            f"{operator}: order {order} is not defined with boundary {boundary!r}; allowed: order 2, or boundary "
            f"{' or '.join(ORDERS[order])}"
        )


def _check_forward(u: Tensor, spacing: Sequence[float], boundary: str, order: int) -> None:
    _check("laplacian3d", "u", u, spacing, boundary, order)
    if boundary == "valid" and min(u.shape[-3:]) <= order:
        raise ValueError(
            f"laplacian3d: u has {tuple(u.shape[-3:])} nodes; boundary 'valid' of order {order} needs at least "
            f"{order + 1} along each axis"
        )


def _check_adjoint(v: Tensor, spacing: Sequence[float], boundary: str, order: int) -> None:
    _check("laplacian3d_adjoint", "v", v, spacing, boundary, order)
    if boundary == "valid" and min(v.shape[-3:]) < 1:
        raise ValueError(
            f"laplacian3d_adjoint: v has {tuple(v.shape[-3:])} nodes; boundary 'valid' needs at least 1 along each axis"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Stock formulas


def _pad(u: Tensor, axis: int, width: int) -> Tensor:
    """`u` with `width` zeros before and behind one axis."""
    return F.pad(u, [*(0, 0) * (-1 - axis), width, width])


def _second_derivative(padded: Tensor, axis: int, h: float, order: int) -> Tensor:
    """The second derivative along an axis at all nodes that have `half_width(order)` others to each side."""
    n = padded.shape[axis] - order
    if order == 2:
        before, centre, after = (padded.narrow(axis, i, n) for i in range(3))
        return (before - 2 * centre + after) / h**2
    before2, before, centre, after, after2 = (padded.narrow(axis, i, n) for i in range(5))
    return (16 * (before + after) - (before2 + after2) - 30 * centre) / (12 * h**2)


def _source_nodes(u: Tensor, axis: int, boundary: str, width: int) -> Tensor:
    """Which nodes stand for those from `width` before the first to `width` behind the last."""
    n = u.shape[axis]
    nodes = torch.arange(-width, n + width, device=u.device)
    if boundary == "periodic":
        return nodes % max(n, 1)
    return (n - 1 - (n - 1 - nodes.abs()).abs()).clamp(min=0)


def laplacian3d_stock(u: Tensor, spacing: Sequence[float], boundary: str, order: int) -> Tensor:
    """The same in stock PyTorch: padding and slices."""
    width = half_width(order)
    total = None
    for axis, h in zip(AXES, spacing, strict=True):
        if boundary == "valid":
            padded = u
            for other in AXES:
                if other != axis:
                    padded = padded.narrow(other, width, u.shape[other] - order)
        elif boundary == "dirichlet" or u.numel() == 0:
            padded = _pad(u, axis, width)
        else:
            padded = u.index_select(axis, _source_nodes(u, axis, boundary, width))
        part = _second_derivative(padded, axis, h, order)
        total = part if total is None else total + part
    assert total is not None
    return total


def _adjoint_stock(v: Tensor, spacing: Sequence[float], boundary: str, order: int) -> Tensor:
    if boundary in ("dirichlet", "periodic"):
        return laplacian3d_stock(v, spacing, boundary, order)
    if boundary == "valid":
        wider = F.pad(v, (order,) * 6)
        return laplacian3d_stock(wider, spacing, boundary, order)
    total = torch.zeros_like(v)
    for axis, h in zip(AXES, spacing, strict=True):
        n = v.shape[axis]
        # A row on the boundary takes its one neighbour twice, so that neighbour gives back twice that row.
        twice = torch.ones(n, dtype=v.dtype, device=v.device)
        twice[:1] = twice[-1:] = 2
        weighted = v * twice.view(-1, *(1,) * (-1 - axis))
        if n == 1:
            neighbours = weighted
        else:
            padded = _pad(weighted, axis, 1)
            neighbours = padded.narrow(axis, 0, n) + padded.narrow(axis, 2, n)
        total = total + (neighbours - 2 * v) / h**2
    return total


# ---------------------------------------------------------------------------------------------------------------------
# CPU: slices added in place, some planes at a time so that what is added to stays in the cache

_STENCIL = {2: ((-1, 1), (1, 1), (0, -2)), 4: ((-1, 16), (1, 16), (0, -32), (-2, -1), (2, -1), (0, 2))}
_DENOMINATOR = {2: 1, 4: 12}
"""(distance, weight) of the nodes, for a spacing of 1, in an order in which constants cancel without rounding."""
_SLAB = 2**18  # elements of the output that each thread works on at a time

_Term = tuple[int, int, int, int]
"""Along an axis: (first output, first input, how many, weight): output += weight * input."""
_Ranges = tuple[tuple[int, int, int], ...]
"""(axis, start, count) of each axis of which not all is meant."""
_Addition = tuple[_Ranges, _Ranges, int]
"""Outputs within the first ranges += weight * inputs within the second."""


def _terms(n: int, boundary: str, order: int, adjoint: bool) -> Iterator[_Term]:
    """The second derivative along an axis of n nodes, or its adjoint, which reads every term the other way round."""
    edge = margin(boundary, order)

    def forward() -> Iterator[_Term]:
        for distance, weight in _STENCIL[order]:
            if boundary == "periodic":
                start = distance % n
                yield 0, start, n - start, weight
                yield n - start, 0, start, weight
                continue
            first = max(0, -(edge + distance))  # the first result of which there is such a node
            yield first, first + edge + distance, min(n - 2 * edge, n - edge - distance) - first, weight
            if boundary == "neumann" and distance:
                yield (0, min(1, n - 1), 1, weight) if distance < 0 else (n - 1, max(n - 2, 0), 1, weight)

    for result, node, count, weight in forward():
        if count > 0:
            yield (node, result, count, weight) if adjoint else (result, node, count, weight)


@functools.lru_cache(maxsize=1024)
def _additions(
    grid: tuple[int, ...], first: int, planes: int, boundary: str, order: int, adjoint: bool
) -> list[list[_Addition]]:
    """For each axis the additions that make the planes of the output from `first` on.

    grid: the nodes along each axis, which are those of the input; of the adjoint, those of the output.
    """
    edge = margin(boundary, order)
    results = [n - 2 * edge for n in grid]
    inputs, outputs = (results, [planes, *grid[1:]]) if adjoint else (list(grid), [planes, *results[1:]])

    def ranges(starts: list[int], counts: list[int], all_: list[int]) -> _Ranges:
        triples = zip(AXES, starts, counts, all_, strict=True)
        return tuple((axis, start, count) for axis, start, count, n in triples if count != n)

    def addition(axis: int, term: _Term) -> _Addition:
        # Along the other axes, the node itself.
        box = [(edge, 0, n, 1) if adjoint else (0, edge, n, 1) for n in results]
        box[axis] = term
        targets, sources, counts, _ = (list(numbers) for numbers in zip(*box, strict=True))
        start, stop = max(targets[0], first), min(targets[0] + counts[0], first + planes)
        sources[0] += start - targets[0]
        targets[0], counts[0] = start - first, stop - start
        return ranges(targets, counts, outputs), ranges(sources, counts, inputs), term[3] if stop > start else 0

    additions = [[addition(axis, term) for term in _terms(n, boundary, order, adjoint)] for axis, n in enumerate(grid)]
    return [[addition for addition in of_axis if addition[2]] for of_axis in additions]


def _part(tensor: Tensor, ranges: _Ranges) -> Tensor:
    for axis, start, count in ranges:
        tensor = tensor.narrow(axis, start, count)
    return tensor


def _cpu(u: Tensor, spacing: Sequence[float], boundary: str, order: int, *, adjoint: bool) -> Tensor:
    out = empty_output(u, boundary, order, adjoint=adjoint)
    if not out.numel():
        return out
    u = computing(u)
    sums = out if out.dtype == u.dtype else torch.empty_like(out, dtype=u.dtype)
    sums.zero_()
    grid = tuple((out if adjoint else u).shape[-3:])
    planes = out.shape[-3]
    step = min(planes, max(1, _SLAB * torch.get_num_threads() * planes // out.numel()))
    derivative = u.new_empty((*out.shape[:-3], step, *out.shape[-2:]))
    for first in range(0, planes, step):
        count = min(step, planes - first)
        derivative = derivative.narrow(-3, 0, count)
        slab = sums.narrow(-3, first, count)
        for additions, h in zip(_additions(grid, first, count, boundary, order, adjoint), spacing, strict=True):
            derivative.zero_()
            for targets, sources, weight in additions:
                _part(derivative, targets).add_(_part(u, sources), alpha=weight)
            slab.add_(derivative, alpha=1 / (_DENOMINATOR[order] * h**2))
    return sums if sums is out else out.copy_(sums)


# ---------------------------------------------------------------------------------------------------------------------
# Registration


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.rest = inputs


def _vmap(operator: Operator, info: Any, dims: tuple[Any, ...], u: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """The batch becomes a leading dimension."""
    return operator(u.movedim(dims[0], 0), *rest), 0


_SPACING = (0.5, 0.75, 1.25)


def _samples(device: torch.device, dtype: torch.dtype, *, adjoint: bool) -> Iterator[Sample]:
    def sample(name: str, u: Tensor, boundary: str = "dirichlet", order: int = 2) -> Sample:
        return Sample(name, (u, _SPACING, boundary, order))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    for order, boundaries in ORDERS.items():
        for boundary in boundaries:
            kind, fits = f"{boundary}, order {order}", boundary != "valid" or adjoint
            n = 2 if fits else order + 1
            yield sample(kind, randn(n + 1, n, n + 2), boundary, order)
            yield sample(f"{kind}, batch", randn(2, 1, n + 2, n, n + 1), boundary, order)
            if fits:
                yield sample(f"{kind}, axes of length 1, 2, 3", randn(1, 2, 3), boundary, order)
            if boundary != "valid":
                yield sample(f"{kind}, aligned rows", randn(2, 3, 32), boundary, order)
    yield sample("transposed", randn(4, 3, 2).permute(2, 0, 1))
    yield sample("sliced", randn(2, 5, 9, 7)[:, 1::2, ::3, 1:], "neumann")
    yield sample("expanded", randn(2, 1, 2, 1, 4).expand(2, 2, 2, 3, 4), "periodic")
    yield sample("longer than a tile", randn(1, 9, 37), "neumann")
    yield sample("empty batch", randn(0, 5, 5, 5), "valid")
    yield sample("empty axis", randn(2, 3, 0, 4), "neumann")


def _cost(u: Tensor, boundary: str, order: int, *, adjoint: bool) -> Cost:
    grown = 2 * margin(boundary, order) * (1 if adjoint else -1)
    nodes = 1
    for n in u.shape[:-3]:
        nodes *= n
    for n in u.shape[-3:]:
        nodes *= n + grown
    return Cost(flops=2 * (3 * order + 1) * nodes, bytes=(u.numel() + nodes) * u.itemsize)


laplacian3d_operator: Operator = register(
    schema="laplacian3d(Tensor u, float[] spacing, str boundary, int order) -> Tensor",
    check=_check_forward,
    shape=lambda u, spacing, boundary, order: empty_output(u, boundary, order, adjoint=False),
    cpu=lambda u, spacing, boundary, order: _cpu(u, spacing, boundary, order, adjoint=False),
    kernel=Kernel("laplacian3d", "laplacian3d"),
    reference=laplacian3d_stock,
    samples=lambda device, dtype: _samples(device, dtype, adjoint=False),
    cost=lambda u, spacing, boundary, order: _cost(u, boundary, order, adjoint=False),
    stock="padding and slices",
    setup=_setup,
    backward=lambda ctx, grad: (laplacian3d_adjoint_operator(grad, *ctx.rest), None, None, None),
    jvp=lambda ctx, tangent, *_: laplacian3d_operator(tangent, *ctx.rest),
    vmap=_vmap,
)

laplacian3d_adjoint_operator: Operator = register(
    schema="laplacian3d_adjoint(Tensor v, float[] spacing, str boundary, int order) -> Tensor",
    check=_check_adjoint,
    shape=lambda v, spacing, boundary, order: empty_output(v, boundary, order, adjoint=True),
    cpu=lambda v, spacing, boundary, order: _cpu(v, spacing, boundary, order, adjoint=True),
    kernel=Kernel("laplacian3d", "laplacian3d_adjoint"),
    reference=_adjoint_stock,
    samples=lambda device, dtype: _samples(device, dtype, adjoint=True),
    cost=lambda v, spacing, boundary, order: _cost(v, boundary, order, adjoint=True),
    stock="the gradient of padding and slices",
    setup=_setup,
    backward=lambda ctx, grad: (laplacian3d_operator(grad, *ctx.rest), None, None, None),
    jvp=lambda ctx, tangent, *_: laplacian3d_adjoint_operator(tangent, *ctx.rest),
    vmap=_vmap,
)
