"""Windows of tokens: the batches of text that is in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from models.transformer.data.tokens import Tokens


def random_windows(tokens: Tokens, length: int, count: int, seed: int, step: int, rank: int) -> dict[str, Tensor]:
    """`count` windows of `length` tokens and the tokens that follow each: a pure function of its arguments.

    Returns input_ids and targets, [count, length] int64. Raises ValueError where the text is shorter than a window.
    """
    if len(tokens) < length + 1:
        raise ValueError(f"a text of {len(tokens)} tokens is too short for windows of {length} and their targets")
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, rank])))
    starts = generator.integers(0, len(tokens) - length, size=count)
    return inputs_and_targets(tokens[starts[:, None] + np.arange(length + 1)])


def consecutive_windows(tokens: Tokens, length: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Windows of `length` tokens, one after the other, in batches: every token but the first is a target exactly once.

    Yields input_ids and targets, [batch_size, length] int64; the last whole windows come in a smaller batch, and what
    is left after them in a batch of one shorter window.
    """
    whole = (len(tokens) - 1) // length
    windows = overlapping(tokens, length) if whole else tokens[:0]
    for first in range(0, whole, batch_size):
        yield inputs_and_targets(windows[first : first + batch_size])
    rest = tokens[whole * length :]
    if len(rest) > 1:
        yield inputs_and_targets(rest[None])


def overlapping(tokens: Tokens, length: int) -> Tokens:
    """Windows of length + 1 tokens, each beginning with the last token of the one before it: [windows, length + 1]."""
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def inputs_and_targets(windows: Tokens) -> dict[str, Tensor]:
    """All tokens of windows but the last, and all but the first: input_ids and targets, int64."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
