"""Checkpoints: bytes and seconds of a save by recipe, the cost of saving in the background per step, and the time from start to the first step on resume.

    python scripts/evidence/bench_checkpoint.py [--layers 4] [--hidden 256] [--repeats 5] [--json FILE]

The arms of the comparison (no saves, saves in the foreground, saves in the background) take turns step by step within one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mpbridge.settings.container import ConfigContainer
from mpbridge.training.base import Hook
from mpbridge.training.checkpoint import io as checkpoint
from mpbridge.training.loop import pretrain

SEQ, VOCAB = 128, 320
DIST = {"use_distributed_optimizer": True}
RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16_mixed": {},
    "bf16_mixed, distributed optimizer": {"mixed_precision": "bf16_mixed", "ddp": DIST},
    "fp16_mixed": {},
    "bf16_mixed_bf16_moments": {"ddp": DIST},
    "full_bf16": {},
    "bf16_with_fp8_delayed_scaling_mixed": {"emulate": True},
    "bf16_with_nvfp4_mixed": {"emulate": True},
}
CHILD = """
import sys, time
began = float(sys.argv[1])
import bench_checkpoint as bench
class First(bench.Hook):
    def stepped(self, training, result):
        print("seconds", time.time() - began, flush=True)
        training.stop = "measured"
made = bench.made("bf16_mixed", int(sys.argv[3]), int(sys.argv[4]), 10_000, checkpoint={"load": sys.argv[2]} if sys.argv[2] else {})
bench.pretrain(made, dataset=bench.Text(), hooks=[First()], quiet=True)
"""


class Text:
    """Random tokens, the same on every iteration."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield {"tokens": torch.randint(0, VOCAB, (SEQ + 1,), generator=generator)}


def made(name: str, layers: int, hidden: int, steps: int, **sections: Any) -> Any:
    """The run of a recipe, by its row in RECIPES."""
    sections = {"mixed_precision": name} | RECIPES[name] | sections
    return ConfigContainer(
        model={
            "num_layers": layers, "hidden_size": hidden, "num_attention_heads": 4, "vocab_size": VOCAB, "max_sequence_length": SEQ,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False, "position_embedding_type": "rope",
        },
        optimizer={"lr": 1e-3},
        scheduler={"lr_decay_iters": 1000},
        train={"micro_batch_size": 4, "global_batch_size": 4, "train_iters": steps, "eval_interval": None, "threads": 1, "audit": "warn"},
        **sections,
    ).resolved()  # fmt: skip


class Sizes(Hook):
    """Saves `repeats` times after step 2 and loads once."""

    def __init__(self, folder: Path, repeats: int) -> None:
        self.folder, self.repeats, self.figures = folder, repeats, {}

    def stepped(self, training: Any, result: Any) -> None:
        if training.counters.iteration != 2:
            return
        seconds = []
        for _ in range(self.repeats):
            began = time.perf_counter()
            place = checkpoint.save(training, self.folder).finish()
            seconds.append(time.perf_counter() - began)
        parameters = sum(tensor.numel() for _, tensor in training.engine.named_parameters())
        began = time.perf_counter()
        checkpoint.load(training, place)
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        self.figures = {
            "parameters": parameters,
            "bytes": size,
            "bytes_a_parameter": round(size / parameters, 2),
            "save_seconds": round(statistics.median(seconds), 4),
            "load_seconds": round(time.perf_counter() - began, 4),
        }


class Turns(Hook):
    """Steps in turns: not saved, saved in the foreground, saved in the background; a background save is sealed in the step after, as in a run."""

    ARMS = ("no save", "foreground", "background")

    def __init__(self, folder: Path) -> None:
        self.folder, self.pending, self.began = folder, None, 0.0
        self.seconds: dict[str, list[float]] = {
            f"{arm} {part}": [] for arm in self.ARMS for part in ("call", "step after")
        }
        self.arm = ""

    def started(self, training: Any) -> None:
        self.began = time.perf_counter()

    def stepped(self, training: Any, result: Any) -> None:
        now, at = time.perf_counter(), training.counters.iteration
        if self.arm and at > 12:  # the first rounds compile and warm up
            self.seconds[f"{self.arm} step after"].append(now - self.began)
        self.arm = ""
        if self.pending is not None:
            self.pending.finish(keep_last=1)
            self.pending = None
        if at % 2 == 0:
            self.arm = self.ARMS[at // 2 % 3]
            began = time.perf_counter()
            if self.arm != "no save":
                writing = checkpoint.save(training, self.folder, background=self.arm == "background")
                if self.arm == "background":
                    self.pending = writing
                else:
                    writing.finish(keep_last=1)
            if at > 12:
                self.seconds[f"{self.arm} call"].append(time.perf_counter() - began)
        self.began = time.perf_counter()

    def closed(self) -> None:
        if self.pending is not None:
            self.pending.abort()


def start_seconds(load: str, layers: int, hidden: int) -> float:
    """From the start of a process to the end of its first step."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    }
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(time.time()), load, str(layers), str(hidden)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(next(line for line in done.stdout.splitlines() if line.startswith("seconds")).split()[1])


def measure(layers: int, hidden: int, repeats: int) -> dict[str, Any]:
    """All figures."""
    figures: dict[str, Any] = {"layers": layers, "hidden": hidden, "recipes": {}}
    with tempfile.TemporaryDirectory(prefix="mpbridge-bench-") as room:
        for name in RECIPES:
            sizes = Sizes(Path(room) / name.replace(" ", "_"), repeats)
            pretrain(made(name, layers, hidden, 2), dataset=Text(), hooks=[sizes], quiet=True)
            figures["recipes"][name] = sizes.figures
            print(f"{name:40} {json.dumps(sizes.figures)}", flush=True)
        turns = Turns(Path(room) / "turns")
        pretrain(made("bf16_mixed", layers, hidden, 12 + 12 * repeats), dataset=Text(), hooks=[turns], quiet=True)
        figures["turns"] = {
            name: {"median": round(statistics.median(values), 4), "n": len(values)}
            for name, values in turns.seconds.items()
            if values
        }
        print(json.dumps(figures["turns"], indent=1), flush=True)
        taken = {
            arm: sum(figures["turns"][f"{arm} {part}"]["median"] for part in ("call", "step after"))
            for arm in Turns.ARMS
        }
        plain = taken["no save"]
        print(
            f"background / foreground, time taken from the loop: {(taken['background'] - plain) / (taken['foreground'] - plain):.2f}",
            flush=True,
        )
        kept = str(Path(room) / "bf16_mixed")
        pairs = [(start_seconds("", layers, hidden), start_seconds(kept, layers, hidden)) for _ in range(3)]
        figures["start_seconds"] = {
            "fresh": round(statistics.median(a for a, _ in pairs), 2),
            "resumed": round(statistics.median(b for _, b in pairs), 2),
        }
        print(json.dumps(figures["start_seconds"]), flush=True)
        print(
            f"resumed / fresh, start to first step: {figures['start_seconds']['resumed'] / figures['start_seconds']['fresh']:.2f}"
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = measure(args.layers, args.hidden, args.repeats)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
