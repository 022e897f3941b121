"""Compares tuning at an early and at a late checkpoint, and scores with the losses of training, from the folder of tune_training.py.

    python scripts/evidence/tune_checkpoints.py late --early DIR --late DIR [--config F] [--out late.json] [key=value ...]
    python scripts/evidence/tune_checkpoints.py gaps --folder FOLDER [--out gaps.json]

`late`: tunes at both checkpoints; prints how many linears change their level, the rank correlation of the damages, and on unseen batches of the late checkpoint the
gradient error of the early choice and of the late one. `gaps`: for each seed of a training comparison, the scores of every arm at its checkpoint, ranked
against the arm's loss after its own steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tune_evidence import RECIPE, candidates, opened, scored
from tune_training import THIN

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("late", "gaps"))
    parser.add_argument("--config", default=str(ROOT / "configs" / "gpt_tiny.yaml"))
    parser.add_argument("--early", type=Path)
    parser.add_argument("--late", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--unseen", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    found = {"late": late, "gaps": gaps}[args.what](args)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def late(args: argparse.Namespace) -> dict[str, Any]:
    from mpbridge.precision.resolve import resolve
    from mpbridge.settings.container import ConfigContainer
    from mpbridge.training.tune.choices import LOW
    from mpbridge.training.tune.proof import prove
    from mpbridge.training.tune.run import tune
    from mpbridge.training.tune.scores import rank_correlation

    results = {}
    for name, checkpoint in (("early", args.early), ("late", args.late)):
        box = ConfigContainer.load(
            Path(args.config),
            [f"mixed_precision={RECIPE}", f"checkpoint.load={checkpoint}", *args.overrides],
            check=False,
        )
        results[name] = tune(box, batches=args.batches, unseen=args.unseen, say=lambda text: None)[0]
    one, two = results["early"], results["late"]
    slots = [{slot: result.choice[unit.name] for unit in result.units for slot in unit.slots} for result in (one, two)]
    damage = [
        {
            slot: mine.get(LOW, 0.0)
            for unit, mine in zip(result.units, result.options, strict=True)
            for slot in unit.slots
        }
        for result in (one, two)
    ]
    same = sum(slots[0][slot] == slots[1][slot] for slot in slots[0])
    args.checkpoint = args.late
    stack, subject = opened(args)
    with stack:
        arms = {name: resolve(result.config) for name, result in results.items()}
        proof = prove(subject, {**arms, "last 15 %": resolve(two.recipes["last 15 % bf16"])}, args.unseen)
    found = {
        "linears": len(slots[0]),
        "same level": same,
        "spearman of damages": rank_correlation(list(damage[0].values()), [damage[1][slot] for slot in damage[0]]),
        "pooled": [one.pooled, two.pooled],
        "gradient error at the late checkpoint": {name: [mine.error, mine.se] for name, mine in proof.items()},
        "early choice against late's, paired": proof["late"].better_than(proof["early"]),
    }
    print(json.dumps(found, indent=1))
    return found


def gaps(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for folder in sorted(args.folder.glob("seed*")):
        if (folder / "bf16.json").is_file():
            rows.append(_seed(args, folder))
            print(f"{folder.name} scored", file=sys.stderr, flush=True)
    return told(rows)


def told(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints and returns each score's rank correlation with the arms' gaps: by seed; with all low's gap replaced by that of its repetition with other random
    bits, which shows the noise of these figures; and of means over seeds."""
    from mpbridge.training.tune.scores import rank_correlation

    arms = rows[0]["arms"]
    twins = [
        [row["again"] if name == "all low" else gap for name, gap in zip(arms, row["gaps"], strict=True)]
        for row in rows
    ]
    mean = [statistics.fmean(row["gaps"][i] for row in rows) for i in range(len(arms))]
    found = {}
    print(
        f"{len(rows)} seeds, arms {', '.join(arms)}: Spearman with the training gap: mean over seeds (each), the same"
    )
    print("with all low's repetition under other random bits in its place, of means over seeds")
    for name in rows[0]["scores"]:
        scores = [row["scores"][name] for row in rows]
        each = [rank_correlation(mine, row["gaps"]) for mine, row in zip(scores, rows, strict=True)]
        again = [rank_correlation(mine, twin) for mine, twin in zip(scores, twins, strict=True)]
        middle = [statistics.fmean(mine[i] for mine in scores) for i in range(len(arms))]
        found[name] = {"each": each, "again": again, "of means": rank_correlation(middle, mean)}
        words = [f"{statistics.fmean(some):5.2f} ({', '.join(f'{one:.2f}' for one in some)})" for some in (each, again)]
        print(f"{words[0]} {words[1]} {found[name]['of means']:5.2f}  {name}")
    orders = [len({_order(row["scores"][name]) for name in row["scores"]}) for row in rows]
    print(f"number of different orders of the arms by the scores, per seed: {orders}")
    return {"arms": arms, "spearman": found, "orders": orders, "rows": rows}


def _order(values: list[float]) -> tuple[int, ...]:
    return tuple(sorted(range(len(values)), key=values.__getitem__))


def _seed(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Arms, their gaps to BF16, and each of their scores at their starting checkpoint."""
    import yaml

    from mpbridge.precision.modules import rule_of_word
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.precision.resolve import resolve
    from mpbridge.training.tune.choices import LOW
    from mpbridge.training.tune.scores import damages, joint

    done = {row["arm"]: row for row in (json.loads(path.read_text()) for path in folder.glob("*.json"))}
    arms = [name for name in yaml.safe_load((folder / "arms.yaml").read_text()) if name in done]
    args.checkpoint, args.overrides = folder / "before", [*THIN, f"train.seed={folder.name.removeprefix('seed')}"]
    stack, subject = opened(args)
    with stack:
        policy = subject.emulation.policy
        wide = {"mxfp8": rule_of_word("mxfp8", policy.compute)}
        some, scores, _ = scored(subject, args.batches, wide)
        levels = {LOW: policy.quant, **wide}
        options = damages(some, levels, scores, joint(subject, policy, levels, {}, 2))
        layers = max(unit.layer for unit in some) + 1
    names = {level.scaling: name for name, level in levels.items()}
    files = [folder / f"{name.replace(' ', '_').replace('%', 'percent')}.yaml" for name in arms]
    rules = [resolve(get_mixed_precision_config(file)) for file in files]

    def level(number: int, slot: str) -> str | None:
        quant = rules[number].of_path(slot, layers).fprop
        return names[quant.scaling] if quant is not None else None

    slots = [slot for unit in some for slot in unit.slots]
    sums = [
        sum(mine.get(level(number, unit.slots[0]) or "", 0.0) for unit, mine in zip(some, options, strict=True))
        for number in range(len(arms))
    ]
    proof = yaml.safe_load((folder / "evidence.yaml").read_text())["evidence"]["proof"]
    return {
        "arms": arms,
        "gaps": [done[name]["loss"] - done["bf16"]["loss"] for name in arms],
        "again": done["all low, other bits"]["loss"] - done["bf16"]["loss"],
        "scores": {
            "gradient error, measured": [proof[name]["error"] for name in arms],
            "damage (what tune chooses by)": sums,
            **candidates([slots] * len(arms), scores, level),
        },
    }


if __name__ == "__main__":
    main()
