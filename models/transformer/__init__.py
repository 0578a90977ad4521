"""Transformer: a decoder language model on text."""

from models.transformer.config import PRESETS, FilesConfig, HubConfig, ModelConfig, StdlibConfig
from models.transformer.task import TransformerTask as Task

DATA = {"stdlib": StdlibConfig, "files": FilesConfig, "hub": HubConfig}
"""The data this model trains on, by name, each with the dataclass of its configuration."""

__all__ = ["DATA", "PRESETS", "FilesConfig", "HubConfig", "ModelConfig", "StdlibConfig", "Task"]
