from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fusedops
from engine import compilation
from engine.arms import Arm, arms_of, compiled, operator_set
from engine.compilation import compile_model, compiling
from engine.config import CompileConfig, OpsConfig, TrainConfig
from engine.errors import RunError
from engine.operators import operator_table
from engine.step import make_stepper
from fusedops.slots import Implementation

AOT_EAGER = CompileConfig(mode="default", backend="aot_eager")
SLOTS = ("activation",)
CPU = torch.device("cpu")
needs_cpp = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++")), reason="Inductor needs a C++ compiler on a CPU"
)


def compiled_arm(name="fused", settings=AOT_EAGER):
    return compiled(operator_set(name, SLOTS), settings)


@pytest.mark.parametrize(
    ("ops", "baseline", "settings", "names", "first"),
    [
        ("fused", "native", CompileConfig(), ["native", "fused"], "native"),
        ("fused", "native", CompileConfig("default"), ["native+compile", "fused+compile"], "native+compile"),
        ("native", "native", CompileConfig("default"), ["native+compile"], "native+compile"),
        ("fused", "none", CompileConfig("reduce_overhead"), ["fused+reduce_overhead"], None),
        (
            "fused",
            "native",
            CompileConfig("max_autotune", "both"),
            ["native", "fused", "native+max_autotune", "fused+max_autotune"],
            "native",
        ),
        ("native", "native", CompileConfig("default", "both"), ["native", "native+compile"], "native"),
        ("fused", "none", CompileConfig("none", "both"), ["fused"], None),
    ],
)
def test_arms_are_operator_sets_and_a_compile_mode(ops, baseline, settings, names, first):
    arms, base = arms_of(OpsConfig(set=ops), baseline, SLOTS, settings)
    assert [arm.name for arm in arms] == names and base == first
    assert [arm.compile_mode for arm in arms] == [settings.mode if "+" in name else "none" for name in names]


def test_a_compiled_arm_trains_as_the_uncompiled_one(toy_task, compare):
    train = TrainConfig(log_every=2, eval_every=2, accumulation=2, device="cpu")
    comparison = compare(toy_task(steps=6), train=train)
    comparison.arms += [compiled(arm, AOT_EAGER) for arm in comparison.arms]
    comparison.run()
    expected = comparison.trainings["native"]
    for name in ("fused", "native+compile", "fused+compile"):
        found = comparison.trainings[name]
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
        losses = ([metrics["loss"] for _, metrics in training.validation] for training in (found, expected))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for name in ("native+compile", "fused+compile"):
        log = comparison.compilation[name].as_dict()
        assert log["seconds"] > 0 and log["graphs"] >= 2 and log["training_recompiles"] == 0
    assert comparison.compilation["fused"].as_dict()["graphs"] == 0
    assert len(comparison.seconds_per_step) == 4
    rows = comparison.operators["fused+compile"]
    assert [(row["operator"], row["path"], row["calls_per_step"]) for row in rows] == [
        ("fusedops::silu_mul", "aot_eager", 2),  # two batches a step
        ("fusedops::silu_mul_backward", "aot_eager", 2),
    ]


@needs_cpp
@pytest.mark.slow
def test_inductor_takes_over_the_pointwise_operator(toy_task, compare):
    comparison = compare(toy_task(steps=4), ("native",))
    comparison.arms.append(compiled_arm(settings=CompileConfig("default")))
    comparison.run()
    eager, fused = (comparison.trainings[arm.name].losses for arm in comparison.arms)
    torch.testing.assert_close(fused, eager, rtol=1e-5, atol=0)
    assert {row["path"] for row in comparison.operators["fused+compile"]} == {"inductor"}
    assert comparison.compilation["fused+compile"].training_recompiles == 0


@pytest.mark.parametrize(
    ("mode", "device", "graphs", "asked"),
    [
        ("default", "cuda", True, "default"),
        ("reduce_overhead", "cuda", True, "reduce-overhead"),
        ("reduce_overhead", "cuda", False, "default"),
        ("reduce_overhead", "cpu", True, "default"),
        ("max_autotune", "cuda", True, "max-autotune"),
        ("max_autotune", "cuda", False, "max-autotune-no-cudagraphs"),
        ("max_autotune", "cpu", True, "max-autotune-no-cudagraphs"),
    ],
)
def test_modes_are_torch_compiles_and_graphs_a_gpus(mode, device, graphs, asked):
    given = {}
    model, arm = torch.nn.Linear(1, 1), Arm("fused", (), mode)
    compile_model(lambda model, **options: given.update(options), model, arm, torch.device(device), graphs)
    assert given == {"backend": "inductor", "mode": asked}
    assert compilation.is_graphed(model) == (asked in ("reduce-overhead", "max-autotune"))


def test_checkpoints_of_compiled_and_plain_models_are_the_same(toy_task, compare):
    comparison = compare(toy_task())
    plain, other = comparison.build(comparison.arms[1]), comparison.build(compiled_arm())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    batch = comparison.task.batch(0)
    with compiling([compiled_arm()]):
        expected, _ = comparison.task.loss(other, batch)
        plain.load_state_dict(other.state_dict(), strict=True)
        torch.testing.assert_close(comparison.task.loss(plain, batch)[0], expected)
        other.load_state_dict({name: torch.zeros_like(t) for name, t in plain.state_dict().items()}, strict=True)
        torch.testing.assert_close(comparison.task.loss(other, batch)[0], batch["y"].square().mean())


def test_a_step_of_another_shape_is_a_recompilation(toy_task, compare):
    comparison = compare(toy_task())
    stepper = make_stepper(
        comparison.task, comparison.build(compiled_arm()), comparison.task.phases()[0], comparison.train, CPU
    )
    with compiling([compiled_arm()]) as log:
        for _ in range(3):
            stepper(comparison.task.batch(0))
        assert log.graphs == 1 and log.training_recompiles == 0
        stepper({name: tensor[:4] for name, tensor in comparison.task.batch(1).items()})
        assert log.training_recompiles == 1
        log.drop_code()
        stepper(comparison.task.batch(0))
        assert log.training_recompiles == 1 and log.graphs == 3


def test_more_versions_than_the_limit_are_an_error(toy_task, compare, monkeypatch):
    monkeypatch.setattr(compilation, "RECOMPILE_LIMIT", 1)
    comparison = compare(toy_task())
    comparison.arms = [compiled_arm()]
    with pytest.raises(RunError, match="compile=default: FailOnRecompileLimitHit"):
        comparison.run()


def test_what_cannot_be_compiled_is_named_with_a_way_out(toy_task, compare):
    def broken(graph, inputs):
        raise ValueError("no such thing")

    comparison = compare(toy_task())
    comparison.arms = [replace(compiled_arm(), backend=broken)]
    with pytest.raises(RunError, match=r"(?s)compile=default: BackendCompilerFailed: .*no such thing.*compile=none"):
        comparison.run()


def test_the_code_is_dropped_at_the_end(toy_task, compare):
    comparison = compare(toy_task())
    model = comparison.build(compiled_arm())
    for _ in range(2):
        with compiling([compiled_arm()]) as log:
            comparison.task.loss(model, comparison.task.batch(0))
        assert log.graphs == 1


# ---------------------------------------------------------------------------------------------------------------------
# Operators of a compiled arm


def table(function, operators=("fusedops::silu_mul", "fusedops::silu_mul_backward")):
    """The operators of a compiled step that calls the function twice."""
    arm = Arm("fused+compile", (Implementation("activation", "fused", function, operators),), "default", "aot_eager")
    gate, up = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    call = torch.compile(lambda: sum(function(gate, up * n).sum() for n in (1, 2)), backend="aot_eager")
    with compiling([arm]):
        rows = operator_table(arm, lambda: call().backward())
    return {(row["operator"], row["path"]): row["calls_per_step"] for row in rows}


def test_an_operator_that_stays_opaque_shows_its_own_path():
    assert table(lambda gate, up: fusedops.silu_mul(gate, up, opaque=True)) == {
        ("fusedops::silu_mul", "cpu"): 2,
        ("fusedops::silu_mul_backward", "cpu"): 2,
    }


def test_stock_operators_that_the_compiler_replaced_are_its_own():
    def attention(gate, up):
        return F.scaled_dot_product_attention(gate[None, None], up[None, None], up[None, None])

    shown = table(attention, ("aten::scaled_dot_product_attention",))
    assert shown == {("aten::scaled_dot_product_attention", "aot_eager"): 2}


def test_an_operator_that_vanishes_when_compiled_is_an_error():
    def vanishing(gate, up):
        return F.silu(gate) * up if torch.compiler.is_compiling() else fusedops.silu_mul(gate, up)

    from fusedops import counting

    counting._executed.pop(("silu_mul", "inductor"), None)  # of other tests
    with pytest.raises(RunError, match="fusedops::silu_mul ran 2 times in a training step and never in a compiled one"):
        table(vanishing)


# ---------------------------------------------------------------------------------------------------------------------
# CUDA graphs


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_cuda_graphs_train_as_eager_does(toy_task, compare, accumulation):
    train = TrainConfig(log_every=4, eval_every=3, accumulation=accumulation, device="cuda")
    comparison = compare(toy_task(steps=12), ("native",), train=train)
    settings = CompileConfig("reduce_overhead")
    comparison.arms += [compiled(operator_set(name, SLOTS), settings) for name in ("native", "fused")]
    comparison.run()
    expected = comparison.trainings["native"]
    for name in ("native+reduce_overhead", "fused+reduce_overhead"):
        found = comparison.trainings[name]
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=1e-6)
        assert found.validation[-1][1]["loss"] == pytest.approx(expected.validation[-1][1]["loss"], rel=1e-4)
        assert comparison.compilation[name].training_recompiles == 0


@pytest.mark.gpu
@pytest.mark.slow
def test_every_replay_of_a_cuda_graph_drops_other_elements():
    from fusedops.slots import SLOTS as ALL

    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

        def forward(self, x):
            up, down = self.up, self.down
            function = ALL["mlp"].implementation("fused").function
            return function(x, up.weight, up.bias, down.weight, down.bias, 0.5, "none", True).square().mean()

    device = torch.device("cuda")
    arm = Arm("fused+reduce_overhead", (), "reduce_overhead")
    model, x = Mlp().to(device), torch.randn(128, 64, device=device)
    compile_model(lambda model, **options: model.compile(**options), model, arm, device)
    assert compilation.is_graphed(model)
    losses = []
    with compiling([arm]):
        for _ in range(8):
            compilation.begin_step(model)
            loss = model(x)
            loss.backward()
            losses.append(float(loss))
            model.zero_grad(set_to_none=True)
    assert all(a != b for a, b in itertools.combinations(losses, 2))
