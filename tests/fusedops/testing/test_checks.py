"""Every check has teeth: a sound operator passes them all, and a copy of it with one fault fails the check for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.operators import pointwise
from fusedops.registration import Cost, Kernel, Operator, Sample, pointwise_vmap, register
from fusedops.testing import CHECKS, check_operator
from fusedops.testing.__main__ import main

numbers = itertools.count()


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * x * x


def cpu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(reference(x, weight))


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from pointwise.samples(2, device=device, dtype=dtype)


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return 3 * grad * weight * x * x, grad * x * x * x


def jvp(ctx: Any, x_t: Tensor, weight_t: Tensor) -> Tensor:
    x, weight = ctx.saved_tensors
    return 3 * weight * x * x * x_t + x * x * x * weight_t


def operator(**faults: Any) -> Operator:
    """weight x^3, under a name of its own, with what `faults` replaces."""
    name = f"cube_{next(numbers)}"
    fields = {
        "check": lambda x, weight: pointwise.check_floating(name, x=x, weight=weight),
        "shape": lambda x, weight: torch.empty_like(x),
        "cpu": cpu,
        "kernel": Kernel("none", "none"),
        "reference": reference,
        "samples": samples,
        "cost": lambda x, weight: Cost(3 * x.numel(), 3 * x.nbytes),
        "stock": "weight * x**3",
        "setup": save,
        "backward": backward,
        "jvp": jvp,
        "vmap": pointwise_vmap,
        "autocast": "promote",
    }
    return register(schema=f"{name}(Tensor x, Tensor weight) -> Tensor", **fields | faults)


def with_half_an_epsilon_too_much(x: Tensor, weight: Tensor) -> Tensor:
    y = reference(x.double(), weight.double())
    return torch.empty_like(x).copy_(y * (1 + 8 * torch.finfo(x.dtype).eps))


def without_nan(x: Tensor, weight: Tensor) -> Tensor:
    return cpu(x, weight).nan_to_num_(0.0)


def with_a_hole(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.empty_like(x)
    if y.dim():
        y[1:].copy_(reference(x, weight)[1:])
    return y


def writing_to_weight(x: Tensor, weight: Tensor) -> Tensor:
    y = cpu(x, weight)
    weight.mul_(2)
    return y


def off_by_a_percent(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    dx, dweight = backward(ctx, grad)
    return 1.01 * dx, dweight


def reading_by_flat_index(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    strides = torch.empty(grad.shape).stride()
    dense = grad.as_strided(grad.shape, strides) if grad.untyped_storage().nbytes() >= grad.nbytes else grad + 1
    return backward(ctx, dense)


def without_second_order(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return tuple(g.detach() for g in backward(ctx, grad))


def overwriting_saved_tensors(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    result = backward(ctx, grad)
    ctx.saved_tensors[0].data.mul_(2)
    return result


def writing_to_the_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    result = backward(ctx, grad)
    grad.data.mul_(2)
    return result


def zero_tangent(ctx: Any, x_t: Tensor, weight_t: Tensor) -> Tensor:
    return torch.zeros_like(x_t)


def vmap_of_the_first_example(
    operator: Operator, info: Any, dims: tuple[Any, ...], *args: Tensor
) -> tuple[Tensor, int]:
    first = [a if dim is None else a.select(dim, 0) for a, dim in zip(args, dims, strict=True)]
    return operator(*first).expand(info.batch_size, *first[0].shape), 0


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "values off by a few units in the last place": ("values", {"cpu": with_half_an_epsilon_too_much}),
    "contiguous by the shape rule": ("shape_rule", {"shape": lambda x, weight: torch.empty(x.shape, dtype=x.dtype)}),
    "double by the shape rule": ("shape_rule", {"shape": lambda x, weight: torch.empty_like(x).double()}),
    "double by the shape rule, seen by opcheck": ("opcheck", {"shape": lambda x, weight: torch.empty_like(x).double()}),
    "NaN swallowed": ("non_finite", {"cpu": without_nan}),
    "first row unwritten": ("unwritten_memory", {"cpu": with_a_hole}),
    "argument overwritten": ("inputs_unwritten", {"cpu": writing_to_weight}),
    "incoming gradient overwritten": ("inputs_unwritten", {"backward": writing_to_the_gradient}),
    "autocast to a half type": ("autocast", {"autocast": "cast"}),
    "mixed dtypes refused under autocast": ("autocast", {"autocast": None}),
    "dtypes not checked": ("wrong_dtypes", {"check": lambda x, weight: None}),
    "gradient off by a percent": ("gradients", {"backward": off_by_a_percent}),
    "gradient off by a percent, seen by gradcheck": ("finite_differences", {"backward": off_by_a_percent}),
    "gradient's strides ignored": ("gradient_layouts", {"backward": reading_by_flat_index}),
    "second derivative lost": ("second_finite_differences", {"backward": without_second_order}),
    "second derivative lost, seen against the reference": ("third_order", {"backward": without_second_order}),
    "second derivative lost, seen by torch.func": ("func_grad", {"backward": without_second_order}),
    "second derivative lost, seen by hessian": ("func_jacobians", {"backward": without_second_order}),
    "second derivative lost, compiled": ("compile_transforms", {"backward": without_second_order}),
    "saved tensor overwritten": ("repeated_backward", {"backward": overwriting_saved_tensors}),
    "tangent zero": ("forward_mode", {"jvp": zero_tangent}),
    "vmap of one example": ("vmap", {"vmap": vmap_of_the_first_example}),
    "gradient off by a percent, compiled": ("compile_static", {"backward": off_by_a_percent}),
    "gradient off by a percent, compiled with dynamic shapes": ("compile_dynamic", {"backward": off_by_a_percent}),
    "shape rule that reads values": (
        "opcheck_aot",
        {"shape": lambda x, weight: torch.empty_like(x if x.sum() > 0 else weight)},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    """The check named beside the fault fails, and the table in the error says so."""
    check, faults = FAULTS[fault]
    faulty = operator(**faults)
    with pytest.raises(AssertionError, match=rf"fusedops::{faulty.name} on cpu, seed \d+\n  {check} +failed"):
        check_operator(faulty, checks=[check])


def test_sound_operator_passes() -> None:
    report = check_operator(operator(), seed=0)
    assert [check.name for check in report] == list(CHECKS)
    inapplicable = {check.name: check.reason for check in report if check.status == "not applicable"}
    assert inapplicable.keys() <= {"wrong_device", "no_gradient", "compile_inductor"}
    assert all(inapplicable.values())


def test_operator_without_derivatives() -> None:
    """What needs a gradient does not apply; that asking for one raises does."""
    checks = [name for name in CHECKS if not name.startswith("compile_inductor")]
    report = {check.name: check for check in check_operator(operator(backward=None, jvp=None), checks=checks)}
    assert report["no_gradient"].status == report["values"].status == report["compile_static"].status == "passed"
    assert report["gradients"].status == report["func_grad"].status == "not applicable"
    without_jvp = check_operator(operator(jvp=None), checks=["forward_mode", "func_jacobians"])
    assert [check.status for check in without_jvp] == ["not applicable", "passed"]


def test_exempt_checks_carry_their_reason() -> None:
    exempt = operator(cpu=without_nan, exempt={"non_finite": "NaN is no case of it"})
    (check,) = check_operator(exempt, checks=["non_finite"])
    assert (check.status, check.reason) == ("not applicable", "NaN is no case of it")


def test_seed_repeats_and_generator_is_kept() -> None:
    drawn: list[Tensor] = []

    def recording(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for sample in samples(device, dtype):
            drawn.append(sample.args[0])
            yield sample

    recorded = operator(samples=recording)
    before = torch.get_rng_state()
    check_operator(recorded, checks=["values"], seed=3)
    first, drawn[:] = list(drawn), []
    check_operator(recorded, checks=["values"], seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first, drawn, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_check() -> None:
    with pytest.raises(KeyError, match="no check valeus; there are values, shape_rule"):
        check_operator(operator(), checks=["valeus"])


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["silu", "--check", "values", "--check", "no_gradient"]) == 0
    output = capsys.readouterr().out
    assert "values       passed" in output
    assert "no_gradient  not applicable" in output
    assert "1 passed, 0 failed, 1 not applicable" in output

    from fusedops import registry

    monkeypatch.setitem(registry.OPERATORS, "faulty", operator(cpu=without_nan))
    assert main(["faulty", "--check", "non_finite"]) == 1
    assert "0 passed, 1 failed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["no_such_operator"])
    assert "no operator no_such_operator; there are silu," in capsys.readouterr().err
