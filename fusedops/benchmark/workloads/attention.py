"""Workload of flash_attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops
from fusedops.benchmark.comparison import Contender, Outputs
from fusedops.benchmark.rows import Row
from fusedops.benchmark.workloads.common import Function, Settings, Work, Workload, by_name, in_float64, wanted


def flash_attention(row: Row, shape: dict[str, int], settings: Settings) -> Workload:
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
    work = Work(row, (q, k, v), (batch, heads, length, head_dim), settings)

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
    if settings.compiled and (wanted("flex_attention", row, settings) or settings.all_peers):
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


def _attention_errors(work: Work, causal: bool, group: int) -> Callable[[Outputs], dict[str, float]]:
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
            in_float64(
                textbook, (part(q, end), part(k, end), part(v, end)), None if work.dy is None else part(work.dy, end)
            )
            for end in (0, -1)
        ]

    def errors(outputs: Outputs) -> dict[str, float]:
        names = ("out", "dq", "dk", "dv")
        worst: dict[str, float] = {}
        for end, expected in zip((0, -1), references(), strict=True):
            found = tuple(part(output, end) for output in outputs)
            for name, error in by_name(names, found, expected).items():
                worst[name] = max(worst.get(name, 0.0), error) if not math.isnan(error) else error
        return worst

    return errors
