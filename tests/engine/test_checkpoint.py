from __future__ import annotations

import logging
import math
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from torch import nn

from engine import checkpoint
from engine.checkpoint import ArmCheckpoints, differences, load_weights, read, unwrapped, write
from engine.errors import ConfigError

IDENTITY = {"model": "toy", "arm": "fused", "device": "cpu", "configuration": {"train": {"steps": 9, "seed": 1}}}


def content(**state):
    return {"format": checkpoint.FORMAT, **state}


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5)])
def test_tensors_come_back_as_they_were(tmp_path, dtype, shape):
    tensor = torch.randn(shape).mul(100).abs().to(dtype)
    write(tmp_path / "file", content(tensor=tensor, turned=tensor.mT if len(shape) == 2 else tensor))
    found = read(tmp_path / "file")
    assert_same(found["tensor"], tensor)
    assert torch.equal(found["turned"], tensor.mT if len(shape) == 2 else tensor)


def test_structures_come_back_as_they_were(tmp_path):
    value = content(
        optimizer={
            "state": {0: {"step": torch.tensor(3.0)}, 7: {}},
            "param_groups": [{"betas": (0.9, 0.95), "lr": 0.1}],
        },
        numbers=[0.1 + 0.2, 1e-320, -0.0, 2**127 + 1, True, None, "ä\n", math.inf],
        nested=([torch.ones(2), (torch.zeros(1), [])], {}),
        awkward={"$tensor": 1, "a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    )
    write(tmp_path / "file", value)
    assert_same(read(tmp_path / "file"), value)


def test_what_an_optimizer_or_a_generator_keeps_comes_back(tmp_path):
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True), torch.optim.LBFGS(model.parameters(), max_iter=3)]
    for optimizer in optimizers:

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    value = content(states=[optimizer.state_dict() for optimizer in optimizers], generator=torch.get_rng_state())
    write(tmp_path / "file", value)
    assert_same(read(tmp_path / "file"), value)


def test_tensors_that_are_one_are_stored_once(tmp_path):
    weight = torch.randn(40, 10)
    write(tmp_path / "file", content(model={"embedding": weight, "head": weight.detach(), "part": weight[:2]}))
    with safe_open(str(tmp_path / "file"), framework="pt") as file:
        assert sorted(file.keys()) == ["model/embedding", "model/part"]
        assert torch.equal(file.get_tensor("model/embedding"), weight)
    model = read(tmp_path / "file")["model"]
    assert torch.equal(model["head"], weight) and torch.equal(model["part"], weight[:2])


def test_what_is_read_does_not_change_the_file(tmp_path):
    write(tmp_path / "file", content(a=torch.zeros(3)))
    read(tmp_path / "file")["a"].add_(1)
    assert read(tmp_path / "file")["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"stream": {"source": [print]}}, "stream/source/0: .* builtin_function"),
        ({"stream": {3.5: 1}}, "stream: .* key of type float"),
        ({"model": torch.eye(2).to_sparse()}, "model: .* layout torch.sparse_coo"),
        ({"data": b"bytes"}, "data: .* bytes"),
    ],
)
def test_what_cannot_be_kept_is_named_and_nothing_is_written(tmp_path, value, named):
    with pytest.raises(TypeError, match=named):
        write(tmp_path / "file", value)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# Files that are damaged, or another's


@pytest.fixture
def saved(tmp_path):
    checkpoints = ArmCheckpoints(tmp_path / "fused", IDENTITY)
    checkpoints.save(12, {"model": {"weight": torch.randn(30, 30)}})
    return checkpoints


@pytest.mark.parametrize("length", [0, 7, 8, 100, 0.5, -1])
def test_a_truncated_file_is_named(saved, length):
    whole = saved.newest.read_bytes()
    saved.newest.write_bytes(whole[: int(length * len(whole)) if isinstance(length, float) else length])
    for use in (saved.check, saved.load):
        with pytest.raises(ConfigError, match=r"checkpoint-12\.safetensors: is no checkpoint, or not a whole one"):
            use()


@pytest.mark.parametrize("damage", [b"\x80\x02}q\x00.", b"not a checkpoint" * 100, b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_that_is_no_checkpoint_is_named(saved, damage):
    saved.newest.write_bytes(damage)
    with pytest.raises(ConfigError, match=r"checkpoint-12\.safetensors: is no checkpoint"):
        saved.load()


def test_a_directory_in_the_place_of_a_checkpoint_is_named(saved):
    saved.newest.unlink()
    (saved.directory / "checkpoint-13.safetensors").mkdir()
    with pytest.raises(ConfigError, match=r"checkpoint-13\.safetensors"):
        saved.load()


def test_another_format_is_named(saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(ConfigError, match="of format 1; this version reads 2"):
        saved.load()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "pinn"}, "model: toy in the run, pinn now"),
        ({"arm": "native"}, "arm: fused in the run, native now"),
        ({"device": "cuda"}, "device: cpu in the run, cuda now"),
        ({"configuration": {"train": {"steps": 10, "seed": 1}}}, r"configuration\.train\.steps: 9 in the run, 10 now"),
        ({"configuration": {"train": {"steps": 9}}}, r"configuration\.train\.seed: 1 in the run, not there now"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_naming_the_difference(saved, change, named):
    other = ArmCheckpoints(saved.directory, IDENTITY | change)
    for use in (other.check, other.load):
        with pytest.raises(ConfigError, match=named) as refused:
            use()
        assert str(saved.newest) in str(refused.value) and len(str(refused.value).splitlines()) == 2


def test_differences_tell_a_missing_value_from_none():
    assert differences({"a": None, "b": {"c": 1}}, {"a": None, "b": {"c": 1}}) == []
    assert differences({"a": None}, {}) == ["a: None in the run, not there now"]


def test_another_version_is_said(saved, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "_versions", lambda: {**checkpoint.versions(), "torch": "1.0"})
    with caplog.at_level(logging.WARNING):
        saved.load()
    assert "not bit for bit" in caplog.text and "torch: " in caplog.text and "1.0 now" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# The newest


def test_the_newest_alone_is_kept(saved):
    for killed in (".checkpoint-3.safetensors.tmp", ".tmpZ9ab31"):  # of writes that were
        (saved.directory / killed).touch()
    assert saved.newest.name == "checkpoint-12.safetensors"
    saved.save(100, {"step": 100})
    assert [path.name for path in saved.directory.iterdir()] == ["checkpoint-100.safetensors"]
    assert saved.load() == {"step": 100}


def test_there_may_be_none(tmp_path):
    checkpoints = ArmCheckpoints(tmp_path / "fused", IDENTITY)
    assert checkpoints.newest is None and checkpoints.load() is None
    checkpoints.check()


KILLED = """
import os, sys
from pathlib import Path
import torch
from engine import checkpoint
at = sys.argv[2]
checkpoints = checkpoint.ArmCheckpoints(Path(sys.argv[1]), {})
checkpoints.save(1, {"weight": torch.ones(1000)})
save_file, replace = checkpoint.save_file, os.replace

def half(tensors, path, metadata):
    save_file(tensors, path, metadata)
    os.truncate(path, os.path.getsize(path) // 2)
    os._exit(9)

if at == "write":
    checkpoint.save_file = half
elif at == "flush":
    checkpoint.flush_to_disk = lambda path: os._exit(9)
elif at == "replace":
    os.replace = lambda a, b: (replace(a, b), os._exit(9))
else:
    Path.unlink = lambda path, missing_ok=False: os._exit(9)
checkpoints.save(2, {"weight": torch.full((1000,), 2.0)})
"""


@pytest.mark.parametrize(("at", "newest"), [("write", 1), ("flush", 1), ("replace", 2), ("unlink", 2)])
def test_a_killed_write_leaves_the_newest_whole(tmp_path, at, newest):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "arm"), at], timeout=120)
    assert done.returncode == 9
    checkpoints = ArmCheckpoints(tmp_path / "arm", {})
    assert checkpoints.newest.name == f"checkpoint-{newest}.safetensors"
    assert checkpoints.load()["weight"].tolist() == [float(newest)] * 1000
    checkpoints.save(3, {})
    assert [path.name for path in checkpoints.directory.iterdir()] == ["checkpoint-3.safetensors"]


def test_a_disk_that_is_full_is_an_error_of_the_system(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", content())
    assert not list(tmp_path.iterdir())


def test_clearing_takes_checkpoints_and_their_models_and_nothing_else(saved, tmp_path):
    saved.model.mkdir()
    for path in (
        saved.model / "model.safetensors",
        tmp_path / "mine" / "model" / "notes",
        tmp_path / "fused" / "notes",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    checkpoint.clear(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["fused/notes", "mine/model/notes"]


# ---------------------------------------------------------------------------------------------------------------------
# Compiled models


@pytest.mark.parametrize("wrapped", ["wrapped", "in place"])
def test_weights_go_from_a_compiled_model_to_a_plain_one_and_back(tmp_path, wrapped):
    def compiled() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        if wrapped == "wrapped":
            return torch.compile(model, backend="eager")
        model.compile(backend="eager")
        return model

    plain, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    for source, target in ((compiled(), plain), (plain, compiled())):
        source(x)
        write(tmp_path / "file", content(model=unwrapped(source).state_dict()))
        weights = read(tmp_path / "file")["model"]
        assert list(weights) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        load_weights(target, weights, "file")
        torch.testing.assert_close(target(x), source(x), rtol=0, atol=0)
        for parameter in unwrapped(source).parameters():
            nn.init.normal_(parameter)


def test_weights_that_do_not_fit_are_refused_naming_them():
    weights = nn.Linear(3, 2).state_dict()
    with pytest.raises(ConfigError, match=r"(?s)the file: .*size mismatch for weight"):
        load_weights(nn.Linear(4, 2), weights, "the file")
    with pytest.raises(ConfigError, match=r"(?s)Missing key.*bias"):
        load_weights(nn.Linear(3, 2), {"weight": weights["weight"]}, "the file")
    with pytest.raises(ConfigError, match=r"(?s)Unexpected key.*bias"):
        load_weights(nn.Linear(3, 2, bias=False), weights, "the file")
