"""CPU time of a training step with Transformer Engine on the CPU (`--emulate te`), each recipe relative to bf16_mixed, in alternating rounds.

python scripts/bench_te_cpu.py [--rounds 2] [--steps 3] [--config gpt_tiny] [key=value ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
COMMON = (
    "emulate=te", "target=b200", "train.train_iters=50", "train.global_batch_size=4", "ddp.use_distributed_optimizer=true",
    "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true",
)  # fmt: skip


def step_seconds(recipe: str, config: str, steps: int, more: list[str]) -> float:
    """The shortest of `steps` steps after a first one."""
    from mpbridge.data.batches import Feed
    from mpbridge.engines.registry import build_engine

    path = Path(__file__).resolve().parent.parent / "configs" / f"{config}.yaml"
    run = ConfigContainer.load(path, [f"mixed_precision.recipe={recipe}", *COMMON, *more]).resolved()
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--config", default="gpt_tiny")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    begin = time.process_time()
    seconds: dict[str, list[float]] = {recipe: [] for recipe in RECIPES}
    with transformer_engine_on_cpu("b200"):
        from mpbridge.train.machine import process_group

        with process_group(False):
            print(f"start: {time.process_time() - begin:.1f} s of CPU time")
            for _ in range(args.rounds):
                for recipe in RECIPES:
                    seconds[recipe].append(step_seconds(recipe, args.config, args.steps, args.overrides))
    base = seconds["bf16_mixed"]
    print("| recipe | CPU seconds per step | over bf16_mixed | at most |")
    print("|---|---|---|---|")
    for recipe, taken in seconds.items():
        ratio = statistics.median(mine / other for mine, other in zip(taken, base, strict=True))
        print(f"| {recipe} | {min(taken):.3f} | {ratio:.2f} | {RECIPES[recipe]:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
