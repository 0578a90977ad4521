"""The rows: every piece of work whose speed this project publishes, with what it is to reach.

A gate must hold; a goal is aimed at. Ratios are over the contender named ("best": the fastest of the others), 1 - TIE
is a tie. Rows marked `extra` run only when named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fusedops.benchmark.schema import TIE, Requirement

FORWARD = "forward"
TRAINING_FORWARD = "training forward"
FORWARD_BACKWARD = "forward + backward"
DIRECTIONS = (FORWARD, TRAINING_FORWARD, FORWARD_BACKWARD)


@dataclass(frozen=True)
class Row:
    """One piece of work.

    id         "4a": a number that stays, and a letter where one number has several shapes.
    operator   the registered operator it is about; `fusedops.benchmark.workloads` builds its contenders.
    shape      sizes by name, as the operator's workload takes them.
    quick      the sizes of a quick run, which only shows that the row works.
    options    what else the workload takes: p, approximate, causal.
    peers      peers and bounds beside the usual ones of the operator that this row measures.
    """

    id: str
    operator: str
    work: str
    shape: dict[str, int]
    quick: dict[str, int]
    direction: str = FORWARD
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    gate: tuple[Requirement, ...] = ()
    goal: tuple[Requirement, ...] = ()
    extra: bool = False

    @property
    def number(self) -> str:
        """The id without its letter."""
        return self.id.rstrip("abcdefghijklmnopqrstuvwxyz") or self.id


def _stock(ratio: float) -> tuple[Requirement, ...]:
    return (Requirement("stock", ratio),)


_TIE = 1 - TIE
_TIE_WITH_BEST = Requirement("best", _TIE)
_POINTWISE_QUICK = {"rows": 48, "columns": 96}


def _pointwise_rows() -> list[Row]:
    best = (_TIE_WITH_BEST, Requirement("stock", 1.7))
    rows = [
        Row(
            id="1",
            operator="silu",
            work="silu",
            shape={"rows": 2**15, "columns": 2**13},
            quick=_POINTWISE_QUICK,
            gate=_stock(1.0),
            goal=(Requirement("copy", 0.98),),
        )
    ]
    for id_, direction in (("2", FORWARD), ("3", FORWARD_BACKWARD)):
        rows.append(
            Row(
                id=id_,
                operator="silu_mul",
                work="silu_mul",
                shape={"rows": 16384, "columns": 8192},
                quick=_POINTWISE_QUICK,
                direction=direction,
                peers=("Liger",),
                gate=best,
                goal=best,
            )
        )
        rows += [
            Row(
                id=f"{id_}{letter}",
                operator="silu_mul",
                work="silu_mul",
                shape={"rows": 2**exponent // 256, "columns": 256},
                quick=_POINTWISE_QUICK,
                direction=direction,
                peers=("Liger",),
                goal=(_TIE_WITH_BEST,),
                extra=True,
            )
            for letter, exponent in (("s", 16), ("t", 20), ("u", 24))
        ]
    rows += [
        Row(
            id="smooth_relu",
            operator="smooth_relu",
            work="smooth_relu",
            shape={"rows": 2**15, "columns": 2**13},
            quick=_POINTWISE_QUICK,
            options={"alpha": 0.01},
        ),
    ]
    return rows


_MLP_A = {"m": 16384, "k": 1024, "n": 4096}
_MLP_B = {"m": 32768, "k": 768, "n": 3072}
_MLP_C = {"m": 8192, "k": 4096, "n": 16384}


def _linear(
    id_: str,
    shape: dict[str, int],
    approximate: str,
    direction: str,
    gate: tuple[Requirement, ...],
    goal: tuple[Requirement, ...],
    peers: tuple[str, ...] = (),
) -> Row:
    training = direction != FORWARD
    return Row(
        id=id_,
        operator="linear_gelu_dropout",
        work=f"linear + GELU ({'exact' if approximate == 'none' else 'tanh'}){' + dropout 0.1' if training else ''}",
        shape=shape,
        quick={"m": 48, "k": 32, "n": 64},
        direction=direction,
        options={"p": 0.1 if training else 0.0, "approximate": approximate, "training": training},
        peers=peers,
        gate=gate,
        goal=goal,
    )


def _linear_rows() -> list[Row]:
    def over_epilogue(stock: float, epilogue: float) -> tuple[Requirement, ...]:
        return (Requirement("stock", stock), Requirement("cuBLASLt epilogue", epilogue))

    products, epilogue = ("products alone",), ("cuBLASLt epilogue",)
    return [
        _linear("4a", _MLP_A, "none", FORWARD, _stock(1.30), _stock(1.42), products),
        _linear("4b", _MLP_B, "none", FORWARD, _stock(1.40), _stock(1.52), products),
        _linear("5a", _MLP_A, "tanh", FORWARD, over_epilogue(1.33, 1.05), over_epilogue(1.42, 1.10), epilogue),
        _linear("5b", _MLP_B, "tanh", FORWARD, over_epilogue(1.45, 1.05), over_epilogue(1.52, 1.10), epilogue),
        _linear("6a", _MLP_A, "none", TRAINING_FORWARD, _stock(1.52), _stock(1.75)),
        _linear("6b", _MLP_B, "none", TRAINING_FORWARD, _stock(1.65), _stock(1.90)),
        _linear("7a", _MLP_A, "tanh", TRAINING_FORWARD, _stock(1.58), _stock(1.75)),
        _linear("7b", _MLP_B, "tanh", TRAINING_FORWARD, _stock(1.70), _stock(1.90)),
        _linear("8", _MLP_A, "none", FORWARD_BACKWARD, _stock(1.25), _stock(1.45), products),
        _linear("9", _MLP_B, "none", FORWARD_BACKWARD, _stock(1.35), _stock(1.60), products),
        _linear("10", _MLP_C, "none", FORWARD_BACKWARD, _stock(1.04), _stock(1.12), products),
        _linear("11", {"m": 64, "k": 1024, "n": 4096}, "none", FORWARD, _stock(_TIE), _stock(1.0)),
    ]


def _attention(
    id_: str,
    shape: tuple[int, int, int, int, int],
    causal: bool,
    direction: str,
    gate: float,
    goal: float,
    flex: bool = False,
) -> Row:
    batch, heads, kv_heads, length, head_dim = shape
    return Row(
        id=id_,
        operator="flash_attention",
        work=f"attention, {'causal' if causal else 'full'}{', GQA' if heads != kv_heads else ''}",
        shape={"batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "head_dim": head_dim},
        quick={"batch": 1, "heads": 4, "kv_heads": 4 * kv_heads // heads, "length": 128, "head_dim": 32},
        direction=direction,
        options={"causal": causal},
        peers=("flex_attention",) if flex else (),
        gate=_stock(gate),
        goal=_stock(goal),
    )


def _attention_rows() -> list[Row]:
    usual = (4, 16, 16, 4096, 128)
    narrow = (4, 16, 16, 4096, 64)
    grouped = (4, 32, 8, 4096, 128)
    return [
        _attention("12", usual, True, FORWARD, 1.10, 1.25, flex=True),
        _attention("13", usual, False, FORWARD, 1.03, 1.10, flex=True),
        _attention("14", narrow, True, FORWARD, 1.05, 1.20, flex=True),
        _attention("15", (1, 16, 16, 16384, 128), True, FORWARD, 1.08, 1.18),
        _attention("16", grouped, True, FORWARD, 1.08, 1.20),
        _attention("17", (64, 8, 8, 256, 64), True, FORWARD, _TIE, 1.1),
        _attention("18", usual, True, FORWARD_BACKWARD, 0.85, 1.10, flex=True),
        _attention("19a", usual, False, FORWARD_BACKWARD, 0.85, 1.10),
        _attention("19b", narrow, True, FORWARD_BACKWARD, 0.85, 1.10),
        _attention("19c", (16, 16, 16, 1024, 64), True, FORWARD_BACKWARD, 0.85, 1.10),
        _attention("19d", grouped, True, FORWARD_BACKWARD, 0.85, 1.10),
    ]


def _laplacian(id_: str, nodes: int, direction: str, gate: Requirement, goal: Requirement) -> Row:
    return Row(
        id=id_,
        operator="laplacian3d",
        work="laplacian3d, dirichlet",
        shape={"x": nodes, "y": nodes, "z": nodes},
        quick={"x": 9, "y": 12, "z": 16},
        direction=direction,
        dtype="float32",
        gate=(gate,),
        goal=(goal,),
    )


def _laplacian_rows() -> list[Row]:
    def over_compile(ratio: float) -> Requirement:
        return Requirement("torch.compile", ratio)

    return [
        _laplacian("27", 512, FORWARD, over_compile(1.05), Requirement("copy", 0.92)),
        _laplacian("28", 512, FORWARD_BACKWARD, over_compile(1.6), over_compile(1.85)),
        _laplacian("29", 256, FORWARD, over_compile(_TIE), Requirement("copy", 0.85)),
    ]


def _residual_rows() -> list[Row]:
    def over(stock: float, compiled: float) -> tuple[Requirement, ...]:
        return (Requirement("stock", stock), Requirement("forward Laplacian, torch.compile", compiled))

    rows = []
    for number, tf32 in (("30", False), ("31", True)):
        for letter, exact in (("a", True), ("b", False)):
            rows.append(
                Row(
                    id=f"{number}{letter}",
                    operator="forward_laplacian_activation",
                    work=f"PINN residual step, {'exact' if exact else 'stencil'}, TF32 {'on' if tf32 else 'off'}",
                    shape={"nodes": 64, "width": 128, "depth": 3},
                    quick={"nodes": 7, "width": 16, "depth": 3},
                    direction=FORWARD_BACKWARD,
                    dtype="float32",
                    options={"exact": exact, "tf32": tf32},
                    peers=("JET",) if exact else (),
                    gate=over(4.0, 1.2) if exact else (Requirement("nested autograd", 9.0),),
                    goal=over(6.0, 1.8) if exact else (),
                )
            )
    return rows


def _embedding_rows() -> list[Row]:
    small = {"features": 26, "rows": 200_000, "width": 64, "batch": 16384, "ids": 1}
    long_bags = {"features": 26, "rows": 200_000, "width": 128, "batch": 16384, "ids": 20}
    large = {"features": 26, "rows": 1_000_000, "width": 128, "batch": 65536, "ids": 1}

    def row(
        id_: str, part: str, shape: dict[str, int], work: str, gate: dict[str, float], goal: dict[str, float]
    ) -> Row:
        return Row(
            id=id_,
            operator="embedding_aggregation",
            work=work,
            shape=shape,
            quick={"features": 3, "rows": 50, "width": 16, "batch": 24, "ids": shape["ids"]},
            direction=FORWARD_BACKWARD if part == "step" else FORWARD,
            dtype="float32",
            options={"part": part, "skewed": shape is long_bags},
            gate=tuple(Requirement(*over) for over in gate.items()),
            goal=tuple(Requirement(*over) for over in goal.items()),
        )

    one, many, step = "embedding, 1 id a bag", "embedding, 20 skewed ids a bag", ", step with SGD"
    return [
        row("22", "look-up", small, one, {"torch.compile": 1.2, "stock": 8.0}, {"torch.compile": 1.5}),
        row("23", "look-up", long_bags, many, {"one table": 6.0}, {}),
        row("24", "look-up", large, one, {"torch.compile": _TIE, "stock": 7.0}, {"torch.compile": 1.15}),
        row("25a", "step", small, one + step, {"stock": 3.0}, {"stock": 5.0}),
        row("25b", "step", long_bags, many + step, {"stock": 5.0}, {"stock": 8.0}),
        row("25c", "step", large, one + step, {"stock": 3.0}, {"stock": 5.0}),
        row("26a", "dot", small, one + ", dot interaction", {"apart": 1.3}, {"apart": 1.8}),
        row("26b", "dot", large, one + ", dot interaction", {"apart": 1.3}, {"apart": 1.8}),
    ]


ROWS: dict[str, Row] = {
    row.id: row
    for row in (
        *_pointwise_rows(),
        *_linear_rows(),
        *_attention_rows(),
        *_embedding_rows(),
        *_laplacian_rows(),
        *_residual_rows(),
    )
}


def select(operators: Sequence[str] = (), ids: Sequence[str] = ()) -> list[Row]:
    """The rows of these operators and with these ids or numbers ("4" is 4a and 4b); all but the extra ones by default.

    Raises ValueError naming what exists for an operator or an id that has no row.
    """
    for operator in operators:
        if all(row.operator != operator for row in ROWS.values()):
            with_rows = ", ".join(dict.fromkeys(row.operator for row in ROWS.values()))
            raise ValueError(f"operator {operator!r} has no row; there are {with_rows}")
    for id_ in ids:
        if all(id_ not in (row.id, row.number) for row in ROWS.values()):
            raise ValueError(f"no row {id_!r}; there are {', '.join(ROWS)}")
    return [
        row
        for row in ROWS.values()
        if (not operators or row.operator in operators)
        and (row.id in ids or (not row.extra and (not ids or row.number in ids)))
    ]
