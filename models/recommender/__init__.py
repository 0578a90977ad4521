"""Recommender: click-through models on embeddings of categorical features."""

from models.recommender.config import PRESETS, ModelConfig
from models.recommender.data import ClicksConfig
from models.recommender.task import RecommenderTask as Task

DATA = {"clicks": ClicksConfig}
"""The data this model trains on, by name, each with the dataclass of its configuration."""

__all__ = ["DATA", "PRESETS", "ClicksConfig", "ModelConfig", "Task"]
