"""The standard library as text: which files, which split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.transformer.data import stdlib


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
    files = stdlib.split(tmp_path, 0.5)
    assert sorted([*files.train, *files.validation]) == sorted(kept)
    corpus = stdlib.stdlib_corpus(tmp_path, 0.5)
    assert b"bad" not in corpus.train.tobytes() + corpus.validation.tobytes()


def test_the_split_is_by_file_and_every_byte_is_in_one_part(library: Path) -> None:
    corpus, files = stdlib.stdlib_corpus(library, 0.1), stdlib.split(library, 0.1)
    assert not set(files.train) & set(files.validation)
    for tokens, names in ((corpus.train, files.train), (corpus.validation, files.validation)):
        assert tokens.dtype == np.uint8
        texts = [(library / name).read_bytes() for name in names]
        assert tokens.tobytes() == b"\0" + b"\0".join(texts) + b"\0"
    assert corpus.validation_bytes == len(corpus.validation) - 1


def test_the_split_depends_on_paths_and_sizes_alone(library: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = stdlib.split(library, 0.1)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in sorted(library.rglob("*.py"), reverse=True):
        write(elsewhere, {path.relative_to(library).as_posix(): path.read_bytes().replace(b"x", b"y")})
    assert list(stdlib.split(elsewhere, 0.1).validation) == list(files.validation)


@pytest.mark.parametrize("fraction", [0.03, 0.1, 0.5])
def test_the_held_out_share_is_close_to_the_asked_and_not_above(library: Path, fraction: float) -> None:
    files = stdlib.split(library, fraction)
    total = sum(path.stat().st_size for path in library.rglob("*.py"))
    held_out = sum(map(len, files.validation.values()))
    smallest = min(map(len, files.train.values()))
    assert fraction * total - smallest < held_out <= fraction * total


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        stdlib.split(tmp_path / "nowhere", 0.1)


@pytest.mark.parametrize(
    ("files", "part"),
    [({}, "training"), ({"a.py": ""}, "training"), ({"a.py": "a = 1\n"}, "validation")],
)
def test_a_part_without_text_is_an_error_that_names_it(
    tmp_path: Path, files: dict[str, str | bytes], part: str
) -> None:
    write(tmp_path, files)
    with pytest.raises(ValueError, match=f"no {part} text: {tmp_path}"):
        stdlib.split(tmp_path, 0.1)


def test_a_file_that_cannot_be_read_is_named(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "module7.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(OSError, match=r"module7\.py"):
        stdlib.split(library, 0.1)


def test_the_running_interpreters_library_is_large_enough_and_has_no_tests() -> None:
    files, corpus = stdlib.split(stdlib.stdlib_root(), 0.06), stdlib.stdlib_corpus(stdlib.stdlib_root(), 0.06)
    assert len(corpus.train) > 3_000_000
    assert 0.05 < len(corpus.validation) / (len(corpus.train) + len(corpus.validation)) < 0.07
    names = [*files.train, *files.validation]
    assert "argparse.py" in names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(Path(name).parts)]
    described = corpus.describe()
    for figure in (len(corpus.train), len(corpus.validation), len(files.train), len(files.validation)):
        assert f"{figure:,}" in described
