"""Transformer: a decoder language model on byte tokens of the standard library's source."""

from models.transformer.config import PRESETS, ModelConfig, StdlibConfig
from models.transformer.task import TransformerTask as Task

DATA = {"stdlib": StdlibConfig}
"""The data this model trains on, by name, each with the dataclass of its configuration."""

__all__ = ["DATA", "PRESETS", "ModelConfig", "StdlibConfig", "Task"]
