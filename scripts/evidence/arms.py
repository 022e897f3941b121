"""Times arms that take turns in one process; shared by bench_overhead.py and bench_peer.py.

The first arm is `pretrain` itself with everything on; the others run between its steps. Measures CPU time of the whole process (all threads), a
few steps of one arm and then of the next, round after round, so that a noisy neighbour or a warming clock affects all arms alike. The figure for
two arms is the median over rounds of the ratio within a round; the A/A ratio, of two identical arms, shows the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpbridge.backend.engines.contract import StepResult
from mpbridge.settings.container import ConfigContainer
from mpbridge.training.base import Hook, Training
from mpbridge.training.loop import pretrain

Seconds = dict[str, list[float]]


class Turns(Hook):
    """Lets other arms run between the steps of ours, and records CPU seconds per step of each, one value per round.

    make: function from our Training to the other arms, name -> one step.
    """

    def __init__(self, make: Callable[[Training], Mapping[str, Callable[[], object]]]) -> None:
        self.make = make
        self.steps, self.warm, self.turn, self.mark = 4, 2, 0, 0.0
        self.arms: dict[str, Callable[[], object]] = {}
        self.seconds: Seconds = {"ours": []}
        self.args: Any = None

    def stepped(self, training: Training, result: StepResult) -> None:
        if training.counters.iteration % self.steps:
            return
        if not self.arms:
            # not earlier: until the first update the audit watches every collective, including theirs
            self.arms = dict(self.make(training))
            self.seconds |= {name: [] for name in self.arms}
        spent = {"ours": (time.process_time() - self.mark) / self.steps}
        names = list(self.arms)
        # the arm that goes first changes every round
        start = self.turn % len(names)
        for name in names[start:] + names[:start]:
            began = time.process_time()
            for _ in range(self.steps):
                self.arms[name]()
            spent[name] = (time.process_time() - began) / self.steps
        self.turn += 1
        if self.turn > self.warm:
            for name, value in spent.items():
                self.seconds[name].append(value)
        self.mark = time.process_time()


def bench(about: str | None, turns: Turns) -> Seconds:
    """Parses the command line, trains with `turns` in between, returns CPU seconds per step of every arm and round."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--config", default=str(Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml"))
    parser.add_argument("--recipe", default="bf16_mixed")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4, help="steps of an arm per round")
    parser.add_argument("--warm", type=int, default=2, help="rounds that are not counted: compilation, caches")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("overrides", nargs="*")
    args = turns.args = parser.parse_args()
    turns.steps, turns.warm = args.steps, args.warm
    with tempfile.TemporaryDirectory() as folder:
        total = (args.rounds + args.warm) * args.steps
        fixed = [
            f"train.train_iters={total}",
            "train.eval_interval=null",
            f"logger.log_dir={folder}",
            "logger.tensorboard=true",
        ]
        container = ConfigContainer.load(
            args.config, overrides=[f"mixed_precision={args.recipe}", *args.overrides, *fixed]
        )
        pretrain(container.resolved(), hooks=[turns])
    return turns.seconds


def ratio(seconds: Seconds, slow: str, fast: str) -> float:
    """Throughput of `fast` relative to `slow`: above 1.0 `fast` wins."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def report(title: str, turns: Turns, ratios: Mapping[str, float]) -> None:
    """Prints medians and ratios, and writes everything to --out."""
    args, seconds = turns.args, turns.seconds
    title = f"{title}: {args.recipe}, {Path(args.config).name}, {torch.get_num_threads()} threads"
    print(title)
    for name, values in seconds.items():
        print(
            f"  {name:<40} {statistics.median(values) * 1e3:8.1f} ms of CPU per step (median of {len(values)} rounds of {args.steps})"
        )
    for name, value in ratios.items():
        print(f"  {name:<40} {value:8.3f}")
    if args.out:
        args.out.write_text(json.dumps({"title": title, "seconds": seconds, "ratios": dict(ratios)}, indent=2) + "\n")
