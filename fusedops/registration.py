"""Registers operators with PyTorch: the one module that talks to torch.library.

`register` takes what an operator is (schema, check, shape rule, CPU implementation, kernel, gradient, reference,
samples, cost) and gives back an `Operator` whose every derivative, transform and compiler path works. The Autograd
kernel redispatches to the same operator below autograd, instead of calling a second, raw one: that is what keeps
opcheck, selective checkpointing, FLOP counters, torch.func and forward mode right at once. It leans on a few private
names of PyTorch, all of them imported here; where one is missing, `torch.library`'s `register_autograd` stands in and
what is lost is said.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor
from torch.autograd import forward_ad
from torch.library import Library, register_autograd, register_fake, register_vmap
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import register_flop_formula

from fusedops import counting
from fusedops.tensor_lists import TensorLists, map_tensors, tensors_in

NAMESPACE = "fusedops"
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter was asked for when this process started: the CPU key then runs the kernels."""

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The floating dtypes that operators are checked in."""

# A Library that is dropped while an operator's handle lives takes the process down, so it is held for good.
_library = Library(NAMESPACE, "DEF")

try:
    from torch._C import (
        _after_ADInplaceOrView_keyset,
        _after_autograd_keyset,
        _are_functorch_transforms_active,
        _AutoDispatchBelowADInplaceOrView,
        _AutoDispatchBelowAutograd,
    )
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch.autograd.forward_ad import _set_fwd_grad_enabled
    from torch.autograd.function import _SingleLevelFunction

    MISSING_PRIVATE_NAME: str | None = None
except ImportError as error:
    MISSING_PRIVATE_NAME = str(error)
    warnings.warn(
        f"this version of PyTorch ({torch.__version__}) lacks a name that fusedops registers gradients with ({error}); "
        "register_autograd stands in: ordinary gradients of any order and torch.compile work, but torch.func.grad, "
        "jacrev and hessian raise, and forward mode returns zero",
        RuntimeWarning,
        stacklevel=2,
    )


class Sample(NamedTuple):
    """Arguments an operator is tested and explained with."""

    name: str
    args: tuple[Any, ...]


class Cost(NamedTuple):
    """What one call must do at least: floating-point operations, and bytes through device memory."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """A launcher of `fusedops.kernels`, imported at its first call, since Triton need not be importable.

    `path` names the road it takes (see `fusedops.counting`); a launcher with more than one has a function of the same
    arguments that tells which.
    """

    module: str
    launcher: str
    path: str | Callable[..., str] = "triton"

    def load(self) -> Callable[..., Any]:
        """The launcher itself. Raises ImportError, naming what is missing, where Triton cannot be imported."""
        return getattr(importlib.import_module(f"fusedops.kernels.{self.module}"), self.launcher)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """A registered operator; see `register` for the fields."""

    schema: str
    check: Callable[..., None]
    shape: Callable[..., Any]
    cpu: Callable[..., Any]
    kernel: Kernel
    reference: Callable[..., Any]
    samples: Callable[[torch.device, torch.dtype], Iterable[Sample]]
    cost: Callable[..., Cost]
    stock: str
    setup: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    jvp: Callable[..., Any] | None = None
    vmap: Callable[..., Any]
    autocast: str | None = None
    interpreted_dtypes: tuple[torch.dtype, ...] = FLOATING
    exempt: Mapping[str, str] = field(default_factory=dict)
    op: Any = field(init=False)
    mutated: tuple[int, ...] = field(init=False)
    """The positions of the arguments that it writes to."""

    @property
    def name(self) -> str:
        """The name without the namespace."""
        return self.schema.split("(", 1)[0]

    def __call__(self, *args: Any) -> Any:
        return self.op(*args)


def register(**fields: Any) -> Operator:
    """Register an operator `fusedops::<name>` and return it.

    schema     "name(Tensor x, float alpha) -> Tensor": positional arguments only. Later arguments are appended with
               defaults and outputs never change, so that programs exported with an older version still load.
               A list of tensors, "Tensor[] xs", is one argument in all that follows: `ctx.needs` has a list of bools
               for it, and its gradient is a sequence or None. Arguments written to, "Tensor(a!) x", make an operator
               without outputs or gradients: it refuses tensors that need one, and runs under no transform.
    check      (*args) -> None: raises ValueError or TypeError naming the argument, what it was and what is allowed.
               Runs before the implementation and before the shape rule.
    shape      (*args) -> outputs: the shape rule on fake tensors; allocates the outputs by the same expression as the
               implementations do.
    cpu        (*args) -> outputs: stock PyTorch below autograd, honouring the shape rule's strides.
    kernel     the CUDA implementation; in Triton's interpreter also the CPU one.
    reference  (*args) -> outputs: the same function in differentiable stock PyTorch, for any dtype and device. Of an
               operator that writes to arguments: what these then hold, in order; nothing is written to.
    samples    (device, dtype) -> Samples: small, varied arguments; at each call the same names and shapes with other
               random values; none for a dtype that the operator does not take. No tensor has requires_grad set (who
               checks gradients sets it).
    cost       (*args) -> Cost of one call.
    stock      what one would write in stock PyTorch, for tables.
    setup      (ctx, inputs, outputs): saves for backward (and forward: ctx.save_for_forward), marks outputs that carry
               no gradient. `inputs` has every argument of the schema.
    backward   (ctx, *gradients) -> a gradient, or None, for each argument; made of differentiable operators, so that
               higher orders follow. `ctx.needs` tells for each argument whether its gradient is wanted.
               None: asking for a gradient raises.
    jvp        (ctx, *tangents) -> output tangents; None: forward mode raises NotImplementedError.
    vmap       (operator, info, in_dims, *args) -> (outputs, out_dims): `pointwise_vmap`, `looped_vmap` or its own.
    autocast   None: runs in its arguments' dtypes; "cast": floating arguments go to autocast's dtype, as for a linear
               layer; "promote": to the widest dtype among them, as for a product.
    interpreted_dtypes
               the dtypes whose kernels are right in Triton's interpreter, where a product (`tl.dot`) of bfloat16 is
               not; left out: all floating ones.
    exempt     checks of fusedops.testing that this operator is not put to: their names, each with the reason.
    """
    operator = Operator(**fields)
    name, qualified = operator.name, f"{NAMESPACE}::{operator.name}"
    _library.define(operator.schema)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    object.__setattr__(operator, "op", op)
    written = (i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    object.__setattr__(operator, "mutated", tuple(written))
    complete = _completer(op)

    def shape_rule(*args: Any) -> Any:
        args = complete(args)
        operator.check(*args)
        return operator.shape(*args)

    register_fake(qualified, shape_rule, lib=_library)
    _library.impl(name, _kernel_implementation(operator, complete, "cuda"), "CUDA")
    if INTERPRETING:
        _library.impl(name, _kernel_implementation(operator, complete, "triton-interpreter"), "CPU")
    else:
        _library.impl(name, _cpu_implementation(operator, complete), "CPU")
    if operator.mutated:
        _register_mutation(operator)
    elif MISSING_PRIVATE_NAME is None:
        _library.impl(name, _autograd_kernel(operator, complete), "Autograd", with_keyset=True)
    else:
        _register_stand_in_gradient(operator, qualified)
    for device_type, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
        if operator.autocast is not None:
            _library.impl(name, _autocast_kernel(operator, device_type, key), key)
    register_vmap(qualified, _vmap_rule(operator, complete), lib=_library)
    register_flop_formula(op.overloadpacket, get_raw=True)(
        lambda *args, out_val=None, **_: operator.cost(*complete(args)).flops
    )
    return operator


def _completer(op: Any) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """The dispatcher drops trailing arguments that equal their defaults: this puts them back."""
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def complete(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if len(args) == len(defaults) else args + defaults[len(args) :]

    return complete


# ---------------------------------------------------------------------------------------------------------------------
# Implementations


def _cpu_implementation(operator: Operator, complete: Callable[..., Any]) -> Callable[..., Any]:
    name, check, function = operator.name, operator.check, operator.cpu

    def run(*args: Any) -> Any:
        args = complete(args)
        check(*args)
        outputs = function(*args)
        counting.record(name, "cpu")
        return outputs

    return run


def _kernel_implementation(operator: Operator, complete: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Runs the launcher on its tensors' GPU, whichever is current, and counts it under the path it took."""
    name, check, kernel = operator.name, operator.check, operator.kernel
    interpreted = where == "triton-interpreter"
    launch: Callable[..., Any] | None = None

    def run(*args: Any) -> Any:
        nonlocal launch
        args = complete(args)
        check(*args)
        if launch is None:
            launch = kernel.load()
        if interpreted:
            outputs, path = launch(*args), where
        else:
            device = next(tensors_in(args)).device
            if device.index == torch.cuda.current_device():
                outputs = launch(*args)
            else:
                with torch.cuda.device(device):
                    outputs = launch(*args)
            path = kernel.path if isinstance(kernel.path, str) else kernel.path(*args)
        counting.record(name, path)
        return outputs

    return run


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def function_name(operator: str) -> str:
    """The name of the autograd.Function that an operator's gradient is recorded by, which profilers show."""
    return "".join(part.capitalize() for part in operator.split("_"))


def _autograd_kernel(operator: Operator, complete: Callable[..., Any]) -> Callable[..., Any]:
    """What runs at the Autograd key: records a node where a derivative may be asked for, then redispatches below it."""
    op, setup, name = operator.op, operator.setup, operator.name
    lists = TensorLists(op)

    def finish(ctx: Any, args: tuple[Any, ...], outputs: Any) -> Any:
        if setup is not None:
            setup(ctx, complete(args), outputs)
        return outputs

    def arguments(ctx: Any, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        return lists.unflatten(flat, ctx.lengths) if lists else flat

    def forward(ctx: Any, state: tuple[Any, tuple[int, ...]], *flat: Any) -> Any:
        keyset, ctx.lengths = state
        args = arguments(ctx, flat)
        with _AutoDispatchBelowAutograd():
            outputs = op.redispatch(keyset & _after_autograd_keyset, *args)
        return finish(ctx, args, outputs)

    def forward_under_transform(ctx: Any, state: tuple[Any, tuple[int, ...], bool], *flat: Any) -> Any:
        # A Function's forward runs without grad mode, yet the levels further out must go on recording: without the
        # caller's mode grad(grad) is zero in silence; without forward-grad enabled jvp(jvp) is.
        keyset, ctx.lengths, grad_mode = state
        args = arguments(ctx, flat)
        with _AutoDispatchBelowAutograd(), torch.set_grad_enabled(grad_mode), _set_fwd_grad_enabled(True):
            outputs = op.redispatch(keyset & _after_autograd_keyset, *args)
        return finish(ctx, args, outputs)

    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.needs = arguments(ctx, ctx.needs_input_grad[1:])
        results = _gradients(operator, ctx, gradients)
        return (None, *(lists.flatten_gradients(results, ctx.lengths) if lists else results))

    def jvp(ctx: Any, _state: None, *tangents: Any) -> Any:
        if operator.jvp is None:
            raise NotImplementedError(f"{NAMESPACE}::{name} has no forward-mode derivative")
        return operator.jvp(ctx, *arguments(ctx, tangents))

    def jvp_under_transform(ctx: Any, _state: None, *tangents: Any) -> Any:
        # As in forward: without it the stock operations of a rule drop the tangents of the levels further out. This
        # level's own must not follow, though: the rule sees the saved tensors without theirs.
        with _set_fwd_grad_enabled(True):
            return jvp(_WithoutTangents(ctx), None, *tangents)

    def function(suffix: str, base: Any, forward: Callable[..., Any], jvp: Callable[..., Any]) -> Any:
        title = function_name(name)
        methods = {"forward": forward, "backward": backward, "jvp": jvp}
        return type(title + suffix, (base,), {key: staticmethod(method) for key, method in methods.items()})

    Recorded = function("", torch.autograd.Function, forward, jvp)
    # Only under a transform: outside of one it breaks compiled autograd.
    RecordedUnderTransform = function(
        "UnderTransform", _SingleLevelFunction, forward_under_transform, jvp_under_transform
    )

    def autograd(keyset: Any, *args: Any) -> Any:
        flat, lengths = lists.flatten(args) if lists else (args, ())
        if _are_functorch_transforms_active():
            with enable_single_level_autograd_function():
                return RecordedUnderTransform.apply((keyset, lengths, torch.is_grad_enabled()), *flat)
        if (torch.is_grad_enabled() and _C._any_requires_grad(*flat)) or forward_ad._current_level >= 0:
            return Recorded.apply((keyset, lengths), *flat)
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _after_autograd_keyset, *args)

    return autograd


class _WithoutTangents:
    """The ctx of an autograd.Function, its saved tensors without their tangents of the current forward-mode level."""

    def __init__(self, ctx: Any):
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        # The level is always 0, functorch nests by wrapping tensors; under compilation unpack_dual would not find it.
        return tuple(t if t is None else forward_ad.unpack_dual(t, level=0).primal for t in self._ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _gradients(operator: Operator, ctx: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    if operator.backward is None:
        raise RuntimeError(f"{NAMESPACE}::{operator.name} has no gradient")
    result = operator.backward(ctx, *gradients)
    return result if isinstance(result, tuple) else (result,)


def _register_mutation(operator: Operator) -> None:
    """What runs at the Autograd key of an operator that writes to arguments, and, below, what counts the writing."""
    op, name, mutated = operator.op, operator.name, operator.mutated
    if MISSING_PRIVATE_NAME is not None:
        return  # PyTorch's own fallback warns of gradients that are asked for

    def autograd(keyset: Any, *args: Any) -> Any:
        if _are_functorch_transforms_active():
            raise NotImplementedError(f"{NAMESPACE}::{name} writes to its arguments and runs under no transform")
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args)):
            raise RuntimeError(
                f"{NAMESPACE}::{name} writes to its arguments and has no gradient; call it under torch.no_grad() where "
                "one of its tensors requires a gradient"
            )
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _after_autograd_keyset, *args)

    def count_versions(keyset: Any, *args: Any) -> Any:
        # A kernel writes through a pointer: without this, a backward pass would use what it saved unawares.
        torch.autograd.graph.increment_version(list(tensors_in(args[i] for i in mutated)))
        with _AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & _after_ADInplaceOrView_keyset, *args)

    _library.impl(name, autograd, "Autograd", with_keyset=True)
    _library.impl(name, count_versions, "ADInplaceOrView", with_keyset=True)


def _register_stand_in_gradient(operator: Operator, qualified: str) -> None:
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.needs = ctx.needs_input_grad
        return _gradients(operator, ctx, gradients)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if operator.setup is not None:
            operator.setup(ctx, inputs, output)

    register_autograd(qualified, backward, setup_context=setup_context, lib=_library)


# ---------------------------------------------------------------------------------------------------------------------
# Autocast and vmap


def _autocast_kernel(operator: Operator, device_type: str, key: str) -> Callable[..., Any]:
    """Casts by the operator's rule. (torch.library.register_autocast fixes one dtype: fp16 would give bf16.)"""
    op, promotes = operator.op, operator.autocast == "promote"
    excluded = _C.DispatchKeySet(getattr(_C.DispatchKey, key))

    def eligible(t: Tensor) -> bool:
        return t.is_floating_point() and t.device.type == device_type

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        if promotes:  # of no floating tensor at all, which the operator's check refuses, nothing is cast
            dtypes = [t.dtype for t in tensors_in(args) if eligible(t)]
            dtype = functools.reduce(torch.promote_types, dtypes or [dtype])
        with _C._ExcludeDispatchKeyGuard(excluded):
            # float64 stays, as in stock autocast.
            return op(*map_tensors(lambda t: t.to(dtype) if eligible(t) and t.dtype != torch.float64 else t, args))

    return kernel


def _vmap_rule(operator: Operator, complete: Callable[..., Any]) -> Callable[..., Any]:
    def rule(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        args = complete(args)
        return operator.vmap(operator, info, (*dims, *(None for _ in args[len(dims) :])), *args)

    return rule


def pointwise_vmap(operator: Operator, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """vmap of an operator whose tensors all have one shape: the batch becomes a leading dimension."""

    def lead(a: Any, dim: int | None) -> Any:
        if not isinstance(a, Tensor):
            return a
        a = a.movedim(dim, 0) if dim is not None else a.expand(info.batch_size, *a.shape)
        return a.contiguous()  # what expand leaves has stride 0

    outputs = operator(*(lead(a, dim) for a, dim in zip(args, dims, strict=True)))
    return outputs, pytree.tree_map(lambda _: 0, outputs)


def looped_vmap(operator: Operator, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """vmap of any operator: one call an example, the results stacked."""

    def call(of_batched: Callable[[Tensor, int], Tensor]) -> Any:
        def chosen(a: Any, dim: Any) -> Any:
            if isinstance(dim, list | tuple):
                return [chosen(member, d) for member, d in zip(a, dim, strict=True)]
            return a if dim is None else of_batched(a, dim)

        return operator(*(chosen(a, dim) for a, dim in zip(args, dims, strict=True)))

    def example(i: int) -> Any:
        return call(lambda a, dim: a.select(dim, i))

    def none_like(a: Tensor, dim: int) -> Tensor:
        return a.new_zeros((*a.shape[:dim], *a.shape[dim + 1 :]))

    if info.batch_size:
        results = [example(i) for i in range(info.batch_size)]
    else:  # one call on zeros tells what the outputs are like
        results = [call(none_like)]

    def stack(parts: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(parts))[: info.batch_size]

    if isinstance(results[0], Tensor):
        return stack(results), 0
    outputs = tuple(stack(parts) for parts in zip(*results, strict=True))
    return outputs, (0,) * len(outputs)
