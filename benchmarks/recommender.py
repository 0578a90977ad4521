"""Time whole training steps of the recommender, stock against fused: python benchmarks/recommender.py [NAME ...]

200k_d64, 200k_d128_bags20, 1m_d128: a DLRM with 26 such tables and 13 dense features is trained on batches of 16,384
samples, by SGD on the tables and AdamW on the rest. The arms, timed in turn:

    bags, one_table                     stock: an F.embedding_bag a feature; or one of all tables put into one
    bags+compile, one_table+compile     the same under torch.compile
    fused, fused+compile                fusedops.embedding_aggregation and fusedops.optim.SGD

Ratios are to the better of bags and one_table. Beside the whole step stands the embedding step alone: look-up, cross,
gradient and update, and GB/s of the bytes that it must touch (models/recommender/traffic.py); the peak memory of a
training step of each arm; and how long its kernels take together, which is what is left where the host keeps up.

auc: native and fused are trained on the synthetic click log, and their AUC compared over a million samples (on a CPU
131,072); and native without the cross, and without embeddings.

    --quick         small tables and batches: shows that it works; nothing is written
    --rounds N      rounds of the timing passes (default 9)

Each result goes to benchmarks/results/<gpu>/recommender_NAME.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script's path is its folder

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402

from benchmarks.training import RESULTS, folder_of  # noqa: E402
from engine import timing  # noqa: E402
from engine.comparison import choose_device, device_name  # noqa: E402
from engine.config import TrainConfig  # noqa: E402
from engine.files import write_atomically  # noqa: E402
from engine.loop import matmul_precision  # noqa: E402
from engine.profiling import STEPS as PROFILED_STEPS  # noqa: E402
from engine.profiling import profile_steps  # noqa: E402
from engine.signals import StopSignal  # noqa: E402
from engine.step import Stepper, to_device  # noqa: E402
from fusedops import optim  # noqa: E402
from fusedops.benchmark.environment import versions  # noqa: E402
from fusedops.operators.embedding_bags import batch_size  # noqa: E402
from fusedops.operators.embedding_cross import crossed  # noqa: E402
from fusedops.operators.embedding_hash import rows_of_ids  # noqa: E402
from fusedops.slots import SLOTS  # noqa: E402
from fusedops.slots.embedding import EmbeddingSpec, embedding_fused, embedding_native  # noqa: E402
from models.recommender import PRESETS, ClicksConfig, ModelConfig, Task  # noqa: E402
from models.recommender.model import Recommender, RecommenderOps  # noqa: E402
from models.recommender.traffic import bytes_touched, distinct_rows  # noqa: E402

FEATURES, DENSE = 26, 13
ALLOWED_AUC_DIFFERENCE = 0.0005


@dataclass(frozen=True)
class Workload:
    """Tables and batches. skew: exponent of the power law of the ids; 0 draws all alike."""

    rows: int
    width: int
    ids_per_bag: int
    skew: float = 0.0
    batch: int = 16_384


WORKLOADS = {
    "200k_d64": Workload(200_000, 64, 1),
    "200k_d128_bags20": Workload(200_000, 128, 20, skew=0.999),
    "1m_d128": Workload(1_000_000, 128, 1),
}


AUC = "auc"


def main() -> int:
    """Measure. Returns 1 where the arms' AUC differ by more than they may."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [*WORKLOADS, AUC]
    arguments.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(known)}")
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--out", type=Path, default=RESULTS, help="default: benchmarks/results")
    options = arguments.parse_args()
    for name in options.names:
        if name not in known:
            arguments.error(f"{name}: there is none of that name; there are: {', '.join(known)}")
    device, failed = choose_device("auto"), False
    folder = options.out / folder_of(device_name(device))
    with StopSignal() as stop, matmul_precision(False):
        for name in options.names or known:
            if name == AUC:
                found = compare_auc(device, options.quick, stop)
                print(json.dumps(found, indent=2))
                failed = abs(found["difference"]) > ALLOWED_AUC_DIFFERENCE
            else:
                workload = WORKLOADS[name]
                if options.quick:
                    workload = replace(workload, rows=workload.rows // 200, width=16, batch=512)
                found = measure(workload, device, options.rounds, stop)
                print_workload(name, found)
            origin = {
                "device": device_name(device),
                "versions": versions(),
                "command": f"python benchmarks/{shlex.join([Path(__file__).name, *sys.argv[1:]])}",
            }
            if not options.quick:
                path = folder / f"recommender_{name}.json"
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(origin | found, indent=2) + "\n")
                print(f"written to {path}", flush=True)
    return int(failed)


# ---------------------------------------------------------------------------------------------------------------------
# Arms


def embedding_one_table(rows: int) -> Callable[..., Tensor]:
    """The slot's function of a stock model whose tables, of so many rows each, are one: no wait for the GPU."""

    def embedding(
        tables: list[Tensor], ids: Tensor, offsets: Tensor, dense: Tensor | None, spec: EmbeddingSpec
    ) -> Tensor:
        count = len(spec.feature_tables)
        batch = batch_size(offsets, count)
        lengths = offsets[batch::batch] - offsets[:-1:batch]
        first = torch.arange(count, device=ids.device) * rows
        shifted = rows_of_ids(ids, rows, spec.hash) + torch.repeat_interleave(first, lengths, output_size=len(ids))
        pooled = bags(shifted, tables[0], offsets, spec.pooling).view(count, batch, -1)
        vectors = pooled.transpose(0, 1)
        if dense is not None:
            vectors = torch.cat([dense[:, None], vectors], 1)
        return crossed(vectors, dense is not None, spec.cross)

    return embedding


@torch.compiler.disable(reason="sparse gradients of embedding_bag")
def bags(rows: Tensor, table: Tensor, offsets: Tensor, pooling: str) -> Tensor:
    """The pooled vectors of every bag, [bags, D]."""
    return F.embedding_bag(rows, table, offsets, mode=pooling, sparse=True, include_last_offset=True)


@dataclass(frozen=True)
class Arm:
    """How an arm does what all do: the slot's function, its tables' optimizer, their number, and compilation."""

    embedding: Callable[..., Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    one_table: bool = False
    compiled: bool = False


def arms_of(workload: Workload) -> dict[str, Arm]:
    """The arms, stock ones first."""
    eager = {
        "bags": Arm(embedding_native, torch.optim.SGD),
        "one_table": Arm(embedding_one_table(workload.rows), torch.optim.SGD, one_table=True),
        "fused": Arm(embedding_fused, optim.SGD),
    }
    return eager | {f"{name}+compile": replace(arm, compiled=True) for name, arm in eager.items()}


class Steps:
    """A model of an arm, and the two things that are timed of it: the whole training step, and the embedding step.

    Neither takes the gradient's norm, for which stock sparse gradients would have to be coalesced: plain SGD needs not.
    """

    def __init__(self, arm: Arm, workload: Workload, batch: dict[str, Tensor], device: torch.device) -> None:
        torch.manual_seed(0)
        architecture = PRESETS["criteo"] | {"embedding_dim": workload.width, "pooling": "sum"}
        tables = [workload.rows * FEATURES] if arm.one_table else [workload.rows] * FEATURES
        with device:
            self.model = Recommender(
                architecture,
                DENSE,
                tables,
                RecommenderOps(arm.embedding),
                feature_tables=[0] * FEATURES if arm.one_table else None,
            )
        self._batch, self._function = batch, arm.embedding
        tables_of_model = list(self.model.tables)
        own = {id(table) for table in tables_of_model}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in own]
        self._tables = arm.optimizer(tables_of_model, lr=0.01)
        self._optimizers = [torch.optim.AdamW(others, lr=1e-3, fused=True), self._tables]
        self._vector = torch.randn(workload.batch, workload.width, device=device, requires_grad=True)
        self._look_up = self._embedding
        if arm.compiled:
            self.model.compile()
            self._look_up = torch.compile(self._embedding)
        with torch.no_grad():
            self._gradient = torch.randn_like(self._embedding())

    def whole(self) -> None:
        """Forward, loss, backward, update."""
        batch = self._batch
        logits = self.model(batch["dense"], batch["ids"], batch["offsets"])
        F.binary_cross_entropy_with_logits(logits, batch["labels"]).backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def embedding(self) -> None:
        """Look-up, cross, their gradient, update of the tables."""
        self._look_up().backward(self._gradient)
        self._tables.step()
        self._tables.zero_grad(set_to_none=True)
        self._vector.grad = None

    def _embedding(self) -> Tensor:
        batch, model = self._batch, self.model
        return self._function(list(model.tables), batch["ids"], batch["offsets"], self._vector, model.crossed)


def random_batch(workload: Workload, device: torch.device) -> dict[str, Tensor]:
    """A batch of raw ids: hashes of draws by the power law."""
    generator = torch.Generator().manual_seed(1)
    bags = FEATURES * workload.batch
    draws = torch.rand(bags * workload.ids_per_bag, generator=generator, dtype=torch.float64)
    if workload.skew:
        power = 1.0 - workload.skew
        draws = (1.0 + draws * ((workload.rows + 1.0) ** power - 1.0)) ** (1.0 / power) - 1.0
    else:
        draws = draws * workload.rows
    batch = {
        "dense": torch.randn(workload.batch, DENSE, generator=generator),
        "ids": draws.long() + workload.rows * torch.randint(0, 2**40, draws.shape, generator=generator),
        "offsets": torch.arange(bags + 1) * workload.ids_per_bag,
        "labels": (torch.rand(workload.batch, generator=generator) < 0.25).float(),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def measure(workload: Workload, device: torch.device, rounds: int, stop: StopSignal) -> dict[str, Any]:
    """Times of both steps, their ratios to the better stock arm, GB/s and peak memory."""
    batch, arms = random_batch(workload, device), arms_of(workload)
    distinct = distinct_rows(batch["ids"].cpu(), batch["offsets"].cpu(), [workload.rows] * FEATURES, "modulo")
    memory = {name: peak_memory(arm, workload, batch, device) for name, arm in arms.items()}
    steps = {name: Steps(arm, workload, batch, device) for name, arm in arms.items()}
    busy = {name: gpu_busy(step.whole, device) for name, step in steps.items()}
    pairs = (FEATURES + 1) * FEATURES // 2
    touched = bytes_touched(
        batch["ids"], batch["offsets"], distinct, workload.width, workload.batch * (workload.width + pairs)
    )
    found: dict[str, Any] = {"workload": asdict(workload), "distinct_rows": distinct, "bytes_touched": touched}
    for what in ("whole", "embedding"):
        seconds = timing.time_steps({name: getattr(step, what) for name, step in steps.items()}, rounds, device, stop)
        milliseconds = {name: timing.median_interval(values * 1e3) for name, values in seconds.items()}
        stock = min(("bags", "one_table"), key=lambda name: milliseconds[name].value)
        found[what] = {
            "better_stock": stock,
            "arms": {
                name: {
                    "ms": milliseconds[name].as_dict(),
                    "ratio": timing.speed_ratio(seconds[name], seconds[stock]).as_dict(),
                }
                for name in arms
            },
        }
    for name in arms:
        whole, apart = found["whole"]["arms"][name], found["embedding"]["arms"][name]
        whole["samples_per_s"] = workload.batch / whole["ms"]["value"] * 1e3
        whole["peak_memory_bytes"], whole["gpu_busy_ms"] = memory[name], busy[name]
        apart["share_of_step"] = apart["ms"]["value"] / whole["ms"]["value"]
        apart["gb_per_s"] = touched / apart["ms"]["value"] / 1e6
    del steps
    release(device)
    return found


def peak_memory(arm: Arm, workload: Workload, batch: dict[str, Tensor], device: torch.device) -> dict[str, int] | None:
    """The most memory allocated in a training step, and the tables' share of it; None on a CPU."""
    if device.type != "cuda":
        return None
    release(device)
    steps = Steps(arm, workload, batch, device)
    for _ in range(3):
        steps.whole()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    steps.whole()
    torch.cuda.synchronize(device)
    peak, tables = torch.cuda.max_memory_allocated(device), sum(table.nbytes for table in steps.model.tables)
    del steps
    release(device)
    return {"peak": peak, "tables": tables, "beyond_tables": peak - tables}


def gpu_busy(step: Callable[[], None], device: torch.device) -> float | None:
    """Milliseconds that a step's kernels and copies take on the GPU, by a profile; None on a CPU."""
    if device.type != "cuda":
        return None
    events = profile_steps(step, device).key_averages()
    on_gpu = (event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation)
    return sum(event.self_device_time_total for event in on_gpu) / PROFILED_STEPS / 1e3


def release(device: torch.device) -> None:
    """Give the memory of models that are gone back."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def print_workload(name: str, found: dict[str, Any]) -> None:
    """A line an arm."""
    print(f"\n{name}: {found['workload']}, {found['distinct_rows']:,} distinct rows")
    better = (found[what]["better_stock"] for what in ("whole", "embedding"))
    print("better stock arm: {}; in the embedding step {}".format(*better))
    header = f"{'arm':18} {'step ms':>9} {'ratio':>22} {'samples/s':>11}"
    print(f"{header} {'embedding ms':>12} {'ratio':>6} {'share':>6} {'GB/s':>7}  GPU busy ms, memory")
    for arm, whole in found["whole"]["arms"].items():
        apart, ratio = found["embedding"]["arms"][arm], whole["ratio"]
        interval = f"{ratio['value']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
        print(
            f"{arm:18} {whole['ms']['value']:9.3f} {interval:>22} {whole['samples_per_s']:11,.0f} "
            f"{apart['ms']['value']:12.3f} {apart['ratio']['value']:6.2f} {apart['share_of_step']:6.0%} "
            f"{apart['gb_per_s']:7.1f}"
            + (f"  {whole['gpu_busy_ms']:.3f} {whole['peak_memory_bytes']}" if whole["peak_memory_bytes"] else "")
        )


# ---------------------------------------------------------------------------------------------------------------------
# What is learnt


def clicks_task(device: torch.device, quick: bool, **model: Any) -> Task:
    """Synthetic clicks, a million samples to validate: tables of 200,000 rows on a GPU, train.py's default on a CPU."""
    on_gpu = device.type == "cuda" and not quick
    steps, batch, samples = (400, 16_384, 2**20) if on_gpu else (1_000, 1_024, 2**17)
    steps, batch, samples = (10, 256, 5_000) if quick else (steps, batch, samples)
    return Task(
        ModelConfig(preset="criteo" if on_gpu else "tiny", **model),
        ClicksConfig(validation_samples=samples, **({"max_ids": 200_000} if on_gpu else {})),
        steps=steps,
        batch_size=batch,
        eval_batch_size=16_384,
        learning_rate=2e-3,
        weight_decay=0.0,
        warmup_steps=steps // 20,
        min_lr_ratio=0.05,
        seed=0,
    )


def trained(tasks: dict[str, tuple[Task, str]], device: torch.device, stop: StopSignal) -> dict[str, dict[str, float]]:
    """Metrics after training each task with an implementation of the slot, all on the first one's batches."""
    train, steppers = TrainConfig(grad_clip=0.0), {}
    for name, (task, implementation) in tasks.items():
        torch.manual_seed(0)
        functions = {slot: SLOTS[slot].implementation(implementation).function for slot in task.slots}
        steppers[name] = Stepper(task, task.build(functions).to(device), task.phases()[0], train, device)
    source, _ = next(iter(tasks.values()))
    for step in range(source.steps):
        stop.check()
        batch = to_device(source.batch(step), device)
        for stepper in steppers.values():
            stepper(batch)
    held_out, found = [to_device(batch, device) for batch in source.validation()], {}
    with torch.no_grad():
        for name, stepper in steppers.items():
            found[name] = tasks[name][0].evaluate(stepper.model.eval(), held_out)
    return found


def compare_auc(device: torch.device, quick: bool, stop: StopSignal) -> dict[str, Any]:
    """AUC of native and fused, from the same weights on the same batches; and of native without some of its parts."""
    task = clicks_task(device, quick)
    tasks = {name: (task, name) for name in ("native", "fused")}
    without = {"cross": {"cross": "none"}, "embeddings": {"embeddings": False}}
    for part, keys in without.items():
        tasks[f"native without {part}"] = (clicks_task(device, quick, **keys), "native")
    found = trained(tasks, device, stop)
    aucs = {name: metrics["auc"] for name, metrics in found.items()}
    return {
        "task": task.describe(task.build({"embedding": embedding_native})),
        "metrics": found,
        "references": task.references(),
        "difference": aucs["fused"] - aucs["native"],
        "shortfall_without": {part: aucs["native"] - aucs[f"native without {part}"] for part in without},
    }


if __name__ == "__main__":
    sys.exit(main())
