"""Tokenizers: bytes, and Hugging Face's, by a directory, by a file, by a name that cannot be reached."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from models.transformer.data.tokens import ByteTokenizer, Document, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")


def trained(texts: list[str], vocabulary: int = 300) -> tokenizers.Tokenizer:
    """A byte-level BPE, which loses nothing."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture
def tokenizer_file(tmp_path: Path, texts) -> Path:
    path = tmp_path / "tokenizer.json"
    trained(texts(40)).save(str(path))
    return path


def documents(texts: list[str]) -> list[Document]:
    return [Document(f"document {i}", text) for i, text in enumerate(texts)]


def test_bytes_are_those_of_utf_8(texts) -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer) and tokenizer.vocabulary == 256
    for text, tokens in zip(texts := texts(5), tokenizer.encode(documents(texts)), strict=True):
        assert tokens.dtype == np.uint8 and tokens.tobytes() == text.encode()
        assert tokenizer.decode(tokens.tolist()) == text
    assert tokenizer.decode([0xE2, 65]) == "\N{REPLACEMENT CHARACTER}A"
    with pytest.raises(ValueError, match="document 1: character 2 is NUL"):
        tokenizer.encode(documents(["a", "bc\0"]))


@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_tokenizer_of_hugging_face_comes_from_a_file_or_a_directory(form: str, tokenizer_file: Path, texts) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if form == "directory":
        saved = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token="Ġ")
        saved.save_pretrained(tokenizer_file.parent)
    tokenizer = load_tokenizer(str(tokenizer_file if form == "file" else tokenizer_file.parent))
    words = json.loads(tokenizer_file.read_text())["model"]["vocab"]
    if form == "file":  # it had no token to separate documents by, and got one
        assert tokenizer.separator == len(words) and tokenizer.vocabulary == len(words) + 1
    else:
        assert tokenizer.separator == words["Ġ"] and tokenizer.vocabulary == len(words)
    text = "a tensor, größer 语言\n"
    (tokens,) = tokenizer.encode(documents([text]))
    assert tokens.dtype == np.uint16 and len(tokens) < len(text.encode())
    if form == "file":  # a token that separates is not text
        assert tokenizer.decode(tokens.tolist()) == text
        assert tokenizer.separator not in tokens
    target = tokenizer_file.parent / "saved"
    target.mkdir()
    tokenizer.save(target)
    again = AutoTokenizer.from_pretrained(str(target))
    assert again(text, add_special_tokens=False)["input_ids"] == tokens.tolist()
    assert again.eos_token_id == tokenizer.separator


def test_thousands_of_documents_are_encoded_one_by_one(tokenizer_file: Path, texts) -> None:
    tokenizer = load_tokenizer(str(tokenizer_file))
    many = texts(2345, longest=8)
    encoded = tokenizer.encode(documents(many))
    assert [tokenizer.decode(tokens.tolist()) for tokens in encoded] == many


def test_a_vocabulary_past_16_bits_is_held_in_32(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(70_000)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    loaded = load_tokenizer(str(tmp_path / "words.json"))
    (tokens,) = loaded.encode(documents(["w69999 w3 nothing"]))
    assert tokens.dtype == np.uint32 and tokens.tolist() == [69_999, 3, 0]


@pytest.mark.parametrize("name", ["/none/here", "./none", "~/none", "none.json", "one/two/three"])
def test_a_path_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"data.tokenizer={name}: there is no such file or directory"):
        load_tokenizer(name)


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"model": 3}')
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "broken.json", tmp_path / "empty"):
        with pytest.raises(ValueError, match=f"data.tokenizer={path}: no tokenizer could be read"):
            load_tokenizer(str(path))
