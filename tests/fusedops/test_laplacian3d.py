"""laplacian3d beyond what every operator is put to: its matrix, orders of accuracy, adjoints, launches, errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck

import fusedops
from fusedops import registry
from fusedops.operators import laplacian3d as definition
from fusedops.registration import INTERPRETING

STENCILS = {2: {-1: 1, 0: -2, 1: 1}, 4: {-2: -1 / 12, -1: 4 / 3, 0: -5 / 2, 1: 4 / 3, 2: -1 / 12}}
SPACING = (0.5, 0.3, 0.7)
KINDS = [(boundary, order) for order, boundaries in definition.ORDERS.items() for boundary in boundaries]

every_kind = pytest.mark.parametrize(("boundary", "order"), KINDS)


def axis_matrix(n: int, h: float, boundary: str, order: int) -> Tensor:
    """The second derivative along an axis of n nodes, row by row from the definition, [results, n]."""
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for row, (distance, weight) in itertools.product(range(n), STENCILS[order].items()):
        node = row + distance
        if boundary == "periodic":
            node %= n
        elif boundary == "neumann":
            node = 0 if n == 1 else abs(node) if node < n else 2 * (n - 1) - node
        if 0 <= node < n:
            matrix[row, node] += weight / h**2
    edge = order // 2 if boundary == "valid" else 0
    return matrix[edge : n - edge]


def matrices(shape: tuple[int, ...], boundary: str, order: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The three terms of the Laplacian, each as a matrix along every axis; shape: that of the nodes."""

    def kept(n: int) -> Tensor:
        edge = order // 2 if boundary == "valid" else 0
        return torch.eye(n, dtype=torch.float64)[edge : n - edge]

    terms = []
    for axis in range(3):
        factors = [kept(n) for n in shape]
        factors[axis] = axis_matrix(shape[axis], SPACING[axis], boundary, order)
        terms.append((factors[0], factors[1], factors[2]))
    return terms


def by_matrix(u: Tensor, shape: tuple[int, ...], boundary: str, order: int, *, adjoint: bool = False) -> Tensor:
    """The Laplacian of u, or its adjoint, by products with matrices in float64."""
    u = u.double().cpu()
    subscripts = "...abc,ax,by,cz->...xyz" if adjoint else "...xyz,ax,by,cz->...abc"
    return sum(torch.einsum(subscripts, u, *term) for term in matrices(shape, boundary, order))  # type: ignore[return-value]


def results(shape: tuple[int, ...], boundary: str, order: int) -> tuple[int, ...]:
    return tuple(n - order for n in shape) if boundary == "valid" else shape


def shapes(boundary: str, order: int, *lengths: int) -> list[tuple[int, ...]]:
    """Grids of axes of these lengths, each beside longer ones; for "valid" so much longer that results are as long."""
    more = order if boundary == "valid" else 0
    return [tuple(n + more for n in shape) for m in lengths for shape in ((m, 3, 4), (4, m, 3), (3, 4, m), (m, m, m))]


def pair(u: Tensor, boundary: str, order: int, *, adjoint: bool) -> Tensor:
    return (fusedops.laplacian3d_adjoint if adjoint else fusedops.laplacian3d)(u, SPACING, boundary, order)


# ---------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
@every_kind
def test_is_its_matrix(device: torch.device, boundary: str, order: int, adjoint: bool) -> None:
    for shape in [*shapes(boundary, order, 1, 2, 3), (6, 9, 7)]:
        u = torch.randn(shape if not adjoint else results(shape, boundary, order), dtype=torch.float64, device=device)
        expected = by_matrix(u, shape, boundary, order, adjoint=adjoint)
        out = pair(u, boundary, order, adjoint=adjoint)
        assert out.shape == expected.shape and out.is_contiguous()
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
@every_kind
def test_few_planes_at_a_time(monkeypatch: pytest.MonkeyPatch, boundary: str, order: int, adjoint: bool) -> None:
    """The CPU's slabs, of one plane and of some that do not divide the grid."""
    shape = (9, 5, 6)
    u = torch.randn((2, *(shape if not adjoint else results(shape, boundary, order))), dtype=torch.float64)
    expected = by_matrix(u, shape, boundary, order, adjoint=adjoint)
    for slab in (1, 4 * 60 // torch.get_num_threads()):
        monkeypatch.setattr(definition, "_SLAB", slab)
        out = definition._cpu(u, SPACING, boundary, order, adjoint=adjoint)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.interpreter
@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
@every_kind
def test_a_march_of_planes(monkeypatch: pytest.MonkeyPatch, boundary: str, order: int, adjoint: bool) -> None:
    """Marches longer than a plane, the last one cut short, over tiles that end inside of them; aligned rows and not.

    The tiles are those of a GPU.
    """
    from fusedops.kernels import laplacian3d as kernels

    monkeypatch.setattr(kernels, "THREADS", 32 * kernels.NUM_WARPS)

    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    monkeypatch.setattr(kernels, "LONGEST_MARCH", 4)
    for shape in ((6, 9, 32), (7, 6, 37)):
        u = torch.randn(shape if not adjoint else results(shape, boundary, order), dtype=torch.float64)
        expected = by_matrix(u.float(), shape, boundary, order, adjoint=adjoint)
        out = pair(u.float(), boundary, order, adjoint=adjoint)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_any_strides(device: torch.device, dtype: torch.dtype) -> None:
    base = torch.randn(2, 6, 7, 8, device=device).to(dtype)
    cases = {
        "permuted": base[0].permute(1, 2, 0),
        "sliced": base[:, 1::2, 3:, ::2],
        "expanded": base[1, :, :1, 2:].expand(6, 5, 6),
        "batch expanded": base[:1, :3, :4].expand(3, 3, 4, 8),
        "batch permuted": base.permute(2, 0, 3, 1),
        "two batches that do not merge": base.unflatten(1, (2, 3)).transpose(0, 1)[..., 1:],
    }
    for name, u in cases.items():
        out = fusedops.laplacian3d(u, SPACING, "neumann")
        expected = by_matrix(u, tuple(u.shape[-3:]), "neumann", 2)
        assert out.is_contiguous() and out.dtype == dtype, name
        # Sums in fp32 at least: of a half type's result only the last rounding is left.
        tolerance = {torch.float16: 2**-11, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
        torch.testing.assert_close(
            out.double().cpu(),
            expected,
            rtol=tolerance,
            atol=1e-5 if dtype == torch.float16 else 50 * tolerance,
            msg=name,
        )


def quadratic(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, float]:
    """x^2 + 2 y^2 + 3 z^2 on n^3 nodes of the unit cube, and their spacing."""
    h = 1 / (n - 1)
    x, y, z = torch.meshgrid(*[torch.arange(n, device=device, dtype=torch.float64) * h] * 3, indexing="ij")
    return (x**2 + 2 * y**2 + 3 * z**2).to(dtype), h


@pytest.mark.parametrize(
    "n", [9, pytest.param(96, id="96, slow", marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.gpu)]
)
@every_kind
def test_of_a_quadratic_is_twelve(device: torch.device, boundary: str, order: int, n: int) -> None:
    if device.type != "cuda" and (n == 256 or (n == 96 and INTERPRETING)):
        pytest.skip("on a GPU")
    for dtype, bound in ((torch.float32, None), (torch.float64, 1e-9)):
        u, h = quadratic(n, device, dtype)
        out = fusedops.laplacian3d(u, h, boundary, order)
        edge = 0 if boundary == "valid" else order // 2
        inner = out[edge : len(out) - edge, edge : len(out) - edge, edge : len(out) - edge]
        error = float((inner.double() - 12).abs().max())
        limit = 2 * torch.finfo(dtype).eps * float(u.abs().max()) * 3 * 2 / h**2 if bound is None else bound
        assert error <= limit, f"{dtype}: error {error:.3g}, allowed {limit:.3g}"


def test_constants_have_none(device: torch.device) -> None:
    """Exactly: what cancels leaves no rounding behind."""
    for boundary, order in KINDS:
        if boundary != "dirichlet":
            u = torch.full((7, 6, 8), 0.1, device=device)
            assert not fusedops.laplacian3d(u, SPACING, boundary, order).any(), (boundary, order)


# ---------------------------------------------------------------------------------------------------------------------
# Orders of accuracy, by refinement

Profile = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""A function of one variable and its second derivative."""

DIRICHLET: Profile = (  # 0 at 0 and 1, not symmetric about either
    lambda t: t * (1 - t) * torch.exp(t),
    lambda t: -t * (t + 3) * torch.exp(t),
)
MIRRORED: Profile = (  # even about 0 and 1
    lambda t: torch.cos(math.pi * t),
    lambda t: -(math.pi**2) * torch.cos(math.pi * t),
)
NOT_MIRRORED: Profile = (  # its first derivative t - t^3 is 0 at 0 and 1, its third is not
    lambda t: t**2 / 2 - t**4 / 4,
    lambda t: 1 - 3 * t**2,
)
PERIODIC: Profile = (
    lambda t: torch.exp(torch.sin(2 * math.pi * t)),
    lambda t: (
        (2 * math.pi) ** 2
        * (torch.cos(2 * math.pi * t) ** 2 - torch.sin(2 * math.pi * t))
        * torch.exp(torch.sin(2 * math.pi * t))
    ),
)
SMOOTH: Profile = (lambda t: torch.exp(1.3 * t), lambda t: 1.69 * torch.exp(1.3 * t))


def nodes(boundary: str, n: int) -> tuple[Tensor, float]:
    """n nodes in [0, 1] as the boundary wants them, and their spacing."""
    steps = {"dirichlet": n + 1, "neumann": n - 1, "periodic": n, "valid": n - 1}[boundary]
    first = 1 if boundary == "dirichlet" else 0
    return (torch.arange(n, dtype=torch.float64) + first) / steps, 1 / steps


def errors_of(profile: Profile, boundary: str, order: int, n: int) -> Tensor:
    """Error of the Laplacian of f(x) f(y) f(z) + 2 f(x), at every node."""
    f, second = profile
    sizes = (n, n + 2, n + 1)
    grid = [nodes(boundary, size) for size in sizes]
    x, y, z = torch.meshgrid(*[t for t, _ in grid], indexing="ij")
    u = f(x) * f(y) * f(z) + (2 * f(x) if boundary != "dirichlet" else 0)
    exact = second(x) * f(y) * f(z) + f(x) * second(y) * f(z) + f(x) * f(y) * second(z)
    exact = exact + (2 * second(x) if boundary != "dirichlet" else 0)
    edge = order // 2 if boundary == "valid" else 0
    inner = tuple(slice(edge, size - edge) for size in sizes)
    return (fusedops.laplacian3d(u, [h for _, h in grid], boundary, order) - exact[inner]).abs()


@pytest.mark.parametrize(
    ("profile", "boundary", "order"),
    [
        pytest.param(DIRICHLET, "dirichlet", 2, id="dirichlet-2"),
        pytest.param(MIRRORED, "neumann", 2, id="neumann-2"),
        pytest.param(PERIODIC, "periodic", 2, id="periodic-2"),
        pytest.param(PERIODIC, "periodic", 4, id="periodic-4"),
        pytest.param(SMOOTH, "valid", 2, id="valid-2"),
        pytest.param(SMOOTH, "valid", 4, id="valid-4"),
    ],
)
def test_order_by_refinement(profile: Profile, boundary: str, order: int) -> None:
    coarse, fine = (float(errors_of(profile, boundary, order, n).max()) for n in (24, 48))
    assert abs(math.log2(coarse / fine) - order) < 0.25


def test_neumann_is_first_order_in_the_boundary_row_and_second_inside() -> None:
    coarse, fine = (errors_of(NOT_MIRRORED, "neumann", 2, n) for n in (24, 48))
    assert 0.85 < math.log2(float(coarse.max()) / float(fine.max())) < 1.15
    inner = [errors[1:-1, 1:-1, 1:-1] for errors in (coarse, fine)]
    assert 1.8 < math.log2(float(inner[0].max()) / float(inner[1].max())) < 2.3


@pytest.mark.parametrize(("boundary", "order", "degree"), [("dirichlet", 2, 3), ("valid", 2, 3), ("valid", 4, 5)])
def test_exact_for_polynomials(boundary: str, order: int, degree: int) -> None:
    """Up to this degree in each variable, and not of the next one."""
    for highest, exact in ((degree, True), (degree + 1, False)):
        # For dirichlet t (1 - t) (1 + ... + t^(highest - 2)), which vanishes at 0 and 1: t - t^highest.
        profile: Profile = (
            lambda t, d=highest: t - t**d,
            lambda t, d=highest: -d * (d - 1) * t ** (d - 2),
        )
        error = float(errors_of(profile, boundary, order, 13).max())
        assert error < 1e-9 if exact else error > 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# Adjoints and derivatives


@every_kind
def test_adjointness(device: torch.device, boundary: str, order: int) -> None:
    for shape in [*shapes(boundary, order, 1), (7, 9, 6)]:
        u = torch.randn(2, *shape, dtype=torch.float64, device=device)
        v = torch.randn(2, *results(shape, boundary, order), dtype=torch.float64, device=device)
        a, b = (
            fusedops.laplacian3d(u, SPACING, boundary, order),
            fusedops.laplacian3d_adjoint(v, SPACING, boundary, order),
        )
        scale = float(a.norm() * v.norm() + u.norm() * b.norm())
        assert abs(float((a * v).sum() - (u * b).sum())) <= 1e-14 * scale


@pytest.mark.parametrize("boundary", ["dirichlet", "periodic"])
def test_self_adjoint_ones_are_their_adjoint(device: torch.device, boundary: str) -> None:
    u = torch.randn(5, 4, 7, device=device)
    assert torch.equal(fusedops.laplacian3d(u, SPACING, boundary), fusedops.laplacian3d_adjoint(u, SPACING, boundary))


@pytest.mark.parametrize("adjoint", [False, True], ids=["forward", "adjoint"])
@every_kind
def test_finite_differences(boundary: str, order: int, adjoint: bool) -> None:
    n = order + 1 if boundary == "valid" and not adjoint else 2
    u = torch.randn(n, n + 1, n, dtype=torch.float64, requires_grad=True)

    def function(u: Tensor) -> Tensor:  # not linear, so that its second derivative is not 0
        return pair(u * u, boundary, order, adjoint=adjoint)

    assert gradcheck(function, (u,), check_forward_ad=True, fast_mode=INTERPRETING)  # which is slow, and has its matrix
    assert gradgradcheck(function, (u,), fast_mode=True)


def test_third_order(device: torch.device) -> None:
    """The bilaplacian's energy: d^3 of sum((L u^2)^2) along a direction, against its closed form."""
    u = torch.randn(3, 4, 3, dtype=torch.float64, device=device, requires_grad=True)
    d = torch.randn_like(u)

    def energy(u: Tensor, laplacian: Callable[[Tensor], Tensor]) -> Tensor:
        return laplacian(u * u).square().sum()

    def third(laplacian: Callable[[Tensor], Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(energy(u, laplacian), u, create_graph=True)
        (second,) = torch.autograd.grad((first * d).sum(), u, create_graph=True)
        return torch.autograd.grad((second * d).sum(), u)[0]

    ours = third(lambda w: fusedops.laplacian3d(w, SPACING, "neumann"))
    stock = third(lambda w: definition.laplacian3d_stock(w, SPACING, "neumann", 2))
    torch.testing.assert_close(ours, stock, rtol=1e-10, atol=1e-8)
    assert float(ours.norm()) > 1


def test_transforms(device: torch.device) -> None:
    """vmap along any dimension of a strided batch, and the Jacobian forward and backward."""
    u = torch.randn(3, 2, 4, 2, dtype=torch.float64, device=device)

    def function(u: Tensor) -> Tensor:
        return fusedops.laplacian3d(u, SPACING, "neumann")

    for dim in range(4):
        looped = torch.stack([function(u.select(dim, i)) for i in range(u.shape[dim])])
        torch.testing.assert_close(torch.func.vmap(function, dim)(u), looped)
    small = u[:2, :, :3, 0]
    torch.testing.assert_close(torch.func.jacfwd(function)(small), torch.func.jacrev(function)(small))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device: torch.device, dynamic: bool) -> None:
    if INTERPRETING:
        pytest.skip("the same above the dispatcher")
    torch._dynamo.reset()

    def loss_gradient(u: Tensor, h: float) -> Tensor:
        u = u.detach().requires_grad_()
        return torch.autograd.grad(fusedops.laplacian3d(u, (h, 2 * h, h), "valid", 4).square().sum(), u)[0]

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda u: fusedops.laplacian3d(u, (0.1, 0.2, 0.1), "valid", 4), backend=backend, fullgraph=True, dynamic=dynamic
    )
    for n in (7, 9, 12):
        u = torch.randn(2, n, n + 1, n + 2, dtype=torch.float64, device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad(compiled(u).square().sum(), u)
        torch.testing.assert_close(gradient, loss_gradient(u, 0.1))
    assert backend.frame_count == (1 if dynamic else backend.frame_count)


# ---------------------------------------------------------------------------------------------------------------------
# Launches


def recorded_launch(
    monkeypatch: pytest.MonkeyPatch, u: Tensor, boundary: str = "dirichlet"
) -> tuple[Tensor, dict[str, Any]]:
    """The tensor and the constants that the kernel is launched with; nothing runs."""
    kernels = pytest.importorskip("fusedops.kernels.laplacian3d")
    calls: list[tuple[Tensor, dict[str, Any]]] = []
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, programs, tensors, *rest, **constants: calls.append((tensors[0], constants))
    )
    kernels.laplacian3d(u, SPACING, boundary, 2)
    return calls[0]


def test_the_kernel_reads_its_input_by_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.randn(4, 6, 8, 10)
    for u in (base.permute(3, 2, 1, 0), base[0, ::2, 1:], base[:, None, 1:3, :, ::3], base[:1].expand(5, 6, 8, 10)):
        read, _ = recorded_launch(monkeypatch, u)
        assert read.data_ptr() == u.data_ptr() and read.stride()[-3:] == u.stride()[-3:]


def test_offsets_of_64_bits_only_where_a_plane_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, wide in (((2**12, 2**10, 2**10), False), ((3, 2**16, 2**15), True), ((3, 2**14, 2**14), False)):
        assert recorded_launch(monkeypatch, torch.empty(shape, device="meta"))[1]["WIDE"] is wide
    strided = torch.empty((2**14, 3, 2**18), device="meta").permute(1, 0, 2)[..., ::2]
    assert recorded_launch(monkeypatch, strided)[1]["WIDE"] is True


@pytest.mark.interpreter
@pytest.mark.parametrize("boundary", definition.BOUNDARIES)
def test_offsets_of_64_bits_are_right(monkeypatch: pytest.MonkeyPatch, boundary: str) -> None:
    from fusedops.kernels import laplacian3d as kernels

    launch = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *args, **constants: launch(*args, **constants | {"WIDE": True}))
    u = torch.randn(2, 4, 5, 16)
    expected = by_matrix(u, (4, 5, 16), boundary, 2)
    torch.testing.assert_close(fusedops.laplacian3d(u, SPACING, boundary).double(), expected, rtol=1e-5, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(2, 1024, 1024, 1025), (1, 2**16, 2**15 + 1)], ids=str)
def test_more_elements_than_31_bits_count(shape: tuple[int, ...], transposed: bool) -> None:
    u = torch.randn(shape, device="cuda", dtype=torch.float16)
    u = u.mT if transposed else u
    corner = (..., *(slice(-9, None),) * 3)
    out = fusedops.laplacian3d(u, 1.0)[corner].double()
    expected = definition.laplacian3d_stock(u[corner].double(), (1.0,) * 3, "dirichlet", 2)
    # Where the corner starts inside of the grid, its first nodes lack their neighbours there.
    inner = (..., *(slice(int(n > 9), None) for n in shape[-3:]))
    torch.testing.assert_close(out[inner], expected[inner], rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"spacing": 0.0}, ValueError, r"spacing is \(0.0, 0.0, 0.0\); allowed: a positive finite"),
        ({"spacing": (1, -1, 1)}, ValueError, r"spacing is \(1.0, -1.0, 1.0\)"),
        ({"spacing": math.nan}, ValueError, r"spacing is \(nan"),
        ({"spacing": math.inf}, ValueError, r"spacing is \(inf"),
        ({"spacing": 1e-200}, ValueError, r"spacing is \(1e-200"),
        ({"spacing": (1, 1)}, ValueError, r"spacing is \(1.0, 1.0\); .* one for each of X, Y, Z"),
        ({"spacing": torch.tensor(1.0)}, TypeError, "spacing is a tensor"),
        ({"spacing": (1, torch.tensor(1.0), 1)}, TypeError, "spacing is a tensor"),
        ({"spacing": None}, TypeError, "spacing is None; allowed: a number, or one for each of X, Y, Z"),
        ({"spacing": True}, TypeError, "spacing is True; allowed: a number"),
        ({"spacing": "abc"}, TypeError, "spacing is 'abc'; allowed: a number"),
        ({"spacing": 1e-20}, ValueError, "spacing is .*; allowed: .* above 5.4e-20 for arithmetic in float32"),
        ({"boundary": "robin"}, ValueError, "boundary is 'robin'; allowed: dirichlet, neumann, periodic, valid"),
        ({"order": 3}, ValueError, "order is 3; allowed: 2, 4"),
        ({"order": 4}, ValueError, "order 4 is not defined with boundary 'dirichlet'; allowed: .* periodic or valid"),
        ({"order": 4, "boundary": "neumann"}, ValueError, "order 4 is not defined with boundary 'neumann'"),
        ({"u": torch.ones(4, 4)}, ValueError, r"u has shape \(4, 4\); it must have at least three dimensions"),
        ({"u": torch.ones(4, 4, 4, dtype=torch.int64)}, TypeError, "u is torch.int64; allowed: float16"),
        ({"u": torch.ones(4, 2, 4), "boundary": "valid"}, ValueError, r"u has \(4, 2, 4\) nodes; .* at least 3 along"),
        (
            {"u": torch.ones(5, 5, 4), "boundary": "valid", "order": 4},
            ValueError,
            r"u has \(5, 5, 4\) nodes; .* at least 5 along",
        ),
    ],
)
def test_bad_input_is_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"u": torch.ones(5, 5, 5), "spacing": 1.0} | change
    with pytest.raises(error, match=message):
        fusedops.laplacian3d(**arguments)
    if "u" not in change:
        with pytest.raises(error, match=message.replace("u has", "v has")):
            fusedops.laplacian3d_adjoint(arguments.pop("u"), **arguments)


@pytest.mark.parametrize(
    "spacing", [np.float32(0.5), np.array([0.5, 0.5, 0.5]), iter((0.5, 0.5, 0.5))], ids=["number", "array", "iterator"]
)
def test_numbers_of_numpy_and_iterators_are_spacings(spacing: Any) -> None:
    u = torch.randn(5, 4, 6)
    torch.testing.assert_close(fusedops.laplacian3d(u, spacing), fusedops.laplacian3d(u, 0.5), rtol=0, atol=0)


def test_empty(device: torch.device) -> None:
    for shape in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        u = torch.randn(shape, device=device, requires_grad=True)
        out = fusedops.laplacian3d(u, 1.0, "periodic")
        out.sum().backward()
        assert out.shape == shape and u.grad is not None and u.grad.shape == shape


def test_cost_is_one_read_and_one_write() -> None:
    cost = registry.operator("laplacian3d").cost(torch.empty(2, 8, 9, 10), SPACING, "valid", 4)
    assert cost.bytes == 4 * 2 * (8 * 9 * 10 + 4 * 5 * 6)
