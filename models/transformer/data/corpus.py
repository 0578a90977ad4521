"""Text in memory: the tokens of the training part in one array, those of the validation part in another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from models.transformer.data.tokens import BYTES, Document, Tokenizer, Tokens

GATHERED = 1000
"""Documents that are encoded at once."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation text. Each array begins and ends with the separator, and has it between documents.

    origin            where the text comes from.
    validation_bytes  the validation text's bytes of UTF-8, each separator counted as one: what its targets stand for.
    """

    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens
    train_documents: int
    validation_documents: int
    validation_bytes: int
    origin: str
    held_out: str = "other documents"
    """What the validation part is made of."""

    @cached_property
    def digest(self) -> str:
        """Of all tokens: whether a text is the same as another time."""
        hashed = hashlib.blake2b(digest_size=8)
        for part in (self.train, self.validation):
            hashed.update(part.data)
        return hashed.hexdigest()

    def describe(self) -> str:
        """Where the text comes from, and how much of it is in each part."""
        unit = self.tokenizer.unit
        total = len(self.train) + len(self.validation)
        return (
            f"{self.origin}: {len(self.train):,} {unit} of {counted(self.train_documents)} to train, "
            f"{len(self.validation):,} {unit} ({len(self.validation) / total:.1%}) of {self.held_out} to validate"
        )


def counted(documents: int) -> str:
    """ "1 document", "2,000 documents"."""
    return f"{documents:,} document{'' if documents == 1 else 's'}"


@dataclass
class Encoded:
    """Documents as tokens; of each, the length of its text in bytes, and a digest of the text."""

    tokens: list[Tokens]
    sizes: list[int]
    digests: list[int]


def digest(text: str) -> int:
    """64 bits of a text's BLAKE2b: which documents are held out depends on what they say, not on where they stand."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def encode_all(documents: Iterable[Document], tokenizer: Tokenizer) -> Encoded:
    """Every document that has any text, encoded, in order."""
    result = Encoded([], [], [])
    for group in _groups(documents):
        result.tokens += tokenizer.encode(group)
        result.sizes += [len(document.text.encode()) for document in group]
        result.digests += [digest(document.text) for document in group]
    return result


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    for document in documents:
        if document.text:
            group.append(document)
        if len(group) == GATHERED:
            yield group
            group = []
    if group:
        yield group


def join(texts: Sequence[Tokens], tokenizer: Tokenizer) -> Tokens:
    """The texts with a separator before, between and after them."""
    separator = np.array([tokenizer.separator], dtype=tokenizer.dtype)
    parts = [separator]
    for text in texts:
        parts += [text, separator]
    return np.concatenate(parts)


def whole_corpus(
    train: Encoded, validation: Encoded, tokenizer: Tokenizer, origin: str, validation_origin: str
) -> Corpus:
    """A corpus whose validation text is a source of its own."""
    return Corpus(
        tokenizer,
        join(train.tokens, tokenizer),
        join(validation.tokens, tokenizer),
        len(train.tokens),
        len(validation.tokens),
        sum(validation.sizes) + len(validation.tokens),
        origin,
        f"{counted(len(validation.tokens))} of {validation_origin}",
    )


def split_corpus(encoded: Encoded, fraction: float, tokenizer: Tokenizer, origin: str) -> Corpus:
    """A corpus that holds a fraction of the bytes out: whole documents in the order of their digests.

    Each is taken unless it would bring the bytes held out past the fraction. Where these come to less than half of it,
    as of a single document, the end of the longest document is held out instead.
    """
    wanted = budget = fraction * sum(encoded.sizes)
    held_out: set[int] = set()
    for i in sorted(range(len(encoded.tokens)), key=encoded.digests.__getitem__):
        if encoded.sizes[i] <= budget:
            held_out.add(i)
            budget -= encoded.sizes[i]
    if budget > wanted / 2:
        return _cut_corpus(encoded, fraction, tokenizer, origin)
    train = [tokens for i, tokens in enumerate(encoded.tokens) if i not in held_out]
    validation = [encoded.tokens[i] for i in sorted(held_out)]
    return Corpus(
        tokenizer,
        join(train, tokenizer),
        join(validation, tokenizer),
        len(train),
        len(validation),
        sum(encoded.sizes[i] for i in held_out) + len(held_out),
        origin,
        f"{counted(len(held_out))} held out",
    )


def _cut_corpus(encoded: Encoded, fraction: float, tokenizer: Tokenizer, origin: str) -> Corpus:
    """A corpus whose validation text is the end of the longest document, at most half of it."""
    longest = max(range(len(encoded.tokens)), key=lambda i: len(encoded.tokens[i]))
    whole, total = encoded.tokens[longest], sum(len(tokens) for tokens in encoded.tokens)
    cut = max(len(whole) - round(fraction * total), len(whole) // 2)
    end = whole[cut:]
    train = [tokens[:cut] if i == longest else tokens for i, tokens in enumerate(encoded.tokens)]
    # Where tokens are not bytes, a cut may fall into a character, which then does not count.
    size = len(end) if tokenizer.name == BYTES else len(tokenizer.decode(end.tolist()).encode())
    return Corpus(
        tokenizer,
        join(train, tokenizer),
        join([end], tokenizer),
        len(train),
        1,
        size + 1,
        origin,
        "the end of the longest document, as no whole ones come near the share asked for",
    )
