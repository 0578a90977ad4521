"""The contenders of each operator's rows, and the float64 reference they are checked against."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
from fusedops.benchmark.comparison import Contender, Outputs, WrongResult, relative_error
from fusedops.benchmark.rows import FORWARD, FORWARD_BACKWARD, Row

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Workload:
    """A row made ready: its contenders, and a contender's outputs -> the relative error of each, by name."""

    contenders: list[Contender]
    errors: Callable[[Outputs], dict[str, float]]


@dataclass(frozen=True)
class Settings:
    """What of a workload is chosen by whoever runs the benchmark.

    compiled      measure the torch.compile peers (a quick run leaves them out: they need a C++ compiler on a CPU).
    max_autotune  torch.compile in mode max-autotune too, which compiles for long.
    all_peers     every peer that runs, the ones known to be far behind included.
    """

    device: torch.device
    compiled: bool = True
    max_autotune: bool = False
    all_peers: bool = False


def build(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    """The workload of a row at these sizes, its inputs drawn from the current generator of the device."""
    return BUILDERS[row.operator](row, shape, settings)


# ---------------------------------------------------------------------------------------------------------------------
# What the operators' workloads share


class _Work:
    """Inputs of a row, and the ways to call a function on them in the row's direction."""

    def __init__(self, row: Row, inputs: tuple[Tensor, ...], output_shape: tuple[int, ...], settings: Settings) -> None:
        self.settings = settings
        self.backward = row.direction == FORWARD_BACKWARD
        self.inputs = tuple(tensor.requires_grad_(row.direction != FORWARD) for tensor in inputs)
        first = inputs[0]
        self.dy = torch.randn(output_shape, device=first.device, dtype=first.dtype) if self.backward else None

    def call(self, function: Function, inputs: tuple[Tensor, ...] | None = None) -> Callable[[], Any]:
        """`function` on the inputs: its output, followed by the inputs' gradients where the row has a backward."""
        inputs = self.inputs if inputs is None else inputs
        if self.dy is None:
            return lambda: function(*inputs)

        def forward_and_backward() -> Outputs:
            y = function(*inputs)
            return (y, *torch.autograd.grad(y, inputs, self.dy))

        return forward_and_backward

    def usual(self, fused: Function, stock: Function) -> list[Contender]:
        """Ours, stock PyTorch, and what torch.compile makes of stock PyTorch."""
        contenders = [
            Contender("fusedops", self.call(fused), path=None, role="fused"),
            Contender("stock", self.call(stock), role="baseline"),
        ]
        if self.settings.compiled:
            compiled = torch.compile(stock, dynamic=False)
            contenders.append(Contender("torch.compile", self.call(compiled), path="inductor"))
        if self.settings.compiled and self.settings.max_autotune:
            # Without CUDA graphs, which would copy the inputs and reuse the outputs: another piece of work.
            tuned = torch.compile(stock, dynamic=False, mode="max-autotune-no-cudagraphs")
            contenders.append(Contender("torch.compile max-autotune", self.call(tuned), path="inductor"))
        return contenders


def _wanted(peer: str, row: Row, settings: Settings) -> bool:
    """Whether the row measures this peer here: those that rows name are a GPU's."""
    return peer in row.peers and settings.device.type == "cuda"


def _in_float64(function: Function, inputs: tuple[Tensor, ...], dy: Tensor | None) -> tuple[Tensor, ...]:
    """The function's output on the inputs in float64, and its gradients where dy is given."""
    doubled = tuple(tensor.detach().double().requires_grad_(dy is not None) for tensor in inputs)
    y = function(*doubled)
    gradients = () if dy is None else torch.autograd.grad(y, doubled, dy.double())
    return (y.detach(), *gradients)


def _by_name(names: tuple[str, ...], outputs: Outputs, references: tuple[Tensor, ...]) -> dict[str, float]:
    return {name: relative_error(*pair) for name, *pair in zip(names, outputs, references, strict=False)}


# ---------------------------------------------------------------------------------------------------------------------
# Pointwise


def _pointwise(
    row: Row, shape: dict[str, int], settings: Settings, fused: Function, stock: Function, names: tuple[str, ...]
) -> tuple[_Work, Workload]:
    size = (shape["rows"], shape["columns"])
    dtype = getattr(torch, row.dtype)
    inputs = tuple(torch.randn(size, device=settings.device, dtype=dtype) for _ in names)
    work = _Work(row, inputs, size, settings)
    contenders = work.usual(fused, stock)
    if not work.backward:
        target = torch.empty_like(inputs[0])
        contenders.append(Contender("copy", lambda: target.copy_(inputs[0]), role="bound"))

    def errors(outputs: Outputs) -> dict[str, float]:
        # In slices of rows: float64 is four times the memory, and there are several of them.
        squares = torch.zeros(len(outputs), 2, dtype=torch.float64, device=settings.device)
        for start in range(0, size[0], 2**12):
            part = slice(start, start + 2**12)
            dy = None if work.dy is None else work.dy[part]
            references = _in_float64(stock, tuple(tensor[part] for tensor in inputs), dy)
            for index, (output, reference) in enumerate(zip(outputs, references, strict=True)):
                squares[index, 0] += (output[part].detach().double() - reference).square().sum()
                squares[index, 1] += reference.square().sum()
        ratios = (squares[:, 0] / squares[:, 1]).sqrt().tolist()
        return dict(zip(("y", *(f"d{name}" for name in names)), ratios, strict=False))

    return work, Workload(contenders, errors)


def _silu(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    return _pointwise(row, shape, settings, fusedops.silu, F.silu, ("x",))[1]


def _stock_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _silu_mul(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    work, workload = _pointwise(row, shape, settings, fusedops.silu_mul, _stock_silu_mul, ("gate", "up"))
    # Of a product of two inputs, a copy is not the bound that it is of one.
    contenders = [contender for contender in workload.contenders if contender.name != "copy"]
    if _wanted("Liger", row, settings) and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        # Its backward overwrites what it saved, which here are the inputs: it gets its own, restored before each call.
        own = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in work.inputs)

        def restore() -> None:
            with torch.no_grad():
                for mine, original in zip(own, work.inputs, strict=True):
                    mine.copy_(original)

        contenders.append(
            Contender(
                "Liger",
                work.call(LigerSiLUMulFunction.apply, own),
                path="triton",
                prepare=restore if work.backward else None,
            )
        )
    return Workload(contenders, workload.errors)


def _smooth_relu(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    alpha = row.options["alpha"]
    return _pointwise(
        row,
        shape,
        settings,
        lambda x: fusedops.smooth_relu(x, alpha),
        lambda x: torch.where(x > 0, x, alpha * x),
        ("x",),
    )[1]


# ---------------------------------------------------------------------------------------------------------------------
# Linear, GELU, dropout


def _linear_gelu_dropout(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    m, k, n = (shape[name] for name in "mkn")
    dtype = getattr(torch, row.dtype)
    p, approximate, training = (row.options[name] for name in ("p", "approximate", "training"))
    dropping = training and p > 0
    x = torch.randn(m, k, device=settings.device, dtype=dtype)
    weight = torch.randn(n, k, device=settings.device, dtype=dtype) * k**-0.5
    bias = torch.randn(n, device=settings.device, dtype=dtype)
    work = _Work(row, (x, weight, bias), (m, n), settings)

    def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fusedops.linear_gelu_dropout(x, weight, bias, p=p, approximate=approximate, training=training)

    def stock(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.gelu(F.linear(x, weight, bias), approximate=approximate)
        return F.dropout(y, p, training) if dropping else y

    contenders = work.usual(fused, stock)
    if _wanted("cuBLASLt epilogue", row, settings):
        transposed = weight.t()
        contenders.append(
            Contender(
                "cuBLASLt epilogue",
                lambda: torch._addmm_activation(bias, x, transposed, use_gelu=True),
                path="cublas",
            )
        )
    if _wanted("products alone", row, settings):
        contenders.append(Contender("products alone", _products_alone(work), path="cublas", role="bound"))

    @functools.cache
    def reference_without_mask() -> tuple[Tensor, ...]:
        return _in_float64(lambda x, w, b: F.gelu(F.linear(x, w, b), approximate=approximate), work.inputs, work.dy)

    def errors(outputs: Outputs) -> dict[str, float]:
        names = ("y", "dx", "dweight", "dbias")
        if not dropping:
            return _by_name(names, outputs, reference_without_mask())
        # Each contender draws its own mask: the reference is taken with the one that its output shows.
        kept = outputs[0].detach() != 0
        _check_share_dropped(1 - float(kept.double().mean()), p, kept.numel())

        def with_mask(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.gelu(F.linear(x, weight, bias), approximate=approximate) * (kept.double() / (1 - p))

        return _by_name(names, outputs, _in_float64(with_mask, work.inputs, work.dy))

    return Workload(contenders, errors)


def _check_share_dropped(share: float, p: float, count: int) -> None:
    """Six standard deviations, and one in ten thousand for outputs that are zero without being dropped."""
    if abs(share - p) > 6 * math.sqrt(p * (1 - p) / count) + 1e-4:
        raise WrongResult(f"the share dropped is {share:.5f}, p is {p}")


def _products_alone(work: _Work) -> Callable[[], Any]:
    """The matrix products of the row and nothing else."""
    x, weight, _ = (tensor.detach() for tensor in work.inputs)
    dz = work.dy
    if dz is None:
        return lambda: x @ weight.t()
    return lambda: (x @ weight.t(), dz @ weight, dz.t() @ x)


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def _flash_attention(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, heads, kv_heads, length, head_dim = (
        shape[name] for name in ("batch", "heads", "kv_heads", "length", "head_dim")
    )
    dtype = getattr(torch, row.dtype)
    causal = row.options["causal"]
    grouped = heads != kv_heads
    q, k, v = (
        torch.randn(batch, count, length, head_dim, device=settings.device, dtype=dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    work = _Work(row, (q, k, v), (batch, heads, length, head_dim), settings)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def by_backend(backend: Any) -> Function:
        def forced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return stock(q, k, v)

        return forced

    # The back end that stock attention chooses is one of those that can be forced, which need no second measurement.
    titles = {
        SDPBackend.CUDNN_ATTENTION: "cuDNN",
        SDPBackend.FLASH_ATTENTION: "FlashAttention-2",
        SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    }
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=grouped))
    contenders = [
        Contender(
            "fusedops", work.call(lambda q, k, v: fusedops.flash_attention(q, k, v, causal)), path=None, role="fused"
        ),
        Contender("stock", work.call(stock), path=f"stock ({titles.get(chosen, 'math')})", role="baseline"),
    ]
    forced = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if settings.all_peers:
        forced.append(SDPBackend.EFFICIENT_ATTENTION)
    if settings.device.type == "cuda":
        contenders += [
            Contender(titles[backend], work.call(by_backend(backend)), path="stock")
            for backend in forced
            if backend != chosen
        ]
    if settings.compiled and (_wanted("flex_attention", row, settings) or settings.all_peers):
        contenders.append(
            Contender("flex_attention", work.call(_flex(causal, grouped, length, settings)), path="inductor")
        )
    return Workload(contenders, _attention_errors(work, causal, heads // kv_heads))


def _flex(causal: bool, grouped: bool, length: int, settings: Settings) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(allowed, None, None, length, length, device=str(settings.device)) if causal else None
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


def _attention_errors(work: _Work, causal: bool, group: int) -> Callable[[Outputs], dict[str, float]]:
    """Errors on the first and the last K/V head with their query heads: float64 scores of all heads do not fit."""
    q, k, v = work.inputs

    def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v

    def part(tensor: Tensor, end: int) -> Tensor:
        """[heads of this part, S, D] of the first (end 0) or last (end -1) batch entry."""
        count = group if tensor.shape[1] == q.shape[1] else 1
        return tensor[end, :count] if end == 0 else tensor[end, -count:]

    @functools.cache
    def references() -> list[tuple[Tensor, ...]]:
        return [
            _in_float64(
                textbook, (part(q, end), part(k, end), part(v, end)), None if work.dy is None else part(work.dy, end)
            )
            for end in (0, -1)
        ]

    def errors(outputs: Outputs) -> dict[str, float]:
        names = ("out", "dq", "dk", "dv")
        worst: dict[str, float] = {}
        for end, expected in zip((0, -1), references(), strict=True):
            found = tuple(part(output, end) for output in outputs)
            for name, error in _by_name(names, found, expected).items():
                worst[name] = max(worst.get(name, 0.0), error) if not math.isnan(error) else error
        return worst

    return errors


BUILDERS: dict[str, Callable[[Row, dict[str, int], Settings], Workload]] = {
    "silu": _silu,
    "silu_mul": _silu_mul,
    "smooth_relu": _smooth_relu,
    "linear_gelu_dropout": _linear_gelu_dropout,
    "flash_attention": _flash_attention,
}
