"""linear_gelu_dropout beyond what every operator is put to: the mask, its seed, the roads on a GPU, extreme values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops import counting, registry
from fusedops.operators import philox
from fusedops.operators.linear_gelu_dropout import one_kernel
from fusedops.registration import INTERPRETING

OPERATOR = registry.operator("linear_gelu_dropout")
BACKWARD = registry.operator("gelu_dropout_backward")
HALVES = [torch.float16] if INTERPRETING else [torch.float16, torch.bfloat16]

both_processes = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
on_cpu_and_gpu = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
approximations = pytest.mark.parametrize("approximate", ["none", "tanh"])


def layer(
    rows: int = 33,
    depth: int = 17,
    columns: int = 65,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, depth, device=device, dtype=dtype)
    weight = torch.randn(columns, depth, device=device, dtype=dtype) / depth**0.5
    bias = torch.randn(columns, device=device, dtype=dtype)
    for tensor in (x, weight, bias):
        tensor.requires_grad_(grad)
    return x, weight, bias


def seed(value: int, device: str = "cpu") -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


def assert_as_accurate(what: str, ours: Tensor, exact: Tensor, stock: Tensor, *, factor: float) -> None:
    """The error of `ours` against float64 is at most `factor` times stock's own, both as norms over the tensor."""
    assert ours.shape == exact.shape, what
    error, own = (float((t.detach().double() - exact.detach()).norm()) for t in (ours, stock))
    # Few elements may all be hit exactly by stock: one epsilon is allowed for.
    luck = torch.finfo(ours.dtype).eps * float(exact.detach().norm()) if exact.numel() < 32 else 0.0
    assert error <= factor * own + luck, f"{what}: error {error:.3g}, stock's own {own:.3g}"


# ---------------------------------------------------------------------------------------------------------------------
# Values


def exact_gelu(z: Tensor, approximate: str) -> Tensor:
    """In float64, to its full relative precision also where 1 + erf would cancel."""
    if approximate == "none":
        return z * torch.special.log_ndtr(z).exp()
    return z * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))


@both_processes
@approximations
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tails_keep_their_relative_precision(device: str, approximate: str, dtype: torch.dtype) -> None:
    """Every z of a fine grid, far into the negative tail, where it is normal in the dtype: no worse than stock."""
    lowest = {torch.float16: -3.5, torch.bfloat16: -8.0}.get(dtype, -5.0)
    z = torch.linspace(lowest, 12, 4001, device=device, dtype=torch.float64).to(dtype)
    one = torch.ones(1, 1, device=device, dtype=dtype)
    ours = OPERATOR(z[:, None], one, None, 0.0, approximate, None, True)[0][:, 0].double()
    exact = exact_gelu(z.double(), approximate)
    stock = F.gelu(z, approximate=approximate).double()
    relative = [((y - exact) / exact).abs()[z != 0].max() for y in (ours, stock)]
    rounding = torch.finfo(dtype).eps * (1 if INTERPRETING and dtype == torch.bfloat16 else 0.6)
    assert relative[0] <= max(2 * relative[1], rounding), f"ours {relative[0]:.2e}, stock {relative[1]:.2e}"


@both_processes
@approximations
@pytest.mark.parametrize("dtype", HALVES)
def test_one_kernel_matches_the_other_road(device: str, approximate: str, dtype: torch.dtype) -> None:
    """Shapes around and below a tile, from both roads, against float64."""
    for rows, depth, columns in ((1, 1, 1), (3, 7, 1), (17, 33, 3), (70, 40, 33), (33, 129, 257), (2, 0, 3)):
        x, weight, bias = layer(rows, max(depth, 1), columns, device=device, dtype=dtype)
        x, weight = x[:, :depth], weight[:, :depth]
        exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate=approximate)
        stock = F.gelu(F.linear(x, weight, bias), approximate=approximate)
        for save_z in (False, True):
            y = OPERATOR(x, weight, bias, 0.0, approximate, None, save_z)[0]
            assert_as_accurate(f"{rows} x {depth} x {columns}, save_z={save_z}", y, exact, stock, factor=2)


@pytest.mark.interpreter
def test_every_tile_on_odd_sizes_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops.kernels import linear_gelu

    x = torch.randn(300, 131, dtype=torch.float16)[::2, ::2]  # (150, 66)
    weight = torch.randn(66, 261, dtype=torch.float16).t() / 8
    bias = torch.randn(522, dtype=torch.float16)[::2]
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()))
    stock = F.gelu(F.linear(x, weight, bias))
    for tile in linear_gelu.TILES:
        monkeypatch.setattr(linear_gelu, "choose_tile", lambda *_, tile=tile: tile)
        y = OPERATOR(x, weight, bias, 0.0, "none", None, False)[0]
        assert_as_accurate(str(tile), y, exact, stock, factor=2)


@pytest.mark.interpreter
def test_tiles_fit_the_gpu() -> None:
    """Any shape on any GPU gets a tile that its shared memory holds; large products large ones, few rows flat ones."""
    from fusedops.kernels.linear_gelu import choose_tile

    for shared_memory in (48 << 10, 99 << 10, 163 << 10, 227 << 10):
        for rows in (1, 16, 17, 64, 100, 1000, 100_000):
            for columns in (1, 100, 4096):
                tile = choose_tile(rows, columns, 132, shared_memory)
                assert tile.shared_memory <= shared_memory
                assert tile.rows < 2 * max(rows, 16)
    assert choose_tile(16384, 4096, 132, 227 << 10)[:2] == (128, 256)
    assert choose_tile(64, 4096, 132, 227 << 10).rows <= 64


@both_processes
def test_nothing_to_compute(device: str) -> None:
    for shape, columns in (((0, 5), 3), ((2, 0, 5), 3), ((4, 5), 0), ((0, 0), 0)):
        x = torch.randn(shape, device=device, requires_grad=True)
        weight = torch.randn(columns, shape[-1], device=device, requires_grad=True)
        bias = torch.randn(columns, device=device, requires_grad=True)
        y = fusedops.linear_gelu_dropout(x, weight, bias, 0.5)
        assert y.shape == (*shape[:-1], columns)
        y.sum().backward()
        for tensor in (x, weight, bias):
            assert tensor.grad is not None and tensor.grad.shape == tensor.shape and not tensor.grad.any()


# ---------------------------------------------------------------------------------------------------------------------
# The mask


@both_processes
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_mask_is_philox(device: str, dtype: torch.dtype) -> None:
    """Forward and gradient drop what philox.keep_mask says, and multiply the rest by 1 / (1 - p)."""
    x, weight, bias = layer(41, 5, 77, device=device, dtype=dtype)
    bias += 20  # gelu(z) = z, gelu'(z) = 1
    p, value = 0.3, int(torch.randint(0, 2**62, ()))
    keep = philox.keep_mask(seed(value), (41, 77), p).to(device)
    y, z = OPERATOR(x, weight, bias, p, "none", seed(value, device), True)
    dz = BACKWARD(torch.ones_like(z), z, p, "none", seed(value, device))
    for name, result, kept in (("y", y, z), ("dz", dz, torch.ones_like(z))):
        assert torch.equal(result != 0, keep), f"{name}, seed {value}"
        torch.testing.assert_close(result, torch.where(keep, kept.double() / (1 - p), 0).to(dtype))


@both_processes
def test_an_element_keeps_its_bits_in_every_shape(device: str) -> None:
    """The mask goes by the place in the result alone: rows split off, another dtype and another road change nothing."""
    x, weight, bias = layer(24, 5, 40, device=device)
    bias += 20
    flat = OPERATOR(x, weight, bias, 0.5, "none", seed(5, device), True)[0] != 0
    shaped = OPERATOR(x.view(2, 3, 4, 5), weight, bias, 0.5, "tanh", seed(5, device), False)[0] != 0
    half = OPERATOR(x.half(), weight.half(), bias.half(), 0.5, "none", seed(5, device), True)[0] != 0
    first = OPERATOR(x[:7], weight, bias, 0.5, "none", seed(5, device), True)[0] != 0
    assert torch.equal(shaped.view(24, 40), flat)
    assert torch.equal(half, flat)
    assert torch.equal(first, flat[:7])


@both_processes
def test_p_of_one_drops_all(device: str) -> None:
    x, weight, bias = layer(device=device, grad=True)
    y = fusedops.linear_gelu_dropout(x, weight, bias, 1.0)
    y.sum().backward()
    for tensor in (y, x.grad, weight.grad, bias.grad):
        assert tensor is not None and not tensor.any()


@on_cpu_and_gpu
def test_without_dropout_no_random_number_is_drawn(device: str) -> None:
    x, weight, bias = layer(device=device)
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    expected = F.gelu(F.linear(x, weight, bias))
    for p, training in ((0.0, True), (0.4, False), (1.0, False)):
        torch.testing.assert_close(fusedops.linear_gelu_dropout(x, weight, bias, p, "none", training), expected)
    assert torch.equal(state, torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state())


@on_cpu_and_gpu
def test_seeds(device: str) -> None:
    """The same manual_seed gives the same masks, the next call another; two layers have different ones."""
    x, weight, bias = layer(64, 8, 64, device=device)
    bias += 20

    def masks() -> list[Tensor]:
        torch.manual_seed(7)
        return [fusedops.linear_gelu_dropout(x, weight, bias, 0.5) != 0 for _ in range(3)]

    first, again = masks(), masks()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for a, b in ((0, 1), (1, 2), (0, 2)):
        agreement = (first[a] == first[b]).double().mean()
        assert abs(agreement - 0.5) < 0.05


@on_cpu_and_gpu
def test_mean_is_kept(device: str) -> None:
    x, weight, bias = layer(1000, 4, 500, device=device)
    y = fusedops.linear_gelu_dropout(x, weight, bias + 20, 0.1)
    dropped = float((y == 0).double().mean())
    assert abs(dropped - 0.1) < 0.002
    assert abs(float(y.mean() / F.gelu(F.linear(x, weight, bias + 20)).mean()) - 1) < 0.003


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@both_processes
@approximations
@pytest.mark.parametrize("save_z", [True, False])
def test_finite_differences_under_a_fixed_mask(device: str, approximate: str, save_z: bool) -> None:
    """Both outputs, first and second order, whether the backward pass has z or computes it again."""
    tensors = layer(3, 4, 5, device=device, dtype=torch.float64, grad=True)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        y, z = OPERATOR(*tensors, 0.3, approximate, seed(11, device), save_z)
        return (y, z) if save_z else (y,)

    # In the interpreter along random directions alone: a whole Jacobian takes 15 s there.
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, fast_mode=INTERPRETING)
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=INTERPRETING)


@both_processes
def test_gradients_of_every_subset(device: str) -> None:
    """A frozen weight or bias gets no gradient, and the others get theirs."""
    for wanted in range(1, 8):
        tensors = layer(device=device)
        for i, tensor in enumerate(tensors):
            tensor.requires_grad_(bool(wanted >> i & 1))
        fusedops.linear_gelu_dropout(*tensors).sum().backward()
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        F.gelu(F.linear(*copies)).sum().backward()
        for ours, stock in zip(tensors, copies, strict=True):
            assert (ours.grad is None) == (stock.grad is None)
            if stock.grad is not None:
                torch.testing.assert_close(ours.grad, stock.grad)


def test_what_is_kept_for_the_backward_pass() -> None:
    """The arguments, the seed and z: no mask, and no activation beside z."""
    tensors = layer(grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = fusedops.linear_gelu_dropout(*tensors, 0.5)
    assert sum(t.numel() for t in kept) == sum(t.numel() for t in tensors) + y.numel() + 1
    with torch.no_grad():
        assert OPERATOR(*tensors, 0.0, "none", None, False)[1].numel() == 0


@on_cpu_and_gpu
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_mask_again(device: str, use_reentrant: bool) -> None:
    tensors = layer(device=device, grad=True)

    def gradients(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        y = run()
        # Reentrant checkpointing allows backward() alone.
        for tensor in tensors:
            tensor.grad = None
        y.square().sum().backward()
        return tuple(t.grad for t in tensors)

    plain = gradients(lambda: fusedops.linear_gelu_dropout(*tensors, 0.5))
    recomputed = gradients(lambda: checkpoint(fusedops.linear_gelu_dropout, *tensors, 0.5, use_reentrant=use_reentrant))
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)


def test_transforms_draw_seeds_as_they_are_told() -> None:
    """vmap(randomness="different"): a seed an example; "same": one for all; the default refuses, as for F.dropout."""
    x, weight, bias = layer(64, 5, 40)
    bias = bias + 20

    def dropped(row: Tensor) -> Tensor:
        return fusedops.linear_gelu_dropout(row, weight, bias, 0.5) == 0

    different = torch.vmap(dropped, randomness="different")(x)
    same = torch.vmap(dropped, randomness="same")(x)
    assert different.shape == same.shape == (64, 40)
    assert (same == same[0]).all() and not (different == different[0]).all()
    assert abs(float(different.double().mean()) - 0.5) < 0.06
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(dropped)(x)


def test_per_example_gradients() -> None:
    """vmap(grad), where requires_grad does not show, against a loop."""
    x, weight, bias = layer(6, 5, 4, dtype=torch.float64)

    def loss(weight: Tensor, bias: Tensor, row: Tensor) -> Tensor:
        return fusedops.linear_gelu_dropout(row, weight, bias).square().sum()

    ours = torch.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))(weight, bias, x)
    for i, row in enumerate(x):
        leaves = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        F.gelu(F.linear(row, *leaves)).square().sum().backward()
        for batched, leaf in zip(ours, leaves, strict=True):
            torch.testing.assert_close(batched[i], leaf.grad)


# ---------------------------------------------------------------------------------------------------------------------
# Compilers, autocast


@on_cpu_and_gpu
def test_compiled_dropout(device: str) -> None:
    """Under fullgraph compile the seed is drawn anew at each call, and forward and backward share it."""
    tensors = layer(device=device, grad=True)
    torch.compiler.reset()
    compiled = torch.compile(fusedops.linear_gelu_dropout, backend="aot_eager", fullgraph=True)
    results = []
    for function in (fusedops.linear_gelu_dropout, compiled):
        torch.manual_seed(5)
        for _ in range(2):
            y = function(*tensors, 0.5, "tanh")
            results.append((y, *torch.autograd.grad(y.square().sum(), tensors)))
    for eager, traced in zip(results[:2], results[2:], strict=True):
        for a, b in zip(eager, traced, strict=True):
            torch.testing.assert_close(a, b)
    assert not torch.equal(results[2][0] != 0, results[3][0] != 0)


def test_checkpointing_inside_compile() -> None:
    tensors = layer(grad=True)
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return checkpoint(fusedops.linear_gelu_dropout, x, weight, bias, 0.5, use_reentrant=False)

    y = block(*tensors)
    keep = y != 0
    gradients = torch.autograd.grad(y.sum(), tensors)
    expected = torch.autograd.grad((F.gelu(F.linear(*tensors)) * keep * 2).sum(), tensors)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)


@on_cpu_and_gpu
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_autocast(device: str, low: torch.dtype) -> None:
    """fp32 parameters: a result in autocast's dtype, as F.linear's, and fp32 gradients close to stock's."""
    tensors = layer(64, 32, 48, device=device, grad=True)
    copies = tuple(t.detach().clone().requires_grad_() for t in tensors)
    exact = tuple(t.detach().double().requires_grad_() for t in tensors)
    with torch.autocast(device, low):
        ours = fusedops.linear_gelu_dropout(*tensors)
        stock = F.gelu(F.linear(*copies))
    assert ours.dtype == stock.dtype == low
    target = F.gelu(F.linear(*exact))
    assert_as_accurate("y", ours, target, stock, factor=2)
    for y in (ours, stock, target):
        y.backward(torch.ones_like(y))
    for i, (a, b, c) in enumerate(zip(tensors, copies, exact, strict=True)):
        assert a.grad is not None and a.grad.dtype == torch.float32
        assert_as_accurate(f"gradient {i}", a.grad, c.grad, b.grad, factor=3)


# ---------------------------------------------------------------------------------------------------------------------
# Errors, the slot


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"p": 1.5}, ValueError, r"p is 1\.5; allowed: a probability, from 0 to 1"),
        ({"p": -0.1}, ValueError, r"p is -0\.1"),
        ({"p": float("nan")}, ValueError, "p is nan"),
        ({"p": 1.5, "training": False}, ValueError, r"p is 1\.5"),
        ({"approximate": "fast"}, ValueError, "approximate is 'fast'; allowed: 'none', 'tanh'"),
        ({"x": torch.randn(())}, ValueError, "x has no dimensions"),
        ({"x": torch.randn(3, 6)}, ValueError, r"weight has shape \(7, 5\) and x \(3, 6\)"),
        ({"weight": torch.randn(5)}, ValueError, r"weight has shape \(5,\)"),
        ({"bias": torch.randn(8)}, ValueError, r"bias has shape \(8,\); allowed: \(7,\)"),
        ({"x": torch.ones(3, 5, dtype=torch.int64)}, TypeError, "x is torch.int64; allowed: float16"),
        ({"weight": torch.randn(7, 5).double()}, TypeError, "weight is torch.float64, x is torch.float32"),
        ({"bias": torch.randn(7).half()}, TypeError, "bias is torch.float16, x is torch.float32"),
        ({"weight": torch.randn(7, 5, device="meta")}, ValueError, "weight is on meta, x on cpu"),
    ],
)
def test_errors(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.randn(3, 5),
        "weight": torch.randn(7, 5),
        "bias": torch.randn(7),
        "p": 0.5,
    }
    with pytest.raises(error, match="linear_gelu_dropout: " + message):
        fusedops.linear_gelu_dropout(**{**arguments, **change})


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (None, ValueError, r"seed is None and p is 0\.5"),
        (torch.tensor([1], dtype=torch.int32), TypeError, "seed is torch.int32; allowed: int64"),
        (torch.tensor(1), ValueError, r"seed has shape \(\); allowed: \(1,\)"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), ValueError, "seed is on meta"),
    ],
)
def test_seed_errors(bad: Tensor | None, error: type[Exception], message: str) -> None:
    x, weight, bias = layer()
    with pytest.raises(error, match="linear_gelu_dropout: " + message):
        OPERATOR(x, weight, bias, 0.5, "none", bad, False)
    with pytest.raises(error, match="gelu_dropout_backward: " + message):
        BACKWARD(x, x, 0.5, "none", bad)


def test_slot() -> None:
    """mlp: fused equals native; what the operator cannot do falls back, announced and counted as stock."""
    from fusedops.slots import SLOTS

    native, fused = (SLOTS["mlp"].implementation(name).function for name in ("native", "fused"))
    x, w1, b1 = layer()
    w2, b2 = torch.randn(17, 65), torch.randn(17)
    for approximate in ("none", "tanh"):
        for p, training in ((0.0, True), (0.5, False)):
            arguments = (x, w1, b1, w2, b2, p, approximate, training)
            torch.testing.assert_close(fused(*arguments), native(*arguments))
    before = counting.executed()
    meta = [t.to("meta") for t in (x, w1, b1, w2, b2)]
    assert fused(*meta, 0.0, "none", True).shape == x.shape
    assert (counting.executed() - before)["linear_gelu_dropout", "stock"] == 1
    assert ("mlp", "the device is meta") in counting.announced_fallbacks()


# ---------------------------------------------------------------------------------------------------------------------
# What needs a GPU


def test_roads() -> None:
    """One kernel for half types in inference alone."""
    x, weight, bias = layer()
    half = [t.half() for t in (x, weight, bias)]
    assert one_kernel(*half, 0.0, "none", None, False)
    assert not one_kernel(*half, 0.0, "none", None, True)
    assert not one_kernel(*half, 0.5, "none", seed(1), False)
    assert not one_kernel(x, weight, bias, 0.0, "none", None, False)
    assert OPERATOR.kernel.path(*half, 0.0, "none", None, False) == "triton"
    assert OPERATOR.kernel.path(x, weight, bias, 0.0, "none", None, False) == "cublas+triton"


@pytest.mark.gpu
@approximations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "size", [(63, 111, 501), (1, 1024, 4096), (64, 1024, 4096), (1000, 1024, 1025), (2048, 768, 3072)]
)
def test_gpu_sizes(size: tuple[int, int, int], dtype: torch.dtype, approximate: str) -> None:
    """Values and gradients, with and without dropout, from both roads, against float64."""
    rows, depth, columns = size
    tensors = layer(rows, depth, columns, device="cuda", dtype=dtype)
    cotangent = torch.randn(rows, columns, device="cuda", dtype=dtype)
    for p in (0.0, 0.1):
        drawn = seed(int(torch.randint(0, 2**62, ())), "cuda") if p else None

        def stock(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y = F.gelu(F.linear(x, weight, bias), approximate=approximate)
            return philox.dropout(y, p, drawn)  # noqa: B023

        def results(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
            inputs = tuple(t.detach().requires_grad_() for t in inputs)
            y = function(*inputs)
            return [y, *torch.autograd.grad(y, inputs, cotangent.to(y.dtype))]

        def ours(*inputs: Tensor) -> Tensor:
            return OPERATOR(*inputs, p, approximate, drawn, True)[0]  # noqa: B023

        exact = results(stock, tuple(t.double() for t in tensors))
        own = results(stock, tensors)
        for name, *triple in zip(("y", "dx", "dweight", "dbias"), results(ours, tensors), exact, own, strict=True):
            assert_as_accurate(f"{name}, p={p}", *triple, factor=2 if name == "y" else 3)
        y = OPERATOR(*tensors, p, approximate, drawn, False)[0]
        assert_as_accurate(f"y, z not saved, p={p}", y, exact[0], own[0], factor=2)


@pytest.mark.gpu
def test_captured_graph_draws_new_masks() -> None:
    """Every replay has another mask, and its gradient has the same one."""
    x, weight, bias = layer(64, 64, 128, device="cuda", grad=True)

    def step() -> tuple[Tensor, Tensor]:
        y = fusedops.linear_gelu_dropout(x, weight, bias, 0.5)
        return y, torch.autograd.grad(y.sum(), bias)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, gradient = step()
    masks = []
    for _ in range(3):
        graph.replay()
        keep = y != 0
        masks.append(keep.clone())
        (expected,) = torch.autograd.grad((F.gelu(F.linear(x, weight, bias)) * keep * 2).sum(), bias)
        torch.testing.assert_close(gradient, expected)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_31_elements() -> None:
    """The last rows of a result past 2^31 elements: values of both roads, mask, gradient."""
    rows, columns = 2**21 + 3, 1025
    x = torch.randn(rows, 16, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, 16, device="cuda", dtype=torch.bfloat16)
    z_end = F.linear(x[-5:], weight)
    torch.testing.assert_close(OPERATOR(x, weight, None, 0.0, "none", None, False)[0][-5:], F.gelu(z_end))
    y, z = OPERATOR(x, weight, None, 0.5, "none", seed(9, "cuda"), True)
    first = (rows - 5) * columns // 8
    bits = philox._kept(seed(9), first, -(-rows * columns // 8), philox.threshold(0.5)).flatten()
    keep = bits[(rows - 5) * columns - 8 * first :][: 5 * columns].view(5, columns).cuda()
    torch.testing.assert_close(y[-5:], F.gelu(z_end) * keep * 2)
    dz = BACKWARD(torch.ones((), device="cuda", dtype=z.dtype).expand(z.shape), z, 0.5, "none", seed(9, "cuda"))
    expected = torch.ops.aten.gelu_backward(torch.ones_like(z_end), z_end) * keep * 2
    torch.testing.assert_close(dz[-5:], expected, rtol=2e-2, atol=1e-3)
