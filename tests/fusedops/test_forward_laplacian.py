"""The forward Laplacian: exact, differentiable to any order, refusing what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fusedops
from fusedops.operators import forward_laplacian_linear as linear_module
from fusedops.operators.forward_laplacian import Jet, forward_laplacian_stock
from fusedops.operators.forward_laplacian_activation import forward_laplacian_activation
from fusedops.operators.forward_laplacian_linear import MOST_COORDINATES
from fusedops.operators.forward_laplacian_output import MOST_UNITS
from fusedops.operators.smooth_activations import ACTIVATIONS, derivatives

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
Parameters = tuple[list[Tensor], list[Tensor]]


def parameters(sizes: tuple[int, ...], device: torch.device) -> Parameters:
    """Weights and biases of a perceptron with these sizes, in float64."""
    weights = [torch.randn(n, m, dtype=torch.float64, device=device) / m**0.5 for m, n in pairwise(sizes)]
    biases = [torch.randn(n, dtype=torch.float64, device=device) for n in sizes[1:]]
    for parameter in (*weights, *biases):
        parameter.requires_grad_()
    return weights, biases


def network(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = ACTIVATIONS[activation](x @ weight.t() + bias)
    return (x @ weights[-1].t() + biases[-1]).squeeze(-1)


def nested(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str, spatial: int) -> Jet:
    x = x if x.requires_grad else x.detach().requires_grad_()
    u = network(x, weights, biases, activation)
    (gradient,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    seconds = [torch.autograd.grad(gradient[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(spatial)]
    return Jet(u, gradient, torch.stack(seconds).sum(0))


def loss(jet: Jet) -> Tensor:
    return (jet.laplacian + jet.value.sin()).square().mean() + (jet.gradient * jet.value[:, None]).mean()


def error(ours: Tensor, expected: Tensor) -> float:
    return float(((ours - expected).norm() / expected.norm()).detach())


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients


@activations
def test_derivatives_are_those_of_autograd(activation: str) -> None:
    z = (3 * torch.randn(101, dtype=torch.float64)).requires_grad_()
    expected = ACTIVATIONS[activation](z)
    for order, ours in enumerate(derivatives(activation, z.detach(), 5)):
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-11, atol=1e-13, msg=f"order {order}")
        (expected,) = torch.autograd.grad(expected.sum(), z, create_graph=True)


@activations
def test_derivatives_far_out_are_their_limits(activation: str, device: torch.device) -> None:
    """Where squares overflow, too: the Laplacian is finite wherever its limit is."""
    if activation == "sin":
        pytest.skip("it has no limit")
    value = torch.tensor([1e4, -1e4, 1e20, -1e20, 3e38, -3e38], device=device)
    ones = torch.ones_like(value)
    out = forward_laplacian_activation(torch.stack([value, ones, ones]), None, activation, 1)
    slope = torch.zeros_like(value) if activation == "tanh" else (value > 0).float()
    expected = torch.tanh(value) if activation == "tanh" else value * slope
    torch.testing.assert_close(out, torch.stack([expected, slope, slope]), rtol=1e-6, atol=0)
    for derivative in derivatives(activation, value, 5):
        assert derivative.isfinite().all()


SIZES = {
    "three hidden layers": ((3, 33, 17, 25, 1), 3),
    "time": ((4, 21, 12, 1), 3),
    "one coordinate": ((1, 15, 9, 1), 1),
    "one hidden layer": ((2, 31, 1), 2),
    "many coordinates": ((MOST_COORDINATES + 3, 15, 20, 1), MOST_COORDINATES + 1),
    "one unit": ((3, 1, 1, 1), 2),
}


def everything(
    function: Callable[..., Jet], x: Tensor, weights: list[Tensor], biases: list[Tensor], *rest: object
) -> dict[str, Tensor]:
    """Value, gradient, Laplacian, and the gradient of a loss of all three with respect to all parameters."""
    jet = function(x, weights, biases, *rest)
    assert jet.value.shape == jet.laplacian.shape == x.shape[:1] and jet.gradient.shape == x.shape
    gradients = torch.autograd.grad(loss(jet), [*weights, *biases])
    return {**jet._asdict(), "parameters": torch.cat([g.reshape(-1) for g in gradients])}


@activations
@pytest.mark.parametrize("case", SIZES)
def test_equals_nested_autograd(activation: str, case: str, device: torch.device) -> None:
    """In the norm over the points, to 1e-12 in float64, and to 1e-6 in float32 or twice nested autograd's own error."""
    sizes, spatial = SIZES[case]
    weights, biases = parameters(sizes, device)
    x = torch.rand(37, sizes[0], dtype=torch.float64, device=device)
    exact = everything(nested, x, weights, biases, activation, spatial)
    ours = everything(fusedops.forward_laplacian, x, weights, biases, activation, spatial)
    stock = everything(forward_laplacian_stock, x, weights, biases, activation, spatial)
    for what, expected in exact.items():
        assert max(error(ours[what], expected), error(stock[what], expected)) < 1e-12, what

    single = [[p.detach().float().requires_grad_() for p in kind] for kind in (weights, biases)]
    ours = everything(fusedops.forward_laplacian, x.float(), *single, activation, spatial)
    own = everything(nested, x.float(), *single, activation, spatial)
    for what, expected in exact.items():
        assert ours[what].dtype == torch.float32
        assert error(ours[what], expected) < max(1e-6, 2 * error(own[what], expected)), what


def test_wide_last_layer_and_no_biases(device: torch.device) -> None:
    """More units than one program has in its hands; biases left out."""
    weights, _ = parameters((3, 5, MOST_UNITS + 3, 1), device)
    x = torch.rand(11, 3, dtype=torch.float64, device=device)
    jet = fusedops.forward_laplacian(x, weights, [None] * 3, "tanh")
    zeros = [torch.zeros(len(w), dtype=torch.float64, device=device) for w in weights]
    for ours, expected in zip(jet, nested(x, weights, zeros, "tanh", 3), strict=True):
        assert error(ours, expected) < 1e-12


def test_no_points(device: torch.device) -> None:
    weights, biases = parameters((3, 5, 4, 1), device)
    jet = fusedops.forward_laplacian(torch.rand(0, 3, dtype=torch.float64, device=device), weights, biases, "tanh")
    assert [tuple(part.shape) for part in jet] == [(0,), (0, 3), (0,)]
    for gradient in torch.autograd.grad(jet.laplacian.sum(), [*weights, *biases[:-1]]):
        assert not gradient.any()


@pytest.mark.interpreter
def test_programs_go_over_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients whose sums over the points are spread over fewer programs than there are tiles."""
    from fusedops.kernels import forward_laplacian_layers as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    monkeypatch.setattr(kernels, "PROGRAMS_INPUT_BACKWARD", 5)
    weights, biases = parameters((3, 200, 150, 1), torch.device("cpu"))
    x = torch.rand(101, 3, dtype=torch.float64)
    ours = everything(fusedops.forward_laplacian, x, weights, biases, "silu", 3)
    for what, expected in everything(forward_laplacian_stock, x, weights, biases, "silu", 3).items():
        assert error(ours[what], expected) < 1e-12, what


@pytest.mark.interpreter
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (63, 37, 200), (500, 129, 17), (301, 64, 128)])
def test_products(rows: int, inputs: int, outputs: int) -> None:
    """Odd sizes, several tiles; the interpreter's float32 products are NumPy's."""
    from fusedops.kernels import products

    a, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    torch.testing.assert_close(products.product(a, weight), a @ weight.t(), rtol=1e-4, atol=1e-4)


def test_paths_tell_whose_products_run() -> None:
    """Channels times a weight are ours in float32 from 32 units on; gradients of weights are always cuBLAS's."""
    z, x, wide, narrow = torch.rand(5, 4, 32), torch.rand(4, 3), torch.rand(32, 32), torch.rand(31, 32)
    first, rest = torch.rand(32, 3), ("tanh", 3)
    for weight, expected in ((wide, "triton"), (narrow, "cublas+triton"), (wide.double(), "cublas+triton")):
        linear, of_input = (z, None, weight, *rest), (x, first, None, weight, *rest)
        assert linear_module.forward_laplacian_linear_operator.kernel.path(*linear) == expected
        assert linear_module.forward_laplacian_input_linear_operator.kernel.path(*of_input) == expected
    assert linear_module.forward_laplacian_linear_backward_operator.kernel.path == "cublas+triton"
    assert linear_module.forward_laplacian_input_linear_backward_operator.kernel.path == "cublas+triton"


@pytest.mark.gpu
def test_products_have_the_error_of_float32() -> None:
    """At most twice cuBLAS's own, for uniform and for mixed scales, where TF32's would be a thousand times that."""
    from fusedops.kernels import products

    for scale in (1.0, torch.logspace(-4, 4, 128, device="cuda")):
        a, weight = torch.tanh(torch.randn(100_003, 128, device="cuda")) * scale, torch.randn(96, 128, device="cuda")
        exact = a.double() @ weight.double().t()
        assert error(products.product(a, weight), exact) < 2 * error(a @ weight.t(), exact)


@pytest.mark.gpu
def test_products_propagate_what_is_not_finite() -> None:
    """As float32 products do, though an infinity's small part is NaN."""
    from fusedops.kernels import products

    a, weight = torch.randn(300, 64, device="cuda"), torch.randn(40, 64, device="cuda")
    a[3, 5], a[70, 1], a[71, 9], weight[7, 5], weight[8, 2] = torch.inf, torch.nan, -torch.inf, 0.0, torch.inf
    ours, stock = products.product(a, weight), a @ weight.t()
    assert torch.equal(ours.isnan(), stock.isnan()) and torch.equal(ours.isinf(), stock.isinf())
    assert stock.isnan().any() and stock.isinf().any()


# ---------------------------------------------------------------------------------------------------------------------
# Higher orders and transforms


@activations
def test_orders_above_the_third(activation: str, device: torch.device) -> None:
    """The gradient with respect to the points, and a product with the Hessian of the parameters: fourth order."""
    weights, biases = parameters((3, 7, 5, 6, 1), device)
    x = torch.rand(9, 3, dtype=torch.float64, device=device, requires_grad=True)
    results = []
    for function in (fusedops.forward_laplacian, nested):
        leaves = [x, *weights, *biases]
        gradients = torch.autograd.grad(loss(function(x, weights, biases, activation, 3)), leaves, create_graph=True)
        across = sum(
            (g * torch.arange(g.numel(), dtype=g.dtype, device=device).view_as(g).cos()).sum() for g in gradients
        )
        results.append([*gradients, *torch.autograd.grad(across, leaves)])
    for ours, expected in zip(*results, strict=True):
        assert error(ours, expected) < 1e-10


def test_transforms() -> None:
    """torch.func.grad, jvp, hessian and vmap of a loss of the parameters."""
    weights, biases = parameters((2, 5, 4, 3, 1), torch.device("cpu"))
    x = torch.rand(6, 2, dtype=torch.float64)
    flat = torch.cat([p.detach().reshape(-1) for p in (*weights, *biases)])

    def of(function: Callable[..., Jet]) -> Callable[[Tensor], Tensor]:
        def loss_of(vector: Tensor) -> Tensor:
            parts = iter(vector.split([p.numel() for p in (*weights, *biases)]))
            shaped = [next(parts).view_as(p) for p in (*weights, *biases)]
            return loss(function(x, shaped[:4], shaped[4:], "tanh", 2))

        return loss_of

    ours, stock = of(fusedops.forward_laplacian), of(forward_laplacian_stock)
    torch.testing.assert_close(torch.func.grad(ours)(flat), torch.func.grad(stock)(flat))
    torch.testing.assert_close(torch.func.hessian(ours)(flat), torch.func.hessian(stock)(flat))
    tangent = torch.randn_like(flat)
    for a, b in zip(torch.func.jvp(ours, (flat,), (tangent,)), torch.func.jvp(stock, (flat,), (tangent,)), strict=True):
        torch.testing.assert_close(a, b)
    batch = torch.stack([flat, flat + 0.1])
    torch.testing.assert_close(torch.vmap(torch.func.grad(ours))(batch), torch.vmap(torch.func.grad(stock))(batch))


def test_forward_mode_over_a_backward_pass_is_right_or_an_error() -> None:
    """Without create_graph the backward pass runs on operators that have no derivative: they say so."""
    weights, biases = parameters((2, 5, 4, 1), torch.device("cpu"))
    x = torch.rand(6, 2, dtype=torch.float64)
    with forward_ad.dual_level():
        first = forward_ad.make_dual(weights[0].detach(), torch.randn_like(weights[0])).requires_grad_()
        value = loss(fusedops.forward_laplacian(x, [first, *weights[1:]], biases, "tanh"))
        assert forward_ad.unpack_dual(value).tangent is not None
        with pytest.raises(NotImplementedError, match=r"forward_laplacian_\w+_backward has no forward-mode"):
            torch.autograd.grad(value, first)


def test_two_backwards_over_one_graph_are_equal(device: torch.device) -> None:
    weights, biases = parameters((3, 7, 5, 6, 1), device)
    x = torch.rand(9, 3, dtype=torch.float64, device=device)
    value = loss(fusedops.forward_laplacian(x, weights, biases, "gelu"))
    first = torch.autograd.grad(value, [*weights, *biases], retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(value, [*weights, *biases]), strict=True):
        assert torch.equal(a, b)


def test_compiles_without_a_break() -> None:
    weights, biases = parameters((3, 7, 5, 6, 1), torch.device("cpu"))

    def step(x: Tensor) -> Tensor:
        return loss(fusedops.forward_laplacian(x, weights, biases, "sin"))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for points in (9, 13):
        x = torch.rand(points, 3, dtype=torch.float64)
        ours = torch.autograd.grad(compiled(x), [*weights, *biases])
        torch.testing.assert_close(ours, torch.autograd.grad(step(x), [*weights, *biases]))


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_an_activation_without_a_second_derivative_is_refused(activation: str) -> None:
    weights, biases = parameters((3, 7, 5, 1), torch.device("cpu"))
    message = f"activation is '{activation}', whose second derivative is zero; allowed: 'tanh', 'sin', 'silu', 'gelu'"
    with pytest.raises(ValueError, match=message):
        fusedops.forward_laplacian(torch.rand(4, 3, dtype=torch.float64), weights, biases, activation)
    with pytest.raises(ValueError, match=message):
        forward_laplacian_activation(torch.randn(5, 2, 3), None, activation, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.rand(4, 3)}, r"weights\[0\] is torch.float64, x is torch.float32"),
        ({"x": torch.ones(4, 3, dtype=torch.int64)}, "x is torch.int64; allowed: float16, bfloat16, float32, float64"),
        ({"x": torch.rand(3, dtype=torch.float64)}, r"x has shape \(3,\); it must be \(N, D\)"),
        ({"x": torch.rand(4, 2, dtype=torch.float64)}, r"weights\[0\] has shape \(7, 3\); .* it must be \(7, 2\)"),
        ({"activation": "softplus"}, "activation is 'softplus'; allowed: 'tanh'"),
        ({"spatial": 0}, "spatial is 0; allowed: 1 to 3"),
        ({"spatial": 4}, "spatial is 4; allowed: 1 to 3"),
        ({"biases": []}, "3 weights and 0 biases"),
    ],
)
def test_bad_input_is_refused_naming_it(change: dict[str, object], message: str) -> None:
    weights, biases = parameters((3, 7, 5, 1), torch.device("cpu"))
    arguments = {"x": torch.rand(4, 3, dtype=torch.float64), "weights": weights, "biases": biases, "activation": "tanh"}
    with pytest.raises((TypeError, ValueError), match=message):
        fusedops.forward_laplacian(**(arguments | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(2, 4, 3), None, "tanh", 1), r"z has shape \(2, 4, 3\); it must be \(D \+ 2, ..., W\)"),
        ((torch.randn(5, 4, 3), torch.randn(4), "tanh", 3), r"bias has shape \(4,\); .* it must be \(3,\)"),
        ((torch.randn(5, 4, 3), torch.randn(3).double(), "tanh", 3), "bias is torch.float64, z is torch.float32"),
    ],
)
def test_the_activation_refuses_naming_the_argument(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        forward_laplacian_activation(*arguments)
