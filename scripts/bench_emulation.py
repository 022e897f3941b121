"""What emulation costs: step time and peak memory of gpt_tiny under each low-precision recipe over bf16_mixed, in one process.

    python scripts/bench_emulation.py [--threads 1] [--rounds 8] [--steps 2] [--recipes ...] [--model gpt_tiny]

All arms live at once and take turns, a few steps each, round after round; the figure is the median over rounds of (arm / bf16_mixed) in CPU
time of the whole process, so that a noisy neighbour meets all arms alike. The A/A arm (bf16_mixed a second time) says how much is noise.
Compile time is measured apart, as the wall time of the first two steps. Memory is the peak, over one step, of the bytes of live storages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from megatron.core import parallel_state

from mpbridge.config.container import ConfigContainer
from mpbridge.devices import device_layer
from mpbridge.engines.parallel import start_process_group, stop_process_group
from mpbridge.engines.registry import build_engine

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "gpt_tiny.yaml"
RECIPES = {
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
LIMITS = {"delayed": 1.35, "tensorwise": 1.35, "blockwise": 1.45, "mxfp8": 1.6, "nvfp4": 2.0}
"""Of issue 5."""


def peak_of(step: Callable[[], object]) -> int:
    """Peak of the bytes that `step` allocates above what lives before it, by torch's own allocation records (compiled kernels included)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def batches(micro: int, seq: int, vocabulary: int = 256) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of random bytes."""
    generator = torch.Generator().manual_seed(0)
    while True:
        text = torch.randint(0, vocabulary, (micro, seq + 1), generator=generator)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": torch.arange(seq).expand(micro, seq),
            "loss_mask": torch.ones(micro, seq),
        }


class Arm:
    """One engine of a recipe, ready to step."""

    def __init__(self, recipe: str, micro: int) -> None:
        # every layer quantized, so that recipes with high-precision edges compare with those without
        full = [] if recipe == "bf16_mixed" else ["mixed_precision.first_last_layers_bf16=false"]
        overrides = [f"mixed_precision={recipe}", *full, "emulate=true", f"train.micro_batch_size={micro}"]
        self.run = ConfigContainer.load(CONFIG, overrides).resolved()
        self.microbatches = self.run.train["global_batch_size"] // micro
        self.data = batches(micro, self.run.facts.shape.seq_length)
        # an engine sets these up and another may not: engines are meant to follow each other, here they stand side by side
        parallel_state._GLOBAL_MEMORY_BUFFER = parallel_state._GLOBAL_SYMMETRIC_MEMORY_BUFFER = None
        self.engine: Any = build_engine(self.run)
        self.emulation = getattr(self.engine, "emulation", None)

    def step(self) -> float:
        """One optimizer step; the loss."""
        return self.engine.train_step(self.data, microbatches=self.microbatches).loss

    def quantized(self) -> int:
        """Linears under emulation."""
        return 0 if self.emulation is None else len(self.emulation.plugs)


def rounds(arms: dict[str, Arm], count: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds a step of every arm, one value a round."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(count):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.process_time()
            for _ in range(steps):
                arms[name].step()
            seconds[name].append((time.process_time() - began) / steps)
    return seconds


def resident(arm: Arm) -> int:
    """Bytes that live between steps: parameters, gradients and optimizer state, each storage once."""
    storages = {live.tensor.untyped_storage()._cdata: live.tensor.untyped_storage().nbytes() for live in arm.engine.tensors()}
    return sum(storages.values())


def peak(arm: Arm) -> int:
    """Resident bytes and the peak of what one step adds to them."""
    if arm.emulation:
        arm.emulation.step_begin()  # frees the cached weights: they count into the step that makes them
    return resident(arm) + peak_of(arm.step)


def main() -> None:
    """Prints the table, writes --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    start_process_group(cuda=False)
    table: dict[str, dict[str, float]] = {}
    with device_layer(cuda=False):
        arms = {"bf16": Arm("bf16_mixed", args.micro), "bf16 again": Arm("bf16_mixed", args.micro)}
        compiling = {}
        for name in args.recipes:
            arms[name] = Arm(RECIPES[name], args.micro)
            began = time.perf_counter()
            arms[name].step(), arms[name].step()
            compiling[name] = time.perf_counter() - began
            print(f"{name}: {arms[name].quantized()} linears quantized, first two steps {compiling[name]:.1f} s", flush=True)
        rounds(arms, 1, 1)
        seconds = rounds(arms, args.rounds, args.steps)
        base = peak(arms["bf16"])
        for name, arm in arms.items():
            ratio = statistics.median(own / bf16 for own, bf16 in zip(seconds[name], seconds["bf16"], strict=True))
            table[name] = {
                "seconds": statistics.median(seconds[name]),
                "ratio": ratio,
                "bytes": peak(arm) / base,
                "compile": compiling.get(name, 0.0),
            }
    print(f"{'arm':<12} {'CPU s/step':>10} {'of bf16':>8} {'limit':>6} {'memory':>7} {'compile s':>9}")
    for name, row in table.items():
        limit = f"{LIMITS[name]:.2f}" if name in LIMITS else ""
        print(f"{name:<12} {row['seconds']:>10.3f} {row['ratio']:>8.3f} {limit:>6} {row['bytes']:>7.3f} {row['compile']:>9.1f}")
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "micro": args.micro, "arms": table}, indent=1))
    stop_process_group()


if __name__ == "__main__":
    main()
