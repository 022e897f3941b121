"""Counts published runs whose layout, or one that is predicted within 3 % of it and fits, is among the first three that `mpbridge layouts` lists.

    python scripts/evidence/published_layouts.py           # the count, a line per run
    python scripts/evidence/published_layouts.py --all     # every published layout, instead of the latest of each model, machine and precision

Runs with pipeline stages, of releases up to megatron-core 0.17: later ones have settings that the rules do not know. The search gets what the run obeyed: model, recipe, GPUs, global batch, sequence, dispatcher, CUDA graphs and overlaps, and its selective recomputation as one of the choices; it does not get the parallel sizes, the micro-batch and the placement of layers.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from published import FITTED, UNUSUAL, run_of, timed

from mpbridge.common.facts import RunFacts
from mpbridge.planning.estimate.layouts import Layout, search
from mpbridge.planning.estimate.predict import estimate
from mpbridge.planning.memory.by_role import memory, verdict
from mpbridge.planning.memory.layers import unsplit

FIRST, NEAR = 3, 0.03


def latest(rows: list[dict]) -> list[dict]:
    """The newest run of each model, machine and precision."""
    found: dict[tuple, dict] = {}
    for row in sorted(rows, key=lambda row: row["release"]):
        found[row["model"], row["machine"], row["precision"]] = row
    return list(found.values())


def distinct(rows: list[dict]) -> list[dict]:
    """One run of each layout."""
    names = ("model", "machine", "precision", "gpus", "global_batch", "micro_batch", "tensor", "pipeline", "virtual", "context", "expert")  # fmt: skip
    return list(
        {tuple(row[name] for name in names): row for row in sorted(rows, key=lambda row: row["release"])}.values()
    )


def sizes(run: RunFacts) -> str:
    one = run.parallel
    again = run.model.get("recompute_granularity") or "none"
    return f"TP {one.tensor} PP {one.pipeline}x{one.virtual_pipeline or 1} CP {one.context} EP {one.expert} mbs {run.micro_batch_size} {again}"


def same(one: Layout, run: RunFacts) -> bool:
    a, b = one.run.parallel, run.parallel
    return (a.tensor, a.pipeline, a.virtual_pipeline or 1, a.context, a.expert, one.run.micro_batch_size) == (
        b.tensor, b.pipeline, b.virtual_pipeline or 1, b.context, b.expert, run.micro_batch_size,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every published layout")
    args = parser.parse_args()
    rows = [row for row in timed() if row["release"] in FITTED and row["pipeline"] > 1 and row["model"] not in UNUSUAL]
    rows = sorted(distinct(rows) if args.all else latest(rows), key=lambda row: not row["model"].startswith("llama"))
    met = 0
    for row in rows:
        run = run_of(row)
        machine = run.facts.machine
        here = estimate(run.policy, run.facts).seconds
        held = memory(run.policy, run.facts)
        ones = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 1)
        whole = replace(run.facts.parallel, world_size=row["gpus"], virtual_pipeline=None, **ones)
        found = search(run.policy, unsplit(run.facts, whole), machine, most=FIRST)
        good = [
            one
            for one in found
            if same(one, run.facts) or (one.answer == "fits" and abs(one.seconds / here - 1) <= NEAR)
        ]
        met += bool(good)
        print(
            f"{'yes' if good else 'NO '} {row['model']} {row['machine']} {row['precision']} {row['release']}: {sizes(run.facts)}, {here:.3g} s, {verdict(held, machine.memory_bytes)}"
        )
        for one in found:
            print(f"      {one.seconds / here - 1:+6.1%}  {sizes(one.run)}  {one.answer}")
        sys.stdout.flush()
    print(f"{met} of {len(rows)} published layouts, or one within {NEAR:.0%} that fits, are among the first {FIRST}")


if __name__ == "__main__":
    main()
