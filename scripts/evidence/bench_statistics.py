"""Measures the cost of low-precision statistics: CPU time of a measured step over a plain one, in alternating steps, with a second plain step for A/A.

    python scripts/evidence/bench_statistics.py [--recipe NAME] [--machine GPU] [--rounds N] [key=value ...]

Without --machine the recipe is emulated; with it, it runs on Transformer Engine on the CPU as on that GPU (`--emulate te`). A measured step
may cost at most one more: a ratio of 2.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpbridge import ConfigContainer, pretrain, transformer_engine_on_cpu
from mpbridge.training.base import Hook, Training

WARM = 4
"""Steps that are not counted."""
ARMS = ("plain", "measured", "plain again")


class Arms(Hook):
    """Turns statistics on and off from step to step, and records the CPU seconds of each arm.

    A step lasts from one end to the next, so that the reading and writing after a measured step counts for that step.
    """

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
        self.last = 0.0

    def stepped(self, training: Training, result: object) -> None:
        done = training.counters.iteration
        now = time.process_time()
        if done > WARM:
            self.seconds[ARMS[done % 3]].append(now - self.last)
        self.last = now
        coming = ARMS[(done + 1) % 3]
        self.hook.every = 1 if coming == "measured" else 1 << 30
        self.hook._alarm = ""  # a loss that jumps would trigger an extra measurement


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="bf16_with_fp8_current_scaling_mixed")
    parser.add_argument("--machine", help="h100 or b200: native, over Transformer Engine on the CPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--config", default="gpt_tiny")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    played = transformer_engine_on_cpu(args.machine) if args.machine else contextlib.nullcontext()
    with played, tempfile.TemporaryDirectory() as folder:
        how = ["emulate=te", f"target={args.machine}"] if args.machine else ["emulate=true"]
        fixed = [f"train.train_iters={WARM + 3 * args.rounds}", "train.eval_interval=null", f"logger.log_dir={folder}", "logger.precision_every=0", "train.audit=warn", "audit.every=0", "ddp.use_distributed_optimizer=true"]  # fmt: skip
        config = ConfigContainer.load(ROOT / "configs" / f"{args.config}.yaml", [f"mixed_precision.recipe={args.recipe}", *how, *fixed, *args.overrides])  # fmt: skip
        from mpbridge.observe.telemetry.hook import StatisticsHook

        hook = StatisticsHook(folder, every=1 << 30)
        arms = Arms(hook)
        pretrain(config.resolved(), hooks=[hook, arms], quiet=True)
    rounds = list(zip(*(arms.seconds[arm] for arm in ARMS), strict=False))
    print(
        f"{args.recipe}, {'native on ' + args.machine if args.machine else 'emulated'}, {args.config}: median of {len(rounds)} rounds"
    )
    for arm, seconds in arms.seconds.items():
        print(f"  {arm:<16} {statistics.median(seconds) * 1e3:9.1f} ms of CPU per step")
    more = statistics.median(measured / plain for plain, measured, _ in rounds)
    alike = statistics.median(again / plain for plain, _, again in rounds)
    print(f"  measured / plain {more:9.2f} (at most 2)")
    print(f"  A/A              {alike:9.2f}")
    return 0 if more <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
