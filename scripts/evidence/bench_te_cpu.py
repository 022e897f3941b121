"""CPU time of a training step with Transformer Engine on the CPU (`--emulate te`), each recipe relative to bf16_mixed, in alternating rounds.

Then the CPU time of whole runs of one step, in processes of their own: with `--emulate te` over without it (bf16_mixed in both), in alternating rounds too.
Exit code 1 if a step or the start takes longer than its limit.

python scripts/evidence/bench_te_cpu.py [--rounds 2] [--steps 3] [--config gpt_tiny] [key=value ...]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from te_folders import ROOT

from mpbridge import ConfigContainer, transformer_engine_on_cpu

RECIPES = {
    "bf16_mixed": 1.0,
    "bf16_with_fp8_current_scaling_mixed": 2.0,
    "bf16_with_fp8_delayed_scaling_mixed": 2.0,
    "bf16_with_mxfp8_mixed": 2.5,
    "bf16_with_fp8_subchannel_scaling_mixed": 3.0,
    "bf16_with_nvfp4_mixed": 5.0,
}
"""Recipe -> maximum time of a step relative to bf16_mixed."""
AGAIN = "bf16_mixed again"
"""The A/A arm: its ratio shows what the machine's noise is worth."""
COMMON = (
    "emulate=te", "target=b200", "train.train_iters=50", "train.global_batch_size=4", "ddp.use_distributed_optimizer=true",
    "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true",
)  # fmt: skip


def step_seconds(recipe: str, config: str, steps: int, more: list[str]) -> float:
    """The shortest of `steps` steps after a first one."""
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.training.data.batches import Feed

    run = ConfigContainer.load(
        ROOT / f"configs/{config}.yaml", [f"mixed_precision.recipe={recipe}", *COMMON, *more]
    ).resolved()
    engine = build_engine(run)
    try:
        stream = Feed(run, None).batches("train", 0, 0, 1)
        taken = []
        for _ in range(steps + 1):
            begin = time.process_time()
            engine.train_step(stream, microbatches=1)
            taken.append(time.process_time() - begin)
    finally:
        engine.close()
    return min(taken[1:])


START = 10.0
"""Maximum CPU seconds of a run's start over a plain run's."""


def run_seconds(config: str, *arguments: str) -> float:
    """CPU time of a process that trains one step."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(ROOT / "scripts/pretrain.py"), "--recipe", "bf16_mixed"]
        command += ["--config", str(ROOT / f"configs/{config}.yaml"), "train.train_iters=1", f"logger.log_dir={folder}"]
        subprocess.run([*command, *arguments], check=True, cwd=folder, env=os.environ, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_seconds(config: str, rounds: int) -> float:
    """Median CPU seconds of a run of one step with `--emulate te` over one without, printed beside the same of two plain runs."""
    arms: dict[str, tuple[str, ...]] = {"te": ("--emulate", "te", "--target", "b200"), "plain": (), "again": ()}
    taken: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, arguments in arms.items():
            taken[arm].append(run_seconds(config, *arguments))
    over, same = (
        statistics.median(mine - plain for mine, plain in zip(taken[arm], taken["plain"], strict=True))
        for arm in ("te", "again")
    )
    print(f"start: {over:+.1f} s of CPU time over a plain run (A/A {same:+.1f}), at most {START:.0f}")
    return over


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--config", default="gpt_tiny")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {arm: [] for arm in (*RECIPES, AGAIN)}
    with transformer_engine_on_cpu("b200"):
        from mpbridge.training.process import process_group

        with process_group(False):
            for _ in range(args.rounds):
                for arm, taken in seconds.items():
                    taken.append(step_seconds(arm.removesuffix(" again"), args.config, args.steps, args.overrides))
    base = seconds["bf16_mixed"]
    print("| recipe | CPU seconds per step | over bf16_mixed | at most |")
    print("|---|---|---|---|")
    slow = False
    for recipe, taken in seconds.items():
        ratio = statistics.median(mine / other for mine, other in zip(taken, base, strict=True))
        slow |= ratio > RECIPES.get(recipe, ratio)
        print(f"| {recipe} | {min(taken):.3f} | {ratio:.2f} | {RECIPES.get(recipe, '-')} |")
    slow |= start_seconds(args.config, args.rounds) > START
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
