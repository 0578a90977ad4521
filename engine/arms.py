"""Arms: what a comparison trains, an operator set (one implementation for each slot) and a compile mode each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import CompileConfig
from engine.errors import ConfigError, unknown
from fusedops.slots import SLOTS, Implementation


@dataclass(frozen=True)
class Arm:
    """An operator set and a compile mode.

    Its name is the set, then the slots that depart from it, then how it is compiled: "fused,attention=native+compile".
    """

    name: str
    implementations: tuple[Implementation, ...]
    """One for each slot of the model, in the model's order."""
    compile_mode: str = "none"
    """The mode of `CompileConfig`."""
    backend: str = "inductor"
    """What compiles it, where it is compiled."""

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """What each slot calls."""
        return {implementation.slot: implementation.function for implementation in self.implementations}


def compiled(arm: Arm, settings: CompileConfig) -> Arm:
    """The arm in a compile mode other than none."""
    suffix = "compile" if settings.mode == "default" else settings.mode
    return replace(arm, name=f"{arm.name}+{suffix}", compile_mode=settings.mode, backend=settings.backend)


def operator_set(name: str, slots: Sequence[str], overrides: dict[str, str | None] | None = None) -> Arm:
    """The set `name` over these slots, with an override where one is given (None inherits the set's).

    Raises ConfigError for a set, a slot or an implementation that does not exist, naming those that do.
    """
    given = {slot: chosen for slot, chosen in (overrides or {}).items() if chosen is not None}
    for slot, chosen in given.items():
        if slot not in slots:
            raise unknown(f"ops.{slot}={chosen}", "slot of this model", slot, slots)
    implementations = []
    for slot in slots:
        existing = SLOTS[slot].implementations
        chosen = given.get(slot, name)
        if chosen not in existing:
            key = f"ops.{slot}" if slot in given else "ops"
            raise unknown(f"{key}={chosen}", f"implementation of {slot}", chosen, existing)
        implementations.append(existing[chosen])
    departures = [f"{slot}={given[slot]}" for slot in slots if given.get(slot, name) != name]
    return Arm(",".join([name, *departures]), tuple(implementations))


def arms_of(
    ops: Any, baseline: str, slots: Sequence[str], compilation: CompileConfig | None = None
) -> tuple[list[Arm], str | None]:
    """The arms that a configuration asks for, the baseline first, and the baseline's name (None where there is none).

    ops: an OpsConfig. An operator set that is the baseline's makes one arm. With a compile mode every arm is compiled;
    where its `arms` is both, the same arms uncompiled come before them.
    """
    arm = operator_set(ops.set, slots, {slot: getattr(ops, slot) for slot in SLOTS})
    first = arm if baseline == "none" else operator_set(baseline, slots)
    arms = [first] if first.implementations == arm.implementations else [first, arm]
    if compilation is not None and compilation.mode != "none":
        eager = arms if compilation.arms == "both" else []
        arms = eager + [compiled(arm, compilation) for arm in arms]
    return arms, None if baseline == "none" else arms[0].name


def check_kind_of_run(values: Any, arms: Sequence[Arm], baseline: str | None) -> None:
    """Raise ConfigError unless the arms are what `equivalence` or `ablate`, where a Config asks for one, compares."""
    if not values.equivalence and not values.ablate:
        return
    asked = f"equivalence={values.equivalence}" if values.equivalence else "ablate=true"
    if values.equivalence and values.ablate:
        raise ConfigError(f"ablate=true with {asked}: a run does one of them")
    if values.profile:
        raise ConfigError(f"profile=true with {asked}: only a run that trains and times its arms is profiled")
    if baseline is None:
        raise ConfigError(f"{asked} with baseline=none: it compares with the stock operators; allowed: baseline=native")
    if len(arms) == 1:
        raise ConfigError(f"{asked} with ops={values.ops.set}: no slot is swapped; allowed: ops=fused")
    if values.ablate and len(arms) > 2:
        raise ConfigError(f"{asked} with compile.arms=both: allowed: compile.arms=compiled, or compile=none")
