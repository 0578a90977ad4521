"""Byte tokens from the running interpreter's own standard library: real text that needs no download.

Files are joined by a separator byte and held as uint8. The split is by file: validation text is of files never seen.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEPARATOR = 0
"""The byte before the first file, between files, and after the last; Python source cannot contain it."""
VOCABULARY = 256

LEFT_OUT = frozenset(
    (
        "site-packages",
        "dist-packages",
        "__pycache__",
        # tests, and the samples they read
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        # generated tables, not source that someone wrote: character maps, hundreds of lines alike in each of 120 files
        "encodings",
    )
)
"""Names of directories, at any depth of the standard library, whose files are not read."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Training and validation text. Each array begins with the separator, so that every byte of a file is a target."""

    train: Bytes
    validation: Bytes
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    root: Path

    def describe(self) -> str:
        """Where the text comes from, and how much of it is in each part."""
        total = len(self.train) + len(self.validation)
        return (
            f"{self.root}: {len(self.train):,} bytes of {len(self.train_files)} files to train, "
            f"{len(self.validation):,} bytes ({len(self.validation) / total:.1%}) of {len(self.validation_files)} "
            "other files to validate"
        )


def stdlib_root() -> Path:
    """The directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def load(root: Path, validation_fraction: float) -> Corpus:
    """Read the Python source under `root` (directories of `LEFT_OUT` excepted) and split it by file.

    Which files are held out depends on their paths and sizes alone: in the order of their paths' SHA-256, each is taken
    unless it would bring the held-out bytes past validation_fraction of all.
    Raises FileNotFoundError where root is no directory, OSError naming a file that cannot be read, ValueError where a
    part is empty.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"the standard library's source: {root} is not a directory")
    texts = {name: text for name, text in _read(root) if text}
    budget = validation_fraction * sum(len(text) for text in texts.values())
    held_out: set[str] = set()
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(texts[name]) <= budget:
            held_out.add(name)
            budget -= len(texts[name])
    train_files = tuple(name for name in texts if name not in held_out)
    validation_files = tuple(name for name in texts if name in held_out)
    for part, files in (("training", train_files), ("validation", validation_files)):
        if not files:
            raise ValueError(
                f"no {part} text: {root} has {len(texts)} Python files that are not empty, of which a share of "
                f"{validation_fraction} in bytes is to be held out"
            )
    return Corpus(
        train=_join([texts[name] for name in train_files]),
        validation=_join([texts[name] for name in validation_files]),
        train_files=train_files,
        validation_files=validation_files,
        root=root,
    )


def _read(root: Path) -> Iterator[tuple[str, bytes]]:
    """The (path relative to root, content) of the source files, by path; a link that leads nowhere is not a file."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.isdisjoint(relative.parts) and path.is_file():
            yield relative.as_posix(), path.read_bytes()


def _join(texts: Sequence[bytes]) -> Bytes:
    separator = bytes([SEPARATOR])
    return np.frombuffer(separator + separator.join(texts) + separator, dtype=np.uint8)


def random_windows(tokens: Bytes, length: int, count: int, seed: int, step: int, rank: int) -> dict[str, Tensor]:
    """`count` windows of `length` tokens and the tokens that follow each: a pure function of its arguments.

    Returns input_ids and targets, [count, length] int64. Raises ValueError where the text is shorter than a window.
    """
    if len(tokens) < length + 1:
        raise ValueError(f"a text of {len(tokens)} tokens is too short for windows of {length} and their targets")
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, rank])))
    starts = generator.integers(0, len(tokens) - length, size=count)
    return _inputs_and_targets(tokens[starts[:, None] + np.arange(length + 1)])


def consecutive_windows(tokens: Bytes, length: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Windows of `length` tokens, one after the other, in batches: every token but the first is a target exactly once.

    Yields input_ids and targets, [batch_size, length] int64; the last whole windows come in a smaller batch, and what
    is left after them in a batch of one shorter window.
    """
    whole = (len(tokens) - 1) // length
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length] if whole else tokens[:0]
    for first in range(0, whole, batch_size):
        yield _inputs_and_targets(windows[first : first + batch_size])
    rest = tokens[whole * length :]
    if len(rest) > 1:
        yield _inputs_and_targets(rest[None])


def _inputs_and_targets(windows: Bytes) -> dict[str, Tensor]:
    tokens = torch.from_numpy(windows.astype(np.int64))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
