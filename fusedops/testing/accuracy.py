"""How wrong a result may be: a multiple of stock PyTorch's own error in that dtype, against its formula in float64."""

from __future__ import annotations

import torch
from torch import Tensor

VALUE_FACTOR = 2.0
"""Values may be off by this many times stock's own error."""
GRADIENT_FACTOR = 3.0
"""Derivatives may be off by this many times stock's own error."""

EXACT_EPSILONS = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 4.0, torch.float64: 4.0}
"""Results may always be off by this many epsilons of the exact value, since stock may hit a value by luck: one where
the arithmetic is in float32 and the result rounded once, more where the arithmetic itself rounds."""

FLOAT64_MARGIN = 4.0
"""float64's own error is not measured but estimated from float32's, and the reference has it too: so many times it."""


def stock_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that stock PyTorch's own error is measured in: float64's against float64 would be zero, so float32."""
    return torch.float32 if dtype == torch.float64 else dtype


def assert_accurate(
    what: str, ours: Tensor, exact: Tensor, stock: Tensor, *, dtype: torch.dtype, factor: float = VALUE_FACTOR
) -> None:
    """Raise AssertionError unless `ours` is close enough to `exact`.

    ours   the result in `dtype`.
    exact  the result in float64 from the same inputs.
    stock  the result of stock PyTorch in `stock_dtype(dtype)`; its largest error, scaled to `dtype`, times `factor` is
           allowed, and EXACT_EPSILONS of each exact value.

    What is not finite must be the same NaN or infinity, and what is not floating must be equal.
    """
    assert ours.shape == exact.shape, f"{what}: shape {tuple(ours.shape)}, reference {tuple(exact.shape)}"
    if not ours.is_floating_point():
        assert torch.equal(ours, exact.to(ours.dtype)), f"{what}: differs from the reference"
        return
    if not ours.numel():
        return
    ours, exact, stock = ours.detach().double(), exact.detach().double(), stock.detach().double()
    info = torch.finfo(dtype)
    finite = exact.isfinite() & (exact.abs() <= info.max)
    # Past the dtype's range the exact value is what it overflows to.
    expected = torch.where(exact.abs() > info.max, exact.sign() * torch.inf, exact)
    same = torch.isclose(ours, expected, equal_nan=True)[~finite]
    assert same.all(), f"{what}: {(~same).sum()} of {(~finite).sum()} NaN or infinite values differ from the reference"

    measured = finite & stock.isfinite()
    margin = FLOAT64_MARGIN if dtype == torch.float64 else 1.0
    own_error = torch.where(measured, (stock - exact).abs(), 0).max() * (info.eps / torch.finfo(stock_dtype(dtype)).eps)
    allowed = (
        factor * margin * own_error + EXACT_EPSILONS[dtype] * info.eps * exact.abs() + info.smallest_normal * info.eps
    )
    error = torch.where(finite, (ours - exact).abs(), 0)
    wrong = finite & ~(error <= allowed)
    if wrong.any():
        worst = int(torch.where(wrong, error.nan_to_num(torch.inf) - allowed, -torch.inf).argmax())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {error.numel()} values are off; at flat index {worst} "
            f"{ours.flatten()[worst]:.9g} against {exact.flatten()[worst]:.9g} in float64, error "
            f"{error.flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g} (stock's own: {own_error:.3g})"
        )


def assert_same(what: str, a: Tensor, b: Tensor) -> None:
    """Raise AssertionError unless the two are bit for bit the same value (NaN equals NaN)."""
    assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}"
    if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
        raise AssertionError(f"{what}: differs in {int((a != b).sum())} of {a.numel()} elements")
