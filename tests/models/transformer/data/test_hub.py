"""data=hub: a data set by its name, from a directory, and without a network."""

from __future__ import annotations

import socket
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

import train
from models.transformer import HubConfig
from models.transformer.data import Corpus, Stream, load, network
from models.transformer.data.tokens import load_tokenizer

pytest.importorskip("datasets")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that resolves no name and connects to nothing; no variable says that it is so."""

    def refuse(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in (*network.OFFLINE, "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def directory(tmp_path: Path, texts, write_jsonl, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of two splits as the Hub lays it out, without a script; its cache is not that of the user."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", texts(40))
    write_jsonl(folder / "validation.jsonl", texts(9))
    return folder


def test_a_directory_is_a_data_set(directory: Path, no_network: None) -> None:
    corpus = load(HubConfig(name=str(directory)), seed=0)
    assert isinstance(corpus, Corpus)
    assert corpus.train_documents + corpus.validation_documents == 40
    apart = load(HubConfig(name=str(directory), validation_split="validation"), seed=0)
    assert isinstance(apart, Corpus)
    assert (apart.train_documents, apart.validation_documents) == (40, 9)
    assert f"{directory} (train)" in apart.describe() and f"{directory} (validation)" in apart.describe()
    some = load(HubConfig(name=str(directory), split="train[:10]", validation_split="validation"), seed=0)
    assert isinstance(some, Corpus) and some.train_documents == 10
    streamed = load(HubConfig(name=str(directory), validation_split="validation", streaming=True), seed=0)
    assert isinstance(streamed, Stream) and streamed.validation_documents == 9
    assert streamed.validation.tobytes() == apart.validation.tobytes()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "test"}, r"data.split=test: .*test"),
        ({"validation_split": "dev"}, r"data.validation_split=dev: .*dev"),
        ({"config": "large"}, r"data.config=large"),
        ({"field": "content"}, r"row 1: there is no field 'content' \(data.field\); there are id, text"),
    ],
    ids=lambda value: str(value),
)
def test_what_a_data_set_lacks_is_named(directory: Path, keys: dict[str, str], message: str, streaming: bool) -> None:
    with pytest.raises(ValueError, match=message):
        load(HubConfig(name=str(directory), streaming=streaming, **keys), seed=0)


def test_a_data_set_that_is_a_program_is_not_run(directory: Path) -> None:
    (directory / "set.py").write_text("raise SystemExit('it ran')")
    for file in directory.glob("*.jsonl"):
        file.unlink()
    with pytest.raises(ValueError, match=f"data.name={directory}.*"):
        load(HubConfig(name=str(directory)), seed=0)


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_without_a_network_the_error_says_so_and_what_needs_none(
    streaming: str, no_network: None, monkeypatch, capfd, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        ["train.py", "data=hub", "data.name=wikitext", f"data.streaming={streaming}", f"hydra.run.dir={tmp_path}"],
    )
    started = time.perf_counter()
    assert train.main() == 2
    assert time.perf_counter() - started < 10
    error = capfd.readouterr().err
    for text in ("data.name=wikitext", "cannot be reached", "data=stdlib", "data=files data.path=", "HF_HUB_OFFLINE=1"):
        assert text in error
    assert len(error.splitlines()) <= 6 and "Traceback" not in error and "Retrying" not in error


def test_a_tokenizer_by_name_without_a_network(no_network: None) -> None:
    started = time.perf_counter()
    with pytest.raises(ConnectionError, match=r"data.tokenizer=gpt2: .* cannot be reached .*\ndata.tokenizer=bytes"):
        load_tokenizer("gpt2")
    assert time.perf_counter() - started < 5


def test_an_answer_of_any_kind_is_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(request: urllib.request.Request, timeout: float) -> None:
        assert timeout <= 10
        raise urllib.error.HTTPError(request.full_url, 403, "Forbidden", Message(), None)

    for name in network.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", forbidden)
    network.require_network("data.name=x", "nothing does")


def test_offline_by_a_variable_asks_nobody(no_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # What the variable does where it is set before Python starts.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConnectionError, match=r"data.name=wikitext: it is not in the cache \(HF_HUB_OFFLINE is set\)\n.*data=stdlib"
    ):
        load(HubConfig(name="wikitext"), seed=0)
    with pytest.raises(ValueError, match=r"data.tokenizer=gpt2: no tokenizer could be read"):
        load_tokenizer("gpt2")
