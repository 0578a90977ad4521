"""The task as the engine sees it: batches, loss, validation, optimizer, schedule, FLOPs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fusedops.slots import SLOTS
from models.transformer import DATA, PRESETS, FilesConfig, HubConfig, ModelConfig, StdlibConfig, Task, data
from models.transformer.count_model import witten_bell
from models.transformer.data.stdlib import stdlib_corpus, stdlib_root

SMALL = {"n_layer": 2, "n_head": 2, "d_model": 32, "d_ff": 48, "context": 24, "init_std": 0.02}


@pytest.fixture(scope="module")
def text() -> data.Corpus:
    """The first bytes of the real text, so that a whole validation set is quick."""
    corpus = stdlib_corpus(stdlib_root(), 0.06)
    return dataclasses.replace(corpus, train=corpus.train[:60_000], validation=corpus.validation[:1_511])


@pytest.fixture(autouse=True)
def short_text(text: data.Corpus, monkeypatch: pytest.MonkeyPatch) -> data.Corpus:
    monkeypatch.setattr(data, "load", lambda config, seed: text)
    return text


def task_of(preset: str = "tiny", model: dict[str, Any] | None = None, **train: Any) -> Task:
    numbers = {
        "steps": 100,
        "batch_size": 5,
        "eval_batch_size": 8,
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "warmup_steps": 10,
        "min_lr_ratio": 0.1,
        "seed": 3,
    }
    return Task(ModelConfig(preset=preset, **SMALL | (model or {})), StdlibConfig(), **numbers | train)


def native_model(task: Task) -> torch.nn.Module:
    return task.build({slot: SLOTS[slot].implementation("native").function for slot in task.slots})


def test_the_package_exports_what_the_engine_looks_up() -> None:
    assert Task.name == "transformer"
    assert Task.unit == "tokens"
    assert {"tiny", "tiny_swiglu", "small", "gpt_d512", "gpt_d768", "gpt2"} <= set(PRESETS)
    assert {"stdlib": StdlibConfig, "files": FilesConfig, "hub": HubConfig} == DATA


def test_slots_follow_the_mlp() -> None:
    assert task_of("tiny").slots == ("attention", "mlp")
    assert task_of("tiny_swiglu", {"n_kv_head": 1}).slots == ("attention", "activation")


def test_a_model_is_built_of_the_current_generator() -> None:
    task = task_of()
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(native_model(task).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not torch.equal(models[0]["lm_head.weight"], models[2]["lm_head.weight"])


def test_a_batch_is_a_pure_function_of_seed_step_and_rank() -> None:
    task = task_of()
    batch = task.batch(4, rank=1)
    assert batch["input_ids"].shape == (5, 24)
    assert task.units(batch) == 5 * 24
    assert torch.equal(batch["input_ids"], task_of().batch(4, rank=1)["input_ids"])
    for other in (task.batch(5, rank=1), task.batch(4), task_of(seed=4).batch(4, rank=1)):
        assert not torch.equal(batch["input_ids"], other["input_ids"])


def test_evaluation_is_the_mean_over_every_byte_of_the_validation_text(short_text: data.Corpus) -> None:
    task = task_of()
    model = native_model(task).eval()
    total, count = 0.0, 0
    tokens = torch.from_numpy(short_text.validation.astype("int64"))
    with torch.no_grad():
        metrics = task.evaluate(model, task.validation())
        for first in range(0, len(tokens) - 1, 24):
            window = tokens[first : first + 25]
            log_probabilities = model(window[None, :-1]).logits[0].double().log_softmax(-1)
            total -= log_probabilities.gather(1, window[1:, None]).sum().item()
            count += len(window) - 1
    assert count == len(tokens) - 1
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("preset", ["tiny", "tiny_swiglu"])
def test_a_few_steps_lower_the_loss(preset: str) -> None:
    task = task_of(preset, {"n_kv_head": 1, "dropout": 0.1}, learning_rate=1e-2, warmup_steps=0)
    torch.manual_seed(0)
    model = native_model(task)
    (optimizer,) = task.phases()[0].optimizers(model)
    losses = []
    for step in range(40):
        loss, count = task.loss(model, task.batch(step))
        assert count == 5 * 24
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert sum(losses[-5:]) / 5 < 4.0


def test_only_matrices_decay() -> None:
    task = task_of()
    model = native_model(task)
    (optimizer,) = task.phases()[0].optimizers(model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {id(p) for p in model.parameters()} == set(decay)
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or name.endswith("bias") else 0.1), name
    assert all(group["lr"] == 2e-3 for group in optimizer.param_groups)


def test_the_schedule_rises_linearly_and_falls_as_a_cosine() -> None:
    (phase,) = task_of(steps=110).phases()
    assert phase.steps == 110
    factors = [phase.schedule(step) for step in range(111)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert factors[60] == pytest.approx(0.55)
    assert factors[110] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    (never_at_peak,) = task_of(steps=5, warmup_steps=10).phases()
    assert [never_at_peak.schedule(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    (constant,) = task_of(steps=1, warmup_steps=0, min_lr_ratio=1.0).phases()
    assert constant.schedule(0) == 1.0


@pytest.mark.parametrize("preset", ["tiny", "tiny_swiglu"])
def test_flops_are_those_that_torch_counts_and_half_of_attentions(preset: str) -> None:
    task = task_of(preset, {"n_kv_head": 1, "positions": "rotary"})
    unfused = {slot: SLOTS[slot].implementation("native").function for slot in task.slots}
    model = task.build(unfused | {"attention": SLOTS["attention"].implementation("unfused").function})
    with FlopCounterMode(display=False) as counter:
        loss, _ = task.loss(model, task.batch(0))
        loss.backward()
    square = 3 * 4 * 5 * 24 * 24 * 32 * 2  # attention's products over all pairs, 2 layers
    causal = square * (24 + 1) // (2 * 24)
    assert task.flops_per_step() == counter.get_total_flops() - square + causal


def test_the_description_and_the_reference_are_those_of_the_text(short_text: data.Corpus) -> None:
    task = task_of()
    model = native_model(task)
    described = task.describe(model)
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in described["model"]
    assert described["data"] == short_text.describe()
    assert "100 steps of 5 x 24 tokens" in described["training"]
    assert task.references() == {"order-3 Witten-Bell": witten_bell(short_text.train, short_text.validation, 3)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"model": {"vocab_size": 255}},
            "model.vocab_size=255: must be at least 256, the tokens of data.tokenizer=bytes",
        ),
        ({"steps": 0}, "train.steps=0: must be at least 1"),
        ({"batch_size": 0}, "train.batch_size=0: must be at least 1"),
        (
            {"model": {"context": 60_000}},
            "model.context=60000: the training text, .*, has 60,000 tokens; must be fewer",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(**override)
