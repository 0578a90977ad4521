"""The recommender's task as the engine sees it: batches, loss, metrics, optimizers, counts; small trainings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from engine.config import TrainConfig
from engine.errors import ConfigError
from engine.loop import evaluate, train_arm
from engine.progress import TrainingProgress
from engine.signals import StopSignal
from engine.step import Stepper, to_device
from fusedops import optim
from fusedops.slots import SLOTS
from models.recommender import DATA, PRESETS, ClicksConfig, CriteoConfig, ModelConfig, MovieLensConfig, Task
from models.recommender.metrics import auc, logloss
from models.recommender.traffic import bytes_touched, distinct_rows

CPU = torch.device("cpu")


def task_of(model: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **train: Any) -> Task:
    numbers: dict[str, Any] = {
        "steps": 40,
        "batch_size": 64,
        "eval_batch_size": 300,
        "learning_rate": 2e-3,
        "weight_decay": 0.01,
        "warmup_steps": 4,
        "min_lr_ratio": 0.1,
        "seed": 0,
    }
    clicks = ClicksConfig(**{"max_ids": 50, "validation_samples": 1000} | (data or {}))
    return Task(ModelConfig(**model or {}), clicks, **numbers | train)


def build(task: Task, name: str = "fused") -> nn.Module:
    torch.manual_seed(0)
    return task.build({slot: SLOTS[slot].implementation(name).function for slot in task.slots})


def train(
    task: Task, name: str, steps: int, device: torch.device = CPU, **keys: Any
) -> tuple[nn.Module, dict[str, float]]:
    settings, model = TrainConfig(**{"grad_clip": 0.0} | keys), build(task, name).to(device)
    stepper = Stepper(task, model, task.phases()[0], settings, device)
    for step in range(steps):
        accumulation = settings.accumulation
        stepper(*(to_device(task.batch(step * accumulation + i), device) for i in range(accumulation)))
    return model, evaluate(task, model, settings, device, StopSignal())


def test_the_package_exports_what_the_engine_looks_up() -> None:
    assert Task.name == "recommender" and Task.unit == "samples"
    assert {"tiny", "tiny_deepfm", "criteo", "criteo_d128", "criteo_deepfm"} == set(PRESETS)
    assert {"clicks": ClicksConfig, "movielens": MovieLensConfig, "criteo": CriteoConfig} == DATA


def test_a_batch_is_a_pure_function_of_seed_step_and_rank() -> None:
    task, batch = task_of(), task_of().batch(4, rank=1)
    assert task.units(batch) == 64
    assert all(torch.equal(value, task.batch(4, rank=1)[name]) for name, value in batch.items())
    for other in (task.batch(5, rank=1), task.batch(4), task_of(seed=4).batch(4, rank=1)):
        assert not torch.equal(batch["dense"], other["dense"])


def test_metrics_are_of_the_whole_validation_set() -> None:
    task = task_of()
    model = build(task).eval()
    with torch.no_grad():
        metrics = task.evaluate(model, task.validation())
        batches = list(task.validation())
        logits = torch.cat([model(b["dense"], b["ids"], b["offsets"]) for b in batches])
    labels = torch.cat([b["labels"] for b in batches])
    assert [len(b["labels"]) for b in batches] == [300, 300, 300, 100]
    assert metrics["auc"] == auc(logits, labels)
    assert metrics["loss"] == metrics["logloss"] == pytest.approx(logloss(logits, labels), rel=1e-12)
    assert metrics["calibration"] == pytest.approx(float(logits.double().sigmoid().mean() / labels.double().mean()))


def test_references_are_the_constant_predictor_and_the_planted_model() -> None:
    references = task_of().references()
    assert list(references) == ["constant", "planted model"]
    assert references["constant"]["auc"] == 0.5
    assert references["planted model"]["auc"] > 0.75
    assert references["planted model"]["loss"] < references["constant"]["loss"]


def test_tables_have_at_most_max_rows() -> None:
    assert max(task_of({"max_rows": 17}).rows) == 17
    assert len(task_of().rows) == 26


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "sparse_adam"])
def test_the_optimizer_of_the_tables_goes_with_the_arm(rule: str) -> None:
    task = task_of({"table_optimizer": rule, "table_learning_rate": 0.3, "network": "deepfm"})
    (phase,) = task.phases()
    for name in ("native", "fused"):
        model = build(task, name)
        dense, tables = phase.optimizers(model)
        assert type(dense) is torch.optim.AdamW
        assert isinstance(tables, optim.RowOptimizer) == (name == "fused")
        assert tables.param_groups[0]["lr"] == 0.3 and len(tables.param_groups[0]["params"]) == 2 * 26
        grouped = [p for o in (dense, tables) for group in o.param_groups for p in group["params"]]
        assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))
        assert all(p.dim() >= 2 for p in dense.param_groups[0]["params"])
        assert dense.param_groups[1]["weight_decay"] == 0.0


def test_a_rule_that_stock_pytorch_lacks_is_refused_for_a_stock_arm() -> None:
    task, train = task_of({"table_optimizer": "rowwise_adagrad"}), TrainConfig()
    task.check({"embedding": SLOTS["embedding"].implementation("fused").function}, train)
    with pytest.raises(
        ConfigError, match=r"model\.table_optimizer=rowwise_adagrad: .* allowed: sgd, adagrad, sparse_adam"
    ):
        task.check({"embedding": SLOTS["embedding"].implementation("native").function}, train)


@pytest.mark.parametrize("keys", [{}, {"cross": "none"}, {"network": "deepfm", "cross": "fm"}], ids=str)
def test_arms_train_alike(keys: dict[str, Any]) -> None:
    """Clipping and accumulation too: the same weights after some steps, but for rounding."""
    task = task_of(keys)
    (native, stock), (fused, ours) = (
        train(task, name, 6, grad_clip=0.05, accumulation=2) for name in ("native", "fused")
    )
    for (name, a), b in zip(fused.named_parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)
    assert ours["auc"] == pytest.approx(stock["auc"], abs=5e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "sparse_adam"])
@pytest.mark.parametrize("network", ["dlrm", "deepfm"])
def test_arms_train_alike_on_a_gpu(network: str, rule: str) -> None:
    task = task_of({"network": network, "table_optimizer": rule, "hash": "mix64"})
    device = torch.device("cuda")
    (native, stock), (fused, ours) = (train(task, name, 6, device, grad_clip=0.05) for name in ("native", "fused"))
    for (name, a), b in zip(fused.named_parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=name)
    assert ours["auc"] == pytest.approx(stock["auc"], abs=2e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_both_arms_train_in_autocast(precision: str) -> None:
    task = task_of()
    results = [train(task, name, 5, precision=precision)[1] for name in ("native", "fused")]
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=2e-2)


def test_flops_are_those_that_pytorch_counts() -> None:
    """Of the perceptrons; of the cross the formula counts each pair once, torch.bmm computes every pair twice."""
    task = task_of({"cross": "none"}, batch_size=32)
    model, counter = build(task, "native"), FlopCounterMode(display=False)
    with counter:
        task.loss(model, task.batch(0))[0].backward()
    first = 2 * 32 * 13 * 64  # dense features want no gradient
    assert counter.get_total_flops() == task.flops_per_step() - first
    crossed = task_of(batch_size=32).flops_per_step() - task_of({"embeddings": False}, batch_size=32).flops_per_step()
    pairs = 27 * 26 // 2
    assert crossed == 32 * 6 * (pairs * 16 + pairs * 64)


def test_bytes_touched_are_counted() -> None:
    ids, offsets = torch.tensor([3, 13, 3, -7, 5, 5]), torch.tensor([0, 2, 3, 4, 6])
    assert distinct_rows(ids, offsets, [10, 10], "modulo") == 1 + 2
    integers = 2 * 8 * (6 + 5)
    assert bytes_touched(ids, offsets, 3, 4, 20) == integers + 4 * (4 * 6 + 2 * 4 * 3 + 2 * 20)
    task = task_of()
    batch = task.batch(0)
    distinct = distinct_rows(batch["ids"], batch["offsets"], task.rows, "modulo")
    features = 64 * (16 + 27 * 26 // 2)
    assert task.bytes_per_step() == bytes_touched(batch["ids"], batch["offsets"], distinct, 16, features)
    assert task_of({"embeddings": False}).bytes_per_step() is None


def test_it_says_what_it_is() -> None:
    task = task_of()
    told = task.describe(build(task), accumulation=2)
    assert list(told) == ["model", "data", "training", "look-up"]
    assert "26 tables of 1,000 to 1,000 rows x 16" in told["model"] and "cross dot" in told["model"]
    assert told["training"].startswith("40 steps of 2 x 64 samples; sparse_adam")
    assert "look-up" not in task_of({"embeddings": False}).describe(build(task_of({"embeddings": False})))


@pytest.mark.parametrize("name", ["native", "fused"])
@pytest.mark.parametrize("rule", ["adagrad", "sparse_adam"])
def test_a_resumed_training_is_bit_equal(name: str, rule: str) -> None:
    task, settings = task_of({"table_optimizer": rule}, steps=8), TrainConfig(checkpoint_every=3)
    states: dict[int, Any] = {}

    def trained(save: Any, resumed: Any) -> tuple[list[float], nn.Module]:
        model = build(task, name)
        progress = TrainingProgress(Console(quiet=True), name, 8, "samples")
        result = train_arm(task, model, settings, CPU, lambda step, values: None, progress, StopSignal(), save, resumed)
        return result.losses, model

    losses, whole = trained(lambda step, state: states.setdefault(step, copy.deepcopy(state)), None)
    again, resumed = trained(None, states[3])
    assert again == losses
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
