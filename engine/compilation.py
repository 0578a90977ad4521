"""torch.compile of the models that are trained: what is compiled, how long that took, and how often it happened again.

The model is compiled in place (`torch.nn.Module.compile`): its parameters keep their names, so that a checkpoint of a
compiled model is that of a plain one. The optimizer stays as it is.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from engine.arms import Arm
from engine.errors import RunError, is_out_of_memory

MODES = {"default": "default", "max_autotune": "max-autotune", "reduce_overhead": "reduce-overhead"}
"""The modes of `compile=` as torch.compile calls them."""
WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
RECOMPILE_LIMIT = 64
"""Versions of the model's code that may be compiled: each arm has one for training and some for evaluation."""
REASON_LINES = 3
"""Of an error of the compiler, which explain at length how to find its cause."""

_graphed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def compile_model(
    compile: Callable[..., None], model: nn.Module, arm: Arm, device: torch.device, graphs: bool = True
) -> None:
    """Compile a model in place as its arm says; an arm that is not compiled leaves it as it is.

    compile  `Task.compile`.
    graphs   False leaves CUDA graphs out of a mode that has them: the same kernels, each launched by itself.
    """
    if arm.compile_mode == "none":
        return
    options: dict[str, Any] = {"backend": arm.backend}
    if arm.backend == "inductor":  # the only one with modes
        mode, graphed = MODES[arm.compile_mode], graphs and has_graphs(arm, device)
        options["mode"] = mode if graphed else WITHOUT_GRAPHS.get(mode, mode)
        if graphed:
            _graphed.add(model)
    compile(model, **options)


def has_graphs(arm: Arm, device: torch.device) -> bool:
    """Whether an arm's training replays CUDA graphs."""
    return arm.backend == "inductor" and device.type == "cuda" and MODES.get(arm.compile_mode) in WITHOUT_GRAPHS


def eager(arm: Arm) -> AbstractContextManager[object]:
    """Inside, the arm's models run as if they were not compiled."""
    # Nothing of the compiler is imported for an arm that has no use for it.
    return torch.compiler.set_stance("force_eager") if arm.compile_mode != "none" else contextlib.nullcontext()


def is_graphed(model: nn.Module) -> bool:
    """Whether calls of the model replay CUDA graphs: what one gives is overwritten by the next."""
    return model in _graphed


def begin_step(model: nn.Module) -> None:
    """Say that nobody needs what earlier calls of this model gave, which CUDA graphs may now overwrite."""
    if model in _graphed:
        torch.compiler.cudagraph_mark_step_begin()


def own_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Move gradients out of the memory of CUDA graphs, for the next batch of the same step to be added to them."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


class CompileLog:
    """What compiling took. Counts while `compiling` is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Wall time spent compiling, recording of CUDA graphs included."""
        self.graphs = 0
        """Pieces of code that were compiled, again or for the first time."""
        self.training_recompiles = 0
        """Of these, again for training: should be none, since all steps have the same shapes."""
        self.evaluation_recompiles = 0
        """Again for evaluation, whose last batches have other shapes; from the second shape on sizes may vary."""
        self._started = 0.0
        self._seen: set[tuple[str, bool]] = set()

    def as_dict(self) -> dict[str, Any]:
        """As summary.json has it."""
        return {
            "seconds": self.seconds,
            "graphs": self.graphs,
            "training_recompiles": self.training_recompiles,
            "evaluation_recompiles": self.evaluation_recompiles,
        }

    def start(self, event: Any) -> None:
        """Dynamo's callback: a compilation begins, of a version of a frame ("0/2") or of a backward put off so far."""
        self._started = time.perf_counter()
        if event.callback_trigger.name != "DYNAMO":
            return
        self.graphs += 1
        training = torch.is_grad_enabled()
        frame = (event.compile_id.partition("/")[0], training)
        if frame in self._seen:
            self.training_recompiles += training
            self.evaluation_recompiles += not training
        self._seen.add(frame)

    def end(self, event: Any) -> None:
        """Dynamo's callback: it is over."""
        self.seconds += time.perf_counter() - self._started

    def listen(self) -> None:
        """Begin to count."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self.start)
        callback_handler.register_end_callback(self.end)

    def drop_code(self) -> None:
        """Drop all code compiled so far, and graphs with their memory; what is compiled next is no recompilation."""
        torch.compiler.reset()  # and with it who listens
        self._seen.clear()
        self.listen()


@contextlib.contextmanager
def compiling(arms: Sequence[Arm]) -> Iterator[CompileLog]:
    """Where arms run that may be compiled; on leaving, their code is dropped.

    Raises RunError where one cannot be compiled, or would be compiled more often than RECOMPILE_LIMIT: Dynamo would
    leave it eager then, without an error.
    """
    log = CompileLog()
    modes = list(dict.fromkeys(arm.compile_mode for arm in arms if arm.compile_mode != "none"))
    if not modes:  # nothing of the compiler is imported
        yield log
        return
    import torch._dynamo
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    log.drop_code()
    try:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True):
            yield log
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:REASON_LINES])
        raise RunError(
            f"compile={','.join(modes)}: {type(error).__name__}: {reason}\ncompile=none runs without torch.compile"
        ) from error
    finally:
        torch.compiler.reset()
