"""data=criteo: text, plain and gzip, and Parquet; streamed, resumed, malformed."""

from __future__ import annotations

import gzip
import logging
import math
import sys
from itertools import islice

import numpy as np
import pytest
import torch

from models.recommender.data import CriteoConfig, load
from models.recommender.data.criteo_rows import CATEGORIES, DENSE, MISSING

NAMES = ("label", *DENSE, *CATEGORIES)


def stream_of(path, batch_size: int = 7, seed: int = 0, **keys):
    return load(CriteoConfig(path=str(path), **{"validation_fraction": 0.3, **keys}), batch_size, 5, seed)


def expected(row: list[str]) -> tuple[float, list[float], list[int]]:
    dense = [math.log1p(max(float(text), 0.0)) if text else 0.0 for text in row[1:14]]
    ids = [int(text, 16) if text else MISSING for text in row[14:]]
    return float(row[0]), dense, [i - 2**64 if i >= 2**63 else i for i in ids]


def row_numbers(batch) -> list[int]:
    """The first count of the fixture's rows, which is their number."""
    return batch["dense"][:, 0].double().expm1().round().long().tolist()


def write_parquet(path, rows, hexadecimal: bool = True):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"label": pa.array([int(row[0]) for row in rows], pa.int32())}
    for i, name in enumerate(DENSE, start=1):
        columns[name] = pa.array([int(row[i]) if row[i] else None for row in rows], pa.int64())
    for i, name in enumerate(CATEGORIES, start=14):
        texts = [row[i] or None for row in rows]
        columns[name] = pa.array(texts if hexadecimal else [None if t is None else int(t, 16) for t in texts])
    parquet.write_table(pa.table(columns), path, row_group_size=11)
    return path


@pytest.mark.parametrize("kind", ["text", "gzip", "parquet", "parquet of integers"])
def test_every_row_is_read_as_it_stands_in_the_file(kind, tmp_path, criteo_rows, write_tsv, check_batch) -> None:
    rows = criteo_rows(83)
    rows[3][14:17] = ["f" * 16, "8" + "0" * 15, "0"] if kind != "parquet of integers" else ["1", "2", "0"]
    if kind.startswith("parquet"):
        path = write_parquet(tmp_path / "rows.parquet", rows, hexadecimal=kind == "parquet")
    else:
        path = write_tsv(tmp_path / "rows.tsv", rows)
        if kind == "gzip":
            path = tmp_path / "day_0"  # told by its content
            path.write_bytes(gzip.compress((tmp_path / "rows.tsv").read_bytes()))
    source = stream_of(path, batch_size=len(rows))
    held_out = list(source.validation())
    assert sum(check_batch(batch, source) for batch in held_out) == source.validation_samples
    training = source.batch(0)
    seen = [number for batch in held_out for number in row_numbers(batch)]
    trained = sorted(set(row_numbers(training)))
    assert sorted(seen + trained) == list(range(len(rows)))
    for batch in [*held_out, training]:
        check_batch(batch, source)
        ids = batch["ids"].view(len(CATEGORIES), -1).T.tolist()
        for i, number in enumerate(row_numbers(batch)):
            label, dense, categories = expected(rows[number])
            assert (batch["labels"][i].item(), ids[i]) == (label, categories)
            torch.testing.assert_close(batch["dense"][i], torch.tensor(dense))
    assert f"{source.validation_samples:,} rows to validate" in source.describe()


@pytest.mark.parametrize("kind", ["text", "gzip", "parquet"])
def test_a_stream_goes_on_from_any_batch(kind, tmp_path, criteo_rows, write_tsv) -> None:
    for part in range(2):
        rows = criteo_rows(41)
        if kind == "parquet":
            write_parquet(tmp_path / f"{part}.parquet", rows)
        else:
            path = write_tsv(tmp_path / f"{part}.tsv", rows)
            if kind == "gzip":
                (tmp_path / f"{part}.tsv.gz").write_bytes(gzip.compress(path.read_bytes()))
                path.unlink()
    source = stream_of(tmp_path, shuffle_buffer=13)
    whole = list(islice(source.batches(0), 25))
    for place in (0, *np.random.default_rng().integers(len(whole) - 1, size=3).tolist()):
        again = stream_of(tmp_path, shuffle_buffer=13)
        for batch in (next(again.batches(place + 1, whole[place][1]))[0], again.batch(place + 1)):
            assert all(torch.equal(batch[name], whole[place + 1][0][name]) for name in batch)


def test_an_epoch_has_every_row_once_in_an_order_of_its_own_and_of_the_seed(tmp_path, criteo_rows, write_tsv) -> None:
    path = write_tsv(tmp_path / "rows.tsv", criteo_rows(100))
    source = stream_of(path, batch_size=1)
    count = 100 - source.validation_samples
    numbers = [row_numbers(batch)[0] for batch, _ in islice(source.batches(0), 2 * count)]
    first, second = numbers[:count], numbers[count:]
    assert sorted(first) == sorted(second) and len(set(first)) == count
    assert first != second and first != sorted(first)
    assert first == [row_numbers(b)[0] for b, _ in islice(stream_of(path, batch_size=1).batches(0), count)]
    assert first != [row_numbers(b)[0] for b, _ in islice(stream_of(path, batch_size=1, seed=1).batches(0), count)]


def test_validation_rows_have_files_of_their_own_on_request(tmp_path, criteo_rows, write_tsv) -> None:
    path = write_tsv(tmp_path / "a.tsv", criteo_rows(20))
    other = write_tsv(tmp_path / "b.tsv", criteo_rows(31))
    source = stream_of(path, validation_path=str(other), validation_samples=17, batch_size=20)
    assert [n for batch in source.validation() for n in row_numbers(batch)] == list(range(17))
    assert sorted(row_numbers(source.batch(0))) == list(range(20))
    labels = torch.cat([batch["labels"] for batch in source.validation()]).double()
    rate = labels.mean()
    assert source.references()["constant"].auc == 0.5
    entropy = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate)).item()
    assert source.references()["constant"].logloss == pytest.approx(entropy, abs=1e-12)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        (0, "2", r"field label: is '2'; must be 0 or 1"),
        (0, "", r"field label: is ''; must be 0 or 1"),
        (3, "many", r"field I3: is 'many'; must be a finite number, or empty"),
        (5, "inf", r"field I5: is 'inf'; must be a finite number"),
        (14, "xyz", r"field C1: is 'xyz'; must be at most 16 hexadecimal digits, or empty"),
        (39, "0" * 17, r"field C26: is '0{17}'; must be at most 16 hexadecimal digits"),
        (20, "ab\0", r"field C7: is 'ab\\x00'; must be"),
        (None, "", r"39 fields; must be 40: label, I1-I13, C1-C26"),
    ],
)
def test_a_malformed_line_is_named_or_counted(
    field, text, message, tmp_path, criteo_rows, write_tsv, caplog: pytest.LogCaptureFixture
) -> None:
    rows = criteo_rows(30)
    if field is None:
        del rows[12][-1]
    else:
        rows[12][field] = text
    path = write_tsv(tmp_path / "rows.tsv", rows)
    with pytest.raises(ValueError, match=rf"rows\.tsv, line 13: {message}[^\n]*\ndata\.malformed=skip"):
        stream_of(path)
    source = stream_of(path, malformed="skip", batch_size=1)
    assert "1 malformed line skipped, the first: " in source.describe() and "line 13" in source.describe()
    with caplog.at_level(logging.WARNING):
        trained = {row_numbers(b)[0] for b, _ in islice(source.batches(0), 30)}
    assert len(trained) + source.validation_samples == 29
    assert "epoch 1 of the training data: 1 malformed line skipped" in caplog.text


def test_a_malformed_row_of_parquet_is_named(tmp_path, criteo_rows) -> None:
    rows = criteo_rows(30)
    rows[8][0], rows[9][15] = "3", "nothing"
    path = write_parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(ValueError, match=r"rows\.parquet, row 9: field label: is 3\.0; must be 0 or 1"):
        stream_of(path)
    source = stream_of(path, malformed="skip")
    assert "2 malformed lines skipped" in source.describe()
    with pytest.raises(ValueError, match=r"there is no column click \(data\.label\); there are label, I1"):
        stream_of(path, label="click")


def test_a_category_of_parquet_that_is_not_utf8_is_named(tmp_path, criteo_rows) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = write_parquet(tmp_path / "rows.parquet", criteo_rows(3))
    table = parquet.read_table(path)
    texts = pa.array([b"1", b"b\xffd", None]).view(pa.string())
    parquet.write_table(table.set_column(table.schema.get_field_index("C1"), "C1", texts), path)
    with pytest.raises(ValueError, match=r"rows\.parquet, row 2: field C1: is 'bÿd'; must be at most 16 hexadecimal"):
        stream_of(path)


def test_what_is_not_there_is_named(tmp_path, criteo_rows, write_tsv, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.path=.*nowhere: there is no such file or folder"):
        stream_of(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"data\.path=.*: there is no file ending in \.tsv"):
        stream_of(tmp_path)
    with pytest.raises(ValueError, match=r"data\.path: none is given"):
        CriteoConfig()
    path = write_tsv(tmp_path / "a.tsv", criteo_rows(9))
    with pytest.raises(ValueError, match=r"a\.tsv: no rows to validate on: a share of 1e-06"):
        stream_of(path, validation_fraction=1e-6)
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(path.read_bytes())[:-30])
    with pytest.raises(ValueError, match=r"cut\.tsv\.gz, after line .*cannot be read"):
        stream_of(tmp_path / "cut.tsv.gz")
    damaged = bytearray(gzip.compress(path.read_bytes()))
    damaged[40:80] = bytes(40)
    (tmp_path / "damaged.tsv.gz").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"damaged\.tsv\.gz"):
        stream_of(tmp_path / "damaged.tsv.gz")
    empty = write_tsv(tmp_path / "empty.tsv", [])
    with pytest.raises(ValueError, match=r"empty\.tsv: no rows to train on"):
        stream_of(empty, validation_path=str(path)).batch(0)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not so")
    with pytest.raises(ValueError, match=r"b\.parquet: cannot be read"):
        stream_of(tmp_path / "b.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"b\.parquet: Parquet is read by the package pyarrow, which is not"):
        stream_of(tmp_path / "b.parquet")
    assert stream_of(path, validation_fraction=0.5).validation_samples


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"validation_fraction": 0.0}, r"data\.validation_fraction=0\.0"),
        ({"malformed": "ignore"}, r"data\.malformed=ignore: allowed: error, skip"),
        ({"rows": 0}, r"data\.rows=0"),
        ({"shuffle_buffer": 0}, r"data\.shuffle_buffer=0"),
        ({"name": "clicks"}, r"data\.name=clicks: allowed: criteo"),
    ],
    ids=str,
)
def test_keys_out_of_range_are_refused(keys, message) -> None:
    with pytest.raises(ValueError, match=message):
        CriteoConfig(path="x", **keys)
