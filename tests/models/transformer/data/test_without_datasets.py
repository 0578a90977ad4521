"""A machine that lacks the package `datasets`: plain text needs none of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from models.transformer import FilesConfig, HubConfig
from models.transformer.data import Corpus, Stream, load


@pytest.fixture(autouse=True)
def no_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)


@pytest.mark.parametrize("streaming", [False, True])
def test_plain_text_is_read_all_the_same(streaming: bool, tmp_path: Path, texts: Any) -> None:
    for i, text in enumerate(texts(60)):
        (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    loaded = load(FilesConfig(path=str(tmp_path), streaming=streaming, validation_fraction=0.3), seed=0)
    assert isinstance(loaded, Stream if streaming else Corpus)


def test_what_is_not_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for config in (FilesConfig(path=str(tmp_path / "a.jsonl")), HubConfig(name=str(tmp_path))):
        with pytest.raises(ValueError, match=r"the package datasets, which is not installed .*data=stdlib"):
            load(config, seed=0)
