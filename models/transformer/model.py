"""A decoder language model given the functions of its attention and MLP, so that arms differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from fusedops.slots import SLOTS
from models.transformer.config import PRESETS, check_architecture, slots_of

ROTARY_BASE = 10_000.0
NORM_EPS = 1e-5
IGNORED_LABEL = -100

Angles = tuple[Tensor, Tensor]  # cosine and sine, [B or 1, 1, S, D / 2] fp32


class TransformerConfig(PretrainedConfig):
    """The architecture, as `transformers` saves and loads it; keys and ranges are those of `ModelConfig`.

    Keys not given have the preset tiny's value. tie_word_embeddings is `ModelConfig.tie_embeddings` under the name that
    `transformers` acts on. Raises ValueError naming a key out of range.
    """

    model_type = "fusedops_transformer"

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
    """Causal self-attention; with fewer key and value heads than query heads, each serves a group of these."""

    def __init__(self, config: TransformerConfig, ops: TransformerOps) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.ops = ops
        # One product for queries, keys and values.
        self.qkv = nn.Linear(config.d_model, (config.n_head + 2 * config.n_kv_head) * config.head_dim, bias=config.bias)
        self.out = ResidualProjection(config.d_model, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # [B, H + 2 H_kv, S, D]
        q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=1)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        # A mask has causality in it: stock attention takes one or the other.
        y = self.ops.attention(q, k, v, mask is None, None, mask, 0.0)  # [B, H, S, D]
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


class Block(nn.Module):
    """Attention, then the MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: TransformerConfig, ops: TransformerOps) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, ops)
        self.mlp_norm = make_norm(config)
        self.mlp = (SwigluMlp if config.mlp == "swiglu" else GeluMlp)(config, ops)

    def forward(self, x: Tensor, angles: Angles | None, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, mask)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(PreTrainedModel, GenerationMixin):
    """Decoder language model. Models of one configuration share a state_dict layout, whatever their `ops`.

    config  the architecture.
    ops     the functions in its slots; stock PyTorch if None. Not saved: `from_pretrained(path, ops)` gives them anew.

    Weights are drawn from the current generator as GPT-2's: N(0, init_std^2), the projections into the residual stream
    by 1 / sqrt(2 n_layer) smaller. Raises ValueError unless ops fills exactly the model's slots.
    """

    config_class = TransformerConfig
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012 - the base class's attribute
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: TransformerConfig, ops: TransformerOps | None = None) -> None:
        super().__init__(config)
        ops = TransformerOps.native(config) if ops is None else ops
        ops.check(config)
        self.ops = ops
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = nn.Embedding(config.context, config.d_model) if config.positions == "learned" else None
        self.layers = nn.ModuleList(Block(config, ops) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config = GenerationConfig(use_cache=False)

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
        return_dict: bool = True,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits and, where there are labels, the mean cross-entropy in nats, computed in fp32.

        input_ids       [B, S] int64, S at most config.context.
        attention_mask  [B, S], 1 for tokens and 0 for padding at either side; None where there is no padding. Positions
                        count tokens only, so that a padded sequence gives what it gives alone.
        labels          [B, S], the tokens themselves: position t is compared with the label of t + 1. -100 is left out.
        shift_labels    [B, S], instead of labels: position t is compared with the label of t. -100 is left out.
        Raises ValueError for a sequence longer than config.context, a mask of another shape, or both kinds of labels.
        """
        length = input_ids.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"input_ids has {length} tokens a sequence; allowed: at most context={self.config.context}"
            )
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: input_ids' {tuple(input_ids.shape)}"
            )
        if labels is not None and shift_labels is not None:
            raise ValueError("labels and shift_labels are both given; allowed: one of them")

        if attention_mask is None:
            positions, mask = torch.arange(length, device=input_ids.device)[None], None
        else:
            positions, mask = padded_positions_and_mask(attention_mask)
        x = self.embed_tokens(input_ids)
        angles = None
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        else:
            angles = rotary_angles(positions, self.config.head_dim)
        for layer in self.layers:
            x = layer(x, angles, mask)
        logits = self.lm_head(self.norm(x))  # [B, S, V]

        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1], labels[:, 1:])
        elif shift_labels is not None:
            loss = cross_entropy(logits, shift_labels)
        output = CausalLMOutput(loss=loss, logits=logits)
        return output if return_dict else output.to_tuple()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Tensor | None]:
        """The last config.context tokens (there is no cache), and their mask if it hides anything."""
        input_ids = input_ids[:, -self.config.context :]
        if attention_mask is not None:
            attention_mask = attention_mask[:, -self.config.context :]
            if attention_mask.all():
                attention_mask = None
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def make_norm(config: TransformerConfig) -> nn.Module:
    """The norm that the configuration names."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=NORM_EPS)
    return nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=config.bias)


def padded_positions_and_mask(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that count tokens only, [B, S]; and where a query may look, [B, 1, S, S], True: at tokens up to itself.

    A padding query looks at itself alone, so that no row is empty: what it computes is finite, and nobody reads it.
    """
    tokens = attention_mask.bool()
    positions = (tokens.long().cumsum(1) - 1).clamp(min=0)
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=tokens.device)
    return positions, (causal & tokens[:, None, None, :]) | itself


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
