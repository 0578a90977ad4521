"""Configuration of the transformer and of its data: presets, overrides and range checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MLPS = ("gelu", "gelu_tanh", "swiglu")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rotary")
FORMATS = ("text", "jsonl", "parquet")
LARGEST = 2**24
"""Of the numbers of an architecture: products of two, and the bytes they stand for, still fit into 64 bits."""

_GPT: dict[str, Any] = {
    "mlp": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "bias": True,
    "tie_embeddings": False,
    "init_std": 0.02,
}
_LLAMA: dict[str, Any] = {
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "positions": "rotary",
    "bias": False,
    "tie_embeddings": False,
    "dropout": 0.0,
    "init_std": 0.02,
}
_TINY: dict[str, Any] = {"tie_embeddings": True, "init_std": 0.125, "dropout": 0.0}


def _shape(n_layer: int, n_head: int, d_model: int, d_ff: int, context: int, vocab_size: int) -> dict[str, int]:
    return {
        "n_layer": n_layer,
        "n_head": n_head,
        "n_kv_head": n_head,
        "d_model": d_model,
        "d_ff": d_ff,
        "context": context,
        "vocab_size": vocab_size,
    }


PRESETS: dict[str, dict[str, Any]] = {
    # Train in about a minute on two CPU cores, for which everything that speeds learning counts: rotary positions, tied
    # embeddings and weights of the spread 1 / sqrt(d_model).
    "tiny": _GPT | _shape(4, 4, 64, 256, 128, 256) | _TINY | {"positions": "rotary"},
    "tiny_swiglu": _LLAMA | _shape(4, 4, 64, 176, 128, 256) | _TINY | {"n_kv_head": 2},
    # Some minutes on a GPU.
    "small": _GPT | _shape(6, 6, 384, 1536, 256, 256) | {"dropout": 0.1},
    # The shapes that GPU figures are given for; the vocabulary is padded.
    "gpt_d512": _GPT | _shape(8, 8, 512, 2048, 512, 8192) | {"dropout": 0.1},
    "gpt_d768": _GPT | _shape(12, 12, 768, 3072, 1024, 8192) | {"dropout": 0.1},
    "llama_d512": _LLAMA | _shape(8, 8, 512, 1408, 512, 8192) | {"n_kv_head": 4},
    # The size of GPT-2 small, its vocabulary of 50257 padded to a multiple of 64.
    "gpt2": _GPT
    | _shape(12, 12, 768, 3072, 1024, 50304)
    | {"dropout": 0.1, "mlp": "gelu_tanh", "tie_embeddings": True},
}


def check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of allowed."""
    if value not in allowed:
        raise ValueError(f"{key}={value}: allowed: {', '.join(allowed)}")


def check_architecture(values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ValueError, naming the key, what it was and what is allowed, unless the values describe a model.

    values has every architecture key of `ModelConfig`, none of them None; prefix is put before the keys in the message.
    """
    for key in ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "vocab_size", "context"):
        if not 1 <= values[key] <= LARGEST:
            raise ValueError(f"{prefix}{key}={values[key]}: must be at least 1 and at most {LARGEST}")
    n_head, n_kv_head, d_model = values["n_head"], values["n_kv_head"], values["d_model"]
    if d_model % n_head:
        raise ValueError(f"{prefix}d_model={d_model}: must be a multiple of n_head={n_head}")
    if n_head % n_kv_head:
        raise ValueError(f"{prefix}n_kv_head={n_kv_head}: must divide n_head={n_head}")
    check_choice(f"{prefix}mlp", values["mlp"], MLPS)
    check_choice(f"{prefix}norm", values["norm"], NORMS)
    check_choice(f"{prefix}positions", values["positions"], POSITIONS)
    if values["positions"] == "rotary" and d_model // n_head % 2:
        raise ValueError(
            f"{prefix}d_model={d_model}: rotary positions need an even d_model / n_head, not {d_model // n_head}"
        )
    if not 0.0 < values["init_std"] < math.inf:
        raise ValueError(f"{prefix}init_std={values['init_std']}: must be above 0 and finite")
    if not 0.0 <= values["dropout"] < 1.0:
        raise ValueError(f"{prefix}dropout={values['dropout']}: must be at least 0 and below 1")


def slots_of(mlp: str) -> tuple[str, str]:
    """The slots of a transformer with this kind of MLP."""
    return ("attention", "activation" if mlp == "swiglu" else "mlp")


@dataclass
class ModelConfig:
    """The transformer: a preset, and what differs from it."""

    name: str = "transformer"
    """The model's name; fixed."""
    preset: str = "tiny"
    """Where keys left null take their values from: tiny, tiny_swiglu, small, gpt_d512, gpt_d768, llama_d512, gpt2."""
    n_layer: int | None = None
    """Blocks."""
    n_head: int | None = None
    """Query heads; divides d_model."""
    n_kv_head: int | None = None
    """Key and value heads; divides n_head, grouped-query attention if fewer. Null beside a given n_head: as many."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the MLP's hidden layer."""
    vocab_size: int | None = None
    """Rows of the embedding and of the output layer, at least as many as the tokenizer has tokens (bytes: 256).

    Null is the preset's number, or where that is too small, the tokenizer's rounded up to a multiple of 64.
    """
    context: int | None = None
    """The longest sequence, in tokens; training uses sequences of this length."""
    mlp: str | None = None
    """gelu (exact), gelu_tanh (both fill the slot mlp), or swiglu (fills the slot activation)."""
    norm: str | None = None
    """layernorm or rmsnorm, before attention, before the MLP and before the output layer."""
    positions: str | None = None
    """learned (a vector a position) or rotary."""
    tie_embeddings: bool | None = None
    """Whether the output layer shares its weight with the embedding."""
    dropout: float | None = None
    """Probability, in [0, 1): inside the MLP after GELU, or on the MLP's output with swiglu. Attention has none."""
    bias: bool | None = None
    """Whether linear layers and LayerNorm have a bias; the output layer never has one."""
    init_std: float | None = None
    """Standard deviation, above 0, that weights are drawn with; narrow models learn slowly from GPT-2's 0.02."""

    def __post_init__(self) -> None:
        check_choice("model.name", self.name, ("transformer",))
        check_choice("model.preset", self.preset, tuple(PRESETS))
        check_architecture(self.architecture(), prefix="model.")

    def architecture(self) -> dict[str, Any]:
        """Every architecture key with its value: the override where there is one, otherwise the preset's."""
        values = dict(PRESETS[self.preset])
        overrides = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("name", "preset")}
        values |= {key: value for key, value in overrides.items() if value is not None}
        if self.n_head is not None and self.n_kv_head is None:
            values["n_kv_head"] = self.n_head
        return values


@dataclass
class StdlibConfig:
    """Text that every machine has: the source of the running interpreter's standard library, bytes as tokens."""

    name: str = "stdlib"
    """The data's name; fixed."""
    validation_fraction: float = 0.06
    """Share of the bytes, in (0, 0.5], held out as whole files for validation."""

    def __post_init__(self) -> None:
        check_choice("data.name", self.name, ("stdlib",))
        check_fraction(self.validation_fraction)


@dataclass
class TextConfig:
    """What text of files and text of the Hub have in common."""

    field: str = "text"
    """The field that has the text, in JSON Lines, Parquet and data sets of the Hub."""
    tokenizer: str = "bytes"
    """bytes, or a Hugging Face tokenizer: a directory, a tokenizer.json, or its name on the Hub."""
    validation_fraction: float = 0.05
    """Share, in (0, 0.5], held out for validation as whole documents; unused where validation text is given apart."""
    streaming: bool = False
    """Whether text is read while it is trained on; otherwise all of it is held in memory as tokens."""
    shuffle_buffer: int = 1000
    """Streaming: documents that are shuffled with one another; fewer where their text exceeds 64 MiB."""
    validation_bytes: int = 2**20
    """Streaming: validation takes documents from the start of the text until they have this many bytes."""

    def __post_init__(self) -> None:
        check_fraction(self.validation_fraction)
        for key in ("shuffle_buffer", "validation_bytes"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key}={getattr(self, key)}: must be at least 1")
        for key in ("field", "tokenizer"):
            if not getattr(self, key):
                raise ValueError(f"data.{key}: must not be empty")


@dataclass
class FilesConfig(TextConfig):
    """Text of files: plain text, where a file is a document, or JSON Lines and Parquet, where a row is one."""

    name: str = "files"
    """The data's name; fixed."""
    path: Any = None
    """A file, a folder, a glob, or a list of these."""
    validation_path: Any = None
    """The same for validation; null holds out a share of the documents of `path`."""
    format: str | None = None
    """text, jsonl or parquet, of every file; null goes by the extension."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("data.name", self.name, ("files",))
        if not self.path:
            raise ValueError("data.path: none is given; data=files needs a file, a folder, a glob or a list of these")
        if self.format is not None:
            check_choice("data.format", self.format, FORMATS)


@dataclass
class HubConfig(TextConfig):
    """Text of the Hugging Face Hub, as `datasets.load_dataset` loads it."""

    source: str = "hub"
    """Where the data is from; fixed."""
    name: str | None = None
    """The data set: a name on the Hub, or a directory."""
    config: str | None = None
    """The data set's configuration, where it has several."""
    split: str = "train"
    """The split to train on; datasets' slices ("train[:10%]") work where nothing is streamed."""
    validation_split: str | None = None
    """The split to validate on; null holds out a share of the documents of `split`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("data.source", self.source, ("hub",))
        if not self.name:
            raise ValueError("data.name: none is given; data=hub needs the name of a data set")


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless this share of the text can be held out."""
    if not 0.0 < fraction <= 0.5:
        raise ValueError(f"data.validation_fraction={fraction}: must be above 0 and at most 0.5")
