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
    """A slot: its name, the signature of its implementations, and these by name ("native" and "fused" among them)."""

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


def make_slot(name: str, signature: str, **implementations: tuple[Callable[..., Any], tuple[str, ...]]) -> Slot:
    """A slot of these implementations: name=(function, the operators a profile of it shows)."""
    return Slot(name, signature, {n: Implementation(name, n, f, ops) for n, (f, ops) in implementations.items()})
