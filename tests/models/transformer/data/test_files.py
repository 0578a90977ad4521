"""data=files: which files, what is read of them, how it is split, and what is said of those that are no good."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import train
from models.transformer import FilesConfig, HubConfig
from models.transformer.data import Corpus, load
from models.transformer.data.documents import find_files

pytest.importorskip("datasets")


def corpus_of(path: object, **keys: Any) -> Corpus:
    corpus = load(FilesConfig(path=path, **keys), seed=0)
    assert isinstance(corpus, Corpus)
    return corpus


def parts(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The documents of each part, which tokens of bytes spell."""
    split = [tokens.tobytes().decode().split("\0") for tokens in (corpus.train, corpus.validation)]
    assert all(documents[0] == documents[-1] == "" for documents in split)
    return split[0][1:-1], split[1][1:-1]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_every_document_is_in_one_part(kind: str, tmp_path: Path, texts, write_jsonl, write_parquet) -> None:
    documents = texts(60)
    if kind == "text":
        for i, text in enumerate(documents):
            (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    else:
        write = write_jsonl if kind == "jsonl" else write_parquet
        write(tmp_path / f"a.{kind}", documents[:25])
        write(tmp_path / f"b.{kind}", documents[25:])
    corpus = corpus_of(str(tmp_path), validation_fraction=0.2)
    train_documents, held_out = parts(corpus)
    assert sorted(train_documents + held_out) == sorted(documents)
    size = sum(len(text.encode()) for text in documents)
    assert 0.1 * size < sum(len(text.encode()) for text in held_out) <= 0.2 * size
    assert corpus.validation_bytes == len(corpus.validation) - 1
    described = corpus.describe()
    assert str(tmp_path) in described
    for figure in (len(corpus.train), len(corpus.validation), len(train_documents), len(held_out)):
        assert f"{figure:,}" in described
    assert parts(corpus_of(str(tmp_path), validation_fraction=0.2)) == (train_documents, held_out)


def test_what_is_held_out_does_not_depend_on_the_files_it_stands_in(
    tmp_path, texts, write_jsonl, write_parquet
) -> None:
    documents = texts(50)
    one = write_jsonl(tmp_path / "one.jsonl", documents)
    other = [write_parquet(tmp_path / "z.parquet", documents[30:]), write_jsonl(tmp_path / "y.jsonl", documents[:30])]
    held_out = [set(parts(corpus_of(path))[1]) for path in (str(one), [str(path) for path in other])]
    assert held_out[0] == held_out[1] != set()


def test_a_path_is_a_file_a_folder_a_glob_or_several(tmp_path, texts, write_jsonl) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    names = ["a.txt", "b [1].txt", "deep/c.md", "deep/er/d.txt"]
    for name, text in zip(names, texts(4), strict=True):
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "deep" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "deep" / ".hidden.txt").write_text("not this")

    def found(*paths: str) -> int:
        files = find_files([str(tmp_path / path) for path in paths], None, "data.path")
        assert len({file for file, _ in files}) == len(files)
        return len(files)

    assert found("") == 4
    assert found("*.txt") == found("a.txt", "b [1].txt") == found("*.txt", "a.txt") == 2
    assert found("**/*.txt") == 3
    assert found("deep", "a.txt") == 3


def test_a_single_text_is_cut_at_its_end(tmp_path, texts) -> None:
    text = "".join(texts(200))
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    corpus = corpus_of(str(path), validation_fraction=0.1)
    tokens = corpus.train.tobytes()[1:-1] + corpus.validation.tobytes()[1:-1]
    assert tokens == text.encode()  # without the byte order mark
    assert len(corpus.validation) - 2 == round(0.1 * len(tokens))  # without the separators around it
    assert "the end of the longest document" in corpus.describe()
    # A short companion is no validation set.
    companion = "A book.\n"
    (tmp_path / "readme.md").write_text(companion)
    corpus = corpus_of(str(tmp_path), validation_fraction=0.1)
    assert len(corpus.validation) - 2 == round(0.1 * (len(tokens) + len(companion)))
    assert corpus.train.tobytes().endswith(b"\0A book.\n\0") and corpus.train_documents == 2


def test_validation_text_of_its_own(tmp_path, texts, write_jsonl) -> None:
    documents = texts(20)
    (tmp_path / "held.txt").write_text(documents[-1], "utf-8")
    corpus = corpus_of(
        str(write_jsonl(tmp_path / "a.jsonl", documents[:-1])), validation_path=str(tmp_path / "held.txt")
    )
    assert parts(corpus) == (documents[:-1], documents[-1:])
    assert "held.txt" in corpus.describe()


def test_field_and_format_can_be_said(tmp_path, texts, write_jsonl) -> None:
    documents = texts(10)
    path = write_jsonl(tmp_path / "rows.log", documents, field="content")
    corpus = corpus_of(str(path), field="content", format="jsonl", validation_fraction=0.5)
    train_documents, held_out = parts(corpus)
    assert sorted(train_documents + held_out) == sorted(documents)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: the file is empty"),
        ("a.jsonl", b"", "a.jsonl: the file is empty"),
        ("a.txt", b"good\xff\xfe", r"a.txt: not UTF-8 text: byte 0xff at 4"),
        ("a.txt", b"good\0", r"a.txt: character 4 is NUL"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', r"a.jsonl, line 3: not JSON: Expecting ',' delimiter"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"a.jsonl, line 2: must be a JSON object, and is list"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a.jsonl, line 2: not UTF-8 text: byte 0xff"),
        ("a.jsonl", b'{"txt": "a"}\n', r"a.jsonl, row 1: there is no field 'text' \(data.field\); there are txt"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r"a.jsonl, row 2: the field 'text' \(data.field\) is missing"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"a.jsonl, row 2: the field 'text' \(data.field\) is of type int"),
        ("a.jsonl", b'{"text": ""}\n', "there is no text in it"),
        ("a.jsonl", b"\n \n", "a.jsonl"),
        ("a.parquet", b"PAR1 and nothing else", "a.parquet: cannot be read: .*[Pp]arquet"),
        ("a.docx", b"PK", r"a.docx: the extension '.docx' is not known\nknown are text: .txt .*parquet.*data.format"),
        ("README", b"text", r"README: it has no extension"),
    ],
)
def test_a_file_that_is_no_good_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus_of(str(tmp_path / name))


def test_a_path_without_files_is_named(tmp_path: Path) -> None:
    for path in ("nowhere.txt", "*.txt"):
        with pytest.raises(FileNotFoundError, match=f"data.path={tmp_path}/.*matches no file"):
            corpus_of(str(tmp_path / path))
    with pytest.raises(FileNotFoundError, match=f"data.path={tmp_path}: the folder has no file ending in .txt"):
        corpus_of(str(tmp_path))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["data=files"], ["data.path: none is given"]),
        (["data=files", "data.path=nowhere.txt"], ["data.path=nowhere.txt", "no such file"]),
        (["data=files", "data.path=3"], ["data.path=3", "must be a path"]),
        (["data=files", "data.path=x.txt", "data.format=csv"], ["data.format=csv", "text, jsonl, parquet"]),
        (["data=files", "data.path=x.txt", "data.validation_fraction=0"], ["data.validation_fraction=0"]),
        (["data=files", "data.path=x.txt", "data.shuffle_buffer=0"], ["data.shuffle_buffer=0"]),
        (["data=files", "data.pth=x.txt"], ["data.pth=x.txt", "did you mean path?"]),
        (["data=files", "data.path=x.txt", "data.tokenizer=/none/here"], ["data.tokenizer=/none/here"]),
        (["data=hub"], ["data.name: none is given"]),
        (["data=hub", "data.name=x", "data.source=files"], ["data", "files"]),
        (["data=fils", "data.path=x.txt"], ["data=fils", "did you mean files?", "hub", "stdlib"]),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else "",
)
def test_configuration_errors_name_the_key(overrides, named, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides, f"hydra.run.dir={tmp_path}"])
    assert train.main() == 2
    error = capfd.readouterr().err
    assert all(text in error for text in named), error
    assert len(error.splitlines()) <= 15 and "Traceback" not in error


def test_of_parquet_no_other_column_is_read(tmp_path, texts) -> None:
    """Not even one of a type that `datasets` has no name for."""
    import pyarrow as pa
    from pyarrow import parquet

    documents = texts(40)
    pairs = pa.array([[("a", i)] for i in range(40)], pa.map_(pa.string(), pa.int64()))
    for name, text in (("plain", pa.array(documents)), ("coded", pa.array(documents).dictionary_encode())):
        parquet.write_table(pa.table({"pairs": pairs, "text": text}), tmp_path / f"{name}.parquet")
        train_documents, held_out = parts(corpus_of(str(tmp_path / f"{name}.parquet"), validation_fraction=0.2))
        assert sorted(train_documents + held_out) == sorted(documents)
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none.parquet: .*no rows"):
        corpus_of(str(tmp_path / "none.parquet"))


def test_a_row_of_parquet_without_text_is_named(tmp_path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    numbers, missing = pa.array([1, 2]), pa.array(["good", None])
    damaged = pa.array([b"good", b"good", b"b\xffd"]).view(pa.string())
    for column, message in (
        (numbers, r"a.parquet: cannot be read: the field 'text' \(data.field\) is of type int64; it must be text"),
        (missing, r"a.parquet, row 2: the field 'text' \(data.field\) is missing"),
        (damaged, r"a.parquet, row 3: not UTF-8 text: byte 0xff at 1"),
    ):
        parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=message):
            corpus_of(str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"a.parquet: .*there is no field 'txt' \(data.field\); there are text"):
        corpus_of(str(tmp_path / "a.parquet"), field="txt")


def test_a_file_of_several_names_counts_once(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "a.txt"
    file.write_text("text", "utf-8")
    (tmp_path / "folder" / "loop").symlink_to(tmp_path / "folder")
    (tmp_path / "folder" / "link.txt").symlink_to(file)
    for paths in (str(tmp_path / "**" / "*.txt"), [str(tmp_path), str(file), str(tmp_path / "folder" / "." / "a.txt")]):
        assert find_files(paths, None, "data.path") == [(file, "text")]


def test_no_file_of_this_machine_touches_the_network(tmp_path, texts, write_jsonl, write_parquet, monkeypatch) -> None:
    def refuse(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise OSError("there is no network")

    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    paths = [str(write_jsonl(tmp_path / "a.jsonl", texts(40))), str(write_parquet(tmp_path / "b.parquet", texts(40)))]
    corpus_of(paths)
    load(HubConfig(name=str(tmp_path)), seed=0)
    assert not asked


def test_nothing_is_written_but_the_run_directory(tmp_path, texts, write_parquet) -> None:
    """Not even a home is needed; nothing that was begun is left to end the interpreter badly."""
    write_parquet(tmp_path / "a.parquet", texts(300))
    program = """if True:
        import contextlib, sys
        from models.transformer import FilesConfig
        from models.transformer.data import load
        print(load(FilesConfig(path=sys.argv[1]), 0).describe())
        stream = load(FilesConfig(path=sys.argv[1], streaming=True, shuffle_buffer=20, validation_bytes=50), 0)
        with contextlib.closing(stream.batches(16, 2, None)) as batches:
            next(batches)
        # Its streams leave threads of Arrow that read a Python file, and may abort the interpreter as it ends.
        assert "datasets" not in sys.modules
    """
    environment = os.environ | {"HOME": "/dev/null/home", "HF_HOME": "/dev/null/home"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", program, str(tmp_path / "a.parquet")]
    paths = (str(Path(train.__file__).parent), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "300" not in result.stderr and "a.parquet" in result.stdout
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.parquet", "temporary"]
