"""Evidence for the scores: their rank correlations with the gradient error of one decision at a time, detection of planted outliers, and the memory of scoring.

    python scripts/evidence/tune_evidence.py ranks --checkpoint DIR --out ranks.json
    python scripts/evidence/tune_evidence.py planted --checkpoint DIR
    python scripts/evidence/tune_evidence.py memory --parameters 100

`ranks`: on --config's model, sets every decision alone to NVFP4 and measures its gradient error on unseen batches; scores from other batches are
ranked against it. `planted`: one channel of a linear's input is scaled up, and the weight that reads it is scaled down. `memory`: peak resident memory of one
forward and backward, and of scoring the same batch, each in a separate process.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")

RECIPE = "bf16_with_nvfp4_mixed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ranks", "planted", "memory", "measure"))
    parser.add_argument("--config", default=str(ROOT / "configs" / "gpt_tiny.yaml"))
    parser.add_argument("--checkpoint")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--unseen", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=100, help="memory: millions, 30, 100 or 300")
    parser.add_argument("--score", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    found = {"ranks": ranks, "planted": planted, "memory": memory, "measure": measure}[args.what](args)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def opened(args: argparse.Namespace) -> Any:
    """(a stack that closes it, the subject) of --config under RECIPE, with the weights of --checkpoint."""
    from contextlib import ExitStack

    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.settings.container import ConfigContainer
    from mpbridge.training.process import process_group
    from mpbridge.training.tune.levels import base_of
    from mpbridge.training.tune.run import opened

    box = ConfigContainer.load(Path(args.config), [f"mixed_precision={RECIPE}", *args.overrides], check=False)
    if args.checkpoint:
        box.checkpoint["load"] = str(args.checkpoint)
    stack = ExitStack()
    stack.enter_context(process_group(False))
    base = base_of(get_mixed_precision_config(RECIPE))
    subject, _ = stack.enter_context(opened(box, base, batches=args.batches, unseen=args.unseen))
    return stack, subject


def scored(subject: Any, batches: int, levels: dict[str, Any] | None = None) -> Any:
    """(units, scores of all batches, the scorer). levels: in addition to the recipe's own format."""
    from mpbridge.training.tune.choices import LOW, TunedLinear, units
    from mpbridge.training.tune.scores import Scorer, merged

    emulation = subject.emulation
    scorer = Scorer({LOW: emulation.policy.quant, **(levels or {})}, emulation)
    for number in range(batches):
        scorer.batch(number)
        with emulation.listening(scorer):
            subject.backward("train", number)
    places = [
        TunedLinear(slot=name, below=below, layer=layer, weight=id(linear.weight))
        for linear, name, below, layer, _ in emulation.linears()
    ]
    return units(places), merged(scorer.halves), scorer


def candidates(some: Any, scores: Any, level: Any) -> dict[str, list[float]]:
    """Name -> a number for each of `some` (lists of slots), for the scores that need no joint measurement. level: (number, slot) -> level or None."""
    from mpbridge.precision.regions import GEMMS

    def over(field: str, gemm: str) -> list[float]:
        return [
            math.fsum(getattr(scores[slot, at], field)[gemm] for slot in slots if (at := level(number, slot)))
            for number, slots in enumerate(some)
        ]

    def size(gemm: str) -> list[float]:
        return [
            math.fsum(next(s.size[gemm] for (where, _), s in scores.items() if where == slot) for slot in slots)
            for slots in some
        ]

    found: dict[str, list[float]] = {}
    for gemm, words in zip(GEMMS, ("(g e)^2 over Y", "(x e)^2 over dX", "e^2 over dW"), strict=True):
        found[f"{gemm}: sum of {words}"] = over("score", gemm)
        found[f"{gemm}: relative output error"] = [e / s for e, s in zip(over("error", gemm), size(gemm), strict=True)]
    return found


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    from mpbridge.precision.regions import Region
    from mpbridge.training.tune.choices import LOW
    from mpbridge.training.tune.proof import prove
    from mpbridge.training.tune.scores import damages, joint, rank_correlation

    stack, subject = opened(args)
    with stack:
        policy = subject.emulation.policy
        some, scores, scorer = scored(subject, args.batches)
        whole = joint(subject, policy, {LOW: policy.quant}, {}, 2)
        alone = {
            unit.name: dataclasses.replace(
                policy, regions=(*(Region(modules=slot, quant=policy.quant) for slot in unit.slots), Region())
            )
            for unit in some
        }
        proof = prove(subject, {**alone, "all": policy}, args.unseen)
    truth = [sum(e * e for e in proof[unit.name].errors) for unit in some]
    tried = {
        "damage (what tune chooses by)": [mine[LOW] for mine in damages(some, {LOW: policy.quant}, scores, whole)],
        **candidates([unit.slots for unit in some], scores, lambda number, slot: LOW),
    }
    halves = [[mine[LOW] for mine in damages(some, {LOW: policy.quant}, half, whole)] for half in scorer.halves]
    found = {name: rank_correlation(values, truth) for name, values in tried.items()}
    together = sum(e * e for e in proof["all"].errors)
    print(
        f"{len(some)} decisions, {args.batches} scoring batches, {args.unseen} unseen; Spearman with the squared gradient error alone"
    )
    for name, value in found.items():
        print(f"{value:6.2f}  {name}")
    print(f"{rank_correlation(*halves):6.2f}  one half of the scoring batches with the other")
    print(f"squared errors one at a time add up to {sum(truth) / together:.2f} times the joint one")
    return {
        "spearman": found,
        "halves": rank_correlation(*halves),
        "additive": sum(truth) / together,
        "truth": truth,
        "scores": tried,
    }


def planted(args: argparse.Namespace) -> dict[str, Any]:
    """Outlier channels in the input of one fc2, compensated in the weight that reads them: one channel alone, then one in every block of 16."""
    import torch

    from mpbridge.training.tune.choices import LOW
    from mpbridge.training.tune.scores import damages, joint

    stack, subject = opened(args)
    target, factor, found = "decoder.layers.1.mlp.linear_fc2", 64.0, {}
    with stack:
        policy = subject.emulation.policy
        linears = {name: linear for linear, name, *_ in subject.emulation.linears()}
        up, down = linears["decoder.layers.1.mlp.linear_fc1"].weight, linears[target].weight
        width = down.shape[1]
        for name, channels in {
            "nothing": [],
            "one channel": [7],
            "one channel in every 16": range(7, width, 16),
        }.items():
            kept = up.detach().clone(), down.detach().clone()
            with torch.no_grad():
                for channel in channels:
                    # in a gated layer, the linear half, not the one that goes through SiLU: in high precision the result is unchanged
                    up[up.shape[0] - width + channel] *= factor
                    down[:, channel] /= factor
            some, scores, _ = scored(subject, args.batches)
            levels = {LOW: policy.quant}
            mine = [one[LOW] for one in damages(some, levels, scores, joint(subject, policy, levels, {}, 2))]
            order = [some[i].name for i in sorted(range(len(some)), key=lambda i: -mine[i])]
            share = {some[i].name: mine[i] / math.fsum(mine) for i in range(len(some))}
            found[name] = {
                "place": order.index("1.mlp.linear_fc2") + 1,
                "share": share["1.mlp.linear_fc2"],
                "most": order[:3],
            }
            print(
                f"{name}: 1.mlp.linear_fc2 is number {found[name]['place']} of {len(order)}, {share['1.mlp.linear_fc2']:.1%} of the damage; most: {', '.join(order[:3])}"
            )
            with torch.no_grad():
                up.copy_(kept[0])
                down.copy_(kept[1])
    return found


def memory(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    # freed memory is returned at once, so that a peak shows what was needed at one time, not what the allocator kept
    returning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    for name, more in (("one forward and backward", []), ("scoring the same batch", ["--score"])):
        command = [sys.executable, __file__, "measure", "--parameters", str(args.parameters), *more]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | returning)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: peak {found[name]['whole']:.2f} GiB, {found[name]['above']:.2f} GiB above the built model")
    ratios = {key: found[b][key] / found[a][key] for a, b in [tuple(found)] for key in ("whole", "above")}
    print(f"scoring over one forward and backward: {ratios['whole']:.2f}, above the built model {ratios['above']:.2f}")
    return {**found, "ratios": ratios}


def _resident(line: str) -> float:
    """GiB of this process: 'VmRSS': current; 'VmHWM': peak since the last reset."""
    status = Path("/proc/self/status").read_text()
    return next(int(row.split()[1]) for row in status.splitlines() if row.startswith(line)) / 2**20


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    width, layers = {30: (768, 4), 100: (768, 12), 300: (1024, 20)}[args.parameters]
    args.overrides = [
        f"model.num_layers={layers}", f"model.hidden_size={width}", f"model.ffn_hidden_size={4 * width}", "model.num_attention_heads=16",
        "train.global_batch_size=2", "train.micro_batch_size=1",
    ]  # fmt: skip
    args.batches, args.unseen = 1, 1
    stack, subject = opened(args)
    with stack, torch._dynamo.config.patch(disable=True):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        if args.score:
            scored(subject, 1)
        else:
            with subject.emulation.paused():
                subject.backward("train", 0)
        peak = _resident("VmHWM")
        count = sum(parameter.numel() for _, parameter in subject.engine.named_parameters())
    found = {"parameters": count, "above": peak - before, "whole": peak}
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
