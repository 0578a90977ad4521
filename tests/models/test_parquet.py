"""Parquet in tables of rows from any row on, of files of odd row groups, of damaged ones, and given up half-way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from models.parquet import opened, tables

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

GROUPS = [5, 0, 1, 13, 0, 0, 7, 2, 0]
"""Rows of the groups of the fixture's file."""


@pytest.fixture
def table() -> Any:
    rows = sum(GROUPS)
    generator = np.random.default_rng()
    texts = [None if i % 5 == 3 else "ü" * length for i, length in enumerate(generator.integers(0, 50, size=rows))]
    return pa.table({"unread": list(range(rows)), "text": texts, "number": generator.standard_normal(rows)})


@pytest.fixture
def path(table: Any, tmp_path: Path) -> Path:
    # A name in which a pattern, a scheme and an escape could be seen.
    path = tmp_path / "s3:[1]*%20.parquet"
    with parquet.ParquetWriter(path, table.schema) as writer:
        for start, rows in zip(np.cumsum([0, *GROUPS]).tolist(), GROUPS, strict=False):
            writer.write_table(table.slice(start, rows))
    groups = parquet.read_metadata(path)
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == GROUPS
    return path


@pytest.mark.parametrize("size", [1, 3, 8, 28, 100])
def test_rows_from_any_row_on_are_those_of_the_table(size: int, table: Any, path: Path) -> None:
    columns = ["number", "text"]
    for start in range(table.num_rows + 3):
        with opened(path) as file:
            blocks = list(tables(file, columns, size, start))
        expected = table.select(columns).slice(start)
        sizes = [size] * (expected.num_rows // size) + [expected.num_rows % size]
        assert [block.num_rows for block in blocks] == [rows for rows in sizes if rows]
        assert all(sorted(block.column_names) == columns for block in blocks)
        if blocks:
            assert pa.concat_tables(blocks).select(columns).combine_chunks().equals(expected.combine_chunks())


def test_a_file_without_rows_gives_none(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with opened(tmp_path / "a.parquet") as file:
        assert not list(tables(file, ["text"], 3)) and not list(tables(file, ["text"], 3, 1))


def test_row_groups_before_the_first_row_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"number": np.random.default_rng().standard_normal(40)})
    parquet.write_table(table, path, row_group_size=10, use_dictionary=False, write_page_checksum=True)
    first = parquet.read_metadata(path).row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[first.data_page_offset + first.total_compressed_size - 3] ^= 0xFF
    path.write_bytes(content)
    with opened(path) as file:
        assert (
            pa.concat_tables(tables(file, ["number"], 7, 10)).combine_chunks().equals(table.slice(10).combine_chunks())
        )
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read: .*CRC"), opened(path) as file:
        list(tables(file, ["number"], 7, 9))


@pytest.mark.parametrize("damage", ["no footer", "cut", "not there", "a folder"])
def test_a_file_that_cannot_be_read_is_named(damage: str, path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "not there":
        path.write_bytes(content[:-8] if damage == "no footer" else content[: len(content) // 2])
    with pytest.raises(ValueError) as raised, opened(path):
        pass
    assert str(raised.value).startswith(f"{path}: cannot be read: ") and "\n" not in str(raised.value)


def test_reading_that_is_given_up_ends_the_interpreter_well(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["some text"] * 20_000, "i": range(20_000)}), path, row_group_size=50)
    program = """if True:
        import sys
        from pathlib import Path
        from models.parquet import opened, tables
        opening = opened(Path(sys.argv[1]))
        rows = tables(opening.__enter__(), ["i", "text"], 30)
        print(next(rows).num_rows)
    """
    paths = (str(Path(train.__file__).parent), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for _ in range(8):
        command = [sys.executable, "-c", program, str(path)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stdout, result.stderr) == (0, "30\n", "")


def test_a_column_that_is_not_there_is_named(path: Path) -> None:
    with (
        opened(path) as file,
        pytest.raises(ValueError, match="no column texts; there are unread, text, number"),
    ):
        next(tables(file, ["texts"], 2))


def test_fewer_rows_than_the_file_says_are_no_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow ends in silence where a file is written over while it is read."""
    batches = parquet.ParquetFile.iter_batches

    def some(*args: Any, **kwargs: Any) -> Any:
        yield next(batches(*args, **kwargs))

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", some)
    with pytest.raises(ValueError, match=r"s3:.*cannot be read: the last \d+ rows are missing"), opened(path) as file:
        list(tables(file, ["text"], 4))
