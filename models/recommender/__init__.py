"""Recommender: click-through models on embeddings of categorical features."""

from models.recommender.config import PRESETS, ModelConfig
from models.recommender.data import ClicksConfig, CriteoConfig, MovieLensConfig
from models.recommender.task import RecommenderTask as Task

DATA = {"clicks": ClicksConfig, "movielens": MovieLensConfig, "criteo": CriteoConfig}
"""The data this model trains on, by name, each with the dataclass of its configuration."""

__all__ = ["DATA", "PRESETS", "ClicksConfig", "CriteoConfig", "ModelConfig", "MovieLensConfig", "Task"]
