"""Speed and memory of every recipe that this GPU runs natively, against a bare megatron-core loop and against the chip's own matmul.

    python scripts/bench_gpu.py [--shapes 1.2b 8b] [--recipes NAME ...] [--rounds 2] [--steps 10] [--out report.json]

Arms take turns, round after round, each built, warmed up, timed with CUDA events and torn down; the figure of an arm is the median over rounds. The ceiling is
a large BF16 matmul measured in the same call, on random data. Random tokens: speed does not depend on the text.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# megatron-core wants one connection for its overlaps; set before CUDA starts
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import itertools

import torch
from bare import BareLoop

from mpbridge.checks.probe import installed, this_machine
from mpbridge.config.container import ConfigContainer
from mpbridge.engines.parallel import ModelParallel, start_process_group, stop_process_group
from mpbridge.engines.registry import build_engine
from mpbridge.train.flops import flops_per_token

COMMON = {
    "gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False, "normalization": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "position_embedding_type": "rope", "share_embeddings_and_output_weights": False, "vocab_size": 32768, "bias_dropout_fusion": True, "apply_rope_fusion": True,
    "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1.2b": COMMON | {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 5632},
    # the layers of an 8B model, as many as leave room for a micro-batch of two
    "8b": COMMON | {"num_layers": 12, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 14336},
}
SEQUENCE = 4096
MICRO_BATCH = {"1.2b": 4, "8b": 2}
RECIPES = ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_subchannel_scaling_mixed")


def resolved(shape: str, recipe: str, *, model: dict[str, Any] | None = None) -> Any:
    """The run of one arm."""
    container = ConfigContainer(
        mixed_precision=recipe,
        model=SHAPES[shape] | (model or {}),
        optimizer={"optimizer": "adam", "lr": 1e-4, "weight_decay": 0.1, "clip_grad": 1.0},
        ddp={"use_distributed_optimizer": True},
        train={"train_iters": 1000, "micro_batch_size": MICRO_BATCH[shape], "global_batch_size": MICRO_BATCH[shape]},
        data={"seq_length": SEQUENCE},
    )
    return container.resolved(world_size=1, machine=this_machine(), versions=installed())


def tokens(shape: str, vocab: int) -> Iterator[dict[str, torch.Tensor]]:
    """Random micro-batches, made on the GPU once: the feed is not what is measured."""
    size = (MICRO_BATCH[shape], SEQUENCE + 1)
    batches = []
    for seed in range(8):
        ids = torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(seed)).cuda()
        positions = torch.arange(SEQUENCE, device="cuda")[None].expand(size[0], -1)
        batches.append({"tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": positions, "loss_mask": torch.ones_like(ids[:, 1:], dtype=torch.float32)})
    while True:
        yield from batches


class Ours:
    """The engine, stepped as the training loop steps it."""

    def __init__(self, run: Any, data: Iterator[Any]) -> None:
        self.engine, self.data = build_engine(run), data

    def step(self) -> float:
        """One step; the loss."""
        return self.engine.train_step(self.data, microbatches=1).loss

    def close(self) -> None:
        """Frees everything."""
        self.engine.close()


class Bare:
    """The same configs in megatron-core's hands alone."""

    def __init__(self, run: Any, data: Iterator[Any]) -> None:
        self.parallel = ModelParallel(run.facts.parallel, seed=1234)
        self.loop: Any = BareLoop(run, data, cuda=True)

    def step(self) -> float:
        """One step; the loss."""
        return float(self.loop.step())

    def close(self) -> None:
        """Frees everything."""
        self.loop = None
        self.parallel.stop()


def measure(make: Any, *, warm: int, steps: int) -> dict[str, float]:
    """Milliseconds a step (median), peak bytes, seconds to the first step and the last loss."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    arm = make()
    try:
        loss = arm.step()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        for _ in range(warm - 1):
            arm.step()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            loss = arm.step()
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return {"ms": statistics.median(times), "peak_bytes": float(torch.cuda.max_memory_allocated()), "first_step_s": first, "loss": loss}
    finally:
        arm.close()
        del arm
        gc.collect()
        torch.cuda.empty_cache()


def ceiling(size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a BF16 matmul of `size` cubed on random data, the best of three."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a @ b
        start.record()
        for _ in range(repeats):
            a @ b
        stop.record()
        torch.cuda.synchronize()
        best = max(best, repeats * 2 * size**3 / (start.elapsed_time(stop) / 1e3))
    return best


def bench(shape: str, recipes: tuple[str, ...], rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Every arm of one shape, in turns."""
    runs = {name: resolved(shape, name) for name in recipes}
    per_token = flops_per_token(runs[recipes[0]].facts.shape)
    vocab = int(SHAPES[shape]["vocab_size"])
    arms: dict[str, Any] = {name: lambda run=run: Ours(run, tokens(shape, vocab)) for name, run in runs.items()}
    arms["bare megatron-core, " + recipes[0]] = lambda: Bare(runs[recipes[0]], tokens(shape, vocab))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for turn in range(rounds):
        names = list(arms) if turn % 2 == 0 else list(arms)[::-1]
        for name in names:
            found[name].append(measure(arms[name], warm=3, steps=steps))
    table = {}
    for name, rows in found.items():
        milliseconds = statistics.median(row["ms"] for row in rows)
        rate = MICRO_BATCH[shape] * SEQUENCE / (milliseconds / 1e3)
        table[name] = {
            "tokens_per_s": rate,
            "model_flops_per_s": rate * per_token,
            "peak_gib": max(row["peak_bytes"] for row in rows) / 2**30,
            "first_step_s": rows[0]["first_step_s"],
            "loss": rows[-1]["loss"],
        }
    return table


def main() -> None:
    """Runs, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu.py needs a CUDA device; there is none here")
    start_process_group(True)
    imports = time.perf_counter() - STARTED
    peak = ceiling()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "versions": {k: getattr(installed(), k) for k in ("torch", "cuda", "transformer_engine", "megatron_core")},
        "date": time.strftime("%Y-%m-%d"), "matmul_tflops": peak / 1e12, "import_s": imports, "shapes": {},
    }  # fmt: skip
    print(f"{report['device']}, {report['versions']}, BF16 matmul {peak / 1e12:.0f} TFLOP/s, imports {imports:.1f} s")
    for shape in args.shapes:
        table = report["shapes"][shape] = bench(shape, tuple(args.recipes), args.rounds, args.steps)
        base = table[args.recipes[0]]["tokens_per_s"]
        print(f"\n{shape}: sequence {SEQUENCE}, micro-batch {MICRO_BATCH[shape]}")
        for name, row in table.items():
            print(
                f"  {name:48} {row['tokens_per_s']:9.0f} tok/s  {row['model_flops_per_s'] / 1e12:6.0f} TFLOP/s  {row['model_flops_per_s'] / peak:5.1%} of matmul"
                f"  x{row['tokens_per_s'] / base:.3f}  {row['peak_gib']:6.1f} GiB  first step {row['first_step_s']:.1f} s"
            )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    stop_process_group()


if __name__ == "__main__":
    main()
