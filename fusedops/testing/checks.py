"""The checks that every registered operator gets for free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch

from fusedops.registration import Operator
from fusedops.testing import compilation, gradients, transforms, values
from fusedops.testing.report import Check, table
from fusedops.testing.subject import NotApplicable, Subject

CHECKS: Mapping[str, Callable[[Subject], None]] = {
    function.__name__: function
    for function in (
        values.values,
        values.shape_rule,
        values.non_finite,
        values.unwritten_memory,
        values.inputs_unwritten,
        values.autocast,
        values.wrong_dtypes,
        values.wrong_device,
        gradients.gradients,
        gradients.gradient_layouts,
        gradients.no_gradient,
        gradients.finite_differences,
        gradients.second_finite_differences,
        gradients.third_order,
        gradients.repeated_backward,
        transforms.forward_mode,
        transforms.func_grad,
        transforms.func_jacobians,
        transforms.vmap,
        compilation.opcheck,
        compilation.opcheck_aot,
        compilation.compile_static,
        compilation.compile_dynamic,
        compilation.compile_transforms,
        compilation.compile_inductor,
    )
}
"""Every check by its name; its docstring says what must hold."""


def check_operator(
    operator: Operator,
    device: str | torch.device = "cpu",
    *,
    checks: Iterable[str] | None = None,
    seed: int | None = None,
) -> list[Check]:
    """Check one operator against its reference, with its own samples, and return the report.

    operator  a registered operator (`fusedops.registry.operator(name)`).
    device    where. On "cpu" the CPU implementation is checked, or the kernels themselves where the process was started
              with TRITON_INTERPRET=1.
    checks    names from `CHECKS`; None: all of them.
    seed      of the random inputs; None draws one. A failure names it.

    Raises AssertionError with the table of all checks if one failed, KeyError for a check that does not exist. The
    random generators' state is kept; Dynamo's cache is reset.
    """
    chosen = list(CHECKS) if checks is None else list(checks)
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown:
        raise KeyError(f"no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if seed is None:
        seed = int(torch.randint(2**31, ()))
    report, errors = [], []
    for name in chosen:
        check, error = _run(operator, torch.device(device), name, seed)
        report.append(check)
        errors += [error] if error is not None else []
    if errors:
        raise AssertionError(table(f"fusedops::{operator.name} on {device}, seed {seed}", report)) from errors[0]
    return report


def _run(operator: Operator, device: torch.device, name: str, seed: int) -> tuple[Check, Exception | None]:
    start = time.perf_counter()
    if name in operator.exempt:
        return Check(name, "not applicable", operator.exempt[name], 0.0), None
    devices = range(torch.cuda.device_count()) if device.type == "cuda" or torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        try:
            CHECKS[name](Subject(operator, device))
        except NotApplicable as error:
            return Check(name, "not applicable", str(error), time.perf_counter() - start), None
        except Exception as error:  # noqa: BLE001 - an operator can fail in any way; the report carries it
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error)
            return Check(name, "failed", reason, time.perf_counter() - start), error
    return Check(name, "passed", "", time.perf_counter() - start), None
