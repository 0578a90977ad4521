"""A decoder language model given the functions of its attention and MLP, so that arms differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from fusedops.slots import SLOTS
from models.transformer.config import PRESETS, check_architecture, slots_of

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-5
IGNORED_LABEL = -100

Angles = tuple[Tensor, Tensor]  # cosine and sine, [B or 1, 1, S, D / 2] fp32
CACHE_FIELD = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"
"""What the installed `transformers` calls the cache of keys and values in a model's output."""


class TransformerConfig(PretrainedConfig):
    """The architecture, as `transformers` saves and loads it; keys and ranges are those of `ModelConfig`.

    Keys not given have the preset tiny's value. tie_word_embeddings is `ModelConfig.tie_embeddings` under the name that
    `transformers` acts on. Raises ValueError naming a key out of range.
    """

    model_type = "fusedops_transformer"
    # The names that caches and tools of `transformers` look for.
    attribute_map = {  # noqa: RUF012 - the base class's attribute
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
    }

    def __init__(
        self,
        n_layer: int = PRESETS["tiny"]["n_layer"],
        n_head: int = PRESETS["tiny"]["n_head"],
        n_kv_head: int = PRESETS["tiny"]["n_kv_head"],
        d_model: int = PRESETS["tiny"]["d_model"],
        d_ff: int = PRESETS["tiny"]["d_ff"],
        vocab_size: int = PRESETS["tiny"]["vocab_size"],
        context: int = PRESETS["tiny"]["context"],
        mlp: str = PRESETS["tiny"]["mlp"],
        norm: str = PRESETS["tiny"]["norm"],
        positions: str = PRESETS["tiny"]["positions"],
        dropout: float = PRESETS["tiny"]["dropout"],
        bias: bool = PRESETS["tiny"]["bias"],
        tie_word_embeddings: bool = PRESETS["tiny"]["tie_embeddings"],
        init_std: float = PRESETS["tiny"]["init_std"],
        **kwargs: Any,
    ) -> None:
        self.n_layer = n_layer
        self.n_head = n_head
        self.n_kv_head = n_kv_head
        self.d_model = d_model
        self.d_ff = d_ff
        self.vocab_size = vocab_size
        self.context = context
        self.mlp = mlp
        self.norm = norm
        self.positions = positions
        self.dropout = dropout
        self.bias = bias
        self.init_std = init_std
        check_architecture(self.__dict__)
        super().__init__(**kwargs)
        self.tie_word_embeddings = tie_word_embeddings

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any]) -> TransformerConfig:
        """The configuration of `ModelConfig.architecture()`."""
        values = dict(architecture)
        return cls(tie_word_embeddings=values.pop("tie_embeddings"), **values)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_head


@dataclass(frozen=True)
class TransformerOps:
    """The functions in a transformer's slots, by the signatures of `fusedops.slots`.

    attention   in every model.
    mlp         in models with a GELU MLP; None in others.
    activation  in models with a SwiGLU MLP; None in others.
    """

    attention: Callable[..., Tensor]
    mlp: Callable[..., Tensor] | None = None
    activation: Callable[..., Tensor] | None = None

    @classmethod
    def native(cls, config: TransformerConfig) -> TransformerOps:
        """Stock PyTorch in each slot that a model of this configuration has."""
        return cls(**{slot: SLOTS[slot].implementation("native").function for slot in slots_of(config.mlp)})

    def check(self, config: TransformerConfig) -> None:
        """Raise ValueError unless exactly the slots of a model of this configuration are filled."""
        filled = tuple(slot for slot, function in vars(self).items() if function is not None)
        wanted = slots_of(config.mlp)
        if set(filled) != set(wanted):
            raise ValueError(
                f"ops fills {', '.join(filled)}; a transformer with mlp={config.mlp} has the slots {', '.join(wanted)}"
            )


class ResidualProjection(nn.Linear):
    """A linear layer whose output is added to the residual stream, of which there are two a block: drawn smaller."""


class Attention(nn.Module):
    """Causal self-attention; with fewer key and value heads than query heads, each serves a group of these.

    The slot `attention` gets whole sequences: in training, and in the prefill of a generation. Queries that follow
    cached keys, as in decoding, go through stock attention by design: the slot's causality is that of whole sequences.
    """

    decode = staticmethod(SLOTS["attention"].implementation("native").function)

    def __init__(self, config: TransformerConfig, ops: TransformerOps, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.ops = ops
        # One product for queries, keys and values.
        self.qkv = nn.Linear(config.d_model, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=config.bias)
        self.out = ResidualProjection(config.d_model, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None, cache: Cache | None, past: int) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # [B, H + 2 H_kv, S, D]
        q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=1)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            # A cache of fixed size gives all that it has room for.
            k, v = (t[:, :, : past + length] for t in cache.update(k, v, self.layer))
        attention = self.decode if past else self.ops.attention
        # A mask has causality in it: stock attention takes one or the other. One query after the past needs neither.
        y = attention(q, k, v, mask is None and not past, None, mask, 0.0)  # [B, H, S, D]
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GeluMlp(nn.Module):
    """Linear, GELU, dropout, linear: one call of the slot `mlp`."""

    def __init__(self, config: TransformerConfig, ops: TransformerOps) -> None:
        super().__init__()
        assert ops.mlp is not None
        self.function = ops.mlp
        self.dropout = config.dropout
        self.approximate = "tanh" if config.mlp == "gelu_tanh" else "none"
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = ResidualProjection(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        return self.function(
            x, up.weight, up.bias, down.weight, down.bias, self.dropout, self.approximate, self.training
        )


class SwigluMlp(nn.Module):
    """silu(gate) * up (the slot `activation`), linear, dropout (Shazeer 2020)."""

    def __init__(self, config: TransformerConfig, ops: TransformerOps) -> None:
        super().__init__()
        assert ops.activation is not None
        self.function = ops.activation
        self.dropout = config.dropout
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = ResidualProjection(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(self.function(self.gate(x), self.up(x))), self.dropout, self.training)


class Block(GradientCheckpointingLayer):
    """Attention, then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: TransformerConfig, ops: TransformerOps, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, ops, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = (SwigluMlp if config.mlp == "swiglu" else GeluMlp)(config, ops)

    def forward(
        self, x: Tensor, angles: Angles | None, mask: Tensor | None, cache: Cache | None = None, past: int = 0
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, mask, cache, past)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(PreTrainedModel, GenerationMixin):
    """Decoder language model. Models of one configuration share a state_dict layout, whatever their `ops`.

    config  the architecture.
    ops     the functions in its slots; stock PyTorch if None. Not saved: `from_pretrained(path, ops)` gives them anew.

    Weights are drawn from the current generator as GPT-2's: N(0, init_std^2), the projections into the residual stream
    by 1 / sqrt(2 n_layer) smaller. Raises ValueError unless ops fills exactly the model's slots.

    `generate` keeps a cache of keys and values while a sequence fits into the context. Past it the oldest tokens are
    forgotten, and since positions then move, every further token takes a pass over the last `context` ones: what cached
    decoding gives is what decoding without a cache gives, at any length.
    """

    config_class = TransformerConfig
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012 - the base class's attribute
    _no_split_modules = ["Block"]  # noqa: RUF012
    supports_gradient_checkpointing = True

    def __init__(self, config: TransformerConfig, ops: TransformerOps | None = None) -> None:
        super().__init__(config)
        ops = TransformerOps.native(config) if ops is None else ops
        ops.check(config)
        self.ops = ops
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = nn.Embedding(config.context, config.d_model) if config.positions == "learned" else None
        self.layers = nn.ModuleList(Block(config, ops, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config = GenerationConfig(use_cache=True)

    def _init_weights(self, module: nn.Module) -> None:
        # Each kind of layer on its own: `transformers` may pass over modules without parameters, such as a Block.
        std = self.config.init_std
        if isinstance(module, ResidualProjection):
            std /= (2 * self.config.n_layer) ** 0.5
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.ones_(module.weight)
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits and, where there are labels, the mean cross-entropy in nats, computed in fp32.

        input_ids        [B, S] int64: the tokens that follow those in the cache; with these at most config.context.
        attention_mask   [B, past + S], 1 for tokens and 0 for padding at either side; None where there is no padding.
                         Positions count tokens only, so that a padded sequence gives what it gives alone.
        labels           [B, S], the tokens: position t is compared with the label of t + 1. -100 is left out.
        shift_labels     [B, S], instead of labels: position t is compared with the label of t. -100 is left out.
        past_key_values  keys and values of the tokens before input_ids, which those of input_ids are added to; newer
                         versions of `transformers` call it cache, and either name will do.
        use_cache        makes a cache where none is given, and returns it.
        Raises ValueError for a sequence longer than config.context, a mask of another shape, or both kinds of labels.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        past = 0 if cache is None else int(cache.get_seq_length())
        total = past + input_ids.shape[1]
        if total > self.config.context:
            after = f", {past} of them in the cache" if past else ""
            raise ValueError(
                f"input_ids has {total} tokens a sequence{after}; allowed: at most context={self.config.context}"
            )
        if attention_mask is not None and attention_mask.shape != (expected := (input_ids.shape[0], total)):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: input_ids' {expected}"
                + (", the cache's tokens counted" if past else "")
            )
        if labels is not None and shift_labels is not None:
            raise ValueError("labels and shift_labels are both given; allowed: one of them")

        positions, mask = positions_and_mask(attention_mask, past, total, input_ids.device)
        x = self.embed_tokens(input_ids)
        angles = None
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        else:
            angles = rotary_angles(positions, self.config.head_dim)
        for layer in self.layers:
            x = layer(x, angles, mask, cache=cache, past=past)
        logits = self.lm_head(self.norm(x))  # [B, S, V]

        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1], labels[:, 1:])
        elif shift_labels is not None:
            loss = cross_entropy(logits, shift_labels)
        returned: dict[str, Any] = {CACHE_FIELD: cache}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **returned)
        return output if return_dict else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that are not in the cache, and the mask if it hides anything; or, past the context, its window.

        Raises ValueError where the window reaches back to tokens that only the cache has.
        """
        cache = past_key_values if cache is None else cache
        context = self.config.context
        total = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
        if total > context:
            if input_ids.shape[1] < context:
                raise ValueError(
                    f"{total} tokens do not fit into context={context}, and of the last {context} only "
                    f"{input_ids.shape[1]} are in input_ids; allowed: all of them there"
                )
            input_ids, cache, use_cache = input_ids[:, -context:], None, False
        elif cache is not None:
            input_ids = input_ids[:, int(cache.get_seq_length()) - total :]
        if attention_mask is not None:
            attention_mask = attention_mask[:, -context:]
            if attention_mask.all():
                attention_mask = None
        return {"input_ids": input_ids, "attention_mask": attention_mask, "cache": cache, "use_cache": use_cache}


def make_norm(config: TransformerConfig) -> nn.Module:
    """The norm that the configuration names."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=NORM_EPS)
    return nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=config.bias)


def positions_and_mask(
    attention_mask: Tensor | None, past: int, total: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Positions of the tokens after `past` others, [B or 1, S]; and where each may look, [B or 1, 1, S, total], True.

    They look at tokens up to themselves. The mask is None where attention needs none: for whole sequences, which are
    causal, and for one token, which sees all. Positions count tokens only. A padding query looks at itself alone, so
    that no row is empty: what it computes is finite, and nobody reads it.
    """
    rows, columns = torch.arange(past, total, device=device), torch.arange(total, device=device)
    causal = columns <= rows[:, None]
    if attention_mask is None:
        return rows[None], causal[None, None] if past and total - past > 1 else None
    tokens = attention_mask.bool()
    positions = (tokens.long().cumsum(1) - 1).clamp(min=0)
    itself = columns == rows[:, None]
    return positions[:, past:], (causal & tokens[:, None, None, :]) | itself


def rotary_angles(positions: Tensor, head_dim: int) -> Angles:
    """Cosine and sine of position / ROTARY_BASE^(2i / D) for the pairs i of a head (Su et al. 2021)."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None] * ROTARY_BASE ** (-pairs / head_dim)  # [B, 1, S, D / 2]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate each pair (i, i + D / 2) of a head by its angle, in fp32 or x's dtype if wider; x is [B, H, S, D]."""
    cos, sin = angles
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 over targets that are not -100."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED_LABEL)


AutoConfig.register(TransformerConfig.model_type, TransformerConfig, exist_ok=True)
AutoModelForCausalLM.register(TransformerConfig, Transformer, exist_ok=True)
