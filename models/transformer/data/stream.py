"""Text that is read while it is trained on: shuffled, packed into windows, and resumed exactly where it stopped.

Documents are read in blocks of `shuffle_buffer`, each of which is put in an order of its own; parts (files) are read in
an order of each epoch. Where the stream stands is thus where its block begins, and how far into the block it is: a few
numbers, whatever the block holds. Going on from there reads the block again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from models.transformer.data.corpus import counted, digest, encode_all, join
from models.transformer.data.documents import Document, Part, Reader, State
from models.transformer.data.tokens import Tokenizer, Tokens
from models.transformer.data.windows import inputs_and_targets, overlapping

BLOCK_BYTES = 64 * 2**20
"""A block ends, before it has its number of documents, once its text has this many bytes."""


@dataclass(frozen=True)
class _Piece:
    """A separator and a document's tokens: those of them that are still to come."""

    tokens: Tokens
    at: State
    """Where the first of these tokens stands in the stream."""

    def after(self, count: int) -> _Piece:
        """What is left after `count` tokens."""
        return _Piece(self.tokens[count:], self.at | {"offset": self.at["offset"] + count})


class Stream:
    """Training text that is streamed, and validation text that is in memory.

    parts             the training text; every document is in one.
    validation_parts  the validation text, of which the first documents are taken up to validation_bytes; None holds
                      documents of the training text out, those whose digest is below `fraction` of all digests.
    shuffle_buffer    documents in a block; at most BLOCK_BYTES of text.
    seed              of the orders.
    origin            what messages call the text; validation_origin, that of validation.

    Raises ValueError where there is no text to train or to validate on.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        validation_parts: Sequence[Part] | None,
        tokenizer: Tokenizer,
        *,
        fraction: float,
        validation_bytes: int,
        shuffle_buffer: int,
        seed: int,
        origin: str,
        validation_origin: str,
    ) -> None:
        self.tokenizer = tokenizer
        self._parts, self._block_size, self._seed, self._origin = parts, shuffle_buffer, seed, origin
        self._held_below = 0 if validation_parts is not None else int(fraction * 2**64)
        held_out, size = [], 0
        with contextlib.closing(iter(Reader(parts if validation_parts is None else validation_parts))) as documents:
            for document in documents:
                if document.text and (validation_parts is not None or self._is_held_out(document)):
                    held_out.append(document)
                    size += len(document.text.encode()) + 1
                if size >= validation_bytes:
                    break
        if not held_out:
            reason = "there is none in it"
            if validation_parts is None:
                reason = (
                    f"data.validation_fraction={fraction} of its documents is none; a file or split of its own works"
                )
            raise ValueError(f"{validation_origin}: no text to validate on: {reason}")
        with contextlib.closing(iter(Reader(parts))) as documents:
            if not any(document.text and not self._is_held_out(document) for document in documents):
                raise self._nothing_to_train_on()
        self.validation = join(encode_all(held_out, tokenizer).tokens, tokenizer)
        self.validation_documents = len(held_out)
        self.validation_bytes = size

    @property
    def digest(self) -> str:
        """Of what can be told without reading all: the parts' identities, and the validation text."""
        hashed = hashlib.blake2b(self.validation.data, digest_size=8)
        for part in self._parts:
            hashed.update(f"{part.identity}\n".encode())
        return hashed.hexdigest()

    def describe(self) -> str:
        """Where the text comes from, and what it is validated on."""
        share = f" (those held out are {self._held_below / 2**64:.1%} of all)" if self._held_below else ""
        return (
            f"{self._origin}: streamed, shuffled in blocks of {counted(self._block_size)}; "
            f"{len(self.validation):,} {self.tokenizer.unit} of {counted(self.validation_documents)} to validate{share}"
        )

    def batches(
        self, length: int, batch_size: int, state: State | None
    ) -> Generator[tuple[dict[str, Tensor], State], None, None]:
        """Batches of windows over the packed documents without end, each with the state from which they go on after it.

        A batch is input_ids and targets, [batch_size, length] int64: its windows follow one another in the text, every
        token of which is a target once an epoch. Raises ValueError where there is no text to train on.
        """
        step = batch_size * length
        waiting: deque[_Piece] = deque()
        there = 0
        with contextlib.closing(self._pieces(state)) as pieces:
            for piece in pieces:
                waiting.append(piece)
                there += len(piece.tokens)
                while there > step:
                    tokens = np.concatenate([piece.tokens for piece in waiting])[: step + 1]
                    self._drop(waiting, step)
                    there -= step
                    yield inputs_and_targets(overlapping(tokens, length)), waiting[0].at

    @staticmethod
    def _drop(waiting: deque[_Piece], count: int) -> None:
        while count >= len(waiting[0].tokens):
            count -= len(waiting.popleft().tokens)
        if count:
            waiting[0] = waiting[0].after(count)

    def _pieces(self, state: State | None) -> Generator[_Piece, None, None]:
        """The documents of all epochs, from a state on."""
        place = state or {"epoch": 0, "block": 0, "reader": None, "document": 0, "offset": 0}
        epoch, block, at = place["epoch"], place["block"], place["reader"]
        skipped, offset = place["document"], place["offset"]
        separator = np.array([self.tokenizer.separator], dtype=self.tokenizer.dtype)
        while True:
            reader = Reader(self._order(epoch), at)
            with contextlib.closing(iter(reader)) as documents:
                while encoded := self._block(documents):
                    start = {"epoch": epoch, "block": block, "reader": at}
                    order = self._generator(epoch, block, 1).permutation(len(encoded))
                    for position in range(skipped, len(order)):
                        tokens = np.concatenate((separator, encoded[order[position]]))
                        whole = _Piece(tokens, start | {"document": position, "offset": 0})
                        yield whole.after(offset) if offset else whole
                        offset = 0
                    skipped, block, at = 0, block + 1, reader.state()
            if block == 0:
                raise self._nothing_to_train_on()
            epoch, block, at = epoch + 1, 0, None

    def _block(self, documents: Iterator[Document]) -> list[Tokens]:
        """The next documents to train on, as tokens; none where there are no more."""
        block, size = [], 0
        for document in documents:
            if document.text and not self._is_held_out(document):
                block.append(document)
                size += len(document.text.encode())
            if len(block) == self._block_size or size >= BLOCK_BYTES:
                break
        return self.tokenizer.encode(block)

    def _nothing_to_train_on(self) -> ValueError:
        return ValueError(f"{self._origin}: no text to train on besides what is held out for validation")

    def _is_held_out(self, document: Document) -> bool:
        return digest(document.text) < self._held_below

    def _order(self, epoch: int) -> list[Part]:
        return [self._parts[i] for i in self._generator(epoch, 0, 0).permutation(len(self._parts))]

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self._seed, *key])))
