"""Rows of Criteo's click log, a label, 13 counts and 26 hashed categories: of text, plain or gzip, or of Parquet.

A block of rows is read at a time, from the beginning of a file or from where an earlier block ended.
"""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.task import StreamState
from models.parquet import opened, tables
from models.recommender.data.lines import Malformed, number
from models.recommender.data.source import Floats, Integers

DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
MISSING = -1
"""The id of a category that is missing; Criteo's own have 8 hexadecimal digits."""
HEX_DIGITS = 16
"""The most that an id of 64 bits has."""
PARSED_AT_ONCE = 10_000
EXTENSIONS = (".tsv", ".txt", ".tsv.gz", ".txt.gz", ".parquet")
"""Of files that are taken from a folder; a file that is named itself may have any, and is text unless it is Parquet."""


class Rows(NamedTuple):
    """Rows as samples: dense float32 [n, 13], ids int64 [n, 26], labels float32 [n]."""

    dense: Floats
    ids: Integers
    labels: Floats

    def take(self, which: Any) -> Rows:
        """Some of the rows: a slice, indices or a mask."""
        return Rows(self.dense[which], self.ids[which], self.labels[which])


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts."""
    if not parts:
        return Rows(
            np.zeros((0, len(DENSE)), dtype=np.float32),
            np.zeros((0, len(CATEGORIES)), dtype=np.int64),
            np.zeros(0, dtype=np.float32),
        )
    return Rows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def find_files(paths: object, key: str) -> list[Path]:
    """The files of a path, folder, glob, or a list of these, in the order of their paths.

    Raises FileNotFoundError where there are none, naming the key.
    """
    found: set[Path] = set()
    for path in [paths] if isinstance(paths, str) else list(paths) if isinstance(paths, Iterable) else [paths]:
        if not isinstance(path, str) or not path:
            raise ValueError(f"{key}={path}: must be a path, or a list of paths")
        place = Path(path).expanduser()
        if place.is_dir():
            files = [file for file in place.rglob("*") if file.is_file() and file.name.lower().endswith(EXTENSIONS)]
        else:
            files = [place] if place.is_file() else [Path(f) for f in glob.glob(str(place)) if Path(f).is_file()]
        if not files:
            reason = f"no file ending in {', '.join(EXTENSIONS)}" if place.is_dir() else "no such file or folder"
            raise FileNotFoundError(f"{key}={path}: there is {reason}")
        found.update(files)
    return sorted(found)


def blocks_of(
    file: Path, size: int, state: StreamState | None, label: str, malformed: Malformed
) -> Generator[tuple[Rows, StreamState], None, None]:
    """Blocks of `size` rows of a file, malformed ones counted, each with the state from which the next one is read.

    Raises ValueError naming file, line and field for a malformed row, unless they are skipped.
    """
    if file.suffix.lower() == ".parquet":
        return _parquet_blocks(file, size, state, label, malformed)
    return _text_blocks(file, size, state, malformed)


# ---------------------------------------------------------------------------------------------------------------------
# Cells


class Cells(NamedTuple):
    """A column's values, and which of them could not be read and what they were."""

    values: NDArray[Any]
    wrong: Mapping[int, object]


def _labels(texts: Sequence[bytes]) -> Cells:
    values = np.array([text == b"1" for text in texts], dtype=np.float32)
    return Cells(values, {i: text for i, text in enumerate(texts) if text not in (b"0", b"1")})


def _counts(texts: Sequence[bytes]) -> Cells:
    """Numbers, NaN where the text is empty."""
    filled = [text or b"nan" for text in texts]
    try:
        values = np.array(filled, dtype=np.bytes_).astype(np.float64)
    except ValueError:
        values = np.full(len(texts), np.nan)
    wrong: dict[int, object] = {}
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        if texts[i]:
            try:
                values[i] = number(texts[i].decode("latin-1"), "count")
            except ValueError:
                wrong[i] = texts[i]
    return Cells(values, wrong)


_DIGITS = np.full(256, 255, dtype=np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)
_DIGITS[np.frombuffer(b"ABCDEF", dtype=np.uint8)] = np.arange(10, 16)


def _hashes(texts: Sequence[bytes]) -> Cells:
    """The 64-bit integers of hexadecimal texts, MISSING where they are empty."""
    longest = max(map(len, texts))
    cut = np.array(texts if longest <= HEX_DIGITS else [text[: HEX_DIGITS + 1] for text in texts], dtype=np.bytes_)
    digits = _DIGITS[cut.view(np.uint8).reshape(len(texts), -1)]
    length = np.char.str_len(cut)
    values = np.zeros(len(texts), dtype=np.uint64)
    bad = length > HEX_DIGITS
    for position in range(min(digits.shape[1], HEX_DIGITS)):
        inside = position < length
        bad |= inside & (digits[:, position] == 255)
        values = np.where(inside, (values << np.uint64(4)) | (digits[:, position] & 15), values)
    ids = values.view(np.int64)
    ids[length == 0] = MISSING
    wrong = {i: texts[i] for i in np.flatnonzero(bad).tolist()}
    # numpy drops NUL bytes at the end of a text.
    wrong |= {i: text for i, text in enumerate(texts) if text[-1:] == b"\0"}
    return Cells(ids, wrong)


EXPECTED: dict[Callable[[Sequence[bytes]], Cells], str] = {
    _labels: "must be 0 or 1",
    _counts: "must be a finite number, or empty",
    _hashes: f"must be at most {HEX_DIGITS} hexadecimal digits, or empty",
}


def _rows(columns: Sequence[tuple[str, str, Cells]], place: Callable[[int], str], malformed: Malformed) -> Rows:
    """The rows of columns, each a name, what is expected of it, and its cells, in the order label, counts, categories.

    place: what messages call a row, by its index.
    """
    count = len(columns[0][2].values)
    good = np.ones(count, dtype=bool)
    wrong: dict[int, str] = {}
    for name, expected, cells in columns:
        for row, text in cells.wrong.items():
            wrong.setdefault(row, f"field {name}: is {_shown(text)}; {expected}")
    for row in sorted(wrong):
        malformed.add(place(row), wrong[row])
        good[row] = False
    values = [cells.values for _, _, cells in columns]
    dense = np.stack(values[1 : 1 + len(DENSE)], axis=1)
    # log(1 + x), as usual for these counts; what is missing or below 0 (I2 has some) is 0.
    dense = np.log1p(np.maximum(np.nan_to_num(dense, nan=0.0), 0.0)).astype(np.float32)
    return Rows(dense, np.stack(values[1 + len(DENSE) :], axis=1), values[0]).take(good)


def _shown(value: object) -> str:
    return repr(value.decode("latin-1") if isinstance(value, bytes) else value)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _open(file: Path) -> Any:
    with open(file, "rb") as start:
        zipped = start.read(2) == b"\x1f\x8b"
    return gzip.open(file, "rb") if zipped else open(file, "rb")


def _text_blocks(
    file: Path, size: int, state: StreamState | None, malformed: Malformed
) -> Generator[tuple[Rows, StreamState], None, None]:
    at = state or {"offset": 0, "line": 0}
    with _open(file) as text:
        text.seek(at["offset"])
        line = at["line"]
        while True:
            parts, read = [], 0
            while read < size:
                try:
                    lines = list(islice(text, min(PARSED_AT_ONCE, size - read)))
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise ValueError(f"{file}, after line {line + read:,}: cannot be read: {error}") from error
                if not lines:
                    break
                parts.append(_parsed(lines, file, line + read, malformed))
                read += len(lines)
            if not read:
                return
            line += read
            yield joined(parts), {"offset": text.tell(), "line": line}


def _parsed(lines: Sequence[bytes], file: Path, before: int, malformed: Malformed) -> Rows:
    names = ("label", *DENSE, *CATEGORIES)
    numbers, fields = [], []
    for index, line in enumerate(lines, start=before + 1):
        row = line.rstrip(b"\r\n").split(b"\t")
        if len(row) == len(names):
            numbers.append(index)
            fields += row
        elif line.strip():
            malformed.add(f"{file}, line {index:,}", f"{len(row)} fields; must be {len(names)}: label, I1-I13, C1-C26")
    if not numbers:
        return joined([])
    columns = []
    for i, name in enumerate(names):
        parse = _labels if i == 0 else _counts if name in DENSE else _hashes
        columns.append((name, EXPECTED[parse], parse(fields[i :: len(names)])))
    return _rows(columns, lambda row: f"{file}, line {numbers[row]:,}", malformed)


def _parquet_blocks(
    file: Path, size: int, state: StreamState | None, label: str, malformed: Malformed
) -> Generator[tuple[Rows, StreamState], None, None]:
    done = 0 if state is None else state["row"]
    names = (label, *DENSE, *CATEGORIES)
    with opened(file) as rows_of_file:
        found = rows_of_file.schema_arrow.names
        missing = [name for name in names if name not in found]
        if missing:
            hint = " (data.label)" if missing[0] == label else ""
            raise ValueError(f"{file}: there is no column {missing[0]}{hint}; there are {', '.join(found)}")
        for table in tables(rows_of_file, names, size, done):
            columns = []
            for i, name in enumerate(names):
                parse = _labels if i == 0 else _counts if i <= len(DENSE) else _hashes
                cells = _arrow_cells(table.column(name), parse, f"{file}, column {name}")
                columns.append((name, EXPECTED[parse], cells))
            rows = _rows(columns, partial(_row_of, file, done + 1), malformed)
            done += table.num_rows
            yield rows, {"row": done}


def _row_of(file: Path, first: int, row: int) -> str:
    return f"{file}, row {first + row:,}"


def _arrow_cells(column: Any, parse: Callable[[Sequence[bytes]], Cells], name: str) -> Cells:
    """The cells of a column of Arrow: numbers as they are, texts as in a file of text."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return parse([text or b"" for text in column.cast(pa.large_binary()).to_pylist()])
    if not (pa.types.is_integer(kind) or (pa.types.is_floating(kind) and parse is not _hashes)):
        raise ValueError(f"{name}: is of type {kind}; must be integers{'' if parse is _hashes else ', floats'} or text")
    missing = column.is_null().to_numpy()
    if parse is _hashes:
        values = column.fill_null(0).to_numpy().astype(np.int64)
        values[missing] = MISSING
        return Cells(values, {})
    values = column.cast(pa.float64()).to_numpy()
    bad = ~np.isin(values, (0.0, 1.0)) if parse is _labels else ~np.isfinite(values) & ~missing
    shown = {i: None if missing[i] else values[i].item() for i in np.flatnonzero(bad).tolist()}
    return Cells(values.astype(np.float32) if parse is _labels else values, shown)
