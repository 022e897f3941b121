"""Compares by training: the evaluation loss of a tuned recipe and of its alternatives, from one BF16 checkpoint per seed, with an A/A arm.

    python scripts/evidence/tune_training.py --out FOLDER [--seeds 5] [--before 2000] [--steps 300] [key=value ...]
    python scripts/evidence/tune_training.py --out FOLDER --report

The model is thin: 12 layers of width 64 (THIN, settings change it). For each seed: BF16 for --before steps at a constant learning rate (once), `tune` on its
checkpoint, then --steps steps per arm, while the learning rate falls to 0, from that checkpoint, optimizer states and data position included: bf16, all
NVFP4, the same under other random bits of stochastic rounding (A/A), the last 15 % in BF16, whole kinds, tuned at the same predicted cost, all MXFP8.
Every arm's loss on the same held-out batches is measured twice: as trained, and with the same weights in BF16. Every finished arm is a file in FOLDER:
the script continues where it was stopped, and the report lists the finished arms and seeds. A gap within the A/A pair's difference is not separated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

from mpbridge.training.base import Hook

if TYPE_CHECKING:
    from mpbridge.training.base import Training

NVFP4, BF16 = "bf16_with_nvfp4_mixed", "bf16_mixed"
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Seeds -> factor on the standard error for 95 % (Student's t with one degree of freedom less)."""


THIN = (
    "model.num_layers=12", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_attention_heads=2", "model.max_sequence_length=64",
    "data.seq_length=64", "scheduler.lr_warmup_iters=100",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", default=str(ROOT / "configs" / "gpt_tiny.yaml"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--before", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        for seed in range(1, args.seeds + 1):
            _seed(args, seed)
    report(args.out)


def _box(args: argparse.Namespace, seed: int, *more: str) -> Any:
    from mpbridge.settings.container import ConfigContainer

    common = [
        f"train.seed={seed}", f"train.train_iters={args.before + args.steps}", "train.eval_interval=null", "logger.progress=false", "train.audit=warn",
        "optimizer.min_lr=0.0", "scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_style=linear", f"scheduler.lr_wsd_decay_iters={args.steps}",
    ]  # fmt: skip
    return ConfigContainer.load(Path(args.config), [*THIN, *common, *args.overrides, *more], check=False)


def _seed(args: argparse.Namespace, seed: int) -> None:
    import yaml

    from mpbridge.training.loop import pretrain
    from mpbridge.training.tune.run import fields, tune, write

    folder = args.out / f"seed{seed}"
    folder.mkdir(exist_ok=True)
    kept, plan = folder / "before", folder / "arms.yaml"
    if not plan.is_file():
        _before(args, seed, kept)
        box = _box(args, seed, f"mixed_precision={NVFP4}", f"checkpoint.load={kept}")
        result, content = tune(box, say=lambda text: None)
        write(folder / "evidence.yaml", content)
        arms = {name: fields(config, NVFP4) for name, config in result.recipes.items() if not name.startswith("random")}
        plan.write_text(yaml.safe_dump(arms, sort_keys=False))
    arms = {"bf16": {"extends": BF16}, **yaml.safe_load(plan.read_text())}
    arms["all low, other bits"] = arms["all low"]
    for name, said in arms.items():
        done = folder / f"{name.replace(' ', '_').replace('%', 'percent')}.json"
        if done.is_file():
            continue
        recipe = folder / f"{done.stem}.yaml"
        recipe.write_text(yaml.safe_dump(said, sort_keys=False))
        more = [f"mixed_precision={recipe}", "emulate=true", "train.eval_iters=64", f"checkpoint.load={kept}"]
        box = _box(args, seed, *more, f"train.eval_interval={args.before + args.steps}")
        arm, began = _Arm(other_bits="other bits" in name), time.process_time()
        summary = pretrain(box.resolved(1), hooks=[arm], quiet=True)
        found = {
            "arm": name,
            "seed": seed,
            "loss": summary.eval_losses[-1][1],
            "loss in bf16": arm.high,
            "steps": args.steps,
        }
        done.write_text(json.dumps(found | {"cpu seconds": round(time.process_time() - began, 1)}))
        print(f"seed {seed}: {name}: {found['loss']:.5f}, in bf16 {arm.high:.5f}", flush=True)


def _before(args: argparse.Namespace, seed: int, kept: Path) -> None:
    """Makes the checkpoint that all arms start from, and earlier ones."""
    from mpbridge.training.loop import pretrain

    settings = [
        f"train.exit_interval={args.before}",
        f"checkpoint.save={kept}",
        f"checkpoint.save_interval={max(1, args.before // 10)}",
    ]
    resume = [f"checkpoint.load={kept}"] if kept.is_dir() and any(kept.iterdir()) else []
    summary = pretrain(_box(args, seed, f"mixed_precision={BF16}", *settings, *resume).resolved(1), quiet=True)
    print(f"seed {seed}: {summary.iterations} steps in BF16, last loss {summary.last_loss:.4f}", flush=True)


class _Arm(Hook):
    """Also measures the held-out loss of the arm's weights in BF16; other_bits: another seed of stochastic rounding, nothing else."""

    def __init__(self, *, other_bits: bool) -> None:
        self.other_bits, self.high = other_bits, math.nan

    def started(self, training: Training) -> None:
        """Changes the seed."""
        if self.other_bits:
            training.engine.emulation.randomness.seed += 1  # type: ignore[attr-defined]

    def evaluated(self, training: Training, loss: float) -> None:
        """Evaluates again without quantization."""
        emulation, count = getattr(training.engine, "emulation", None), int(training.run.train["eval_iters"])
        with contextlib.nullcontext() if emulation is None else emulation.paused():
            self.high = training.engine.evaluate(training.feed.batches("valid", 0, 0, 1), microbatches=count)


def report(folder: Path) -> None:
    """Gaps to the same seed's BF16, mean over seeds with a 95 % interval."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("seed*/*.json"))]
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        losses.setdefault(row["arm"], {})[row["seed"]] = row["loss"]
    base = losses.get("bf16", {})
    pairs = losses.get("all low", {}), losses.get("all low, other bits", {})
    twice = [abs(pairs[0][seed] - pairs[1][seed]) for seed in pairs[0].keys() & pairs[1].keys()]
    print("arm, seeds, mean gap to BF16 in nats per token, half width of the 95 % interval")
    for name, found in losses.items():
        gaps = [found[seed] - base[seed] for seed in found.keys() & base.keys()]
        if name != "bf16" and gaps:
            half = (
                STUDENT.get(len(gaps), math.nan) * statistics.stdev(gaps) / math.sqrt(len(gaps))
                if len(gaps) > 1
                else math.nan
            )
            print(f"{name:24} {len(gaps)}  {statistics.fmean(gaps):+.5f}  {half:.5f}")
    if twice:
        print(
            f"A/A: the same recipe with other random bits differs by up to {max(twice):.5f}, {statistics.fmean(twice):.5f} on average ({len(twice)} seeds): gaps within that are not separated"
        )


if __name__ == "__main__":
    main()
