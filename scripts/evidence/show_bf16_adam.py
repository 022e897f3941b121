"""Shows why Adam with BF16 states fails: a moment that stalls, updates that vanish, and the effect on a small GPT over three seeds.

`python scripts/evidence/show_bf16_adam.py` prints the first two (seconds). `--train` also trains fp32, bf16_mixed and full_bf16 with three seeds each
(`--steps`, default 200: about a minute per run on one core) and writes a plot (`--plot FILE`) and the curves (`--json FILE`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

RECIPES = ("fp32", "bf16_mixed", "full_bf16")
SEQ, VOCAB = 64, 256


def second_moment(dtype: torch.dtype, *, beta2: float, steps: int = 3000) -> float:
    """Adam's second moment after `steps` gradients of exactly 1; it should approach 1."""
    v, g = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    for _ in range(steps):
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return float(v)


def trained_weight(dtype: torch.dtype, *, steps: int = 100, lr: float = 6e-4) -> float:
    """A weight that starts at 1 after AdamW steps along a constant gradient of 0.01, without weight decay."""
    w = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer = torch.optim.AdamW([w], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        w.grad = torch.full_like(w, 0.01)
        optimizer.step()
    return float(w.detach())


def lost_updates(dtype: torch.dtype, relative: float, *, count: int = 10_000) -> float:
    """Share of weights in [1, 2) that an update of `relative` times their size leaves unchanged."""
    generator = torch.Generator().manual_seed(0)
    w = (1 + torch.rand(count, generator=generator)).to(dtype)
    return float((w - (w.float() * relative).to(dtype) == w).float().mean())


def numbers() -> list[tuple[str, str, str]]:
    """(what, FP32, BF16) rows."""
    fp32, bf16 = torch.float32, torch.bfloat16
    rows = [
        (
            f"second moment, beta2 {beta2}, 3000 gradients of 1",
            f"{second_moment(fp32, beta2=beta2):.4f}",
            f"{second_moment(bf16, beta2=beta2):.4f}",
        )
        for beta2 in (0.95, 0.99, 0.999)
    ]
    rows.append(
        ("weight 1 after 100 AdamW steps of 6e-4", f"{trained_weight(fp32):.6f}", f"{trained_weight(bf16):.6f}")
    )
    rows += [
        (
            f"updates of {relative:g} of a weight that are lost",
            f"{lost_updates(fp32, relative):.0%}",
            f"{lost_updates(bf16, relative):.0%}",
        )
        for relative in (1e-2, 3e-3, 1e-3, 1e-4)
    ]
    return rows


def batches(seed: int, micro: int) -> Iterator[dict[str, torch.Tensor]]:
    """Sequences that count modulo 50 from a random start: learnable to a loss near zero, so that the last digits of the loss distinguish the arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(0, 200, (micro, 1), generator=generator)
        text = (torch.arange(SEQ + 1) % 50 + start) % VOCAB
        positions = torch.arange(SEQ).expand(micro, SEQ)
        yield {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "position_ids": positions,
            "loss_mask": torch.ones(micro, SEQ),
        }


def curve(recipe: str, *, seed: int, steps: int, lr: float) -> list[float]:
    """Training losses of a two-layer GPT, 128 wide, gradient clipping off."""
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.settings.container import ConfigContainer

    mine = start_process_group(False)
    container = ConfigContainer(
        mixed_precision=recipe,
        model={
            "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": VOCAB, "max_sequence_length": SEQ,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "position_embedding_type": "rope", "share_embeddings_and_output_weights": True,
        },
        optimizer={"lr": lr, "clip_grad": 0.0, "weight_decay": 0.01},
        train={"micro_batch_size": 16, "global_batch_size": 16, "train_iters": steps, "seed": seed},
    )  # fmt: skip
    with device_layer(False):
        engine = build_engine(container.resolved())
        data = batches(seed, 16)
        losses = [engine.train_step(data, microbatches=1).loss for _ in range(steps)]
        engine.close()
    if mine:
        stop_process_group()
    return losses


def plot(curves: dict[str, list[list[float]]], file: Path) -> None:
    """Plots every seed as a thin line and their mean as a thick one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for recipe, color in zip(curves, ("#222222", "#1f77b4", "#d62728"), strict=False):
        runs = torch.tensor(curves[recipe])
        for run in runs:
            axes.plot(run, color=color, alpha=0.25, linewidth=0.8)
        # dashed and on top, because bf16_mixed would hide it
        style: dict[str, Any] = {"linestyle": "--", "zorder": 5} if recipe == "fp32" else {}
        axes.plot(
            runs.mean(0),
            color=color,
            linewidth=1.8,
            **style,
            label=f"{recipe}: {runs[:, -10:].mean():.4f} over the last 10 steps",
        )
    axes.set(yscale="log", xlabel="step", ylabel="training loss", title="the same model and data, three seeds each")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def train(steps: int, seeds: int, lr: float) -> dict[str, Any]:
    """{'curves': recipe -> seeds -> losses, 'last': recipe -> mean of the last ten}."""
    curves = {
        recipe: [curve(recipe, seed=1234 + seed, steps=steps, lr=lr) for seed in range(seeds)] for recipe in RECIPES
    }
    last = {recipe: sum(sum(run[-10:]) / 10 for run in runs) / len(runs) for recipe, runs in curves.items()}
    return {"steps": steps, "lr": lr, "last": last, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{'':54} {'fp32':>10} {'bf16':>10}")
    for what, fp32, bf16 in numbers():
        print(f"{what:54} {fp32:>10} {bf16:>10}")
    if not args.train:
        return
    found = train(args.steps, args.seeds, args.lr)
    reference = found["last"]["fp32"]
    for recipe, loss in found["last"].items():
        print(
            f"{recipe:12} loss over the last 10 of {args.steps} steps, mean of {args.seeds} seeds: {loss:.4f} ({loss / reference - 1:+.1%})"
        )
    if args.json:
        args.json.write_text(json.dumps(found))
    if args.plot:
        plot(found["curves"], args.plot)


if __name__ == "__main__":
    main()
