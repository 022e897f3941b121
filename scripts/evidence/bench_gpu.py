"""Speed and memory of every recipe that this GPU runs natively, compared with a bare megatron-core loop and with the GPU's own matmul.

    python scripts/evidence/bench_gpu.py [--shapes 1.2b 8b] [--recipes NAME ...] [--rounds 2] [--steps 10] [--set KEY=VALUE ...] [--profile] [--out report.json]

Arms take turns, round after round, each built, warmed up, timed over all its steps and torn down; the figure of an arm is the median over rounds. The ceiling is
a large BF16 matmul measured in the same call, on random data. Random tokens: speed does not depend on the text. --set changes every arm
(model.cuda_graph_impl=transformer_engine). --profile adds, for each arm, where one step's GPU time goes, by kind of kernel. The shape "smoke" is for a CPU: it only
shows that this script works; its speeds mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from bare import BareLoop

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.engines.parallel import ModelParallel, start_process_group, stop_process_group
from mpbridge.backend.engines.registry import build_engine
from mpbridge.common.probe import installed, this_machine
from mpbridge.planning.estimate.gemms import whole_square_flops_per_token
from mpbridge.planning.memory.by_role import memory
from mpbridge.settings.container import ConfigContainer

COMMON = {
    "gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False, "normalization": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "position_embedding_type": "rope", "share_embeddings_and_output_weights": False, "vocab_size": 32768, "bias_dropout_fusion": True, "apply_rope_fusion": True,
    "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1.2b": COMMON | {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 5632},
    # the layers of an 8B model, as many as leave room for a micro-batch of two
    "8b": COMMON
    | {
        "num_layers": 12,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
    },
    "smoke": COMMON
    | {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 256,
        "vocab_size": 256,
        "apply_rope_fusion": False,
        "bias_dropout_fusion": False,
        "cross_entropy_loss_fusion": False,
    },
}
SEQUENCE = {"1.2b": 4096, "8b": 4096, "smoke": 64}
MICRO_BATCH = {"1.2b": 4, "8b": 2, "smoke": 2}
CUDA = torch.cuda.is_available()
KINDS = (
    ("GEMM", ("gemm", "cutlass", "cublas", "xmma", "nvjet", "matmul", "::mm")), ("attention", ("attention", "flash", "fmha", "cudnn", "bmm")),
    ("quantization", ("quantize", "cast_transpose", "amax", "scale_inv", "transpose")), ("norm", ("norm",)), ("optimizer", ("adam", "multi_tensor")),
    ("copies", ("memcpy", "memset", "copy")), ("elementwise", ("elementwise", "vectorized", "add", "mul", "silu", "gelu", "swiglu", "softmax", "reduce")),
)  # fmt: skip
"""Kind of kernel -> words in the names of its kernels, first match wins."""
RECIPES = (
    "bf16_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
)


def resolved(shape: str, recipe: str, changes: tuple[str, ...] = ()) -> Any:
    """The run of one arm."""
    settings: dict[str, Any] = {
        "mixed_precision": recipe, "optimizer.optimizer": "adam", "optimizer.lr": 1e-4, "optimizer.weight_decay": 0.1, "optimizer.clip_grad": 1.0,
        "ddp.use_distributed_optimizer": True, "train.train_iters": 1000, "train.micro_batch_size": MICRO_BATCH[shape],
        "train.global_batch_size": MICRO_BATCH[shape], "data.seq_length": SEQUENCE[shape],
    } | {f"model.{name}": value for name, value in SHAPES[shape].items()}  # fmt: skip
    container = ConfigContainer.load(
        None, [*(f"{name}={json.dumps(value)}" for name, value in settings.items()), *changes]
    )
    return container.resolved(world_size=1, machine=this_machine(), versions=installed())


def tokens(shape: str, vocab: int) -> Iterator[dict[str, torch.Tensor]]:
    """Random micro-batches, made on the GPU once: the data feed is not measured."""
    size, device = (MICRO_BATCH[shape], SEQUENCE[shape] + 1), "cuda" if CUDA else "cpu"
    batches = []
    for seed in range(8):
        ids = torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(seed)).to(device)
        positions = torch.arange(SEQUENCE[shape], device=device)[None].expand(size[0], -1)
        batches.append(
            {
                "tokens": ids[:, :-1],
                "labels": ids[:, 1:],
                "position_ids": positions,
                "loss_mask": torch.ones_like(ids[:, 1:], dtype=torch.float32),
            }
        )
    while True:
        yield from batches


class Ours:
    """The engine, stepped like the training loop."""

    def __init__(self, run: Any, data: Iterator[Any]) -> None:
        self.engine, self.data = build_engine(run), data

    def step(self) -> float:
        """One step; the loss."""
        return self.engine.train_step(self.data, microbatches=1).loss

    def close(self) -> None:
        """Frees everything."""
        self.engine.close()


class Bare:
    """The same configs with megatron-core alone."""

    def __init__(self, run: Any, data: Iterator[Any]) -> None:
        self.parallel = ModelParallel(run.facts.parallel, seed=1234)
        self.loop: Any = BareLoop(run, data, cuda=CUDA)

    def step(self) -> float:
        """One step; the loss."""
        return float(self.loop.step())

    def close(self) -> None:
        """Frees everything."""
        self.loop = None
        self.parallel.stop()


def synchronize() -> None:
    """Waits for the GPU."""
    if CUDA:
        torch.cuda.synchronize()


def free() -> None:
    """Frees memory and resets its peak."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(make: Any, *, warm: int, steps: int, profile: bool) -> dict[str, Any]:
    """Milliseconds per step, peak bytes, seconds to build and from then to the end of the first step, the last loss; with `profile`, milliseconds by kind of kernel."""
    free()
    began = time.perf_counter()
    arm = make()
    try:
        built = time.perf_counter()
        arm.step()
        synchronize()
        first = time.perf_counter()
        for _ in range(warm - 1):
            arm.step()
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            loss = arm.step()
        synchronize()
        milliseconds = (time.perf_counter() - start) * 1e3 / steps
        peak = float(torch.cuda.max_memory_allocated()) if CUDA else 0.0
        return {"ms": milliseconds, "peak_bytes": peak, "build_s": built - began, "first_step_s": first - built, "loss": loss,
                "kinds": by_kind(arm) if profile else {}}  # fmt: skip
    finally:
        arm.close()
        del arm
        free()


def by_kind(arm: Any) -> dict[str, float]:
    """Milliseconds of one step by kind of kernel, and the five longest kernels by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]) as seen:
        arm.step()
        synchronize()
    rows = [
        (row.key, (row.self_device_time_total if CUDA else row.self_cpu_time_total) / 1e3)
        for row in seen.key_averages()
    ]
    found: dict[str, float] = {}
    for name, milliseconds in rows:
        kind = next((kind for kind, words in KINDS if any(word in name.lower() for word in words)), "other")
        found[kind] = found.get(kind, 0.0) + milliseconds
    longest = sorted(rows, key=lambda row: -row[1])[:5]
    return found | {f"longest: {name[:80]}": milliseconds for name, milliseconds in longest}


def ceiling(size: int, repeats: int = 20) -> float:
    """FLOP/s of a BF16 matmul of `size` cubed on random data, the best of three."""
    a, b = (torch.randn(size, size, device="cuda" if CUDA else "cpu", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(3):
        a @ b
        synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ b
        synchronize()
        best = max(best, repeats * 2 * size**3 / (time.perf_counter() - start))
    return best


def bench(shape: str, args: argparse.Namespace, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Measures every arm of one shape, in turns; what was measured so far is in `found` and its file."""
    recipes = args.recipes
    runs = {name: resolved(shape, name, tuple(args.set)) for name in recipes}
    per_token = whole_square_flops_per_token(runs[recipes[0]].facts.shape)
    vocab = int(SHAPES[shape]["vocab_size"])
    arms: dict[str, Any] = {name: lambda run=run: Ours(run, tokens(shape, vocab)) for name, run in runs.items()}
    arms["bare megatron-core, " + recipes[0]] = lambda: Bare(runs[recipes[0]], tokens(shape, vocab))
    predicted = {name: memory(run.policy, run.facts).total / 2**30 for name, run in runs.items()}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for turn in range(args.rounds):
        names = list(arms) if turn % 2 == 0 else list(arms)[::-1]
        for name in names:
            rows[name].append(measure(arms[name], warm=3, steps=args.steps, profile=args.profile and turn == 0))
            found["shapes"][shape] = table_of(shape, rows, predicted, per_token)
            write(found, args.out)
    return table_of(shape, rows, predicted, per_token)


def table_of(shape: str, measured: dict[str, Any], predicted: dict[str, float], per_token: float) -> dict[str, Any]:
    """Arm -> its figures, for the arms that were measured."""
    table = {}
    for name, rows in ((name, rows) for name, rows in measured.items() if rows):
        milliseconds = statistics.median(row["ms"] for row in rows)
        rate = MICRO_BATCH[shape] * SEQUENCE[shape] / (milliseconds / 1e3)
        table[name] = {
            "tokens_per_s": rate,
            "model_flops_per_s": rate * per_token,
            "peak_gib": max(row["peak_bytes"] for row in rows) / 2**30,
            "predicted_gib": predicted.get(name),
            "build_s": rows[0]["build_s"],
            "first_step_s": rows[0]["first_step_s"],
            "loss": rows[-1]["loss"],
            "kinds": rows[0]["kinds"],
        }
    return table


def main() -> None:
    """Runs the benchmark, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["1.2b", "8b"], choices=list(SHAPES))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not CUDA and args.shapes != ["smoke"]:
        sys.exit("bench_gpu.py needs a CUDA device; there is none here")
    imports = time.perf_counter() - STARTED
    with device_layer(CUDA, fused_adam=CpuFusedAdam):
        start_process_group(CUDA)
        report(args, imports)
        stop_process_group()


def report(args: argparse.Namespace, imports: float) -> None:
    """Measures, prints and writes."""
    communication = time.perf_counter() - STARTED - imports
    peak = ceiling(512 if args.shapes == ["smoke"] else 8192)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if CUDA else "CPU", "versions": {k: getattr(installed(), k) for k in ("torch", "cuda", "transformer_engine", "megatron_core")},
        "date": time.strftime("%Y-%m-%d"), "matmul_tflops": peak / 1e12, "import_s": imports, "process_group_s": communication, "shapes": {},
    }  # fmt: skip
    print(
        f"{found['device']}, {found['versions']}, BF16 matmul {peak / 1e12:.1f} TFLOP/s, imports {imports:.1f} s, process group {communication:.1f} s"
    )
    for shape in args.shapes:
        table = bench(shape, args, found)
        base = table[args.recipes[0]]["tokens_per_s"]
        print(f"\n{shape}: sequence {SEQUENCE[shape]}, micro-batch {MICRO_BATCH[shape]}")
        for name, row in table.items():
            print(
                f"  {name:48} {row['tokens_per_s']:9.0f} tok/s  {row['model_flops_per_s'] / 1e12:6.0f} TFLOP/s  {row['model_flops_per_s'] / peak:5.1%} of matmul"
                f"  x{row['tokens_per_s'] / base:.3f}  {row['peak_gib']:6.1f} GiB  built in {row['build_s']:.1f} s, first step {row['first_step_s']:.1f} s"
            )


def write(found: dict[str, Any], out: Path | None) -> None:
    """The figures so far, as JSON."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
