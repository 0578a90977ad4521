"""The standard library as text: which files, which split, which windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.transformer import data


def write(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def library(tmp_path: Path) -> Path:
    write(tmp_path, {f"package{i % 3}/module{i}.py": f"x = {i}\n" * (5 + 7 * i % 11) for i in range(40)})
    return tmp_path


def test_only_source_that_belongs_to_the_library_is_read(tmp_path: Path) -> None:
    kept = {"a.py": "a = 1\n", "email/b.py": "b = 2\n", "testing.py": "c = 3\n", "unittest/d.py": "d = 4\n"}
    left_out = dict.fromkeys(
        (
            "site-packages/torch/e.py",
            "dist-packages/e.py",
            "test/e.py",
            "unittest/tests/e.py",
            "idlelib/idle_test/e.py",
            "lib2to3/e.py",
            "encodings/cp437.py",
            "email/__pycache__/e.py",
            "notes.txt",
            "a.pyc",
        ),
        "bad = 1\n",
    )
    write(tmp_path, kept | left_out | {"empty/__init__.py": ""})
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    corpus = data.load(tmp_path, 0.5)
    assert sorted(corpus.train_files + corpus.validation_files) == sorted(kept)
    assert b"bad" not in corpus.train.tobytes() + corpus.validation.tobytes()


def test_the_split_is_by_file_and_every_byte_is_in_one_part(library: Path) -> None:
    corpus = data.load(library, 0.1)
    assert not set(corpus.train_files) & set(corpus.validation_files)
    for tokens, names in ((corpus.train, corpus.train_files), (corpus.validation, corpus.validation_files)):
        assert tokens.dtype == np.uint8
        texts = [(library / name).read_bytes() for name in names]
        assert tokens.tobytes() == b"\0" + b"\0".join(texts) + b"\0"


def test_the_split_depends_on_paths_and_sizes_alone(library: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    corpus = data.load(library, 0.1)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in sorted(library.rglob("*.py"), reverse=True):
        write(elsewhere, {path.relative_to(library).as_posix(): path.read_bytes().replace(b"x", b"y")})
    assert data.load(elsewhere, 0.1).validation_files == corpus.validation_files


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.5])
def test_the_held_out_share_is_close_to_the_asked_and_not_above(library: Path, fraction: float) -> None:
    corpus = data.load(library, fraction)
    total = sum(path.stat().st_size for path in library.rglob("*.py"))
    held_out = sum((library / name).stat().st_size for name in corpus.validation_files)
    smallest = min((library / name).stat().st_size for name in corpus.train_files)
    assert fraction * total - smallest < held_out <= fraction * total


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        data.load(tmp_path / "nowhere", 0.1)


@pytest.mark.parametrize(
    ("files", "part"),
    [({}, "training"), ({"a.py": ""}, "training"), ({"a.py": "a = 1\n"}, "validation")],
)
def test_a_part_without_text_is_an_error_that_names_it(
    tmp_path: Path, files: dict[str, str | bytes], part: str
) -> None:
    write(tmp_path, files)
    with pytest.raises(ValueError, match=f"no {part} text: {tmp_path}"):
        data.load(tmp_path, 0.1)


def test_a_file_that_cannot_be_read_is_named(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "module7.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(OSError, match=r"module7\.py"):
        data.load(library, 0.1)


def test_the_running_interpreters_library_is_large_enough_and_has_no_tests() -> None:
    corpus = data.load(data.stdlib_root(), 0.06)
    assert len(corpus.train) > 3_000_000
    assert 0.05 < len(corpus.validation) / (len(corpus.train) + len(corpus.validation)) < 0.07
    files = corpus.train_files + corpus.validation_files
    assert "argparse.py" in files
    assert not [name for name in files if {"test", "tests", "site-packages"} & set(Path(name).parts)]
    described = corpus.describe()
    for figure in (len(corpus.train), len(corpus.validation), len(corpus.train_files), len(corpus.validation_files)):
        assert f"{figure:,}" in described


def sample_text(length: int) -> data.Bytes:
    return np.random.default_rng().integers(0, 256, length, dtype=np.uint8)


def test_random_windows_are_a_pure_function_of_seed_step_and_rank() -> None:
    tokens = sample_text(5000)
    state = torch.get_rng_state()
    first = data.random_windows(tokens, 33, 7, seed=1, step=2, rank=3)
    again = data.random_windows(tokens, 33, 7, seed=1, step=2, rank=3)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert torch.equal(state, torch.get_rng_state())
    for other in (
        {"seed": 2, "step": 2, "rank": 3},
        {"seed": 1, "step": 3, "rank": 3},
        {"seed": 1, "step": 2, "rank": 2},
    ):
        assert not torch.equal(first["input_ids"], data.random_windows(tokens, 33, 7, **other)["input_ids"])


def test_random_windows_are_text_and_what_follows_it() -> None:
    tokens = sample_text(5000)
    batch = data.random_windows(tokens, 33, 7, seed=0, step=0, rank=0)
    assert batch["input_ids"].shape == batch["targets"].shape == (7, 33)
    assert batch["input_ids"].dtype == batch["targets"].dtype == torch.int64
    for inputs, targets in zip(batch["input_ids"], batch["targets"], strict=True):
        window = bytes([*inputs.tolist(), targets[-1].item()])
        assert window in tokens.tobytes()
        assert torch.equal(inputs[1:], targets[:-1])


def test_random_windows_reach_both_ends_of_the_text() -> None:
    tokens = np.arange(12, dtype=np.uint8)
    batch = data.random_windows(tokens, 5, 400, seed=0, step=0, rank=0)
    assert batch["input_ids"].min() == 0
    assert batch["targets"].max() == 11
    exact = data.random_windows(tokens, 11, 3, seed=0, step=0, rank=0)
    assert exact["targets"].tolist() == [list(range(1, 12))] * 3


def test_a_text_shorter_than_a_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="a text of 12 tokens is too short for windows of 12 and their targets"):
        data.random_windows(sample_text(12), 12, 1, seed=0, step=0, rank=0)


@pytest.mark.parametrize("length", [2, 31, 32, 33, 64, 65, 500, 513])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_consecutive_windows_have_every_token_but_the_first_as_a_target_once(length: int, batch_size: int) -> None:
    tokens = sample_text(length)
    batches = list(data.consecutive_windows(tokens, 32, batch_size))
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    inputs = torch.cat([batch["input_ids"].flatten() for batch in batches])
    assert targets.tolist() == tokens[1:].tolist()
    assert inputs.tolist() == tokens[:-1].tolist()
    assert all(len(batch["targets"]) <= batch_size for batch in batches)
    assert all(batch["targets"].shape[1] <= 32 for batch in batches)
