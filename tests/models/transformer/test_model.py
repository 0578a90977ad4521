"""The transformer against a plain reimplementation, causality, padding, arms, and what `transformers` does with it."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.counting import executed
from fusedops.slots import SLOTS
from models.transformer.config import ModelConfig, slots_of
from models.transformer.model import Transformer, TransformerConfig, TransformerOps, rotary_angles, rotate

CONTEXT = 37
SIZE = {"n_layer": 2, "n_head": 2, "d_model": 48, "d_ff": 80, "context": CONTEXT, "vocab_size": 256}
SMALL: dict[str, dict[str, Any]] = {
    "gelu": {"preset": "gpt_d512", "dropout": 0.0} | SIZE,
    "swiglu": {"preset": "llama_d512"} | SIZE | {"n_head": 4, "n_kv_head": 2},
}
SMALL["gelu_tanh"] = SMALL["gelu"] | {"mlp": "gelu_tanh", "tie_embeddings": True, "bias": False}
SMALL["gelu_rotary"] = SMALL["gelu"] | {"positions": "rotary", "n_head": 4, "n_kv_head": 1}
KINDS = list(SMALL)


def config_of(kind: str, **overrides: Any) -> TransformerConfig:
    return TransformerConfig.from_architecture(ModelConfig(**SMALL[kind] | overrides).architecture())


def ops_of(config: TransformerConfig, *names: str) -> TransformerOps:
    return TransformerOps(
        **{
            slot: SLOTS[slot].implementation(name).function
            for slot, name in zip(slots_of(config.mlp), names, strict=True)
        }
    )


def build(kind: str, *names: str, **overrides: Any) -> Transformer:
    """A model in evaluation mode, its weights far enough from those of initialization that every part matters."""
    config = config_of(kind, **overrides)
    model = Transformer(config, ops_of(config, *names) if names else None)
    for parameter in model.parameters():
        parameter.data.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def tokens(batch: int = 3, length: int = CONTEXT) -> Tensor:
    return torch.randint(0, 256, (batch, length))


ARMS = [
    pytest.param(kind, *names, id="-".join((kind, *names)))
    for kind in ("gelu", "swiglu")
    for names in product(*(SLOTS[slot].implementations for slot in slots_of(kind)))
]


# ---------------------------------------------------------------------------------------------------------------------
# values


def plain_forward(model: Transformer, ids: Tensor) -> Tensor:
    """The logits of one sequence, written out position by position from the state_dict, in float64."""
    c = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}
    width = c.d_model // c.n_head

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def norm(x: Tensor, name: str) -> Tensor:
        if c.norm == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
        centered = x - x.mean(-1, keepdim=True)
        y = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def turn(head: Tensor, position: int) -> Tensor:
        """Rotary embedding as a product of complex numbers."""
        if c.positions != "rotary":
            return head
        i = torch.arange(width // 2, dtype=torch.float64)
        turned = torch.complex(*head.chunk(2)) * torch.polar(
            torch.ones_like(i), position * 10_000.0 ** (-2 * i / width)
        )
        return torch.cat((turned.real, turned.imag))

    def gelu(x: Tensor) -> Tensor:
        if c.mlp == "gelu_tanh":
            return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    x = weights["embed_tokens.weight"][ids]
    if c.positions == "learned":
        x = x + weights["embed_positions.weight"][: len(ids)]
    for layer in range(c.n_layer):
        prefix = f"layers.{layer}"
        rows = linear(norm(x, f"{prefix}.attention_norm"), f"{prefix}.attention.qkv")
        q, k, v = rows.split((c.n_head * width, c.n_kv_head * width, c.n_kv_head * width), dim=-1)
        attended = torch.zeros_like(x)
        for head in range(c.n_head):
            mine, shared = slice(head * width, (head + 1) * width), head // (c.n_head // c.n_kv_head)
            theirs = slice(shared * width, (shared + 1) * width)
            keys = torch.stack([turn(k[t, theirs], t) for t in range(len(ids))])
            for t in range(len(ids)):
                scores = keys[: t + 1] @ turn(q[t, mine], t) / width**0.5
                attended[t, mine] = scores.softmax(0) @ v[: t + 1, theirs]
        x = x + linear(attended, f"{prefix}.attention.out")
        h = norm(x, f"{prefix}.mlp_norm")
        up = linear(h, f"{prefix}.mlp.up")
        if c.mlp == "swiglu":
            gate = linear(h, f"{prefix}.mlp.gate")
            hidden = gate * torch.sigmoid(gate) * up
        else:
            hidden = gelu(up)
        x = x + linear(hidden, f"{prefix}.mlp.down")
    return norm(x, "norm") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_a_plain_reimplementation(kind: str) -> None:
    model, ids = build(kind), tokens(2, 19)
    expected = torch.stack([plain_forward(model, row) for row in ids])
    with torch.no_grad():
        actual = model(ids).logits
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4 * expected.std().item())


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(at: int, to: int) -> float:
        turned = [rotate(x, rotary_angles(torch.tensor([[p]]), 16)) for x, p in ((q, at), (k, to))]
        return (turned[0] * turned[1]).sum().item()

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_mean_cross_entropy_of_the_labels_given(kind: str) -> None:
    model, ids = build(kind), tokens()
    labels = torch.where(torch.rand(ids.shape) < 0.3, -100, torch.randint(0, 256, ids.shape))
    with torch.no_grad():
        output = model(ids, labels=labels)
        shifted = model(ids, shift_labels=labels)
    log_probabilities = output.logits.double().log_softmax(-1)

    def mean(rows: Tensor, targets: Tensor) -> float:
        losses = [-row[t].item() for row, t in zip(rows.flatten(0, 1), targets.flatten(), strict=True) if t != -100]
        return sum(losses) / len(losses)

    assert output.loss.item() == pytest.approx(mean(log_probabilities[:, :-1], labels[:, 1:]), rel=1e-5)
    assert shifted.loss.item() == pytest.approx(mean(log_probabilities, labels), rel=1e-5)


def test_weights_are_drawn_as_gpt2s() -> None:
    model = Transformer(config_of("gelu", n_layer=8, d_model=96, init_std=0.02))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = 0.02 / (2 * 8) ** 0.5 if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


# ---------------------------------------------------------------------------------------------------------------------
# what may not leak


@pytest.mark.parametrize(("kind", "attention", "other"), ARMS)
def test_logits_do_not_move_when_a_later_token_changes(kind: str, attention: str, other: str) -> None:
    model, ids = build(kind, attention, other), tokens()
    changed = ids.clone()
    changed[:, 20] = (ids[:, 20] + 1) % 256
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-5)
    assert ((after - before)[:, 20:].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("kind", "attention", "other"), ARMS)
def test_a_padded_sequence_gives_what_it_gives_alone(kind: str, attention: str, other: str, side: str) -> None:
    model, ids = build(kind, attention, other), tokens(3, 23)
    lengths = (23, 9, 1)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, 23 - length :] = 1
    if side == "right":
        mask = mask.flip(1)
    output = model(ids, attention_mask=mask, shift_labels=ids.masked_fill(mask == 0, -100))
    assert output.logits.isfinite().all()
    for row, used in enumerate(mask.bool()):
        with torch.no_grad():
            alone = model(ids[row][used][None]).logits[0]
        torch.testing.assert_close(output.logits[row][used], alone, rtol=1e-4, atol=1e-4)
    output.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# arms


@pytest.mark.parametrize(("kind", "attention", "other"), ARMS)
def test_arms_start_equal_and_stay_equal_in_training(kind: str, attention: str, other: str) -> None:
    config = config_of(kind)
    models = []
    for names in (("native", "native"), (attention, other)):
        torch.manual_seed(5)
        models.append(Transformer(config, ops_of(config, *names)))
    weights = [model.state_dict() for model in models]
    assert list(weights[0]) == list(weights[1])
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))
    losses: list[list[float]] = [[], []]
    batch = tokens(4, CONTEXT + 1)
    for model, history in zip(models, losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(5):
            loss = model(batch[:, :-1], shift_labels=batch[:, 1:]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["gelu", "swiglu", "gelu_rotary"])
def test_three_steps_with_the_kernels_themselves_equal_stock_pytorch(kind: str) -> None:
    config = config_of(kind, n_layer=1, context=21)
    batch = tokens(2, 22)
    losses: list[list[float]] = []
    before = executed()
    for name in ("native", "fused"):
        torch.manual_seed(5)
        model = Transformer(config, ops_of(config, name, name))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses.append([])
        for _ in range(3):
            loss = model(batch[:, :-1], shift_labels=batch[:, 1:]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    mlp = "silu_mul" if kind == "swiglu" else "linear_gelu_dropout"
    assert {("flash_attention", "triton-interpreter"), (mlp, "triton-interpreter")} <= set(executed() - before)


def test_dropout_is_in_the_mlp_and_only_in_training() -> None:
    for kind in ("gelu", "swiglu"):
        ids = tokens()
        model = build(kind, dropout=0.4)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, model(ids).logits)
            reference = model(ids).logits
            model.train()
            torch.manual_seed(3)
            first = model(ids).logits
            assert not torch.equal(first, reference)
            assert not torch.equal(first, model(ids).logits)
            torch.manual_seed(3)
            assert torch.equal(first, model(ids).logits)


@pytest.mark.parametrize(
    ("kind", "filled", "message"),
    [
        (
            "gelu",
            ("attention", "activation"),
            "ops fills attention, activation; .*mlp=gelu has the slots attention, mlp",
        ),
        ("swiglu", ("attention", "mlp"), "ops fills attention, mlp; .*mlp=swiglu has the slots attention, activation"),
        ("gelu", ("attention",), "ops fills attention; .* has the slots attention, mlp"),
        ("gelu", ("attention", "mlp", "activation"), "ops fills attention, mlp, activation; "),
    ],
)
def test_ops_must_fill_exactly_the_models_slots(kind: str, filled: tuple[str, ...], message: str) -> None:
    ops = TransformerOps(**{slot: SLOTS[slot].implementation("native").function for slot in filled})
    with pytest.raises(ValueError, match=message):
        Transformer(config_of(kind), ops)


# ---------------------------------------------------------------------------------------------------------------------
# bad input


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=f"input_ids has {CONTEXT + 1} tokens .* at most context={CONTEXT}"):
        build("gelu")(tokens(2, CONTEXT + 1))


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 6\); allowed: input_ids' \(2, 5\)"):
        build("gelu")(tokens(2, 5), attention_mask=torch.ones(2, 6))


def test_two_kinds_of_labels_are_refused() -> None:
    ids = tokens(2, 5)
    with pytest.raises(ValueError, match="labels and shift_labels are both given"):
        build("gelu")(ids, labels=ids, shift_labels=ids)


def test_an_architecture_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="d_model=50: must be a multiple of n_head=4"):
        TransformerConfig(n_head=4, d_model=50)


# ---------------------------------------------------------------------------------------------------------------------
# transformers, autocast, compile


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    model, ids = build(kind), tokens()
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path, ops_of(model.config, *["native"] * 2)).eval()
    keys = ModelConfig(**SMALL[kind]).architecture()
    assert loaded.config.tie_word_embeddings == keys.pop("tie_embeddings")
    assert {key: getattr(loaded.config, key) for key in keys} == keys
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_tied_embeddings_are_one_parameter(tmp_path: Path) -> None:
    tied, untied = build("gelu", tie_embeddings=True), build("gelu")
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight
    tied.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.embed_tokens.weight


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_generate_is_greedy_search_over_the_last_context_tokens(kind: str) -> None:
    model, ids = build(kind).double(), tokens(2, CONTEXT - 4)  # where rounding decides between no two tokens
    generated = model.generate(ids, max_new_tokens=9, do_sample=False)
    expected = ids
    with torch.no_grad():
        for _ in range(9):
            chosen = model(expected[:, -CONTEXT:]).logits[:, -1].argmax(-1)
            expected = torch.cat((expected, chosen[:, None]), dim=1)
    assert generated.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_generate_from_prompts_of_unequal_length_gives_what_each_gives_alone(kind: str) -> None:
    model, ids = build(kind).double(), tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    together = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    alone = model.generate(ids[:1, 4:], max_new_tokens=8, do_sample=False)
    assert together[0, 4:].tolist() == alone[0].tolist()


@pytest.mark.parametrize(("kind", "attention", "other"), [p for p in ARMS if "unfused" not in p.values])
def test_autocast_computes_in_bf16_and_the_loss_in_fp32(kind: str, attention: str, other: str) -> None:
    model, ids = build(kind, attention, other), tokens()
    with torch.no_grad():
        reference = model(ids, labels=ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(ids, labels=ids)
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(reference.loss.item(), rel=0.02)
    output.loss.backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_it_compiles_whole_and_for_more_than_one_length(kind: str) -> None:
    model = build(kind)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for length in (CONTEXT, 17):
        ids = tokens(2, length)
        expected, actual = model(ids, shift_labels=ids).loss, compiled(ids, shift_labels=ids).loss
        assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        actual.backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "attention", "other"), ARMS)
def test_arms_agree_on_a_gpu(kind: str, attention: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    config, ids = config_of(kind), tokens().cuda()
    torch.manual_seed(5)
    stock = Transformer(config, ops_of(config, "native", "native")).cuda()
    model = Transformer(config, ops_of(config, attention, other)).cuda()
    model.load_state_dict(stock.state_dict())
    expected, actual = stock(ids, shift_labels=ids).loss, model(ids, shift_labels=ids).loss
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    actual.backward()
    for (name, a), b in zip(stock.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-3 * a.grad.abs().max().item(), msg=name)


def test_native_is_the_default_and_equals_stock_pytorch() -> None:
    model, ids = build("gelu"), tokens()
    assert model.ops.attention is SLOTS["attention"].implementation("native").function
    assert model.layers[0].mlp.function is SLOTS["mlp"].implementation("native").function
    with torch.no_grad():
        hidden = model.layers[0].mlp(torch.ones(1, 3, 48))
        mlp = model.layers[0].mlp
        assert torch.equal(hidden, mlp.down(F.gelu(mlp.up(torch.ones(1, 3, 48)))))
    assert model(ids).loss is None
