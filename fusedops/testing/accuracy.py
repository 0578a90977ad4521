"""How wrong a result may be: a multiple of stock PyTorch's own error in that dtype, against its formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops.testing.subject import cast

VALUE_FACTOR = 2.0
"""Values may be off by this many times stock's own error."""
GRADIENT_FACTOR = 3.0
"""Derivatives may be off by this many times stock's own error."""

EXACT_EPSILONS = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 8.0, torch.float64: 8.0}
"""Results may always be off by this many epsilons of the exact value, since stock may hit a value by luck: one where
the arithmetic is in float32 and the result rounded once, more where the arithmetic itself rounds. As many epsilons of
the tensor's largest value are for sums that cancel: another order of summation leaves that much, and so does a
probability that attention's gradient recovers from the rounded logarithm of a sum."""

FLOAT64_MARGIN = 64.0
"""float64's own error cannot be measured, for its reference has the same; it is estimated from float32's, which at one
point may be small by luck. So many times that still tells float64 from float32, which is 5e8 epsilons off."""


def assert_accurate(
    what: str,
    ours: Sequence[Tensor],
    reference: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Any],
    *,
    dtype: torch.dtype,
    factor: float,
    further: Iterable[Sequence[Any]] = (),
) -> None:
    """Raise AssertionError unless `ours` are close enough to the reference's results.

    ours       the results in `dtype` for `inputs`.
    reference  the same function in stock PyTorch, for inputs of any dtype. In float64 it gives the exact results; in
               `dtype` (for float64 in float32, and scaled) it gives stock's own error: the largest in each tensor, of
               which `factor` times as much is allowed, and what EXACT_EPSILONS says.
    further    other inputs like `inputs`: stock's own error is the largest over all, since in a small tensor it may be
               small by luck.

    Where the exact result is NaN or infinite, ours must be the same, or the same as stock's in `dtype`. Results that
    are not floating must be equal.
    """
    stock_dtype = torch.float32 if dtype == torch.float64 else dtype
    scale = FLOAT64_MARGIN * torch.finfo(dtype).eps / torch.finfo(stock_dtype).eps if dtype == torch.float64 else 1.0
    exact, stock = reference(*cast(inputs, torch.float64)), reference(*cast(inputs, stock_dtype))
    own_errors = [_largest_error(s, e) for s, e in zip(stock, exact, strict=True)]
    for other in further:
        results = zip(reference(*cast(other, stock_dtype)), reference(*cast(other, torch.float64)), strict=True)
        own_errors = [max(own, _largest_error(s, e)) for own, (s, e) in zip(own_errors, results, strict=True)]
    assert len(ours) == len(exact), f"{what}: {len(ours)} results, reference {len(exact)}"
    for i, (result, e, s, own) in enumerate(zip(ours, exact, stock, own_errors, strict=True)):
        _assert_close(f"{what}, result {i}", result.detach(), e.detach(), s.detach(), dtype, factor * scale * own)


def _largest_error(stock: Tensor, exact: Tensor) -> float:
    if not stock.is_floating_point() or not stock.numel():
        return 0.0
    stock, exact = stock.detach().double(), exact.detach().double()
    return torch.where(stock.isfinite() & exact.isfinite(), (stock - exact).abs(), 0).max().item()


def _assert_close(what: str, ours: Tensor, exact: Tensor, stock: Tensor, dtype: torch.dtype, allowed: float) -> None:
    assert ours.shape == exact.shape, f"{what}: shape {tuple(ours.shape)}, reference {tuple(exact.shape)}"
    if not ours.is_floating_point():
        assert torch.equal(ours, exact.to(ours.dtype)), f"{what}: differs from the reference"
        return
    if not ours.numel():
        return
    ours, exact, stock = ours.double(), exact.double(), stock.double()
    info = torch.finfo(dtype)
    # Past the dtype's range the exact value is what it overflows to.
    exact = torch.where(exact.abs() > info.max, exact.sign() * torch.inf, exact)
    finite = exact.isfinite()
    same = torch.isclose(ours, exact, equal_nan=True) | torch.isclose(ours, stock, equal_nan=True)
    wrong = (~same & ~finite).sum()
    assert not wrong, f"{what}: {wrong} of {(~finite).sum()} NaN or infinite values differ from the reference"

    error = torch.where(finite, (ours - exact).abs(), 0)
    largest = torch.where(finite, exact.abs(), 0).max()
    limit = allowed + info.eps * (EXACT_EPSILONS[dtype] * (exact.abs() + largest) + info.smallest_normal)
    excess = torch.where(finite & ~(error <= limit), (error - limit).nan_to_num(torch.inf), -torch.inf).flatten()
    if (excess > -torch.inf).any():
        worst = int(excess.argmax())
        raise AssertionError(
            f"{what}: {int((excess > -torch.inf).sum())} of {error.numel()} values are off; at flat index {worst} "
            f"{ours.flatten()[worst]:.9g} against {exact.flatten()[worst]:.9g} in float64, error "
            f"{error.flatten()[worst]:.3g}, allowed {limit.flatten()[worst]:.3g}"
        )


def assert_same(what: str, a: Tensor, b: Tensor) -> None:
    """Raise AssertionError unless the two are bit for bit the same value (NaN equals NaN)."""
    assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}"
    if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
        raise AssertionError(f"{what}: differs in {int((a != b).sum())} of {a.numel()} elements")
