"""Windows of tokens: random ones to train on, consecutive ones to validate on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.transformer import data
from models.transformer.data.tokens import Bytes


def sample_text(length: int) -> Bytes:
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
