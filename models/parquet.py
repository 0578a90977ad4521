"""Files of Parquet on this machine, read by pyarrow a few rows at a time from any row on.

pyarrow gets the path, never a Python file object: a thread of Arrow that still reads one ahead while the interpreter
ends aborts the process (https://github.com/apache/arrow/issues/45214), as with streams of `datasets`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BUFFER_BYTES = 1 << 20
"""What is read of a column at a time; without it, all of a row group would be."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`, closed at the end.

    Raises ValueError naming the file where it cannot be read, then or inside the block, and where pyarrow is missing.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: Parquet is read by the package pyarrow, which is not installed ({error}); text needs none"
        ) from error
    try:
        # pre_buffer would begin to read all row groups at once, on threads of Arrow's. Few files have checksums.
        with parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=BUFFER_BYTES, page_checksum_verification=True
        ) as file:
            yield file
    except (OSError, ArrowException) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: cannot be read: {reason}") from error


def tables(file: Any, columns: Sequence[str], size: int, start: int = 0) -> Iterator[Any]:
    """The rows of an opened file from row `start` on, as `pyarrow.Table`s of `size` rows; the last may have fewer.

    columns  those that are read.
    start    the rows to leave out, from 0. Row groups that lie wholly before it are not read.

    Raises ValueError for a column that the file has not, OSError where fewer rows come than the file says it has.
    """
    import pyarrow as pa

    names = file.schema_arrow.names
    if missing := [column for column in columns if column not in names]:
        raise ValueError(f"there is no column {', '.join(missing)}; there are {', '.join(names)}")
    groups, skipped = _groups_from(file.metadata, start)
    expected = max(file.metadata.num_rows - start, 0)
    held = None
    for batch in file.iter_batches(batch_size=size, row_groups=groups, columns=list(columns)):
        left_out = min(skipped, batch.num_rows)
        skipped -= left_out
        table = pa.Table.from_batches([batch.slice(left_out)])
        expected -= table.num_rows
        held = table if held is None else pa.concat_tables([held, table])
        while held.num_rows >= size:
            yield held.slice(0, size)
            held = held.slice(size)
    if expected:  # Arrow ends in silence where a file was written over while it was read
        raise OSError(f"the last {expected:,} rows are missing; was it changed meanwhile?")
    if held is not None and held.num_rows:
        yield held


def _groups_from(metadata: Any, start: int) -> tuple[range, int]:
    """The row groups from the one of row `start` on, and how many of their rows come before it."""
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if start < rows:
            return range(group, metadata.num_row_groups), start
        start -= rows
    return range(0), 0
