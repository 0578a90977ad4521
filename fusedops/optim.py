"""Optimizers of embedding tables: they update the rows that a sparse gradient touches, in place, and no others.

They stand in for the stock optimizers of the same rule: arguments, defaults and the names of their state are theirs,
and a stock one's state_dict loads. A step is `fusedops.row_update_` on the coalesced gradients of all tables at once,
its state in fp32 also for tables in half precision. Gradients accumulate, are clipped, unscaled and set to None as
anywhere in PyTorch, and a step that is not taken changes nothing.

    embedding = torch.nn.EmbeddingBag(1_000_000, 128, sparse=True)
    optimizer = fusedops.optim.Adagrad(embedding.parameters(), lr=0.05)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.operators.row_update import row_update_

__all__ = ["SGD", "Adagrad", "RowWiseAdagrad", "SparseAdam"]

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]

NOT_NEGATIVE = ("lr", "lr_decay", "initial_accumulator_value", "eps")
STOCK_ONLY = ("momentum", "nesterov", "weight_decay", "maximize")
"""Options of stock optimizers, off by default, that would touch rows without a gradient or that no rule here has."""


class _Touched(NamedTuple):
    """Tables of one device and dtype, and what `row_update_` takes beside them."""

    tables: list[Tensor]
    rows: list[Tensor]
    row_grads: list[Tensor]


class RowOptimizer(torch.optim.Optimizer):
    """What they have in common: checks, state, and the gradients of a step.

    Raises ValueError naming an option that is out of range, or that a stock optimizer's state_dict has and none here
    does; TypeError from `step` for a gradient that is dense.
    """

    rule: str

    def __init__(self, params: Parameters, lr: float | Tensor, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for table in group["params"]:
            if table.dim() != 2:
                self.param_groups.pop()
                raise ValueError(
                    f"{type(self).__name__}: a parameter has shape {tuple(table.shape)}; allowed: tables, (rows, D)"
                )
        for table in group["params"]:
            if state := self._new_state(table, group):
                self.state[table] = state

    def _check(self, group: Mapping[str, Any]) -> None:
        name = type(self).__name__
        for option in NOT_NEGATIVE:
            if option in group and not 0 <= group[option] < math.inf:
                raise ValueError(f"{name}: {option}={group[option]}: must be at least 0 and finite")
        if any(not 0 <= beta < 1 for beta in group.get("betas", ())):
            raise ValueError(f"{name}: betas={group['betas']}: each must be at least 0 and below 1")
        for option in STOCK_ONLY:
            if group.get(option):
                raise ValueError(f"{name}: {option}={group[option]}: updates of rows have no {option}; allowed: 0")

    def _new_state(self, table: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """What is kept of a table from the beginning."""
        return {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the rows of every gradient there is. Returns what the closure does, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            alike: dict[Any, _Touched] = {}
            for table in group["params"]:
                grad = table.grad
                if grad is None:
                    continue
                if not grad.is_sparse:
                    raise TypeError(
                        f"{type(self).__name__}: the gradient of a table of shape {tuple(table.shape)} in parameter "
                        f"group {index} is dense; allowed: sparse ones (torch.optim has the optimizers of others)"
                    )
                grad = grad.coalesce()
                kind = (table.device, table.dtype)
                touched = alike.get(kind)
                if touched is None:
                    touched = alike[kind] = _Touched([], [], [])
                touched.tables.append(table)
                touched.rows.append(grad._indices())
                touched.row_grads.append(grad._values())
            for touched in alike.values():
                self._update(*touched, group)
        return loss

    def _update(
        self, tables: list[Tensor], rows: list[Tensor], row_grads: list[Tensor], group: Mapping[str, Any]
    ) -> None:
        """Update tables of one device and dtype."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state_dict, of this optimizer or of the stock one of the same rule."""
        for group in state_dict["param_groups"]:
            self._check(group)
        super().load_state_dict(state_dict)
        # PyTorch has given the state its table's dtype, which for half precision would be a loss.
        names = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        tables = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for name, table in zip(names, tables, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    self.state[table][key] = value.to(table.device, state_dtype(table), copy=True)

    def _states(self, tables: Sequence[Tensor], key: str) -> list[Tensor]:
        return [self.state[table][key] for table in tables]


def state_dtype(table: Tensor) -> torch.dtype:
    """The dtype of what is kept of a table: float32, in which sums of squares do not stall, or float64 with its own."""
    return torch.float64 if table.dtype == torch.float64 else torch.float32


class SGD(RowOptimizer):
    """w -= lr g. As torch.optim.SGD without momentum."""

    def __init__(self, params: Parameters, lr: float | Tensor = 1e-3) -> None:
        super().__init__(params, lr)

    def _update(
        self, tables: list[Tensor], rows: list[Tensor], row_grads: list[Tensor], group: Mapping[str, Any]
    ) -> None:
        row_update_(tables, rows, row_grads, rule="sgd", lr=float(group["lr"]))


class Adagrad(RowOptimizer):
    """s += g^2; w -= lr / (1 + (step - 1) lr_decay) g / (sqrt(s) + eps).

    As torch.optim.Adagrad; Duchi, Hazan, Singer 2011, "Adaptive Subgradient Methods".
    """

    rule = "adagrad"

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        super().__init__(params, lr, lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value, eps=eps)

    def _new_state(self, table: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        value = group["initial_accumulator_value"]
        return {"step": torch.tensor(0.0), "sum": torch.full_like(table, value, dtype=state_dtype(table))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state_dict, of this optimizer or of the stock one, whose steps were once plain numbers."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32)

    def _update(
        self, tables: list[Tensor], rows: list[Tensor], row_grads: list[Tensor], group: Mapping[str, Any]
    ) -> None:
        lr, decay = float(group["lr"]), group["lr_decay"]
        steps = self._states(tables, "step")
        rates = [lr / (1 + float(step) * decay) for step in steps] if decay else lr
        torch._foreach_add_(steps, 1)
        states = [self._states(tables, "sum")]
        row_update_(tables, rows, row_grads, rule=self.rule, lr=rates, states=states, eps=group["eps"])


class RowWiseAdagrad(Adagrad):
    """s += mean of g^2 over a row; w -= lr g / (sqrt(s) + eps): Adagrad with one number of state a row.

    As in FBGEMM and torchrec (EXACT_ROWWISE_ADAGRAD), whose default of eps it has; Mudigere et al. 2022,
    "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation Models",
    arXiv:2104.05158. Stock PyTorch has none.
    """

    rule = "rowwise_adagrad"

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr, lr_decay, initial_accumulator_value, eps)

    def _new_state(self, table: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        value = group["initial_accumulator_value"]
        return {"step": torch.tensor(0.0), "sum": torch.full_like(table[:, 0], value, dtype=state_dtype(table))}


class SparseAdam(RowOptimizer):
    """Adam of the rows touched: moments of other rows do not decay, and the bias correction counts a table's steps.

    As torch.optim.SparseAdam; Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization".
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, lr, betas=betas, eps=eps)

    def _update(
        self, tables: list[Tensor], rows: list[Tensor], row_grads: list[Tensor], group: Mapping[str, Any]
    ) -> None:
        for table in tables:
            state = self.state[table]
            if not state:  # a table without gradients has none
                moments = {key: torch.zeros_like(table, dtype=state_dtype(table)) for key in ("exp_avg", "exp_avg_sq")}
                state.update({"step": 0, **moments})
            state["step"] += 1
        row_update_(
            tables,
            rows,
            row_grads,
            rule="sparse_adam",
            lr=float(group["lr"]),
            states=[self._states(tables, "exp_avg"), self._states(tables, "exp_avg_sq")],
            eps=group["eps"],
            betas=group["betas"],
            step=[self.state[table]["step"] for table in tables],
        )
