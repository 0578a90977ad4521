"""The recommender as the engine trains it: click-through rates, by the logistic loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import TrainConfig
from engine.errors import ConfigError, RunError
from engine.task import Batch, Phase, StreamState, Task, warmup_cosine
from fusedops.slots.embedding import embedding_native, table_optimizers
from models.recommender import data as clicks
from models.recommender.config import ModelConfig
from models.recommender.data import ClicksConfig, CriteoConfig, MovieLensConfig
from models.recommender.metrics import Predictions
from models.recommender.model import Recommender, RecommenderOps
from models.recommender.traffic import bytes_touched, distinct_rows


class RecommenderTask(Task):
    """A network that ranks samples by their probability of a click.

    model            the network, its tables and how these are trained.
    data             its samples.
    steps            training steps.
    batch_size       samples a step.
    eval_batch_size  samples a validation batch.
    learning_rate    AdamW's, of all but the tables, at the schedule's peak: linear up over warmup_steps, a cosine down
                     to min_lr_ratio of it. The tables' own rate, model.table_learning_rate, follows the same schedule.
    weight_decay     decoupled, on the perceptrons' matrices; tables have none.
    seed             of the training batches.

    Raises ValueError, naming the key, for a number out of range; what `data.load` raises for data that cannot be read.
    """

    name = "recommender"
    unit = "samples"

    def __init__(
        self,
        model: ModelConfig,
        data: ClicksConfig | MovieLensConfig | CriteoConfig,
        *,
        steps: int,
        batch_size: int,
        eval_batch_size: int,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        min_lr_ratio: float,
        seed: int,
    ) -> None:
        self.architecture = model.architecture()
        self.slots = ("embedding",) if self.architecture["embeddings"] else ()
        self.steps = steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.source = clicks.load(data, batch_size, eval_batch_size, seed)
        self.chosen = {"data": {"digest": self.source.digest}}
        self.rows = tuple(min(feature.rows, self.architecture["max_rows"]) for feature in self.source.features)

    def build(self, ops: Mapping[str, Callable[..., Any]]) -> nn.Module:
        chosen = RecommenderOps(**ops) if self.slots else None
        return Recommender(self.architecture, self.source.n_dense, self.rows, chosen)

    def check(self, ops: Mapping[str, Callable[..., Any]], train: TrainConfig) -> None:
        if not self.slots:
            return
        rule, allowed = self.architecture["table_optimizer"], table_optimizers(ops["embedding"])
        if rule not in allowed:
            raise ConfigError(
                f"model.table_optimizer={rule}: an arm of ops.embedding=native is trained by stock PyTorch, which has "
                f"none; allowed: {', '.join(allowed)}, or baseline=none"
            )

    def batch(self, step: int, rank: int = 0) -> Batch:
        return self.source.batch(step, rank)

    def batches(self, start: int, state: StreamState | None = None) -> Iterator[tuple[Batch, StreamState | None]]:
        try:
            yield from self.source.batches(start, state)
        except (ValueError, OSError) as error:
            raise RunError(str(error)) from error

    def units(self, batch: Batch) -> int:
        return len(batch["labels"])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        logits = model(batch["dense"], batch["ids"], batch["offsets"])
        return F.binary_cross_entropy_with_logits(logits.float(), batch["labels"]), len(logits)

    def validation(self) -> Iterable[Batch]:
        return self.source.validation()

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Over the whole validation set: auc; logloss, which is the loss; calibration, mean prediction / mean label."""
        predictions = Predictions()
        for batch in batches:
            predictions.add(model(batch["dense"], batch["ids"], batch["offsets"]), batch["labels"])
        found = predictions.metrics()
        return {"loss": found["logloss"], **{name: found[name] for name in ("auc", "logloss", "calibration")}}

    def references(self) -> Mapping[str, Mapping[str, float]]:
        """The simple predictors of the data and, where it is known, the model that its labels were drawn from."""
        known = dict(self.source.references())
        ceiling = self.source.ceiling()
        if ceiling is not None:
            known["planted model"] = ceiling
        return {
            name: {"loss": reached.logloss, "auc": reached.auc, "logloss": reached.logloss}
            for name, reached in known.items()
        }

    def phases(self) -> list[Phase]:
        return [Phase("adamw", self.steps, self._optimizers, self._schedule)]

    def _optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """AdamW, of stock PyTorch in every arm, and the tables' own, which is that of the slot's implementation."""
        assert isinstance(model, Recommender)
        tables = [*model.tables, *model.linear_tables]
        apart = {id(parameter) for parameter in tables}
        others = [p for p in model.parameters() if id(p) not in apart]
        groups = [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=self.learning_rate, fused=True)]
        if model.ops is not None:
            if not torch.sparse.check_sparse_tensor_invariants.is_enabled():
                torch.sparse.check_sparse_tensor_invariants.disable()  # as before, but stock optimizers warn of it
            a = self.architecture
            made = table_optimizers(model.ops.embedding)[a["table_optimizer"]]
            optimizers.append(made(tables, lr=a["table_learning_rate"]))
        return optimizers

    def _schedule(self, step: int) -> float:
        return warmup_cosine(step, self.steps, self.warmup_steps, self.min_lr_ratio)

    def flops_per_step(self) -> int:
        """6 a sample and weight of the perceptrons, and 6 a number of every pair's product.

        A product of forward costs 2, and backward twice that. Sums, a factorization machine's among them, are left out.
        """
        a = self.architecture
        with torch.device("meta"):
            model = Recommender(
                a, self.source.n_dense, self.rows, RecommenderOps(embedding_native) if self.slots else None
            )
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        weights = sum(layer.in_features * layer.out_features for layer in layers)
        vectors = len(self.rows) + 1
        pairs = vectors * (vectors - 1) // 2 if self.slots and a["cross"] == "dot" else 0
        return self.batch_size * 6 * (weights + pairs * a["embedding_dim"])

    def bytes_per_step(self) -> int | None:
        """What `traffic.bytes_touched` counts of the first batch: the tables' part of a step."""
        return self._bytes_touched if self.slots else None

    @cached_property
    def _bytes_touched(self) -> int:
        a, batch = self.architecture, self._first
        ids, offsets = batch["ids"], batch["offsets"]
        features = len(self.rows)
        distinct = distinct_rows(ids, offsets, self.rows, a["hash"])
        width, vectors = a["embedding_dim"], features + 1
        crossed = {"dot": width + vectors * (vectors - 1) // 2, "fm": width, "none": vectors * width}
        samples = len(batch["labels"])
        touched = bytes_touched(ids, offsets, distinct, width, samples * crossed[a["cross"]])
        if a["network"] == "deepfm":  # the vectors side by side, and the linear term's
            touched += bytes_touched(ids, offsets, distinct, 1, samples * features)
            touched += 0 if a["cross"] == "none" else bytes_touched(ids, offsets, 0, width, samples * vectors * width)
        return touched

    @cached_property
    def _first(self) -> Batch:
        return self.batch(0)

    def describe(self, model: nn.Module, accumulation: int = 1) -> dict[str, str]:
        assert isinstance(model, Recommender)
        a, first = self.architecture, self._first
        tables = sum(p.numel() for p in (*model.tables, *model.linear_tables))
        others = sum(p.numel() for p in model.parameters()) - tables
        widths = f"hidden layers of {a['bottom'] or 'no'} units below and {a['top'] or 'no'} above"
        seen = "no embeddings"
        if self.slots:
            seen = (
                f"{tables:,} parameters in {len(self.rows)} tables of {min(self.rows):,} to {max(self.rows):,} rows x "
                f"{a['embedding_dim']}, hash {a['hash']}, pooling {a['pooling']}, cross {a['cross']}"
            )
        result = {
            "model": f"{a['network']}: {seen}; {others:,} parameters in perceptrons, {widths}",
            "data": self.source.describe(),
            "training": (
                f"{self.steps:,} steps of {f'{accumulation} x ' if accumulation > 1 else ''}{self.batch_size:,} samples"
            ),
        }
        if self.slots:
            result["training"] += f"; {a['table_optimizer']} of the tables' rows, AdamW of the rest"
            result["look-up"] = (
                f"{len(first['ids']) / len(first['labels']):.1f} ids a sample; GB/s count the "
                f"{self._bytes_touched / 1e6:.3g} MB that look-up, gradient and update of the first batch must touch, "
                "optimizer state left out"
            )
        return result
