"""silu, silu_mul and smooth_relu: what their generated checks (test_operators.py) do not cover."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
from fusedops.registration import FLOATING, INTERPRETING
from fusedops.testing.accuracy import VALUE_FACTOR

ALPHA = 0.1


def stock_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def stock_smooth_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, ALPHA * x)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "silu": (fusedops.silu, F.silu, 1),
    "silu_mul": (fusedops.silu_mul, stock_silu_mul, 2),
    "smooth_relu": (partial(fusedops.smooth_relu, alpha=ALPHA), stock_smooth_relu, 1),
}

functions = pytest.mark.parametrize("name", FUNCTIONS)
dtypes = pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype).removeprefix("torch."))


def arguments(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """x, and for a function of two tensors a random partner of moderate size."""
    return (x,) if FUNCTIONS[name][2] == 1 else (x, torch.randn_like(x))


def with_gradient(function: Callable[..., Tensor], args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output and the gradients of its sum, whose incoming gradient has stride 0."""
    leaves = tuple(a.detach().requires_grad_() for a in args)
    output = function(*leaves)
    return (output.detach(), *torch.autograd.grad(output.sum(), leaves))


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


@functions
@dtypes
def test_special_values(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Zero, infinities, NaN and the largest and smallest numbers go where stock PyTorch sends them."""
    ours, stock, _ = FUNCTIONS[name]
    info = torch.finfo(dtype)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, info.min, 1.0, -1.0]
    if not (INTERPRETING and dtype == torch.bfloat16):  # see test_subnormal_halves
        special += [info.tiny, -info.tiny]
    args = arguments(name, torch.tensor(special, dtype=dtype, device=device))
    results = with_gradient(ours, args), with_gradient(stock, args), with_gradient(stock, [a.double() for a in args])
    for result, low, exact in zip(*results, strict=True):
        exact = exact.to(dtype)
        close = partial(torch.isclose, result, rtol=info.eps, equal_nan=True)  # an ulp: the interpreter truncates
        same = close(exact) | close(low)
        assert same.all(), f"{result[~same]} against {exact[~same]} in float64, {low[~same]} in stock {dtype}"


@functions
@dtypes
@pytest.mark.parametrize(
    "ends", [(-1e3, -80.0), (-80.0, -10.0), (-10.0, -1e-3), (-1e-3, 1e-3), (1e-3, 20.0), (20.0, 1e4)]
)
def test_relative_error(name: str, dtype: torch.dtype, ends: tuple[float, float], device: torch.device) -> None:
    """In each range, the negative tail among them, the relative error is at most twice stock's largest there."""
    ours, stock, _ = FUNCTIONS[name]
    x = torch.empty(4099, dtype=torch.float64, device=device).uniform_(*ends).to(dtype)
    args = arguments(name, x)
    result, low, exact = ours(*args), stock(*args), stock(*(a.double() for a in args))
    info = torch.finfo(dtype)
    measured = (exact.abs() >= info.tiny) & (exact.abs() <= info.max) & (args[-1] != 0)
    scale = exact.abs().clamp_min(info.tiny)
    error, own = ((t.double() - exact).abs() / scale for t in (result, low))
    # float64 is its own reference: what both may round.
    own_error = torch.where(measured, own, 0).max() if dtype != torch.float64 else 2 * info.eps
    assert torch.where(measured, error, 0).max() <= VALUE_FACTOR * own_error + 2 * info.eps


@functions
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_subnormal_halves(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Results below the smallest normal number are the nearest subnormal ones, not zero."""
    if INTERPRETING and dtype == torch.bfloat16:
        pytest.skip("the interpreter converts subnormal bfloat16 wrongly, to and from float32")
    ours, stock, _ = FUNCTIONS[name]
    info = torch.finfo(dtype)
    step = info.tiny * info.eps
    x = (torch.randint(-(2**7), 2**7, (1001,), device=device) * step).to(dtype)
    args = (x,) if name != "silu_mul" else (x, torch.rand_like(x) + 0.5)
    exact = stock(*(a.double() for a in args))
    assert (ours(*args).double() - exact).abs().max() <= 0.5 * step * (1 + 1e-3)
    assert (ours(*args) != 0).sum() > 500


@functions
@dtypes
def test_mixed_scales(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Magnitudes from subnormal to nearly overflowing in one tensor: each value right by itself, gradients too."""
    ours, stock, _ = FUNCTIONS[name]
    info = torch.finfo(dtype)
    exponents = torch.empty(4099, dtype=torch.float64, device=device).uniform_(-8, 3)
    x = (10.0**exponents * torch.where(torch.rand_like(exponents) > 0.5, 1.0, -1.0)).to(dtype)
    args = arguments(name, x)
    results = with_gradient(ours, args), with_gradient(stock, args), with_gradient(stock, [a.double() for a in args])
    for result, low, exact in zip(*results, strict=True):
        scale = exact.abs().clamp_min(info.tiny)
        measured = (exact.abs() <= info.max) & low.isfinite()
        error, own = (torch.where(measured, (t.double() - exact).abs() / scale, 0) for t in (result, low))
        allowed = 3 * own.max() if dtype != torch.float64 else torch.where(measured, 1e6 * info.eps, 0).max()
        assert error.max() <= allowed + 2 * info.eps


def test_alpha_is_exact_in_float64(device: torch.device) -> None:
    """0.1 is not the float32 nearest to it; a Python float could arrive at a kernel as one."""
    x = torch.randn(1001, dtype=torch.float64, device=device)
    for alpha in (0.1, 1 / 3, -0.7, 1e-300, 2):
        assert torch.equal(fusedops.smooth_relu(x, alpha), torch.where(x > 0, x, alpha * x))
        (grad,) = torch.autograd.grad(fusedops.smooth_relu(x.requires_grad_(), alpha).sum(), x)
        x = x.detach()
        assert torch.equal(grad, torch.where(x > 0, torch.ones_like(x), alpha))


def test_smooth_relu_at_zero(device: torch.device) -> None:
    """The derivative at 0 is alpha, as documented; zeros keep their sign."""
    x = torch.tensor([0.0, -0.0], device=device, requires_grad=True)
    y = fusedops.smooth_relu(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 0.01))
    assert torch.equal(y.signbit(), torch.tensor([False, True], device=device))


# ---------------------------------------------------------------------------------------------------------------------
# Layout, size, device


@functions
def test_memory_format_is_kept(name: str, device: torch.device) -> None:
    """Output and gradients of channels-last tensors are channels-last, in two and three dimensions."""
    ours, _, _ = FUNCTIONS[name]
    for shape, memory_format in (
        ((2, 3, 5, 7), torch.channels_last),
        ((2, 3, 4, 5, 3), torch.channels_last_3d),
    ):
        x = torch.randn(shape, device=device).to(memory_format=memory_format)
        for result in with_gradient(ours, arguments(name, x)):
            assert result.is_contiguous(memory_format=memory_format)
            assert result.stride() == x.stride()


@functions
def test_partner_of_another_layout(name: str, device: torch.device) -> None:
    """The first argument decides the output's layout; a gradient comes in its input's shape whatever arrives."""
    ours, stock, count = FUNCTIONS[name]
    x = torch.randn(6, 5, 4, dtype=torch.float64, device=device).permute(2, 0, 1)
    partners = (x.contiguous(), x[:, :1].expand_as(x), x.flip(0).transpose(0, 2).contiguous().transpose(0, 2))
    for partner in partners:
        args = (x, partner)[:count]
        assert ours(*args).stride() == x.stride()
        torch.testing.assert_close(with_gradient(ours, args), with_gradient(stock, args))


@functions
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2), (), (1,), (1, 1)])
def test_empty_and_single(name: str, shape: tuple[int, ...], device: torch.device) -> None:
    """A grid of no blocks is not launched; tensors without dimensions have a value."""
    ours, stock, _ = FUNCTIONS[name]
    args = arguments(name, torch.randn(shape, dtype=torch.float64, device=device))
    torch.testing.assert_close(with_gradient(ours, args), with_gradient(stock, args))


def test_one_tensor_twice(device: torch.device) -> None:
    """Gradients of both places add up."""
    x = torch.randn(5, 7, dtype=torch.float64, device=device, requires_grad=True)
    (ours,) = torch.autograd.grad(fusedops.silu_mul(x, x).sum(), x)
    (stock,) = torch.autograd.grad(stock_silu_mul(x, x).sum(), x)
    torch.testing.assert_close(ours, stock)


@functions
def test_saved_tensors_are_watched(name: str, device: torch.device) -> None:
    """Writing to an input between forward and backward raises, as in stock PyTorch."""
    x = torch.randn(5, device=device, requires_grad=True)
    copy = x * 1
    output = FUNCTIONS[name][0](*arguments(name, copy))
    copy.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@functions
@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(name: str) -> None:
    """Offsets past 32 bits, forward and backward."""
    ours, stock, _ = FUNCTIONS[name]
    elements = 2**31 + 1025
    x = torch.randn(elements, device="cuda", dtype=torch.float16)
    args = (x,) if name != "silu_mul" else (x, x)
    leaves = tuple(a.detach().requires_grad_() for a in args)
    output = ours(*leaves)
    gradients = torch.autograd.grad(output, leaves, x)
    for part in (slice(0, 1000), slice(2**31 - 500, 2**31 + 500), slice(elements - 1000, elements)):
        parts = tuple(a[part].double().requires_grad_() for a in args)
        expected = stock(*parts)
        torch.testing.assert_close(output[part].double(), expected, rtol=2e-3, atol=1e-6)
        for gradient, exact in zip(gradients, torch.autograd.grad(expected, parts, x[part].double()), strict=True):
            torch.testing.assert_close(gradient[part].double(), exact, rtol=2e-3, atol=1e-3)


@functions
@pytest.mark.gpu
def test_addresses_past_two_to_the_31(name: str) -> None:
    """Few elements far apart in memory."""
    ours, stock, _ = FUNCTIONS[name]
    x = torch.randn(5, 2**29, device="cuda", dtype=torch.float32)[:, :: 2**27]
    args = arguments(name, x)
    torch.testing.assert_close(with_gradient(ours, args), with_gradient(stock, args))


@functions
@pytest.mark.gpu
def test_another_current_device(name: str) -> None:
    """Tensors on a GPU that is not the current one, and on the CPU while there is a GPU."""
    ours, stock, _ = FUNCTIONS[name]
    others = ["cpu", *(f"cuda:{i}" for i in range(1, torch.cuda.device_count()))]
    for other in others:
        args = arguments(name, torch.randn(1001, device=other))
        torch.testing.assert_close(with_gradient(ours, args), with_gradient(stock, args))
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_devices_that_differ() -> None:
    gate, up = torch.randn(5, device="cuda"), torch.randn(5)
    with pytest.raises(ValueError, match="up is on cpu, gate on cuda:0"):
        fusedops.silu_mul(gate, up)


# ---------------------------------------------------------------------------------------------------------------------
# Errors


@functions
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_other_dtypes(name: str, dtype: torch.dtype, where: str) -> None:
    """Refused by implementation and shape rule alike, with the argument, its dtype and what is allowed."""
    x = torch.zeros(5, dtype=dtype, device=where)
    argument = "gate" if name == "silu_mul" else "x"
    message = rf"{name}: {argument} is {dtype}; allowed: float16, bfloat16, float32, float64"
    with pytest.raises(TypeError, match=message):
        FUNCTIONS[name][0](*([x] * FUNCTIONS[name][2]))


def test_silu_mul_arguments_that_differ() -> None:
    gate = torch.randn(5, 7)
    with pytest.raises(TypeError, match=r"up is torch.float16, gate is torch.float32; they must be of one dtype"):
        fusedops.silu_mul(gate, gate.half())
    with pytest.raises(ValueError, match=r"up has shape \(7,\), gate \(5, 7\); they must be of one shape"):
        fusedops.silu_mul(gate, gate[0])


def test_a_tensor_is_no_alpha() -> None:
    """The dispatcher would take its value, and a learned alpha would get no gradient."""
    with pytest.raises(TypeError, match="smooth_relu: alpha is a tensor; allowed: a number"):
        fusedops.smooth_relu(torch.randn(5), torch.tensor(0.1, requires_grad=True))


def test_size_one_dimensions_keep_the_layout_of_the_shape_rule() -> None:
    x = torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last)
    assert fusedops.smooth_relu(x).stride() == torch.empty_like(x).stride()


# ---------------------------------------------------------------------------------------------------------------------
# Compilers, graphs


@functions
@pytest.mark.parametrize("opaque", [False, True])
def test_hand_over_to_inductor(name: str, opaque: bool) -> None:
    """Under torch.compile the stock formula stands in the graph, for Inductor to fuse, unless asked to stay."""
    torch._dynamo.reset()
    ours, stock, _ = FUNCTIONS[name]
    targets: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    args = arguments(name, torch.randn(5, 7))
    compiled = torch.compile(partial(ours, opaque=opaque), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*args), stock(*args))
    if opaque:
        assert targets == [f"fusedops.{name}.default"]
    else:
        assert targets
        assert not [target for target in targets if "fusedops" in target]


def test_stock_operations_take_what_the_operator_takes() -> None:
    """They would broadcast and promote: what raises in eager raises compiled, and autocast's rule is the operator's."""
    torch._dynamo.reset()
    gate = torch.randn(5, 7)
    compiled = torch.compile(fusedops.silu_mul, backend="eager")
    for up in (gate[0], gate.half()):
        with pytest.raises(Exception, match=r"silu_mul: up (has shape|is torch\.float16)"):
            compiled(gate, up)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(gate.bfloat16(), gate).dtype == torch.float32
    integers = torch.ones(5, dtype=torch.int64)
    with pytest.raises(Exception, match=r"smooth_relu: x is torch\.int64"):
        torch.compile(fusedops.smooth_relu, backend="eager")(integers)


@functions
@pytest.mark.parametrize("dynamic", [False, True])
def test_handed_over_gradients(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    ours, stock, _ = FUNCTIONS[name]
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (5, 3):
        args = arguments(name, torch.randn(rows, 7, dtype=torch.float64))
        torch.testing.assert_close(with_gradient(compiled, args), with_gradient(stock, args))


@functions
@pytest.mark.gpu
def test_cuda_graph(name: str) -> None:
    """Captured once, forward and backward; a replay computes on the new inputs."""
    ours, stock, _ = FUNCTIONS[name]
    args = arguments(name, torch.randn(1001, device="cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with_gradient(ours, args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = with_gradient(ours, args)
    for a in args:
        a.normal_()
    graph.replay()
    torch.testing.assert_close(results, with_gradient(stock, args))


@functions
@pytest.mark.gpu
@pytest.mark.slow
def test_reduce_overhead(name: str) -> None:
    """CUDA graphs as torch.compile makes them, around the opaque operator."""
    torch._dynamo.reset()
    ours, stock, _ = FUNCTIONS[name]
    compiled = torch.compile(
        lambda *a: ours(*(t * 2 for t in a), opaque=True) + 1, mode="reduce-overhead", fullgraph=True
    )
    for _ in range(4):
        args = arguments(name, torch.randn(1001, device="cuda"))
        expected = with_gradient(lambda *a: stock(*(t * 2 for t in a)) + 1, args)
        torch.testing.assert_close(with_gradient(compiled, args), expected)
