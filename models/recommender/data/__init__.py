"""Labelled samples of dense and categorical features: a synthetic click log, MovieLens, Criteo."""

from __future__ import annotations

from models.recommender.data.clicks import Clicks
from models.recommender.data.config import ClicksConfig, CriteoConfig, MovieLensConfig
from models.recommender.data.criteo import Criteo
from models.recommender.data.movielens import MovieLens
from models.recommender.data.source import Feature, Reference, Source, units

__all__ = [
    "Clicks",
    "ClicksConfig",
    "Criteo",
    "CriteoConfig",
    "Feature",
    "MovieLens",
    "MovieLensConfig",
    "Reference",
    "Source",
    "load",
    "units",
]


def load(
    config: ClicksConfig | MovieLensConfig | CriteoConfig, batch_size: int, eval_batch_size: int, seed: int
) -> Source:
    """The samples that a configuration names, in batches of these sizes, those of training in the order of the seed.

    Raises OSError and ValueError, naming the key, or the file and line, for data that is not there or cannot be read.
    """
    if isinstance(config, MovieLensConfig):
        return MovieLens(config, batch_size, eval_batch_size, seed)
    if isinstance(config, CriteoConfig):
        return Criteo(config, batch_size, eval_batch_size, seed)
    return Clicks(config, batch_size, eval_batch_size, seed)
