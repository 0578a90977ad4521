"""The registration recipe: each trap that was met, as a test, on silu and on operators registered here."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fusedops
from fusedops import counting, registration, registry, slots
from fusedops.operators import pointwise
from fusedops.operators.silu import silu_operator
from fusedops.registration import Cost, Kernel, Operator, Sample, looped_vmap, pointwise_vmap, register
from fusedops.testing import check_operator, schemas

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(__file__).with_name("schemas.json")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def executions(operator: str = "silu") -> int:
    return sum(count for (name, _), count in counting.executed().items() if name == operator)


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives that were zero in silence


def test_grad_of_grad_is_not_zero() -> None:
    """A Function's forward runs without grad mode: unless the caller's is restored, grad(grad) is zero."""
    x = random(7)

    def second(f: Callable[[Tensor], Tensor]) -> Tensor:
        grad = torch.func.grad(lambda t: f(t).sum())
        return torch.func.grad(lambda t: grad(t).sum())(x)

    torch.testing.assert_close(second(silu_operator.op), second(F.silu))
    assert second(silu_operator.op).abs().min() > 0


def test_jvp_of_jvp_is_not_zero() -> None:
    """Both the redispatch and the rule's stock operations must run with forward mode on, or jvp(jvp) is zero."""
    gate, up, tangents = random(7), random(7), (random(7), random(7))

    def second(f: Callable[..., Tensor]) -> Tensor:
        def first(*primals: Tensor) -> Tensor:
            return torch.func.jvp(f, primals, tangents)[1]

        return torch.func.jvp(first, (gate, up), tangents)[1]

    torch.testing.assert_close(second(fusedops.silu_mul), second(lambda gate, up: F.silu(gate) * up))
    assert second(fusedops.silu_mul).abs().min() > 0


def test_no_grad_inside_a_transform_is_kept() -> None:
    """The caller's grad mode is restored, not simply turned on."""

    def detached(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = silu_operator(x)
        return (y * x).sum()

    x = random(7)
    torch.testing.assert_close(torch.func.grad(detached)(x), F.silu(x))


def test_compiled_autograd() -> None:
    """A single-level Function on the ordinary path would break it."""
    x, weight = random(5, 7), random(7, 7).requires_grad_()

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> None:
        fusedops.silu(x @ weight, opaque=True).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        step(x)
    (expected,) = torch.autograd.grad(F.silu(x @ weight).sum(), weight)
    torch.testing.assert_close(weight.grad, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes, strides, vmap, defaults


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_dtype_is_the_one_asked_for(dtype: torch.dtype) -> None:
    """torch.library.register_autocast fixes one dtype for a device: under fp16 the result was bf16."""
    register_once("cast_to_autocast(Tensor x) -> Tensor", autocast="cast")
    x = random(7, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype):
        y = torch.ops.fusedops.cast_to_autocast(x)
        double = torch.ops.fusedops.cast_to_autocast(x.double())
    y.sum().backward()
    assert (y.dtype, double.dtype, x.grad.dtype) == (dtype, torch.float64, torch.float32)


def test_autocast_of_no_floating_tensor_is_left_to_the_check() -> None:
    x = torch.ones(3, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"silu_mul: gate is torch\.int64"):
        fusedops.silu_mul(x, x)


def test_expanded_input_gives_an_output_of_its_own_memory() -> None:
    """`empty_strided(x.stride())` would give every row of the output the same memory."""
    x = random(1, 7).expand(5, 7)
    y = fusedops.silu(x)
    assert y.stride() == torch.empty_like(x).stride()
    assert y.untyped_storage().nbytes() >= y.numel() * y.itemsize
    torch.testing.assert_close(y, F.silu(x))


def test_vmap_over_one_argument() -> None:
    """What `expand` hands to the rule for the other argument has stride 0; a kernel would read out of bounds."""
    gate, up = random(3, 5), random(5)
    mapped = torch.func.vmap(fusedops.silu_mul, in_dims=(0, None))(gate, up)
    torch.testing.assert_close(mapped, F.silu(gate) * up)


def register_once(schema: str, **overrides: Any) -> Operator:
    """y = factor x, or y = x for a schema without a factor, registered under a name that only these tests use."""
    name = schema.split("(")[0]
    if name in _registered:
        return _registered[name]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.inputs = inputs

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        factor = ctx.inputs[1] if len(ctx.inputs) > 1 else 1.0
        return factor * grad, *(None for _ in ctx.inputs[1:])

    fields: dict[str, Any] = {
        "check": lambda x, *rest: pointwise.check_floating(name, x=x),
        "shape": lambda x, *rest: torch.empty_like(x),
        "cpu": lambda x, factor=1.0: torch.empty_like(x).copy_(x * factor),
        "kernel": Kernel("none", "none"),
        "reference": lambda x, factor=1.0: x * factor,
        "samples": lambda device, dtype: [Sample("vector", (torch.randn(5, device=device, dtype=dtype),))],
        "cost": lambda x, *rest: Cost(x.numel(), 2 * x.nbytes),
        "stock": "x * factor",
        "setup": setup,
        "backward": backward,
        "jvp": lambda ctx, tangent, *_: backward(ctx, tangent)[0],
        "vmap": pointwise_vmap,
    }
    _registered[name] = register(schema=schema, **fields | overrides)
    return _registered[name]


_registered: dict[str, Operator] = {}


@pytest.mark.parametrize("vmap", [pointwise_vmap, looped_vmap])
def test_defaults_that_the_dispatcher_drops_are_refilled(vmap: Callable[..., Any]) -> None:
    """Trailing arguments equal to their defaults do not arrive: every rule gets them all the same."""
    operator = register_once(f"scaled_{vmap.__name__}(Tensor x, float factor=3.0) -> Tensor", vmap=vmap)
    x = random(4, 5).requires_grad_()
    for args in ((x,), (x, 3.0)):
        (grad,) = torch.autograd.grad(operator(*args).sum(), x)
        torch.testing.assert_close(grad, torch.full_like(x, 3.0))
        assert torch.func.vmap(operator.op, in_dims=(0, None)[: len(args)])(*args).shape == x.shape
    check_operator(operator, checks=["values", "shape_rule", "gradients", "forward_mode", "vmap", "opcheck_aot"])


def test_looped_vmap_over_no_example() -> None:
    x, weights = random(2, 3), random(4, 0, 3)
    mapped = torch.func.vmap(lambda weight: fusedops.linear_gelu_dropout(x, weight), in_dims=1)(weights)
    assert mapped.shape == (0, 2, 4)


def listed() -> Operator:
    """y = x sum_k (k + 1) xs[k], of which `ctx.needs` and gradients are nested as the arguments are."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        xs, x = inputs
        ctx.save_for_backward(*xs, x)

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *xs, x = ctx.saved_tensors
        needs_list, needs_x = ctx.needs
        assert len(needs_list) == len(xs)
        total = sum((k + 1) * t for k, t in enumerate(xs))
        of_list = [(k + 1) * grad * x if needed else None for k, needed in enumerate(needs_list)]
        return of_list if any(needs_list) else None, grad * total if needs_x else None

    def jvp(ctx: Any, list_t: list[Tensor | None], x_t: Tensor | None) -> Tensor:
        *xs, x = ctx.saved_tensors
        total = sum((k + 1) * t for k, t in enumerate(xs))
        tangent = torch.zeros_like(x) if x_t is None else x_t * total
        return tangent + sum((k + 1) * x * t for k, t in enumerate(list_t) if t is not None)

    def setup_both(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        setup(ctx, inputs, output)
        ctx.save_for_forward(*inputs[0], inputs[1])

    def function(xs: list[Tensor], x: Tensor) -> Tensor:
        return x * sum((k + 1) * t for k, t in enumerate(xs))

    def samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
        three = [torch.randn(5, device=device, dtype=dtype) for _ in range(3)]
        return [Sample("three", (three, torch.randn(5, device=device, dtype=dtype)))]

    return register_once(
        "listed(Tensor[] xs, Tensor x) -> Tensor",
        check=lambda xs, x: pointwise.check_floating("listed", x=x, **{f"xs{i}": t for i, t in enumerate(xs)}),
        shape=lambda xs, x: torch.empty_like(x),
        cpu=lambda xs, x: torch.empty_like(x).copy_(function(xs, x)),
        reference=function,
        samples=samples,
        cost=lambda xs, x: Cost(2 * len(xs) * x.numel(), (len(xs) + 2) * x.nbytes),
        setup=setup_both,
        backward=backward,
        jvp=jvp,
        vmap=looped_vmap,
        autocast="promote",
    )


@pytest.mark.skipif(registration.INTERPRETING, reason="operators registered here have no kernel")
def test_lists_of_tensors() -> None:
    """With a hand-written Autograd kernel that gets a list, gradients of its members vanish in silence."""
    checks = ["values", "gradients", "third_order", "forward_mode", "func_grad", "vmap", "opcheck", "compile_static",
              "compile_transforms", "autocast"]  # fmt: skip
    check_operator(listed(), checks=checks)


@pytest.mark.skipif(registration.INTERPRETING, reason="operators registered here have no kernel")
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_every_member_of_a_list_gets_its_gradient(wanted: tuple[int, ...]) -> None:
    """Those that want one and no others, whether or not another argument (the last one here) wants one too."""
    tensors = [random(5).requires_grad_(i in wanted) for i in range(3)]
    listed()(tensors[:2], tensors[2]).sum().backward()
    a, b, x = (t.detach() for t in tensors)
    expected = (x, 2 * x, a + 2 * b)
    for i, tensor in enumerate(tensors):
        if i in wanted:
            torch.testing.assert_close(tensor.grad, expected[i])
        else:
            assert tensor.grad is None


def test_operator_without_a_gradient_raises() -> None:
    """Without an Autograd kernel, x.grad would be None after a mere warning."""
    operator = register_once("without_gradient(Tensor x) -> Tensor", backward=None, jvp=None)
    x = random(5).requires_grad_()
    with pytest.raises(RuntimeError, match="fusedops::without_gradient has no gradient"):
        operator(x).sum().backward()
    with pytest.raises(NotImplementedError, match="fusedops::without_gradient has no forward-mode derivative"):
        torch.func.jvp(operator.op, (x,), (x,))
    assert not operator(x.detach()).requires_grad


# ---------------------------------------------------------------------------------------------------------------------
# The private names of PyTorch


def test_private_names_are_there() -> None:
    """This PyTorch has every private name that fusedops.registration uses; they are used nowhere else."""
    assert registration.MISSING_PRIVATE_NAME is None
    names = (
        "_after_ADInplaceOrView_keyset",
        "_after_autograd_keyset",
        "_AutoDispatchBelowADInplaceOrView",
        "_are_functorch_transforms_active",
        "_AutoDispatchBelowAutograd",
        "enable_single_level_autograd_function",
        "_set_fwd_grad_enabled",
        "_SingleLevelFunction",
    )
    assert [name for name in names if not hasattr(registration, name)] == []
    for path in (ROOT / "fusedops").rglob("*.py"):
        if path.name != "registration.py":
            assert not [name for name in names if name in path.read_text()], path


def run_python(source: str) -> str:
    """The standard output of a fresh interpreter in the repository's root."""
    command = [sys.executable, "-c", textwrap.dedent(source)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_missing_private_name_is_said_and_gradients_stay_right() -> None:
    """A PyTorch without one of them: a warning that says what is lost; ordinary gradients go on."""
    output = run_python("""
        import warnings
        import torch, torch._functorch.autograd_function
        del torch._functorch.utils.enable_single_level_autograd_function
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import fusedops
        (warning,) = [w for w in caught if w.category is RuntimeWarning and "fusedops" in str(w.message)]
        print(warning.message)
        x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(fusedops.silu, (x,))
        torch.autograd.gradgradcheck(fusedops.silu, (x,))
        compiled = torch.compile(lambda t: fusedops.silu(t, opaque=True).sum(), backend="aot_eager", fullgraph=True)
        (grad,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(grad, torch.autograd.grad(torch.nn.functional.silu(x).sum(), x)[0])
        try:
            torch.func.grad(lambda t: fusedops.silu(t).sum())(x.detach())
        except RuntimeError:
            print("torch.func.grad raises")
    """)
    assert "enable_single_level_autograd_function" in output
    assert "torch.func.grad, jacrev and hessian raise, and forward mode returns zero" in output
    assert "torch.func.grad raises" in output


# ---------------------------------------------------------------------------------------------------------------------
# What PyTorch does to operators


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    x = random(5, 7).requires_grad_()
    (grad,) = torch.autograd.grad(F.silu(F.silu(x)).sum(), x)
    checkpoint(lambda t: fusedops.silu(fusedops.silu(t)), x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, grad)


def test_selective_checkpoint_by_name() -> None:
    """The operator that ran is the one that is named, so that its result can be kept instead of computed again."""
    x = random(5, 7).requires_grad_()

    def run(keep: list[Any]) -> int:
        before = executions()
        contexts = partial(create_selective_checkpoint_contexts, keep)
        checkpoint(lambda t: fusedops.silu(t).sin(), x, use_reentrant=False, context_fn=contexts).sum().backward()
        return executions() - before

    assert run([torch.ops.aten.sin.default]) == 2
    assert run([torch.ops.fusedops.silu.default]) == 1


def test_flop_counter() -> None:
    x = random(5, 7).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        fusedops.silu(x).sum().backward()
    flops = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    backward = registry.operator("silu_backward")
    assert flops["fusedops.silu"] == silu_operator.cost(x).flops > 0
    assert flops["fusedops.silu_backward"] == backward.cost(x, x).flops > 0


class Gated(torch.nn.Module):
    """A module that keeps its operator under torch.export."""

    def forward(self, x: Tensor) -> Tensor:
        return fusedops.silu(x, opaque=True) * 2


def test_export_save_load(tmp_path: Path) -> None:
    """The exported program holds the operator, and another process loads it."""
    x = random(5, 7)
    program = torch.export.export(Gated(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2)}})
    assert torch.ops.fusedops.silu.default in [node.target for node in program.graph.nodes]
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save(x, tmp_path / "x.pt")
    run_python(f"""
        import torch, fusedops
        module = torch.export.load({str(tmp_path / "program.pt2")!r}).module()
        x = torch.load({str(tmp_path / "x.pt")!r})
        for rows in (5, 3):
            torch.testing.assert_close(module(x[:rows]), torch.nn.functional.silu(x[:rows]) * 2)
    """)


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")],
        ),
    ],
)
def test_executions_are_counted_alike(backend: str) -> None:
    """Once a call, forward and backward, with neighbours that Inductor compiles: none for tracing, none missed."""
    compiled = torch.compile(lambda t: fusedops.silu(t * 2, opaque=True) + 1, backend=backend, fullgraph=True)
    x = random(5, 7).requires_grad_()
    before = counting.executed()
    for _ in range(3):
        x.grad = None
        compiled(x).sum().backward()
    path = "triton-interpreter" if registration.INTERPRETING else "cpu"
    assert counting.executed() - before == Counter({("silu", path): 3, ("silu_backward", path): 3})
    torch.testing.assert_close(x.grad, torch.autograd.grad((F.silu(x * 2) + 1).sum(), x)[0])


def test_dynamo_sees_one_opaque_operator() -> None:
    """The graph holds the operator, and nothing of what implements it."""
    targets: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        targets.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compile(partial(fusedops.silu, opaque=True), backend=backend, fullgraph=True)(random(5))
    assert targets == [torch.ops.fusedops.silu.default]


def test_double_backward_over_a_compiled_function_is_refused() -> None:
    """PyTorch itself refuses it, so there is no wrong second derivative; grad(grad) goes inside."""
    x = random(5).requires_grad_()
    compiled = torch.compile(partial(fusedops.silu, opaque=True), backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(grad.sum(), x)


def test_public_functions_pickle() -> None:
    """OpOverload objects do not pickle; plain functions in modules do."""
    functions = [getattr(fusedops, name) for name in fusedops.__all__]
    functions += [i.function for slot in slots.SLOTS.values() for i in slot.implementations.values()]
    for function in functions:
        assert pickle.loads(pickle.dumps(function)) is function


# ---------------------------------------------------------------------------------------------------------------------
# Schemas


def test_schemas_stay_compatible() -> None:
    """Programs exported with the recorded schemas still load; the record is complete."""
    recorded = schemas.read(SCHEMAS)
    assert schemas.incompatibilities(recorded, schemas.current()) == []
    assert recorded == schemas.current(), f"record the new schemas: {schemas.HOW_TO_RECORD}"


def test_incompatible_schemas_are_found(tmp_path: Path) -> None:
    old = {"f": "fusedops::f(Tensor x) -> Tensor", "gone": "fusedops::gone(Tensor x) -> Tensor"}
    compatible = {"f": "fusedops::f(Tensor x, float alpha=1.) -> Tensor", "gone": old["gone"], "new": old["f"]}
    assert schemas.incompatibilities(old, compatible) == []
    without_default = {"f": "fusedops::f(Tensor x, float alpha) -> Tensor"}
    lines = schemas.incompatibilities(old, without_default)
    assert [line.split(":")[0] for line in lines] == ["f", "gone"]
    another_output = {"f": "fusedops::f(Tensor x) -> (Tensor, Tensor)", "gone": old["gone"]}
    assert len(schemas.incompatibilities(old, another_output)) == 1

    path = tmp_path / "schemas.json"
    schemas.record(path)
    assert schemas.read(path) == schemas.current()
    path.write_text('{"gone": "fusedops::gone(Tensor x) -> Tensor"}')
    with pytest.raises(ValueError, match="gone: was"):
        schemas.record(path)
