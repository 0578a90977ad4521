"""Streams: what is in them, in which order, and that they go on exactly where they stopped."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.transformer import FilesConfig, HubConfig
from models.transformer.data import Stream, load, stream
from models.transformer.data.corpus import digest

pytest.importorskip("datasets")

LENGTH, BATCH = 24, 3


@pytest.fixture
def documents(texts) -> list[str]:
    return texts(80)


@pytest.fixture(params=["text", "jsonl", "parquet", "mixed", "hub"])
def config(request, tmp_path: Path, documents: list[str], write_jsonl, write_parquet) -> FilesConfig | HubConfig:
    """The documents in files of one kind or another, to be streamed."""
    keys: dict[str, Any] = {"streaming": True, "shuffle_buffer": 9, "validation_bytes": 300, "validation_fraction": 0.2}
    if request.param == "text":
        for i, text in enumerate(documents):
            (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    elif request.param == "mixed":
        write_jsonl(tmp_path / "a.jsonl", documents[:31])
        write_parquet(tmp_path / "b.parquet", documents[31:50])
        for i, text in enumerate(documents[50:]):
            (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    else:
        write = write_jsonl if request.param == "jsonl" else write_parquet
        extension = "parquet" if request.param == "hub" else request.param
        write(tmp_path / f"train-0.{extension}", documents[:40])
        write(tmp_path / f"train-1.{extension}", documents[40:])
    if request.param == "hub":
        return HubConfig(name=str(tmp_path), **keys)
    return FilesConfig(path=str(tmp_path), **keys)


def stream_of(config: FilesConfig | HubConfig, seed: int = 0) -> Stream:
    found = load(config, seed)
    assert isinstance(found, Stream)
    return found


def take(source: Stream, count: int, state: Any = None) -> list[tuple[dict[str, torch.Tensor], Any]]:
    with contextlib.closing(source.batches(LENGTH, BATCH, state)) as batches:
        return list(itertools.islice(batches, count))


def spelt(batches: list[tuple[dict[str, torch.Tensor], Any]]) -> bytes:
    return b"".join(bytes(batch["input_ids"].flatten().tolist()) for batch, _ in batches)


def assert_equal(actual: list[tuple[dict[str, torch.Tensor], Any]], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for (batch, _), (other, _) in zip(actual, expected, strict=True):
        assert torch.equal(batch["input_ids"], other["input_ids"]) and torch.equal(batch["targets"], other["targets"])


def epoch_batches(documents: list[str]) -> int:
    return sum(len(text.encode()) + 1 for text in documents) // (LENGTH * BATCH) + 1


def test_every_document_but_those_held_out_comes_once_an_epoch(config, documents: list[str]) -> None:
    source = stream_of(config)
    held_out = source.validation.tobytes().decode().split("\0")[1:-1]
    assert len(held_out) == source.validation_documents > 0
    assert sum(len(text.encode()) + 1 for text in held_out) == source.validation_bytes == len(source.validation) - 1
    text = spelt(take(source, 3 * epoch_batches(documents)))
    seen = text.decode(errors="replace").split("\0")[1:]
    # Held out is more than validation reads, which has enough after some documents.
    trained = sorted(set(documents) & set(seen))
    assert not set(trained) & set(held_out)
    assert len(trained) >= 0.5 * len(documents)
    first, second, third = (seen[i * len(trained) : (i + 1) * len(trained)] for i in range(3))
    assert sorted(first) == sorted(second) == trained
    assert first != second
    assert third[: len(trained) // 2] != first[: len(trained) // 2]


def test_windows_are_the_packed_text_and_what_follows(config) -> None:
    batches = take(stream_of(config), 9)
    inputs = torch.cat([batch["input_ids"].flatten() for batch, _ in batches])
    targets = torch.cat([batch["targets"].flatten() for batch, _ in batches])
    assert torch.equal(inputs[1:], targets[:-1])
    for batch, _ in batches:
        assert batch["input_ids"].shape == batch["targets"].shape == (BATCH, LENGTH)
        assert batch["input_ids"].dtype == batch["targets"].dtype == torch.int64


def test_after_a_resume_batches_are_bit_equal(config, documents: list[str]) -> None:
    """At any batch of two epochs, by another object, from a state that went through JSON."""
    whole = take(stream_of(config), 2 * epoch_batches(documents))
    resumed, generator = stream_of(config), np.random.default_rng()
    for place in (0, int(generator.integers(1, len(whole) - 3)), len(whole) - 3):
        rest = take(resumed, len(whole) - place - 1, json.loads(json.dumps(whole[place][1])))
        assert_equal(rest, whole[place + 1 :])
    place = int(generator.integers(len(whole) // 2))
    rest = take(resumed, len(whole) // 2, json.loads(json.dumps(whole[place][1])))
    again = int(generator.integers(len(rest) - 1))
    assert_equal(take(resumed, len(rest) - again - 1, json.loads(json.dumps(rest[again][1]))), rest[again + 1 :])


def test_a_state_is_small_and_never_changed(config, documents: list[str]) -> None:
    kept, copies = [], []
    with contextlib.closing(stream_of(config).batches(LENGTH, BATCH, None)) as batches:
        for _, state in itertools.islice(batches, epoch_batches(documents)):
            kept.append(state)
            copies.append(copy.deepcopy(state))
            assert len(json.dumps(state)) < 1000
    assert kept == copies


def test_the_order_is_that_of_the_seed(config) -> None:
    first = spelt(take(stream_of(config, seed=1), 8))
    assert first == spelt(take(stream_of(config, seed=1), 8))
    assert first != spelt(take(stream_of(config, seed=2), 8))
    one, other = stream_of(config, seed=1), stream_of(config, seed=2)
    assert np.array_equal(one.validation, other.validation)


def test_documents_longer_than_a_batch_and_blocks_cut_short(tmp_path, texts, write_jsonl, monkeypatch) -> None:
    documents = texts(6, longest=400)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1500)
    held_out = write_jsonl(tmp_path / "held.jsonl", texts(3))
    config = FilesConfig(
        path=str(write_jsonl(tmp_path / "a.jsonl", documents)),
        validation_path=str(held_out),
        streaming=True,
        validation_bytes=10**6,
    )
    whole = take(stream_of(config), 3 * epoch_batches(documents))
    seen = spelt(whole).decode(errors="replace").split("\0")[1:]
    assert sorted(seen[:6]) == sorted(seen[6:12]) == sorted(documents)
    assert stream_of(config).validation_documents == 3
    for place in np.random.default_rng().integers(len(whole) - 1, size=4):
        again = take(stream_of(config), 1, whole[place][1])
        assert torch.equal(again[0][0]["input_ids"], whole[place + 1][0]["input_ids"])


def test_a_stream_without_text_says_so(tmp_path, texts, write_jsonl) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(1))
    with pytest.raises(ValueError, match=r"a.jsonl: no text to validate on: data.validation_fraction=1e-06 of"):
        stream_of(FilesConfig(path=str(path), streaming=True, validation_fraction=1e-6))
    empty = write_jsonl(tmp_path / "b.jsonl", ["", ""])
    with pytest.raises(ValueError, match=r"b.jsonl: no text to train on"):
        stream_of(FilesConfig(path=str(empty), validation_path=str(path), streaming=True))
    with pytest.raises(ValueError, match=r"b.jsonl: no text to validate on"):
        stream_of(FilesConfig(path=str(path), validation_path=str(empty), streaming=True))


def test_a_stream_of_which_all_is_held_out_says_so(tmp_path, texts) -> None:
    path = tmp_path / "a.txt"
    held_out = next(text for i in itertools.count() if digest(text := f"{texts(1)[0]} {i}") < 2**63)
    path.write_text(held_out, "utf-8")
    with pytest.raises(ValueError, match=r"a.txt: no text to train on besides what is held out"):
        stream_of(FilesConfig(path=str(path), validation_fraction=0.5, streaming=True))
