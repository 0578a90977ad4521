"""A count model to hold the transformer against: byte n-grams interpolated as by Witten and Bell (1991)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.transformer.data.tokens import SEPARATOR, VOCABULARY, Bytes

Integers = NDArray[np.integer[Any]]


def witten_bell(train: Bytes, validation: Bytes, order: int = 3) -> float:
    """Mean nats a token of the count model fitted on `train`, over every token of `validation` but the first.

    With c(h, w) how often w followed the context h in training, c(h) their sum, and t(h) how many different w followed,

        p(w | h) = (c(h, w) + t(h) p(w | h')) / (c(h) + t(h)),    p(w | h') where c(h) = 0,

    h' being h without its oldest token: from `order` tokens (0 to 3) down to none, and last a uniform distribution over
    the 256 bytes. Before the first token there are separators.
    Raises ValueError for another order, and for a text of fewer than 2 tokens.
    """
    if not 0 <= order <= 3:
        raise ValueError(f"order={order}: must be from 0 to 3 (an n-gram is held in 32 bits)")
    for name, tokens in (("train", train), ("validation", validation)):
        if len(tokens) < 2:
            raise ValueError(f"{name} has {len(tokens)} tokens; at least 2 are needed")
    probability = np.full(len(validation) - 1, 1.0 / VOCABULARY)
    for n in range(order + 1):
        ngrams, counts = np.unique(_ngrams(train, n), return_counts=True)
        # Sorted n-grams of one context lie side by side.
        first = np.flatnonzero(np.diff(ngrams >> 8, prepend=-1))
        contexts = ngrams[first] >> 8
        context_counts = np.add.reduceat(counts, first)
        distinct = np.diff(first, append=len(ngrams))

        queries = _ngrams(validation, n)
        count = _look_up(ngrams, counts, queries)
        total = _look_up(contexts, context_counts, queries >> 8)
        types = _look_up(contexts, distinct, queries >> 8)
        seen = total > 0
        interpolated = (count + types * probability) / np.where(seen, total + types, 1)
        probability = np.where(seen, interpolated, probability)
    return float(-np.log(probability).mean())


def _ngrams(tokens: Bytes, context: int) -> Integers:
    """Each token but the first, as the low byte, below the `context` tokens before it, the nearest lowest."""
    padded = np.concatenate([np.full(context, SEPARATOR, dtype=np.uint8), tokens])
    count = len(tokens) - 1
    codes = np.zeros(count, dtype=np.uint32)
    for offset in range(context + 1):
        codes = (codes << 8) | padded[1 + offset : 1 + offset + count]
    return codes


def _look_up(keys: Integers, values: Integers, queries: Integers) -> Integers:
    """The value of each query's key, 0 where the sorted keys lack it."""
    index = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[index] == queries, values[index], 0)
