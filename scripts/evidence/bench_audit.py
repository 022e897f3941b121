"""Measures the cost of the audit in CPU time, for every kind of recipe, emulated and over Transformer Engine's Python: plain and audited steps alternate, so that a busy machine slows both alike.

python scripts/evidence/bench_audit.py [--rounds 9] [ROW ...] writes data/audit_cost.json, which docs/audit.md shows; with rows, only those anew. Exit code 1 if
an audited step takes longer than two plain ones.
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
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
warnings.simplefilter("ignore")

from te_folders import ROOT

from mpbridge import ConfigContainer, transformer_engine_on_cpu

CONFIG = ROOT / "configs" / "gpt_tiny.yaml"
FIGURES = Path(__file__).parent / "data" / "audit_cost.json"
MOST = 2.0
"""Plain steps that an audited step may take."""
LOW = (
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
)
ROWS: dict[str, tuple[str, ...]] = {
    "bf16_mixed": ("bf16_mixed", "false"),
    "fp16_mixed": ("fp16_mixed", "false"),
    **{f"{recipe}, emulated": (recipe, "true") for recipe in LOW},
    "fp32_params_bf16_compute, Muon": ("fp32_params_bf16_compute", "false", "engine=fsdp2", "optimizer.optimizer=muon"),
    "bf16_mixed, adapters": (
        "bf16_mixed", "false", "mixed_precision.frozen=['*']", "model.lora_rank=8", "model.lora_alpha=16", "model.share_embeddings_and_output_weights=false",
    ),
    **{f"{recipe}, Transformer Engine": (recipe, "te") for recipe in ("bf16_mixed", *LOW)},
}  # fmt: skip
"""Row of the table -> (recipe, `emulate`, further overrides)."""


def measured(rounds: int, recipe: str, emulate: str, *more: str) -> dict[str, float]:
    """Medians over rounds: an audited step, and a second plain one, over the plain step before it; invariants and the check before a checkpoint likewise."""
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.observe.audit import AuditHook
    from mpbridge.observe.audit.between import broken
    from mpbridge.observe.audit.examine import audit, promises_of
    from mpbridge.observe.audit.flags import Updates
    from mpbridge.training.data.batches import Feed

    # from 2**32 FP16's first steps are skipped, and none of those is audited
    words = [f"mixed_precision.recipe={recipe}", f"emulate={emulate}", *more]
    words += ["mixed_precision.initial_loss_scale=1024"] if recipe.startswith("fp16") else []
    words += (
        [
            "target=b200",
            "ddp.use_distributed_optimizer=true",
            "ddp.overlap_grad_reduce=true",
            "ddp.overlap_param_gather=true",
        ]
        if emulate == "te"
        else []
    )
    run = ConfigContainer.load(CONFIG, words).resolved()
    engine = build_engine(run)
    stream = Feed(run).batches("train", 0, 0, 1)
    hook, training = AuditHook(mode="stop", every=1, invariants=0), SimpleNamespace(engine=engine)
    hook.built(training)
    hook.started(training)
    promises = promises_of(run.policy, engine)

    def plain() -> Any:
        return engine.train_step(stream, microbatches=1)

    def audited() -> None:
        hook._updates, hook._left, hook._scales = Updates(), None, {}  # the hook did not see the plain steps in between
        hook.stepping(training)
        hook.stepped(training, plain())

    arms = {
        "plain": plain,
        "audited": audited,
        "again": plain,
        "invariants": lambda: broken(engine, promises, hook._wiring),
        "checkpoint": lambda: audit(run.policy, engine, stage="live"),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 2):
        for name, act in arms.items():
            begun = time.process_time()
            act()
            if turn >= 2:  # the first two compile
                times[name].append(time.process_time() - begun)
    assert hook.reports["live"].ok, hook.reports["live"].faults
    hook.closed()
    engine.close()
    over = {name: statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True)) for name in arms}
    return {name: round(value, 4) for name, value in over.items() if name != "plain"} | {
        "seconds": round(statistics.median(times["plain"]), 4)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("row", nargs="*", help="default: all")
    args = parser.parse_args()
    names = [name for name in ROWS if not args.row or name in args.row]
    # Transformer Engine's Python comes before megatron-core's import, and stays
    for te in (False, True):
        mine = [name for name in names if (ROWS[name][1] == "te") is te]
        if mine:
            os.environ["OMP_NUM_THREADS"] = "1"  # a thread that waits for another one counts as CPU time
            apart = multiprocessing.get_context("spawn").Process(target=rows, args=(mine, args.rounds, te))
            apart.start()
            apart.join()
            if apart.exitcode:
                return 2
    figures = json.loads(FIGURES.read_text())
    return int(any(figures[name]["audited"] > MOST for name in names))


def rows(names: list[str], rounds: int, te: bool) -> None:
    """Measures those rows in this process, and writes each down."""
    warnings.simplefilter("ignore")
    with transformer_engine_on_cpu("b200") if te else nullcontext():
        from mpbridge.training.process import process_group

        with process_group(False):
            for name in names:
                one = measured(rounds, *ROWS[name])
                print(f"{name}: {one}", flush=True)
                figures = (json.loads(FIGURES.read_text()) if FIGURES.exists() else {}) | {name: one}
                FIGURES.write_text(json.dumps({row: figures[row] for row in ROWS if row in figures}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
