"""The user-and-item-bias predictor, which every model of ratings must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.recommender.data.source import Floats, Integers

RIDGE = 5.0
"""How many labels of the average each user and item is taken to have besides its own."""
SWEEPS = 10
"""Times that users' and items' biases are fitted in turn."""
SMALLEST = 0.01
"""Predictions are kept from this to one minus this."""


@dataclass(frozen=True)
class BiasPredictor:
    """The probability of a click as a mean and a bias of the user and of the item (ridge regression).

    Source: Koren, Bell, Volinsky, Matrix factorization techniques for recommender systems, 2009.
    """

    mean: float
    users: NDArray[np.float64]
    items: NDArray[np.float64]

    @classmethod
    def fit(cls, users: Integers, items: Integers, labels: Floats, n_users: int, n_items: int) -> BiasPredictor:
        """The predictor of these samples, [n] each; users and items without any have no bias."""
        mean = float(labels.mean(dtype=np.float64))
        rest = labels.astype(np.float64) - mean
        user_bias, item_bias = np.zeros(n_users), np.zeros(n_items)
        user_weight = RIDGE + np.bincount(users, minlength=n_users)
        item_weight = RIDGE + np.bincount(items, minlength=n_items)
        for _ in range(SWEEPS):
            item_bias = np.bincount(items, rest - user_bias[users], n_items) / item_weight
            user_bias = np.bincount(users, rest - item_bias[items], n_users) / user_weight
        return cls(mean, user_bias, item_bias)

    def __call__(self, users: Integers, items: Integers) -> NDArray[np.float64]:
        """The probabilities, [n], of users and items by index."""
        return np.clip(self.mean + self.users[users] + self.items[items], SMALLEST, 1 - SMALLEST)
