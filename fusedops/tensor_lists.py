"""Arguments of an operator that are lists of tensors: their tensors, found and replaced, and the lists taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor


class TensorLists:
    """Takes an operator's lists of tensors apart: what autograd is given in a list has no gradient, in silence."""

    def __init__(self, op: Any):
        self._positions = frozenset(i for i, a in enumerate(op._schema.arguments) if _is_tensor_list(a.type))

    def __bool__(self) -> bool:
        return bool(self._positions)

    def flatten(self, args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """The arguments with each list's members in its place, and the lengths of the lists."""
        flat: list[Any] = []
        lengths = []
        for i, a in enumerate(args):
            if i in self._positions:
                flat += a
                lengths.append(len(a))
            else:
                flat.append(a)
        return tuple(flat), tuple(lengths)

    def unflatten(self, flat: Sequence[Any], lengths: tuple[int, ...]) -> tuple[Any, ...]:
        """One entry an argument again, of what `flatten` gave or of something parallel to it."""
        args: list[Any] = []
        members, remaining = iter(flat), iter(lengths)
        while len(args) < len(flat) - sum(lengths) + len(lengths):
            if len(args) in self._positions:
                args.append([next(members) for _ in range(next(remaining))])
            else:
                args.append(next(members))
        return tuple(args)

    def flatten_gradients(self, gradients: Sequence[Any], lengths: tuple[int, ...]) -> tuple[Any, ...]:
        """A gradient for each member, where None stands for a whole list's too."""
        remaining = iter(lengths)
        filled = list(gradients)
        for i in sorted(self._positions):
            length = next(remaining)
            filled[i] = (None,) * length if filled[i] is None else filled[i]
        return self.flatten(filled)[0]


def _is_tensor_list(kind: Any) -> bool:
    return kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType"


def tensors_in(args: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments, those in lists included, in order."""
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, list | tuple):
            yield from (member for member in a if isinstance(member, Tensor))


def map_tensors(function: Callable[[Tensor], Any], args: Iterable[Any]) -> tuple[Any, ...]:
    """The arguments with `function` of each tensor in its place, those in lists included."""

    def mapped(a: Any) -> Any:
        if isinstance(a, Tensor):
            return function(a)
        return [mapped(member) for member in a] if isinstance(a, list | tuple) else a

    return tuple(map(mapped, args))
