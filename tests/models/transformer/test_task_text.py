"""The task on text of files: tokenizers, streams, a saved model, a sample."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import RunError
from fusedops.slots import SLOTS
from models.transformer import FilesConfig, ModelConfig, Task

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("datasets")

SMALL = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_ff": 24, "context": 20, "init_std": 0.02}
WORDS = ["alpha", "beta", "gamma", "delta", "größer", "语言"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """JSON Lines of different numbers of words, and a tokenizer of 600 words, most of which never come up."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *WORDS, *(f"word{i}" for i in range(593))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    rows = []
    for i in range(90):
        chosen = torch.randint(
            0, len(WORDS), (int(torch.randint(3, 30, (), generator=generator)),), generator=generator
        )
        rows.append({"text": f"word{i} " + " ".join(WORDS[word] for word in chosen)})
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def task_of(folder: Path, model: dict[str, Any] | None = None, **keys: Any) -> Task:
    return Task(
        ModelConfig(**SMALL | (model or {})),
        FilesConfig(**{"path": str(folder / "text.jsonl"), "tokenizer": str(folder / "words.json")} | keys),
        steps=30,
        batch_size=3,
        eval_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=0,
        min_lr_ratio=0.1,
        seed=3,
    )


def native_model(task: Task) -> Any:
    return task.build({slot: SLOTS[slot].implementation("native").function for slot in task.slots})


STREAM = {"streaming": True, "shuffle_buffer": 7, "validation_bytes": 500, "validation_fraction": 0.2}


@pytest.mark.parametrize("keys", [{}, STREAM], ids=["memory", "stream"])
def test_the_model_has_a_row_for_each_token_unless_told_how_many(folder: Path, keys: dict[str, Any]) -> None:
    task = task_of(folder, **keys)
    model = native_model(task)
    assert model.config.vocab_size == 640  # 600 words and the one that separates, to a multiple of 64
    assert model.generation_config.eos_token_id == 600
    assert task.chosen["model"] == {"vocab_size": 640}
    described = task.describe(model)
    assert "601 tokens" in described["tokenizer"] and "rows for 640" in described["tokenizer"]
    assert task_of(folder, {"vocab_size": 601}, **keys).config().vocab_size == 601
    assert task_of(folder, {"preset": "gpt_d512"}, **keys).config().vocab_size == 8192
    with pytest.raises(ValueError, match=r"model.vocab_size=600: must be at least 601, .* data.tokenizer=.*words.json"):
        task_of(folder, {"vocab_size": 600}, **keys)


@pytest.mark.parametrize("keys", [{}, STREAM], ids=["memory", "stream"])
def test_text_that_changed_has_another_digest(folder: Path, keys: dict[str, Any]) -> None:
    digest = task_of(folder, **keys).chosen["data"]["digest"]
    assert task_of(folder, **keys).chosen["data"]["digest"] == digest
    rows = (folder / "text.jsonl").read_text()
    (folder / "text.jsonl").write_text(rows + '{"text": "alpha"}\n')
    assert task_of(folder, **keys).chosen["data"]["digest"] != digest


@pytest.mark.parametrize("keys", [{}, STREAM], ids=["memory", "stream"])
def test_losses_of_different_tokenizers_compare_by_the_byte(folder: Path, keys: dict[str, Any]) -> None:
    task = task_of(folder, **keys)
    torch.manual_seed(0)
    model = native_model(task).eval()
    with torch.no_grad():
        metrics = task.evaluate(model, task.validation())
        nats = sum(float(task.loss(model, batch)[0]) * task.count(batch) for batch in task.validation())
    names = {i: word for word, i in json.loads((folder / "words.json").read_text())["model"]["vocab"].items()}
    held_out = "".join(" ".join(names.get(token, "\0") for token in task.text.validation.tolist()))
    documents = [text.strip() for text in held_out.split("\0")[1:-1]]
    size = sum(len(text.encode()) + 1 for text in documents)
    assert len(documents) > 1
    assert metrics["nats_per_byte"] == pytest.approx(nats / size, rel=1e-6)
    assert task.references() == {}
    on_bytes = task_of(folder, tokenizer="bytes", **keys)
    with torch.no_grad():
        assert set(on_bytes.evaluate(native_model(on_bytes).eval(), on_bytes.validation())) == {"loss"}
    assert bool(on_bytes.references()) == (not keys)


@pytest.mark.parametrize("keys", [{}, STREAM], ids=["memory", "stream"])
def test_batches_go_on_from_a_state(folder: Path, keys: dict[str, Any]) -> None:
    """A model trained with a stop, each half by a task of its own, is bit-equal to one trained through."""

    def train(model: Any, optimizer: Any, batches: Any, count: int) -> Any:
        state = None
        for batch, reached in itertools.islice(batches, count):
            state = reached
            loss, _ = task.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return state

    task = task_of(folder, **keys)
    weights = []
    for parts in ((14,), (5, 9), (1, 12, 1)):
        torch.manual_seed(1)
        model = native_model(task).train()
        (optimizer,) = task.phases()[0].optimizers(model)
        done, state = 0, None
        for count in parts:
            with contextlib.closing(task_of(folder, **keys).batches(done, state)) as batches:
                state = json.loads(json.dumps(train(model, optimizer, batches, count)))
            done += count
        weights.append(model.state_dict())
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in other)


def test_a_batch_by_its_index_is_that_of_the_stream(folder: Path) -> None:
    task = task_of(folder, **STREAM)
    with contextlib.closing(task.batches(0)) as batches:
        found = [batch for batch, _ in itertools.islice(batches, 6)]
    with contextlib.closing(task.batches(4)) as batches:
        later = next(batches)[0]
    for index, batch in ((0, found[0]), (5, found[5])):
        assert torch.equal(task.batch(index)["input_ids"], batch["input_ids"])
    assert torch.equal(later["targets"], found[4]["targets"])
    assert task.units(found[0]) == 3 * 20


def test_a_row_that_is_no_good_stops_the_training_by_its_name(folder: Path) -> None:
    task = task_of(folder, **STREAM)
    with open(folder / "text.jsonl", "a") as file:
        file.write('{"text": 5}\n')
    with pytest.raises(RunError, match=r"text.jsonl, row 91: the field 'text' \(data.field\) is of type int"):
        for _ in itertools.islice(task.batches(0), 200):
            pass


@pytest.mark.parametrize("tokenizer", ["bytes", "words.json"])
def test_a_saved_model_loads_and_goes_on_with_text(folder: Path, tokenizer: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = tokenizer if tokenizer == "bytes" else str(folder / tokenizer)
    task = task_of(folder, tokenizer=name)
    model = native_model(task).eval()
    directory = folder / "model"
    directory.mkdir()
    task.save(model, directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    state = loaded.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert loaded.generation_config.eos_token_id == task.text.tokenizer.separator
    if tokenizer == "bytes":
        assert not list(directory.glob("tokenizer*"))
        return
    ids = AutoTokenizer.from_pretrained(directory)("alpha größer", return_tensors="pt")
    assert ids["input_ids"].tolist() == [[1, 5]]
    assert loaded.generate(**ids, max_new_tokens=3).shape[1] <= 5


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokenizer", ["bytes", "words.json"])
def test_a_sample_goes_on_from_validation_text_and_moves_no_generator(folder: Path, tokenizer: str, where: str) -> None:
    task = task_of(folder, tokenizer=tokenizer if tokenizer == "bytes" else str(folder / tokenizer))
    model = native_model(task).eval().to(where)

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]

    before = states()
    samples = task.samples(model, 30)
    assert all(torch.equal(*pair) for pair in zip(before, states(), strict=True))
    assert samples == task.samples(model, 30)
    ((prompt, text),) = samples.items()
    assert prompt == task.text.tokenizer.decode(task.text.validation[1:10].tolist())
    assert len(text) > 0
    with torch.autocast(where, torch.bfloat16):
        assert task.samples(model, 30).keys() == samples.keys()
