"""The Hugging Face life of the model: caches, generation, AutoModel, gradient checkpointing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from fusedops.counting import executed
from fusedops.slots import SLOTS
from models.transformer.config import PRESETS, ModelConfig, slots_of
from models.transformer.model import CACHE_FIELD, Transformer, TransformerConfig, TransformerOps

CONTEXT = 33
SIZE = {"n_layer": 2, "n_head": 4, "d_model": 40, "d_ff": 56, "context": CONTEXT, "vocab_size": 97}
FAMILIES = {preset: SIZE | {"n_kv_head": 2 if "llama" in preset or "swiglu" in preset else 4} for preset in PRESETS}


def build(preset: str, implementation: str = "native", **overrides: Any) -> Transformer:
    """A model in evaluation, its weights spread so far that every part matters and no two tokens are nearly tied."""
    keys: dict[str, Any] = FAMILIES[preset] | {"dropout": 0.0} | overrides
    config = TransformerConfig.from_architecture(ModelConfig(preset=preset, **keys).architecture())
    ops = {slot: SLOTS[slot].implementation(implementation).function for slot in slots_of(config.mlp)}
    model = Transformer(config, TransformerOps(**ops))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, SIZE["vocab_size"], (batch, length))


def cache_of(output: Any) -> Any:
    return output[CACHE_FIELD]


# ---------------------------------------------------------------------------------------------------------------------
# a cache changes nothing


@pytest.mark.parametrize("implementation", ["native", "fused"])
@pytest.mark.parametrize("preset", PRESETS)
def test_logits_with_a_cache_are_those_without(preset: str, implementation: str) -> None:
    """A prefill, single tokens, several at once, up to the context."""
    model, ids = build(preset, implementation), tokens(3, CONTEXT)
    with torch.no_grad():
        expected = model(ids).logits
        output = model(ids[:, :11], use_cache=True)
        logits, cache = [output.logits], cache_of(output)
        for first, last in ((11, 12), (12, 13), (13, 20), (20, 21), (21, CONTEXT)):
            logits.append(model(ids[:, first:last], past_key_values=cache).logits)
    assert cache.get_seq_length() == CONTEXT
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["gpt_d512", "llama_d512"])
def test_logits_with_a_cache_and_left_padding_are_those_of_each_alone(preset: str) -> None:
    model, ids = build(preset), tokens(3, CONTEXT)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 13)):
        mask[row, :padding] = 0
    with torch.no_grad():
        output = model(ids[:, :14], attention_mask=mask[:, :14], use_cache=True)
        logits, cache = [output.logits], cache_of(output)
        for first, last in ((14, 15), (15, 19), (19, CONTEXT)):
            logits.append(model(ids[:, first:last], attention_mask=mask[:, :last], cache=cache).logits)
        together = torch.cat(logits, dim=1)
        for row, padding in enumerate((0, 5, 13)):
            alone = model(ids[row : row + 1, padding:]).logits[0]
            torch.testing.assert_close(together[row, padding:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preset", ["gpt_d512", "llama_d512"])
def test_a_cache_of_fixed_size_gives_the_same(preset: str) -> None:
    model, ids = build(preset), tokens(2, 19)
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT)
    with torch.no_grad():
        first = model(ids[:, :10], past_key_values=cache).logits
        second = model(ids[:, 10:], past_key_values=cache).logits
        torch.testing.assert_close(torch.cat((first, second), 1), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 0, "temperature": 0.9},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=["greedy", "sampled", "beams", "several"],
)
@pytest.mark.parametrize("preset", ["gpt_d512", "llama_d512", "tiny"])
def test_generation_with_a_cache_is_that_without(preset: str, how: dict[str, Any]) -> None:
    """Prompts padded at the left, and on past the context, where the cache has no more to give.

    In float64, where no two tokens are so close that rounding decides.
    """
    model, prompt = build(preset).double(), tokens(2, 12)
    mask = torch.ones_like(prompt)
    mask[1, :5] = 0
    generated = []
    for use_cache in (True, False):
        torch.manual_seed(11)
        generated.append(
            model.generate(prompt, attention_mask=mask, max_new_tokens=CONTEXT, use_cache=use_cache, **how)
        )
    assert generated[0].shape[1] == 12 + CONTEXT
    assert generated[0].tolist() == generated[1].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["gpt_d512", "llama_d512"])
def test_on_a_gpu_the_fused_prefill_and_stock_decoding_go_together(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model, ids = build(preset, "fused").cuda(), tokens(2, CONTEXT).cuda()
    with torch.no_grad():
        expected = model(ids).logits
        output = model(ids[:, :11], use_cache=True)
        logits, cache = [output.logits], cache_of(output)
        for position in range(11, CONTEXT):
            logits.append(model(ids[:, position : position + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-3, atol=1e-3)


def test_generation_uses_a_cache_unless_told_otherwise() -> None:
    model, prompt = build("llama_d512"), tokens(1, 5)
    lengths: list[int] = []
    model.layers[0].register_forward_hook(lambda _module, args, _output: lengths.append(args[0].shape[1]))
    model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert lengths == [5, 1, 1, 1]
    lengths.clear()
    model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False)
    assert lengths == [5, 6, 7, 8]


def test_a_generation_goes_on_from_its_own_cache() -> None:
    model, prompt = build("llama_d512").double(), tokens(1, 5)
    whole = model.generate(prompt, max_new_tokens=12, do_sample=False)
    cache = DynamicCache(config=model.config)
    begun = model.generate(prompt, max_new_tokens=4, do_sample=False, **{CACHE_FIELD: cache})
    assert cache.get_seq_length() == 8
    ended = model.generate(begun, max_new_tokens=8, do_sample=False, **{CACHE_FIELD: cache})
    assert ended.tolist() == whole.tolist()


@pytest.mark.parametrize("preset", ["gpt_d512", "llama_d512"])
def test_a_prefill_runs_the_slot_and_decoding_stock_attention(preset: str) -> None:
    model, prompt = build(preset, "fused"), tokens(2, 9)
    before = executed()
    model.generate(prompt, max_new_tokens=6, do_sample=False)
    ran = executed() - before
    mlp = "silu_mul" if preset == "llama_d512" else "linear_gelu_dropout"
    layers = SIZE["n_layer"]
    assert {name: n for (name, _), n in ran.items()} == {"flash_attention": layers, mlp: 6 * layers}


def test_a_cache_that_would_pass_the_context_is_refused() -> None:
    model, ids = build("gpt_d512"), tokens(1, CONTEXT)
    cache = cache_of(model(ids[:, :-2], use_cache=True))
    with pytest.raises(ValueError, match=f"input_ids has {CONTEXT + 1} tokens .*, {CONTEXT - 2} of them in the cache"):
        model(ids[:, :3], past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \(1, 2\); allowed: input_ids' \(1, 33\), the cache"
    ):
        model(ids[:, :2], attention_mask=torch.ones(1, 2), past_key_values=cache)
    with pytest.raises(
        ValueError, match="tokens do not fit into context=33, and of the last 33 only 3 are in input_ids"
    ):
        model.prepare_inputs_for_generation(ids[:, :3], attention_mask=torch.ones(1, 34), past_key_values=cache)


# ---------------------------------------------------------------------------------------------------------------------
# AutoModel


@pytest.mark.parametrize("preset", ["tiny", "gpt2", "llama_d512"])
def test_automodel_loads_a_saved_model_with_its_operators(preset: str, tmp_path: Path) -> None:
    model, ids = build(preset), tokens(2, 21)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), TransformerConfig)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, Transformer) and not loaded.training
    tied = loaded.lm_head.weight is loaded.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings == PRESETS[preset]["tie_embeddings"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    fused = {slot: SLOTS[slot].implementation("fused").function for slot in slots_of(model.config.mlp)}
    other = AutoModelForCausalLM.from_pretrained(tmp_path, ops=TransformerOps(**fused))
    assert other.ops.attention is fused["attention"]
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_importing_the_model_registers_it_once(tmp_path: Path) -> None:
    build("tiny").save_pretrained(tmp_path)
    program = """if True:
        import importlib, sys
        import models.transformer.model
        from transformers import AutoModelForCausalLM
        importlib.reload(models.transformer.model)
        print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = Path(__file__).parents[3]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "Transformer", result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# gradient checkpointing


@pytest.mark.parametrize("implementation", ["native", "fused"])
@pytest.mark.parametrize("preset", ["gpt_d512", "llama_d512"])
def test_gradients_with_checkpointing_are_those_without_dropout_included(preset: str, implementation: str) -> None:
    model, ids = build(preset, implementation, dropout=0.3).train(), tokens(2, 17)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(7)
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert model.is_gradient_checkpointing
    assert len(gradients[0]) == len(list(model.named_parameters()))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)
