"""The transformer as the engine trains it: next-token prediction on text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.errors import RunError
from engine.task import Batch, Phase, StreamState, Task, warmup_cosine
from models.transformer import data as text
from models.transformer.config import FilesConfig, HubConfig, ModelConfig, StdlibConfig, slots_of
from models.transformer.count_model import witten_bell
from models.transformer.data.tokens import BYTES

if TYPE_CHECKING:
    from models.transformer.model import TransformerConfig

BETAS = (0.9, 0.95)
REFERENCE_ORDER = 3
PROMPT_TOKENS = 64
"""Tokens of the validation text, its first separator among them, that a sample goes on from."""
SAMPLE_TEMPERATURE = 0.8
VOCABULARY_MULTIPLE = 64
"""Vocabularies are padded to a multiple: products of odd sizes are slow on a GPU."""


class TransformerTask(Task):
    """A language model on byte tokens, or on those of a tokenizer.

    model            its architecture.
    data             its text.
    steps            training steps.
    batch_size       sequences a step, each of model.context tokens.
    eval_batch_size  sequences a validation batch.
    learning_rate    AdamW's at the schedule's peak: linear up over warmup_steps, a cosine down to min_lr_ratio of it.
    weight_decay     decoupled, on matrices, embeddings among them; biases and norms have none.
    seed             of the training batches.

    Raises ValueError, naming the key, for a vocabulary too small for the tokenizer or a number out of range; what
    `data.load` raises where the text cannot be read.
    """

    name = "transformer"
    unit = "tokens"

    def __init__(
        self,
        model: ModelConfig,
        data: StdlibConfig | FilesConfig | HubConfig,
        *,
        steps: int,
        batch_size: int,
        eval_batch_size: int,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        min_lr_ratio: float,
        seed: int,
    ) -> None:
        self.architecture = model.architecture()
        for key, value in (("steps", steps), ("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value < 1:
                raise ValueError(f"train.{key}={value}: must be at least 1")
        self.context: int = self.architecture["context"]
        self.slots = slots_of(self.architecture["mlp"])
        self.steps = steps
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.seed = seed
        self.text = text.load(data, seed)
        self.chosen = {"model": self._fitting_vocabulary(model), "data": {"digest": self.text.digest}}
        self.architecture |= self.chosen["model"]
        if isinstance(self.text, text.Corpus) and self.context >= len(self.text.train):
            raise ValueError(
                f"model.context={self.context}: the training text, {self.text.origin}, has {len(self.text.train):,} "
                "tokens; must be fewer"
            )

    def _fitting_vocabulary(self, model: ModelConfig) -> dict[str, int]:
        """The vocab_size that gives the model a row for each token, where it has fewer and none was asked for."""
        tokenizer = self.text.tokenizer
        if self.architecture["vocab_size"] >= tokenizer.vocabulary:
            return {}
        if model.vocab_size is not None:
            raise ValueError(
                f"model.vocab_size={model.vocab_size}: must be at least {tokenizer.vocabulary}, the tokens of "
                f"data.tokenizer={tokenizer.name}; null chooses a size that fits"
            )
        return {"vocab_size": math.ceil(tokenizer.vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE}

    def config(self) -> TransformerConfig:
        """The configuration of the model."""
        from models.transformer.model import TransformerConfig  # transformers takes seconds to import

        return TransformerConfig.from_architecture(self.architecture)

    def build(self, ops: Mapping[str, Callable[..., Any]]) -> nn.Module:
        from models.transformer.model import Transformer, TransformerOps

        model = Transformer(self.config(), TransformerOps(**ops))
        # Generation ends where a document does.
        separator = self.text.tokenizer.separator
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = separator
        return model

    def batch(self, step: int, rank: int = 0) -> Batch:
        if isinstance(self.text, text.Corpus):
            return text.random_windows(self.text.train, self.context, self.batch_size, self.seed, step, rank)
        with contextlib.closing(self.batches(0)) as batches:
            return next(islice(batches, step, None))[0]

    def batches(
        self, start: int, state: StreamState | None = None
    ) -> Generator[tuple[Batch, StreamState | None], None, None]:
        if isinstance(self.text, text.Corpus):
            yield from super().batches(start, state)
            return
        skipped = start if state is None else 0
        try:
            with contextlib.closing(self.text.batches(self.context, self.batch_size, state)) as batches:
                yield from islice(batches, skipped, None)
        except (ValueError, OSError) as error:
            raise RunError(str(error)) from error

    def units(self, batch: Batch) -> int:
        return batch["targets"].numel()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        output = model(input_ids=batch["input_ids"], shift_labels=batch["targets"])
        return output.loss, batch["targets"].numel()

    def validation(self) -> Iterable[Batch]:
        return text.consecutive_windows(self.text.validation, self.context, self.eval_batch_size)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """loss, in nats a token; and unless tokens are bytes nats_per_byte, which does not depend on the tokenizer.

        A separator counts as a byte, so that for byte tokens the two are one.
        """
        metrics = super().evaluate(model, batches)
        if not self.on_bytes:
            targets = len(self.text.validation) - 1
            metrics["nats_per_byte"] = metrics["loss"] * targets / self.text.validation_bytes
        return metrics

    @property
    def on_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return self.text.tokenizer.name == BYTES

    def save(self, model: nn.Module, directory: Path) -> None:
        """As `transformers` saves a model, safetensors; and its tokenizer, if that is one of Hugging Face's."""
        from transformers.utils import logging

        transformer: Any = model
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # of writing one file
        try:
            transformer.save_pretrained(directory)
        finally:
            if shown:
                logging.enable_progress_bar()
        self.text.tokenizer.save(directory)

    def samples(self, model: nn.Module, length: int) -> dict[str, str]:
        """What the model goes on with, drawn with temperature `SAMPLE_TEMPERATURE`, by the validation text it goes on.

        The same for the same model; no generator of random numbers is moved. Ends early where a document ends.
        """
        transformer: Any = model
        device = transformer.device
        tokens = self.text.validation[: min(PROMPT_TOKENS, self.context // 2)].astype("int64")
        prompt = torch.from_numpy(tokens)[None].to(device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            # torch.manual_seed would seed every GPU there is.
            (torch.cuda if device.type == "cuda" else torch.default_generator).manual_seed(self.seed)
            generated = transformer.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=1,
                max_new_tokens=length,
                do_sample=True,
                temperature=SAMPLE_TEMPERATURE,
                top_k=0,
            )
        decode = self.text.tokenizer.decode
        return {decode(tokens[1:].tolist()): decode(generated[0, len(tokens) :].tolist())}

    def phases(self) -> list[Phase]:
        return [Phase("adamw", self.steps, self._optimizers, self._schedule)]

    def _optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, lr=self.learning_rate, betas=BETAS, fused=True)]

    def _schedule(self, step: int) -> float:
        return warmup_cosine(step, self.steps, self.warmup_steps, self.min_lr_ratio)

    def flops_per_step(self) -> int:
        """6 a token and weight of every product, and attention's own products, those above the diagonal left out.

        A product of forward costs 2 a weight and token, and backward twice that. The two products of attention cost
        4 d_model a query and key forward, for S (S + 1) / 2 such pairs a sequence.
        """
        a = self.architecture
        d_model, head_dim = a["d_model"], a["d_model"] // a["n_head"]
        attention = d_model * (a["n_head"] + 2 * a["n_kv_head"]) * head_dim + d_model * d_model
        mlp = (3 if a["mlp"] == "swiglu" else 2) * d_model * a["d_ff"]
        weights = a["n_layer"] * (attention + mlp) + d_model * a["vocab_size"]
        pairs = self.context * (self.context + 1) // 2
        products = 6 * weights * self.context + 3 * 4 * d_model * pairs * a["n_layer"]
        return self.batch_size * products

    def describe(self, model: nn.Module, accumulation: int = 1) -> dict[str, str]:
        count = sum(p.numel() for p in model.parameters())
        a = self.architecture
        passes = ""
        if isinstance(self.text, text.Corpus):
            seen = self.steps * accumulation * self.batch_size * self.context / len(self.text.train)
            passes = f", {seen:.2f} passes over the text"
        return {
            "model": (
                f"{count:,} parameters: {a['n_layer']} layers, width {a['d_model']}, {a['n_head']} heads "
                f"({a['n_kv_head']} of keys and values), {a['mlp']} MLP of {a['d_ff']}, {a['norm']}, "
                f"{a['positions']} positions"
            ),
            "tokenizer": (
                f"{self.text.tokenizer.name}: {self.text.tokenizer.vocabulary:,} tokens; "
                f"the model has rows for {a['vocab_size']:,}"
            ),
            "data": self.text.describe(),
            "training": (
                f"{self.steps:,} steps of {f'{accumulation} x ' if accumulation > 1 else ''}{self.batch_size} x "
                f"{self.context} tokens{passes}"
            ),
        }

    def references(self) -> dict[str, float]:
        if not self.on_bytes or not isinstance(self.text, text.Corpus):
            return {}  # the count model is one of bytes, and wants the training text whole
        return {f"order-{REFERENCE_ORDER} Witten-Bell": self._count_model_loss}

    @cached_property
    def _count_model_loss(self) -> float:
        assert isinstance(self.text, text.Corpus)
        return witten_bell(self.text.train, self.text.validation, REFERENCE_ORDER)
