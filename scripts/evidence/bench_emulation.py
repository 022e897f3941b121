"""Measures the cost of emulation: step time and peak memory of gpt_tiny under each low-precision recipe relative to bf16_mixed.

    python scripts/evidence/bench_emulation.py [--threads 1] [--rounds 8] [--recipes ...]      gpt_tiny under megatron-core
    python scripts/evidence/bench_emulation.py --plain [--threads 1] [--rounds 8]              a GPT of nn.Linear, beside torchao's emulated float8

Every arm is a separate process and they take turns, a step each, round after round, so that a noisy neighbour affects all arms alike; the
figure is the median over rounds of (arm / bf16) in CPU time of the arm's process. The second bf16 arm shows the noise. Compile time
is reported separately: the wall time of the first two steps. Memory is the peak, over one step, of the bytes of live storages.

`least` estimates the ratio that the bytes alone would cost: each operand read once and each copy of it that a GEMM reads written once, in BF16, at the
rate at which the bf16 arm copies tensors of 3 MB. torchao's bytes are not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
from mpbridge.backend.engines.registry import build_engine
from mpbridge.numerics import emulate_linears
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.settings.container import ConfigContainer

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml"
RECIPES = {
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
LIMITS = {"delayed": 1.35, "tensorwise": 1.35, "blockwise": 1.45, "mxfp8": 1.6, "nvfp4": 2.0}
"""Maximum cost ratio over bf16_mixed for each recipe."""


def peak_of(step: Callable[[], object]) -> int:
    """Peak bytes that `step` allocates beyond those allocated before it, by torch's own allocation records (compiled kernels included)."""
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


def moved(emulation: Any, tokens: int) -> int:
    """Bytes that quantizing the operands of a step's GEMMs moves at least."""
    count = 0
    for linear in emulation.plugged():
        outs, ins = linear.weight.shape
        for side, elements in (("x", tokens * ins), ("w", outs * ins), ("dy", tokens * outs)):
            count += elements * (2 if linear.plug.quantizer.shares_copies(side) else 3)
    return count * torch.bfloat16.itemsize


def seconds_per_byte(rows: int = 2048, columns: int = 768, repeats: int = 200) -> float:
    """CPU seconds of a byte read or written, where eight tensors of an operand's size are copied in turn."""
    pairs = [[torch.ones(rows, columns, dtype=torch.bfloat16) for _ in range(2)] for _ in range(8)]
    began = time.process_time()
    for turn in range(repeats):
        source, copy = pairs[turn % len(pairs)]
        copy.copy_(source)
    return (time.process_time() - began) / (repeats * 2 * source.nbytes)


class Arm:
    """One engine running a recipe, ready to step."""

    def __init__(self, recipe: str, micro: int) -> None:
        # every layer quantized, so that recipes with high-precision edges are comparable with those without
        full = [] if recipe == "bf16_mixed" else ["mixed_precision.first_last_layers_bf16=false"]
        overrides = [f"mixed_precision={recipe}", *full, "emulate=true", f"train.micro_batch_size={micro}"]
        self.run = ConfigContainer.load(CONFIG, overrides).resolved()
        self.microbatches = self.run.train["global_batch_size"] // micro
        self.data = batches(micro, self.run.facts.shape.seq_length)
        self.engine: Any = build_engine(self.run)
        self.emulation = getattr(self.engine, "emulation", None)
        self.linears = 0 if self.emulation is None else len(self.emulation.plugs)
        tokens = self.run.train["global_batch_size"] * self.run.facts.shape.seq_length
        self.moved = moved(self.emulation, tokens) if self.emulation else 0

    def step(self) -> None:
        """One optimizer step."""
        self.engine.train_step(self.data, microbatches=self.microbatches)

    def peak(self) -> int:
        """Bytes that live between steps (parameters, gradients, optimizer state, each storage once) and the peak of what one step adds."""
        if self.emulation:
            self.emulation.step_begin()  # frees the cached weights: they count for the step that makes them
        storages = {
            live.tensor.untyped_storage()._cdata: live.tensor.untyped_storage().nbytes()
            for live in self.engine.tensors()
        }
        return sum(storages.values()) + peak_of(self.step)


class Plain:
    """A GPT of plain modules; kind: 'bf16', 'torchao' (its emulated float8) or one of RECIPES."""

    def __init__(self, kind: str, width: int = 256, layers: int = 4, tokens: tuple[int, int] = (8, 256)) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.ModuleList(PlainLayer(width) for _ in range(layers)).bfloat16()
        self.x, self.emulation, self.linears = torch.randn(*tokens, width).bfloat16(), None, 0
        self.moved = 0
        if kind == "torchao":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(self.net, config=Float8LinearConfig(emulate=True))
        elif kind != "bf16":
            config = get_mixed_precision_config(RECIPES[kind])
            config.first_last_layers_bf16 = False
            self.emulation = emulate_linears(self.net, resolve(config))
            self.linears = len(self.emulation.plugs)
            self.moved = moved(self.emulation, tokens[0] * tokens[1])

    def step(self) -> None:
        """Forward and backward."""
        if self.emulation:
            self.emulation.step_begin()
        x = self.x
        for layer in self.net:
            x = layer(x)
        x.float().square().mean().backward()
        self.net.zero_grad()

    def peak(self) -> int:
        """Peak bytes of one step."""
        return peak_of(self.step)


class PlainLayer(torch.nn.Module):
    """Attention and a gated MLP, simplified: four linears of gpt_tiny's sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        linear = lambda i, o: torch.nn.Linear(i, o, bias=False)  # noqa: E731
        self.qkv, self.proj, self.up, self.down = (
            linear(width, 3 * width),
            linear(width, width),
            linear(width, 1408),
            linear(704, width),
        )
        self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * up)


def cpu(step: Callable[[], object]) -> float:
    """CPU seconds that it takes."""
    began = time.process_time()
    step()
    return time.process_time() - began


def child(pipe: Any, kind: str, plain: bool, micro: int, threads: int) -> None:
    """One arm's process: builds the arm, sends (linears, seconds of the first two steps), then answers 'step' with CPU seconds, 'peak' and
    'moved' with bytes, and 'rate' with the CPU seconds of a byte that is copied."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    start_process_group(cuda=False)
    with nullcontext() if plain else device_layer(cuda=False):
        arm = Plain(kind) if plain else Arm(RECIPES.get(kind, "bf16_mixed"), micro)
        began = time.perf_counter()
        arm.step(), arm.step()
        pipe.send((arm.linears, time.perf_counter() - began))
        while (asked := pipe.recv()) != "stop":
            pipe.send(
                {"peak": arm.peak, "moved": lambda: arm.moved, "rate": seconds_per_byte, "step": lambda: cpu(arm.step)}[
                    asked
                ]()
            )
    stop_process_group()


class Processes:
    """The arms, one process each."""

    def __init__(self, kinds: list[str], args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: dict[str, Any] = {}
        self.built: dict[str, tuple[int, float]] = {}
        for name in kinds:
            self.pipes[name], theirs = context.Pipe()
            kind = name.removesuffix(" again")
            context.Process(
                target=child, args=(theirs, kind, args.plain, args.micro, args.threads), daemon=True
            ).start()
            self.built[name] = self.pipes[
                name
            ].recv()  # one after the other: the compilers of two would disturb each other
            print(
                f"{name}: {self.built[name][0]} linears quantized, first two steps {self.built[name][1]:.1f} s",
                flush=True,
            )

    def ask(self, name: str, what: str) -> Any:
        """The arm's answer."""
        self.pipes[name].send(what)
        return self.pipes[name].recv()

    def rounds(self, count: int) -> dict[str, list[float]]:
        """CPU seconds of a step of every arm, one value per round; the arm that goes first changes."""
        names = list(self.pipes)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(count + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[name].append(self.ask(name, "step"))
        return {name: values[1:] for name, values in seconds.items()}


def main() -> None:
    """Prints the table, writes --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plain", action="store_true", help="nn.Linear instead of megatron-core, with torchao beside it"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    arms = Processes(["bf16", "bf16 again", *args.recipes, *(["torchao"] if args.plain else [])], args)
    seconds = arms.rounds(args.rounds)
    base, rate = arms.ask("bf16", "peak"), statistics.median(arms.ask("bf16", "rate") for _ in range(5))
    bf16 = statistics.median(seconds["bf16"])
    table: dict[str, dict[str, float]] = {}
    print(f"{'arm':<12} {'CPU s/step':>10} {'of bf16':>8} {'least':>6} {'limit':>6} {'memory':>7} {'compile s':>9}")
    for name in arms.pipes:
        ratio = statistics.median(own / bf16 for own, bf16 in zip(seconds[name], seconds["bf16"], strict=True))
        row = {
            "seconds": statistics.median(seconds[name]),
            "ratio": ratio,
            "least": 1 + arms.ask(name, "moved") * rate / bf16,
            "bytes": arms.ask(name, "peak") / base,
            "compile": arms.built[name][1],
        }
        table[name] = row
        limit = f"{LIMITS[name]:.2f}" if name in LIMITS and not args.plain else ""
        print(
            f"{name:<12} {row['seconds']:>10.3f} {row['ratio']:>8.3f} {row['least']:>6.3f} {limit:>6} {row['bytes']:>7.3f} {row['compile']:>9.1f}",
            flush=True,
        )
        arms.pipes[name].send("stop")
    print(f"memory: {1e-9 / rate:.1f} GB read and written per CPU second")
    if args.json:
        args.json.write_text(
            json.dumps({"threads": args.threads, "micro": args.micro, "plain": args.plain, "arms": table}, indent=1)
        )


if __name__ == "__main__":
    main()
