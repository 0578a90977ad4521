"""data=movielens: the files as published and as recbole has them, the split, the reference, malformed lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from models.recommender.data import MovieLensConfig, load
from models.recommender.data.bias import BiasPredictor
from models.recommender.data.movielens_files import GENRES

RATINGS = [(1, 10, 5, 100), (1, 20, 3, 200), (2, 10, 4, 300), (7, 30, 1, 50), (7, 10, 4, 60), (2, 20, 2, 70)]
"""User, item, rating, time."""
USERS = {1: (24, "M", "writer"), 2: (53, "F", "other")}
"""Age, gender, occupation; nothing is known of user 7."""
MOVIES = {10: ("Tóy Story (1995)", ["Animation", "Comedy"]), 20: ('Heat, "The" (1996)', []), 30: ("Plain", ["Drama"])}
FEATURES = {
    "ml-100k": ("user", "item", "gender", "occupation", "year", "genres"),
    "ml-1m": ("user", "item", "gender", "occupation", "year", "genres"),
    "ml-25m": ("user", "item", "year", "genres"),
    "recbole": ("user", "item", "gender", "occupation", "year", "genres"),
}


def write(folder: Path, kind: str) -> Path:
    """The six ratings in the files of a kind."""
    if kind == "ml-100k":
        lines = {
            "u.data": ["\t".join(map(str, row)) for row in RATINGS],
            "u.user": [f"{u}|{age}|{gender}|{job}|12345" for u, (age, gender, job) in USERS.items()],
            "u.item": [
                "|".join([str(i), t, f"01-Jan-{t[-5:-1]}" if "(" in t else "", "", "http://x", *_flags(genres)])
                for i, (t, genres) in MOVIES.items()
            ],
        }
    elif kind == "ml-1m":
        lines = {
            "ratings.dat": ["::".join(map(str, row)) for row in RATINGS],
            "users.dat": [f"{u}::{gender}::{age}::{job}::12345" for u, (age, gender, job) in USERS.items()],
            "movies.dat": [f"{i}::{t}::{'|'.join(genres)}" for i, (t, genres) in MOVIES.items()],
        }
    elif kind == "ml-25m":
        quoted = {i: t.replace('"', '""') for i, (t, _) in MOVIES.items()}
        lines = {
            "ratings.csv": ["userId,movieId,rating,timestamp", *(",".join(map(str, row)) for row in RATINGS)],
            "movies.csv": [
                "movieId,title,genres",
                *(f'{i},"{quoted[i]}",{"|".join(g) or "(no genres listed)"}' for i, (_, g) in MOVIES.items()),
            ],
        }
    else:
        header = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"
        lines = {
            "six.inter": [
                "user_id:token\titem_id:token\trating:float\ttimestamp:float",
                *("\t".join(map(str, row)) for row in RATINGS),
            ],
            "six.user": [header, *(f"{u}\t{age}\t{g}\t{job}\t12345" for u, (age, g, job) in USERS.items())],
            "six.item": [
                "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
                *(f"{i}\t{t}\t{t[-5:-1] if '(' in t else ''}\t{' '.join(g)}" for i, (t, g) in MOVIES.items()),
            ],
        }
    for name, content in lines.items():
        encoding = "latin-1" if name in ("u.item", "movies.dat") else "utf-8"
        (folder / name).write_text("\n".join(content) + "\n", encoding)
    return folder


def _flags(genres: list[str]) -> list[str]:
    return [str(int(name in genres)) for name in GENRES]


def write_ratings(folder: Path, users, items, ratings, times) -> Path:
    rows = zip(users.tolist(), items.tolist(), ratings.tolist(), times.tolist(), strict=True)
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return folder


def source_of(path, batch_size: int = 4, seed: int = 0, **keys):
    return load(MovieLensConfig(path=str(path), **{"validation_fraction": 1 / 3, **keys}), batch_size, 3, seed)


@pytest.mark.parametrize("kind", FEATURES)
def test_the_files_say_what_was_written(kind: str, tmp_path: Path, check_batch, bags) -> None:
    source = source_of(write(tmp_path, kind), split="time")
    names = tuple(feature.name for feature in source.features)
    assert names == FEATURES[kind] and source.n_dense == (1 if kind == "ml-25m" else 2)
    assert source.validation_samples == 2
    assert "6 ratings of 3 users and 3 items, 4 to train and the latest 2 (33.3%)" in source.describe()
    training, (held_out,) = source.batch(0), source.validation()
    for batch in (training, held_out):
        check_batch(batch, source)
    # The latest two: user 1 of item 20 with 3, user 2 of item 10 with 4.
    assert held_out["labels"].tolist() == [0.0, 1.0] and sorted(training["labels"].tolist()) == [0, 0, 1, 1]
    rows = [dict(zip(names, sample, strict=True)) for sample in bags(held_out, len(names))]
    assert rows[0]["genres"] == [] and len(rows[1]["genres"]) == 2
    assert rows[0]["user"] != rows[1]["user"] and rows[0]["item"] != rows[1]["item"]
    assert rows[0]["year"] != rows[1]["year"] and [0] not in (rows[0]["year"], rows[1]["year"])
    by_item = {sample[1][0]: dict(zip(names, sample, strict=True)) for sample in bags(training, len(names))}
    plain = by_item[next(i for i in by_item if i not in (rows[0]["item"][0], rows[1]["item"][0]))]
    assert plain["year"] == [0] and len(plain["genres"]) == 1
    if "gender" in names:
        assert rows[0]["gender"] != rows[1]["gender"] and plain["gender"] == plain["occupation"] == [0]
        ages = torch.cat([training["dense"], held_out["dense"]])[:, 1]
        assert len(ages.unique()) == 3  # two that are known, and 0 where it is not
    # Standardised by the training part, whose times are 100, 300, 50, 60 without those held out.
    assert training["dense"][:, 0].mean().abs() < 1e-6
    assert (training["dense"][:, 0].square().mean() - 1).abs() < 1e-5
    for sample, feature in ((s, f) for s in bags(training, len(names)) for f in range(len(names))):
        assert all(0 <= i < source.features[feature].rows for i in sample[feature])


def test_the_threshold_is_the_lowest_click(tmp_path: Path) -> None:
    write(tmp_path, "ml-1m")
    for threshold, clicks in ((4.0, 3), (4.5, 1), (2.0, 5)):
        source = source_of(tmp_path, threshold=threshold)
        total = source.batch(0)["labels"].sum() + sum(batch["labels"].sum() for batch in source.validation())
        assert total == clicks


def test_a_file_of_ratings_may_be_named_itself_and_must_be_where_there_are_several(tmp_path: Path) -> None:
    write(write(tmp_path, "ml-1m"), "recbole")
    with pytest.raises(ValueError, match=r"data\.path=.*: several files of ratings: ratings\.dat, six\.inter"):
        source_of(tmp_path)
    assert source_of(tmp_path / "six.inter").validation_samples == 2


@pytest.mark.parametrize("split", ["random", "time"])
def test_every_rating_is_in_one_part_and_every_epoch_has_those_of_training_once(split: str, tmp_path: Path) -> None:
    generator = np.random.default_rng()
    n = 503
    times = generator.permutation(n) + 1000
    write_ratings(tmp_path, generator.integers(9, size=n), generator.integers(9, size=n), np.full(n, 4), times)
    source = source_of(tmp_path, batch_size=10, split=split, validation_fraction=0.2)
    held_out = torch.cat([batch["dense"][:, 0] for batch in source.validation()])
    count = n - len(held_out)
    assert len(held_out) == source.validation_samples == round(0.2 * n)
    trained = torch.cat([source.batch(step)["dense"][:, 0] for step in range(-(-2 * count // 10))])
    epochs = trained[:count], trained[count : 2 * count]
    for epoch in epochs:
        assert len(torch.cat([epoch, held_out]).unique()) == n
    assert not torch.equal(*epochs)
    assert (held_out.min() > epochs[0].max()) == (split == "time")
    other = source_of(tmp_path, batch_size=10, split=split, validation_fraction=0.2, split_seed=1)
    same = torch.equal(torch.cat([batch["dense"][:, 0] for batch in other.validation()]), held_out)
    assert same == (split == "time")
    assert (other.digest == source.digest) == same


def test_a_batch_is_a_function_of_seed_step_and_rank(tmp_path: Path) -> None:
    write(tmp_path, "recbole")
    source, again = source_of(tmp_path, batch_size=5), source_of(tmp_path, batch_size=5)
    later = source.batch(7), source.batch(3, rank=1), source.batch(7)
    for name in later[0]:
        assert torch.equal(later[0][name], later[2][name])
        assert torch.equal(later[1][name], again.batch(3, rank=1)[name])
    first = torch.cat([source.batch(step)["ids"] for step in range(9)])
    for other in (
        torch.cat([source.batch(step, rank=1)["ids"] for step in range(9)]),
        torch.cat([source_of(tmp_path, batch_size=5, seed=1).batch(step)["ids"] for step in range(9)]),
    ):
        assert len(other) != len(first) or not torch.equal(other, first)


def test_the_bias_predictor_finds_planted_biases() -> None:
    generator = np.random.default_rng()
    users, items = generator.integers(50, size=100_000), generator.integers(40, size=100_000)
    probabilities = 0.5 + generator.uniform(-0.2, 0.2, 50)[users] + generator.uniform(-0.2, 0.2, 40)[items]
    labels = (generator.random(100_000) < probabilities).astype(np.float32)
    predictor = BiasPredictor.fit(users, items, labels, 51, 41)
    assert np.abs(predictor(users, items) - probabilities).mean() < 0.02
    unseen = predictor(np.array([50]), np.array([40]))
    assert unseen[0] == pytest.approx(labels.mean(), abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "file", "line", "text", "message"),
    [
        ("ml-100k", "u.data", 2, "1\t20\t3", r"3 fields; must be 4: user, item, rating, timestamp"),
        ("ml-100k", "u.data", 2, "1\t20\tgood\t200", r"field rating: 'good' is not a finite number"),
        ("ml-100k", "u.data", 2, "1\t20\t3\tnan", r"field timestamp: 'nan' is not a finite number"),
        ("ml-100k", "u.data", 2, "\t20\t3\t200", r"field user: is empty"),
        ("ml-100k", "u.user", 1, "1|old|M|writer|12345", r"field age: 'old' is not a finite number"),
        ("ml-100k", "u.item", 1, "10|a||||" + "|".join("2" * 19), r"field genre:unknown: '2' is neither 0 nor 1"),
        ("ml-1m", "ratings.dat", 4, "7:30:1:50", r"1 field; must be 4"),
        ("ml-1m", "movies.dat", 1, "10::a", r"2 fields; must be 3: item, title, genres"),
        ("ml-25m", "ratings.csv", 3, "1,20,,200", r"field rating: '' is not a finite number"),
        ("ml-25m", "movies.csv", 2, '10,"a,b', r"cannot be read: unexpected end of data"),
        ("recbole", "six.inter", 6, "7\t10\t4\t60\t1", r"5 fields; must be 4"),
        ("recbole", "six.user", 2, "1\t24\t\udcff\twriter\t12345", r"cannot be read: .*utf-8"),
    ],
)
def test_a_malformed_line_is_named_or_counted(kind, file, line, text, message, tmp_path: Path) -> None:
    path = write(tmp_path, kind) / file
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = text.encode(errors="surrogateescape") + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"{file}, line {line}: {message}[^\n]*\ndata\.malformed=skip"):
        source_of(tmp_path)
    source = source_of(tmp_path, malformed="skip")
    assert f"1 malformed line skipped, the first: {path}, line {line}" in source.describe()
    left = 5 if file in ("u.data", "ratings.dat", "ratings.csv", "six.inter") else 6
    assert f"{left} ratings of" in source.describe()


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.path=.*nowhere: there is no such file or folder"):
        source_of(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no ratings there; known are u\.data, ratings\.dat, ratings\.csv"):
        source_of(tmp_path)
    with pytest.raises(ValueError, match=r"data\.path: none is given"):
        MovieLensConfig()
    (tmp_path / "a.inter").write_text("")
    with pytest.raises(ValueError, match=r"a\.inter: the file is empty"):
        source_of(tmp_path)
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\n1\t2\n")
    with pytest.raises(ValueError, match=r"a\.inter: there is no field rating; there are user, item"):
        source_of(tmp_path)
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\n")
    with pytest.raises(ValueError, match=r"a\.inter: there are no ratings in it"):
        source_of(tmp_path)
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\n1\t1\t5\n")
    with pytest.raises(ValueError, match=r"data\.validation_fraction=.* of 1 ratings in"):
        source_of(tmp_path)
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\n" + "1\t1\t5\n2\t1\t4\n" * 2)
    with pytest.raises(ValueError, match=r"data\.split=time: the ratings in .* have no timestamps; allowed: random"):
        source_of(tmp_path, split="time")
    source = source_of(tmp_path)
    assert source.n_dense == 0 and source.batch(0)["dense"].shape == (4, 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "user"}, r"data\.split=user: allowed: random, time"),
        ({"validation_fraction": 0.7}, r"data\.validation_fraction=0\.7: must be above 0 and at most 0\.5"),
        ({"malformed": "warn"}, r"data\.malformed=warn: allowed: error, skip"),
    ],
    ids=str,
)
def test_keys_out_of_range_are_refused(keys, message) -> None:
    with pytest.raises(ValueError, match=message):
        MovieLensConfig(path="x", **keys)


@pytest.fixture(scope="module")
def ml_100k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy of ml-100k in the wheel recbole 1.2.1, installed without its dependencies; skips without a network."""
    target = tmp_path_factory.mktemp("recbole")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--retries", "1", "--timeout", "20", "--target", str(target), "recbole==1.2.1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        unreachable = ("connection", "resolve", "timed out", "No matching distribution", "Network is unreachable")
        assert any(sign.lower() in done.stderr.lower() for sign in unreachable), done.stderr
        pytest.skip(f"recbole 1.2.1 cannot be installed without a network: {reason}")
    return target / "recbole" / "dataset_example" / "ml-100k"


@pytest.mark.slow
def test_movielens_100k_as_recbole_ships_it(ml_100k: Path, check_batch) -> None:
    source = load(MovieLensConfig(path=str(ml_100k)), 1024, 4096, 0)
    assert "100,000 ratings of 943 users and 1,682 items, 80,000 to train" in source.describe()
    assert "(55.4%)" in source.describe()
    assert source.validation_samples == 20_000
    rows = {feature.name: feature.rows for feature in source.features}
    assert (rows["user"], rows["item"], rows["gender"], rows["occupation"]) == (943, 1682, 3, 22)
    assert [feature.name for feature in source.features if feature.multi_valued] == ["genres"]
    assert check_batch(source.batch(0), source) == 1024
    assert sum(check_batch(batch, source) for batch in source.validation()) == 20_000
    reached = source.references()
    assert reached["constant"].logloss == pytest.approx(0.687, abs=0.004)
    # Means of users and items, added up, have 0.761; fitted together they have 0.772.
    assert 0.761 < reached["user and item bias"].auc < 0.785
    assert reached["user and item bias"].logloss < reached["constant"].logloss - 0.1
