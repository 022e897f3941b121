"""What predicts damage: rank correlations of scores with the gradient error of one decision at a time, planted outliers found, and scoring's memory.

    python scripts/tune_evidence.py ranks --checkpoint DIR --out ranks.json
    python scripts/tune_evidence.py planted --checkpoint DIR
    python scripts/tune_evidence.py memory --parameters 100

`ranks`: on --config's model every decision alone goes to NVFP4 and its gradient error on unseen batches is measured; scores from other batches are
ranked against it. `planted`: one channel of a linear's input is scaled up and undone in the weight that reads it. `memory`: peak resident memory of one
forward and backward, and of scoring the same batch, each in a process of its own.
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

ROOT = Path(__file__).resolve().parents[1]
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


def _opened(args: argparse.Namespace) -> Any:
    from contextlib import ExitStack

    from mpbridge.config.container import ConfigContainer
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.train.machine import process_group
    from mpbridge.tune.run import opened

    box = ConfigContainer.load(Path(args.config), [f"mixed_precision={RECIPE}", *args.overrides], check=False)
    if args.checkpoint:
        box.checkpoint["load"] = args.checkpoint
    stack = ExitStack()
    stack.enter_context(process_group(False))
    subject, _ = stack.enter_context(
        opened(box, get_mixed_precision_config(RECIPE), batches=args.batches, unseen=args.unseen)
    )
    return stack, subject


def _scored(subject: Any, batches: int) -> Any:
    from mpbridge.tune.scores import Scorer, merged
    from mpbridge.tune.units import LOW, Place, units

    emulation = subject.emulation
    scorer = Scorer({LOW: emulation.policy.quant}, emulation)
    for number in range(batches):
        scorer.batch(number)
        with emulation.listening(scorer):
            subject.backward("train", number)
    places = [
        Place(slot=name, below=below, layer=layer, layers=layers, weight=id(linear.weight))
        for linear, name, below, layer, layers in emulation.linears()
    ]
    return units(places), merged(scorer.halves), scorer


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    from mpbridge.precision.regions import GEMMS, Region
    from mpbridge.tune.damage import damages, joint, rank_correlation
    from mpbridge.tune.proof import prove
    from mpbridge.tune.units import LOW

    stack, subject = _opened(args)
    with stack:
        policy = subject.emulation.policy
        some, scores, scorer = _scored(subject, args.batches)
        whole = joint(subject, policy, {LOW: policy.quant}, {}, 2)
        alone = {
            unit.name: dataclasses.replace(
                policy, regions=(*(Region(modules=slot, quant=policy.quant) for slot in unit.slots), Region())
            )
            for unit in some
        }
        proof = prove(subject, {**alone, "all": policy}, args.unseen)
    truth = [sum(e * e for e in proof[unit.name].errors) for unit in some]
    candidates: dict[str, list[float]] = {
        "damage (what tune chooses by)": [mine[LOW] for mine in damages(some, {LOW: policy.quant}, scores, whole)]
    }
    halves = [[mine[LOW] for mine in damages(some, {LOW: policy.quant}, half, whole)] for half in scorer.halves]

    def over(field: str, gemm: str) -> list[float]:
        return [math.fsum(getattr(scores[slot, LOW], field)[gemm] for slot in unit.slots) for unit in some]

    for gemm, words in zip(GEMMS, ("(g e)^2 over Y", "(x e)^2 over dX", "e^2 over dW"), strict=True):
        candidates[f"{gemm}: sum of {words}"] = over("score", gemm)
        candidates[f"{gemm}: relative output error"] = [
            e / s for e, s in zip(over("error", gemm), over("size", gemm), strict=True)
        ]
    found = {name: rank_correlation(values, truth) for name, values in candidates.items()}
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
        "scores": candidates,
    }


def planted(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from mpbridge.tune.units import LOW

    stack, subject = _opened(args)
    target, factor, found = "decoder.layers.1.mlp.linear_fc2", 64.0, {}
    with stack:
        for when in ("before", "after"):
            some, scores, _ = _scored(subject, args.batches)
            each = {unit.name: sum(scores[slot, LOW].score["fprop"] for slot in unit.slots) for unit in some}
            order = sorted(each, key=lambda name: -each[name])
            found[when] = order.index("1.mlp.linear_fc2") + 1
            print(f"{when}: {target} is number {found[when]} of {len(order)} by its score")
            if when == "before":
                linears = {name: linear for linear, name, *_ in subject.emulation.linears()}
                with torch.no_grad():
                    up, down = linears["decoder.layers.1.mlp.linear_fc1"].weight, linears[target].weight
                    # the gated half that is multiplied, not the one that goes through SiLU: high precision computes the same
                    up[up.shape[0] // 2 + 7] *= factor
                    down[:, 7] /= factor
    return found


def memory(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    # what is freed goes back at once, so that a peak is of what was needed at one time and not of what the allocator kept
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
    """GiB of this process: 'VmRSS' now, 'VmHWM' at most since the last reset."""
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
    stack, subject = _opened(args)
    with stack, torch._dynamo.config.patch(disable=True):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        if args.score:
            _scored(subject, 1)
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
