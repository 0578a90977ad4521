"""Tokenizers: bytes, or one of Hugging Face's by path or name, behind the few things that text needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from models.transformer.data.network import require_network

BYTES = "bytes"
"""The name of the tokenizer whose tokens are the bytes of UTF-8."""
SEPARATOR = 0
"""The byte between documents, before the first and after the last."""
VOCABULARY = 256
ENCODED_AT_ONCE = 1000
END_OF_TEXT = "<|endoftext|>"
"""The token added to a tokenizer that has none to separate documents by."""

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.unsignedinteger[Any]]


class Document(NamedTuple):
    """A text, and where it stands: a file's path, and the row in it."""

    name: str
    text: str


class Tokenizer(Protocol):
    """What text needs of a tokenizer."""

    name: str
    """As the configuration names it."""
    unit: str
    """What its tokens are called: "bytes" or "tokens"."""
    vocabulary: int
    """Tokens are below it."""
    separator: int
    """The token between documents."""
    dtype: type[np.unsignedinteger[Any]]
    """The narrowest that holds a token."""

    def encode(self, documents: Sequence[Document]) -> list[Tokens]:
        """The tokens of each document, without a separator."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text is replaced."""

    def save(self, directory: Path) -> None:
        """Write the tokenizer where `AutoTokenizer.from_pretrained` finds it, if it is one of Hugging Face's."""


class ByteTokenizer:
    """The bytes of UTF-8 as tokens."""

    name = BYTES
    unit = "bytes"
    vocabulary = VOCABULARY
    separator = SEPARATOR
    dtype = np.uint8

    def encode(self, documents: Sequence[Document]) -> list[Tokens]:
        """Raises ValueError naming a document that contains the separator."""
        for document in documents:
            if "\0" in document.text:
                raise ValueError(
                    f"{document.name}: character {document.text.index(chr(0))} is NUL, which separates documents where "
                    "tokens are bytes; a file of text has none"
                )
        return [np.frombuffer(document.text.encode(), dtype=np.uint8) for document in documents]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """Nothing: bytes need no files."""


class HuggingFaceTokenizer:
    """A tokenizer of `transformers`. Documents are separated by its end-of-text token, which it gets if it has none."""

    unit = "tokens"

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.tokenizer = tokenizer
        separators = (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id)
        if all(separator is None for separator in separators):
            tokenizer.add_special_tokens({"eos_token": END_OF_TEXT})
            separators = (tokenizer.eos_token_id, None, None)
        self.separator: int = next(separator for separator in separators if separator is not None)
        self.vocabulary: int = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        self.dtype = np.uint16 if self.vocabulary <= 2**16 else np.uint32

    def encode(self, documents: Sequence[Document]) -> list[Tokens]:
        encoded: list[Tokens] = []
        for first in range(0, len(documents), ENCODED_AT_ONCE):
            texts = [document.text for document in documents[first : first + ENCODED_AT_ONCE]]
            # verbose=False: texts longer than the tokenizer's own model allows are not worth a warning here.
            ids = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            encoded += [np.array(tokens, dtype=self.dtype) for tokens in ids["input_ids"]]
        return encoded

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        self.tokenizer.save_pretrained(directory)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer`: bytes, a directory or tokenizer.json on this machine, or a name on the Hub.

    Raises ConnectionError where the Hub is needed and cannot be reached, ValueError for what is no tokenizer. Code that
    a repository brings is not run.
    """
    if name == BYTES:
        return ByteTokenizer()
    key = f"data.tokenizer={name}"
    path = Path(name).expanduser()
    if not path.exists():
        if path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json" or len(path.parts) > 2:
            raise FileNotFoundError(f"{key}: there is no such file or directory")
        require_network(key, "data.tokenizer=bytes and data.tokenizer=PATH need none")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer: Any
    try:
        if path.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(path) if path.exists() else name, trust_remote_code=False)
    except Exception as error:  # what a damaged file makes the package tokenizers raise is nothing narrower
        raise ValueError(f"{key}: no tokenizer could be read: {first_line(error)}") from error
    return HuggingFaceTokenizer(name, tokenizer)


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
