"""What a slot is: its name, its signature and its implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Implementation:
    """One way to fill a slot: a plain module-level function of the slot's signature.

    operators: what a profile of one call shows, forward and, where it has one, backward: "fusedops::silu_mul" of ours,
    "aten::silu" of stock PyTorch. A fused slot that shows none of its own, with no fallback announced, swapped nothing.
    """

    slot: str
    name: str
    function: Callable[..., Any]
    operators: tuple[str, ...]

    @property
    def fused(self) -> bool:
        """Whether it runs operators of this library."""
        return any(operator.startswith("fusedops::") for operator in self.operators)


@dataclass(frozen=True)
class Slot:
    """A slot: its name, the signature of its implementations, and these by name ("native" and "fused" among them).

    A name may be an alias: it leads to an implementation that has another name, which is the one tables show.
    """

    name: str
    signature: str
    implementations: dict[str, Implementation] = field(default_factory=dict)

    def implementation(self, name: str) -> Implementation:
        """The implementation `name`. Raises KeyError naming those that exist."""
        if name not in self.implementations:
            raise KeyError(
                f"ops.{self.name}={name}: no such implementation; there are {', '.join(self.implementations)}"
            )
        return self.implementations[name]


def make_slot(name: str, signature: str, **implementations: tuple[Callable[..., Any], tuple[str, ...]] | str) -> Slot:
    """A slot of these implementations: name=(function, operators that a profile shows), or alias=the name meant."""
    own = {n: Implementation(name, n, *given) for n, given in implementations.items() if not isinstance(given, str)}
    return Slot(name, signature, {n: own[g if isinstance(g, str) else n] for n, g in implementations.items()})
