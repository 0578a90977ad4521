"""flash_attention beyond what every operator is put to: alignments, rows that see nothing, groups, strides, sizes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
from fusedops import counting, registry
from fusedops.operators import flash_attention as definition
from fusedops.registration import INTERPRETING
from fusedops.slots.attention import attention_fused, attention_native

OPERATOR = registry.operator("flash_attention")
BACKWARD = registry.operator("flash_attention_backward")
DTYPES = [torch.float16, torch.float32, torch.float64] + ([] if INTERPRETING else [torch.bfloat16])

both_alignments = pytest.mark.parametrize("alignment", definition.ALIGNMENTS)


def qkv(
    queries: int = 17,
    keys: int = 17,
    head_dim: int = 8,
    *,
    batch: int = 2,
    heads: int = 2,
    kv_heads: int = 2,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    def randn(h: int, length: int) -> Tensor:
        return torch.randn(batch, h, length, head_dim, device=device, dtype=dtype)

    return randn(heads, queries), randn(kv_heads, keys), randn(kv_heads, keys)


def visible(queries: int, keys: int, alignment: str, device: torch.device | str = "cpu") -> Tensor:
    """Which keys each query sees, by the definition of the two alignments."""
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)[None, :]
    return j <= i if alignment == "top_left" else keys - 1 - j >= queries - 1 - i


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Stock attention with an explicit mask, every row of which sees something."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def with_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = tuple(t.detach().requires_grad_() for t in inputs)
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def double(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() for t in tensors)


def assert_as_accurate_as_stock(
    function: Callable[..., Tensor],
    stock: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    grad: Tensor,
    largest_score: float = 0.0,
) -> None:
    """Errors against float64, as norms: at most twice stock's own, three times for gradients; results are no NaN.

    largest_score: float32 knows large scores, and so the exponent of a probability, to an epsilon of this.
    """
    ours = with_gradients(function, inputs, grad)
    exact = with_gradients(stock, double(inputs), grad.double())
    low = inputs if inputs[0].dtype != torch.float64 else tuple(t.float() for t in inputs)
    own = with_gradients(stock, low, grad.to(low[0].dtype))
    scale = torch.finfo(inputs[0].dtype).eps / torch.finfo(low[0].dtype).eps
    # Gradients of q and k are differences of terms of about this size, which are rounded as the arithmetic is. One that
    # is zero, as dq of a query that sees one key, is what that leaves: nothing in stock PyTorch, where both terms are
    # computed the same way.
    terms = math.prod(t.norm(dim=-1).max().item() for t in (grad.double(), *double(inputs[1:])) if t.numel())
    terms *= inputs[0].shape[-1] ** -0.5
    rounding = terms * torch.finfo(torch.promote_types(inputs[0].dtype, torch.float32)).eps
    for name, ours_, exact_, own_ in zip(("out", "dq", "dk", "dv"), ours, exact, own, strict=True):
        assert ours_.dtype == inputs[0].dtype and ours_.shape == exact_.shape, name
        error, own_error = ((t.double() - exact_).norm().item() for t in (ours_, own_))
        luck = torch.finfo(ours_.dtype).eps * exact_.norm().item() + (1 + largest_score) * rounding
        allowed = (2 if name == "out" else 3) * own_error * scale + luck
        assert error <= allowed, f"{name}: error {error:.2e}, stock's own {own_error * scale:.2e}"


def strided(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another layout."""
    if layout == "(B, S, H, D)":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "column by column":
        return tensor.mT.contiguous().mT
    if layout == "sliced":
        padded = tensor.new_zeros((*tensor.shape[:2], 2 * tensor.shape[2], tensor.shape[3] + 3))
        padded[:, :, ::2, 1:-2] = tensor
        return padded[:, :, ::2, 1:-2]
    return tensor


@contextlib.contextmanager
def tiles_of(monkeypatch: pytest.MonkeyPatch, block_m: int, block_n: int) -> Iterator[None]:
    """Every kernel runs with one size of tile."""
    from fusedops.kernels import attention_tiles, flash_attention, flash_attention_backward

    with monkeypatch.context() as patch:
        for module in (flash_attention, flash_attention_backward):
            patch.setattr(module, "tiles", lambda *_: [attention_tiles.Tile(block_m, block_n, 4, 2)])
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "(B, S, H, D)", "column by column", "sliced"])
def test_values_and_gradients(device: torch.device, dtype: torch.dtype, layout: str) -> None:
    """Odd sizes in every layout, grouped queries, a scale: causal and full."""
    for causal in (False, True):
        inputs = qkv(37, 37, 13, heads=4, device=device, dtype=dtype)
        inputs = tuple(strided(t, layout) for t in inputs)
        grad = strided(torch.randn_like(inputs[0]), layout)
        assert_as_accurate_as_stock(
            lambda q, k, v: fusedops.flash_attention(q, k, v, causal, 0.3),  # noqa: B023
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True),  # noqa: B023
            inputs,
            grad,
        )


@both_alignments
@pytest.mark.parametrize(("queries", "keys"), [(5, 40), (40, 5), (33, 34), (1, 19)])
def test_alignments(device: torch.device, alignment: str, queries: int, keys: int) -> None:
    """A non-square causal mask against stock attention with that mask; rows that see nothing are 0."""
    q, k, v = qkv(queries, keys, device=device, dtype=torch.float32, heads=4)
    mask = visible(queries, keys, alignment, device)
    seeing = mask.any(-1)
    first = int((~seeing).sum())

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fusedops.flash_attention(q, k, v, True, None, alignment)
        assert (out[:, :, :first] == 0).all()
        return out

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.pad(masked_attention(q[:, :, first:], k, v, mask[first:]), (0, 0, first, 0))

    assert_as_accurate_as_stock(ours, stock, (q, k, v), torch.randn_like(q))


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16), (64, 16), (16, 16)])
@pytest.mark.interpreter
def test_tiles(monkeypatch: pytest.MonkeyPatch, block_m: int, block_n: int) -> None:
    """Results do not depend on how sizes and diagonals fall on tiles."""
    with tiles_of(monkeypatch, block_m, block_n):
        for (queries, keys), causal, alignment in itertools.product(
            [(64, 64), (45, 70), (70, 45)], [False, True], definition.ALIGNMENTS
        ):
            args = (*qkv(queries, keys, 4, batch=1, heads=2, kv_heads=1, dtype=torch.float64), causal, None, alignment)
            out, lse = OPERATOR(*args)
            exact, exact_lse = OPERATOR.reference(*args)
            torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)
            backward = (torch.randn_like(out), *args[:3], out, lse, *args[3:])
            torch.testing.assert_close(BACKWARD(*backward), BACKWARD.reference(*backward), rtol=1e-11, atol=1e-11)


HEAD_DIMS = [1, 8, 16, 40, 64, 72, 80, 96, 111, 128, 200, 256]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_head_dims_on_a_gpu(head_dim: int, dtype: torch.dtype) -> None:
    """Every head dim, lengths that are no multiple of a tile, grouped queries, causal."""
    inputs = qkv(333, 333, head_dim, heads=4, device="cuda", dtype=dtype)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    assert_as_accurate_as_stock(
        lambda q, k, v: fusedops.flash_attention(q, k, v, True), stock, inputs, torch.randn_like(inputs[0])
    )


@pytest.mark.gpu
@both_alignments
@pytest.mark.parametrize(("queries", "keys"), [(1, 1000), (200, 1000), (1000, 200), (1024, 1024)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_on_a_gpu(queries: int, keys: int, causal: bool, alignment: str) -> None:
    q, k, v = qkv(queries, keys, 64, heads=8, device="cuda", dtype=torch.bfloat16)
    mask = visible(queries, keys, alignment, "cuda") if causal else torch.ones(queries, keys, device="cuda") > 0
    first = int((~mask.any(-1)).sum())

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.pad(masked_attention(q[:, :, first:], k, v, mask[first:]), (0, 0, first, 0))

    assert_as_accurate_as_stock(
        lambda q, k, v: fusedops.flash_attention(q, k, v, causal, None, alignment),
        stock,
        (q, k, v),
        torch.randn_like(q),
    )


@pytest.mark.gpu
def test_tf32_only_where_pytorch_allows_it() -> None:
    """float32 is as exact as in float32, unless the user lets products be rounded to TF32."""
    q, k, v = qkv(200, 200, 64, device="cuda")
    exact = fusedops.flash_attention(*double((q, k, v)))
    errors = {}
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for setting in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = setting
            errors[setting] = (fusedops.flash_attention(q, k, v) - exact).abs().max().item()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert errors["ieee"] < 5e-6
    assert 2e-5 < errors["tf32"] < 5e-3


@pytest.mark.gpu
@pytest.mark.slow
def test_addresses_past_32_bits() -> None:
    """Rows, heads and batches whose offsets pass 2^31 elements, inputs and outputs."""
    big = torch.empty(2**31 + 2**20, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv(70, 70, 64, batch=1, heads=1, kv_heads=1, device="cuda", dtype=torch.bfloat16)
    row = (2**31 + 2**19) // 69 // 8 * 8
    far = big.as_strided((1, 1, 70, 64), (row * 70, row * 70, row, 1))
    far.copy_(q)
    expected = with_gradients(fusedops.flash_attention, (q, k, v), torch.ones_like(q))
    actual = with_gradients(fusedops.flash_attention, (far, k, v), torch.ones_like(q))
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# Rows that see nothing, values that are not finite


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(6, 4, True), (3, 0, False), (3, 0, True), (0, 3, True), (40, 1, True)]
)
def test_rows_that_see_nothing(device: torch.device, queries: int, keys: int, causal: bool) -> None:
    """Output 0, log-sum-exp -inf, gradients 0, to the second order, and no NaN."""
    q, k, v = (t.requires_grad_() for t in qkv(queries, keys, 4, device=device, dtype=torch.float64))
    out, lse = OPERATOR(q, k, v, causal, None, "bottom_right")
    blind = max(queries - keys, 0) if causal else (queries if keys == 0 else 0)
    assert (out[:, :, :blind] == 0).all() and (lse[:, :, :blind] == float("-inf")).all()
    assert lse[:, :, blind:].isfinite().all() and not out.isnan().any()
    first = torch.autograd.grad(out.square().sum() + out.sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v), materialize_grads=True)
    assert (first[0][:, :, :blind] == 0).all() and (second[0][:, :, :blind] == 0).all()
    assert not any(g.isnan().any() for g in (*first, *second))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(device: torch.device, value: float) -> None:
    """In q it spoils its own row and no other; in k or v it reaches every row that sees it as in stock formulas."""
    for position in range(3):
        inputs = qkv(40, 40, 8, device=device)
        inputs[position][0, 1, 20, 3] = value
        out = fusedops.flash_attention(*inputs, True)
        exact, _ = OPERATOR.reference(*inputs, True, None, "top_left")
        rows = slice(20, 21) if position == 0 else slice(20, None)
        torch.testing.assert_close(out[0, 1, rows], exact[0, 1, rows], equal_nan=True)
        assert not out[0, 1, rows].isfinite().all()
        other = torch.ones_like(out, dtype=torch.bool)
        other[0, 1, :] = position == 0
        other[0, 1, rows] = False
        torch.testing.assert_close(out[other], exact[other])


@pytest.mark.parametrize("magnitude", [1e-4, 30.0])
def test_small_and_large_scores(device: torch.device, magnitude: float) -> None:
    """Softmaxes that are uniform, and ones that pick a single key."""
    q, k, v = qkv(33, 33, 16, device=device)
    inputs = (q * magnitude, k * magnitude, v)
    grad = torch.randn_like(q)
    assert_as_accurate_as_stock(
        lambda q, k, v: fusedops.flash_attention(q, k, v, True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        inputs,
        grad,
        largest_score=(inputs[0] @ inputs[1].mT).abs().max().item() * q.shape[-1] ** -0.5 if magnitude > 1 else 0.0,
    )


@pytest.mark.parametrize("scale", [-0.5, 0.0, 2.0])
def test_any_scale(device: torch.device, scale: float) -> None:
    inputs = qkv(19, 19, device=device, dtype=torch.float64)
    out, lse = OPERATOR(*inputs, True, scale, "top_left")
    exact, exact_lse = OPERATOR.reference(*inputs, True, scale, "top_left")
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)
    ours = with_gradients(lambda *t: fusedops.flash_attention(*t, True, scale), inputs, torch.ones_like(out))
    stock = with_gradients(lambda *t: OPERATOR.reference(*t, True, scale, "top_left")[0], inputs, torch.ones_like(out))
    torch.testing.assert_close(ours, stock)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def test_gradients_of_a_sum(device: torch.device) -> None:
    """out.sum() sends back a gradient of stride 0, a slice of out one of zeros and ones."""
    for take in (lambda out: out, lambda out: out[:, :, ::3, 1:], lambda out: out.transpose(1, 2).flatten(2)):
        inputs = qkv(19, 19, device=device, dtype=torch.float64)
        gradients = []
        for function in (fusedops.flash_attention, F.scaled_dot_product_attention):
            leaves = tuple(t.detach().requires_grad_() for t in inputs)
            gradients.append(torch.autograd.grad(take(function(*leaves)).sum(), leaves))
        torch.testing.assert_close(*gradients)


def test_heads_of_a_group_are_added_in_float32(device: torch.device) -> None:
    """The sum over 16 query heads in half precision is as exact as one rounding."""
    dtype = torch.float16
    q, k, v = qkv(9, 9, heads=16, kv_heads=1, device=device, dtype=dtype)
    grad = torch.randn_like(q)
    _, _, dk, dv = with_gradients(lambda *t: fusedops.flash_attention(*t, True), (q, k, v), grad)
    many = (q, *(t.expand(-1, 16, -1, -1) for t in (k, v)))
    exact = with_gradients(lambda *t: OPERATOR.reference(*t, True, None)[0], double(many), grad.double())
    each = with_gradients(lambda *t: fusedops.flash_attention(*t, True), many, grad)
    for name, ours, exact_, each_ in (("dk", dk, exact[2], each[2]), ("dv", dv, exact[3], each[3])):
        total = exact_.sum(1, keepdim=True)
        running = each_.new_zeros(total.shape)
        for head in range(16):
            running += each_[:, head : head + 1]
        error, in_half = ((t.double() - total).norm().item() for t in (ours, running))
        assert error < 0.75 * in_half, f"{name}: error {error:.2e}, added in half {in_half:.2e}"


def test_second_order(device: torch.device) -> None:
    """gradgradcheck with every argument in play: groups, a mask that hides whole rows, a scale."""
    inputs = tuple(t.requires_grad_() for t in qkv(5, 3, 2, batch=1, kv_heads=1, device=device, dtype=torch.float64))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fusedops.flash_attention(q, k, v, True, 0.8, "bottom_right")

    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_vectorized_hessian_of_groups(device: torch.device) -> None:
    """The vmap of torch.autograd.functional is older than that of torch.func, and knows fewer operations."""
    q, k, v = qkv(3, 3, 2, batch=1, kv_heads=1, device=device, dtype=torch.float64)

    def function(k: Tensor) -> Tensor:
        return fusedops.flash_attention(q, k, v, True).sin().sum()

    one_by_one, at_once = (torch.autograd.functional.hessian(function, k, vectorize=flag) for flag in (False, True))
    torch.testing.assert_close(at_once, one_by_one)


def test_bitwise_repeatable(device: torch.device) -> None:
    """Forward and backward give the same bits each time."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    length = 777 if device.type == "cuda" else 40
    inputs = qkv(length, length, 64, heads=4, device=device, dtype=dtype)
    grad = torch.randn_like(inputs[0])
    first, *others = (
        with_gradients(lambda *t: fusedops.flash_attention(*t, True), inputs, grad)
        for _ in range(10 if device.type == "cuda" else 2)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_results_merge_heads_without_a_copy(device: torch.device) -> None:
    """out and the gradients lie as (B, S, H, D) in memory, whatever the inputs' layout."""
    inputs = qkv(7, 7, heads=4, device=device)
    for tensor in with_gradients(fusedops.flash_attention, inputs, torch.ones_like(inputs[0])):
        assert tensor.transpose(1, 2).is_contiguous()


def test_result_may_be_modified(device: torch.device) -> None:
    """A view that a custom Function returns may not be; the gradient, which needs the result, says that it changed."""
    q, k, v = (t.requires_grad_() for t in qkv(3, 3, device=device))
    out = fusedops.flash_attention(q, k, v)
    twice = 2 * out.detach()
    out.mul_(2)
    torch.testing.assert_close(out.detach(), twice)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Decoding, the slot, errors, cost


def test_decoding_against_a_cache(device: torch.device) -> None:
    """Token by token, bottom_right, against a slice of a longer cache: the causal result of all at once."""
    q, k, v = qkv(23, 23, device=device, dtype=torch.float64, heads=4)
    cache = [torch.full((2, 2, 64, 8), float("nan"), dtype=q.dtype, device=device) for _ in "kv"]
    whole = fusedops.flash_attention(q, k, v, True)
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 23)):
        for store, new in zip(cache, (k, v), strict=True):
            store[:, :, start:stop] = new[:, :, start:stop]
        keys, values = (store[:, :, :stop] for store in cache)
        out = fusedops.flash_attention(q[:, :, start:stop], keys, values, True, None, "bottom_right")
        torch.testing.assert_close(out, whole[:, :, start:stop])
        stock = masked_attention(
            q[:, :, start:stop], keys, values, visible(23, 23, "top_left", device)[start:stop, :stop]
        )
        torch.testing.assert_close(out, stock)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, "an attention mask was given"),
        ({"dropout_p": 0.5}, "attention dropout is 0.5"),
        ({"head_dim": 257}, "the head dim is 257, above 256"),
    ],
)
def test_slot_falls_back(case: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """What the operator cannot do goes to stock attention, is counted so, and is said."""
    counting._announced.clear()
    case = dict(case)
    q, k, v = qkv(5, 5, case.pop("head_dim", 8))
    before = counting.executed()
    with caplog.at_level(logging.WARNING, logger="fusedops"):
        torch.manual_seed(0)
        out = attention_fused(q, k, v, False, None, **case)
    torch.manual_seed(0)
    torch.testing.assert_close(out, attention_native(q, k, v, False, None, **case))
    assert counting.executed() - before == {("flash_attention", "stock"): 1}
    assert reason in caplog.text


def test_slot_runs_the_operator() -> None:
    q, k, v = qkv(5, 5, heads=4)
    before = counting.executed()
    torch.testing.assert_close(
        attention_fused(q, k, v, True, 0.2), attention_native(q, k, v, True, 0.2), rtol=1e-5, atol=1e-6
    )
    assert (counting.executed() - before).keys() == {
        ("flash_attention", "triton-interpreter" if INTERPRETING else "cpu")
    }


def refused(error: type[Exception], message: str, **changes: object) -> None:
    q, k, v = qkv(4, 4, heads=4)
    args = {"q": q, "k": k, "v": v, "causal": True, "scale": None, "alignment": "top_left"} | changes
    with pytest.raises(error, match=message):
        fusedops.flash_attention(**args)
    with pytest.raises(error, match=message), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fusedops.flash_attention(**args)


def test_errors() -> None:
    """Bad input is refused before anything runs, also when traced: the argument, what it was, what is allowed."""
    q, k, v = qkv(4, 4, heads=4)
    refused(
        TypeError,
        r"q is torch\.int64; allowed: float16",
        **{n: t.long() for n, t in zip("qkv", (q, k, v), strict=True)},
    )
    refused(TypeError, r"k is torch\.float64, q is torch\.float32; they must be of one dtype", k=k.double())
    refused(ValueError, r"k is on meta, q on cpu; they must be on one device", k=k.to("meta"))
    refused(ValueError, r"q has shape \(4, 4, 8\); it must have four dimensions", q=q[0])
    refused(ValueError, r"k has shape \(2, 2, 4, 8\), v \(2, 2, 3, 8\); they must be of one shape", v=v[:, :, 1:])
    refused(ValueError, r"k has batch 1, q 2; they must be equal", k=k[:1], v=v[:1])
    refused(ValueError, r"k has head dim 7, q 8; they must be equal", k=k[..., 1:], v=v[..., 1:])
    refused(ValueError, r"q has 3 heads, k and v 2; q's must be a multiple of those of k and v", q=q[:, 1:])
    refused(ValueError, r"alignment is 'top'; allowed: top_left, bottom_right", alignment="top")
    refused(ValueError, r"scale is nan; allowed: a finite number, or None for D\*\*-0\.5", scale=float("nan"))
    refused(ValueError, r"scale is -inf; allowed: a finite number", scale=float("-inf"))
    # The dispatcher would take its value, and a learned scale would get no gradient.
    refused(TypeError, r"scale is a tensor; allowed: a number", scale=torch.tensor(0.1, requires_grad=True))
    wide = qkv(4, 4, 257)
    refused(ValueError, r"the head dim is 257; allowed: 1 to 256", **dict(zip("qkv", wide, strict=True)))
    none = qkv(4, 4, 0)
    refused(ValueError, r"the head dim is 0; allowed: 1 to 256", **dict(zip("qkv", none, strict=True)))


def test_errors_of_the_gradient() -> None:
    q, k, v = qkv(4, 4)
    out, lse = OPERATOR(q, k, v, True, None, "top_left")
    with pytest.raises(ValueError, match=r"grad has shape \(2, 2, 3, 8\); it must be that of q, \(2, 2, 4, 8\)"):
        BACKWARD(out[:, :, 1:], q, k, v, out, lse, True, None, "top_left")
    with pytest.raises(ValueError, match=r"lse is torch\.float64 of shape \(2, 2, 4\)"):
        BACKWARD(out, q, k, v, out, lse.double(), True, None, "top_left")


def test_forward_mode_is_refused() -> None:
    q, k, v = qkv(4, 4)
    with pytest.raises(NotImplementedError, match="fusedops::flash_attention has no forward-mode derivative"):
        torch.func.jvp(lambda q: fusedops.flash_attention(q, k, v), (q,), (q,))


def test_cost_counts_what_is_seen() -> None:
    """Floating-point operations are 4 D for each pair of a query and a key that it sees."""
    for queries, keys, causal, alignment in itertools.product(
        [0, 1, 5, 9], [0, 1, 5, 9], [False, True], definition.ALIGNMENTS
    ):
        q, k, v = qkv(queries, keys, 3, heads=4)
        seen = int(visible(queries, keys, alignment).sum()) if causal else queries * keys
        assert OPERATOR.cost(q, k, v, causal, None, alignment).flops == 4 * 3 * 2 * 4 * seen
