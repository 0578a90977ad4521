"""Text that needs no download: the source of the running interpreter's own standard library.

The split is by file: validation text is of files never seen.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.transformer.data.corpus import Corpus, join
from models.transformer.data.tokens import ByteTokenizer

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


@dataclass(frozen=True)
class Split:
    """Files by their paths relative to a directory, each with its content."""

    train: dict[str, bytes]
    validation: dict[str, bytes]


def stdlib_root() -> Path:
    """The directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def split(root: Path, validation_fraction: float) -> Split:
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
    result = Split(
        {name: text for name, text in texts.items() if name not in held_out},
        {name: text for name, text in texts.items() if name in held_out},
    )
    for part, files in (("training", result.train), ("validation", result.validation)):
        if not files:
            raise ValueError(
                f"data.validation_fraction={validation_fraction}: no {part} text: {root} has {len(texts)} Python files "
                "that are not empty, of which this share in bytes is to be held out"
            )
    return result


def stdlib_corpus(root: Path, validation_fraction: float) -> Corpus:
    """The source under `root`, split as by `split`, its bytes as tokens."""
    files, tokenizer = split(root, validation_fraction), ByteTokenizer()
    train, validation = (
        join([np.frombuffer(text, dtype=np.uint8) for text in part.values()], tokenizer)
        for part in (files.train, files.validation)
    )
    return Corpus(
        tokenizer,
        train,
        validation,
        len(files.train),
        len(files.validation),
        len(validation) - 1,
        str(root),
        f"{len(files.validation)} other files",
    )


def _read(root: Path) -> Iterator[tuple[str, bytes]]:
    """The (path relative to root, content) of the source files, by path; a link that leads nowhere is not a file."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.isdisjoint(relative.parts) and path.is_file():
            yield relative.as_posix(), path.read_bytes()
