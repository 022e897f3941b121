"""Measures how far the emulation is from Transformer Engine: the same weights and batches through the real and the emulated recipe, layer by layer, step by step.

    python scripts/evidence/gpu_agreement.py [--recipes NAME ...] [--layers 6] [--steps 3] [--out agreement.json]

For each recipe, runs three engines one after another with the same BF16 weights, at a learning rate too small to change them: the recipe as Transformer Engine runs
it, the recipe emulated, and bf16_mixed on the emulation's modules without quantization. A row is a layer's relative difference (norm of the difference over
the norm of the real one) of its output hidden states and of its linears' weight gradients. "floor" is the effect of kernels alone: bf16_mixed on Transformer
Engine's modules against bf16_mixed on ours. "without" is the difference of a run without any quantization: the size of the effect to be reproduced.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.mcore import McoreEngine
from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.backend.engines.parallel import start_process_group, stop_process_group
from mpbridge.backend.engines.registry import build_engine
from mpbridge.backend.models.local_spec import CpuSpecProvider
from mpbridge.settings.container import ConfigContainer

RECIPES = (
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_subchannel_scaling_mixed",
)
LAYER = re.compile(r"decoder\.layers\.(\d+)$")
FUSED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""Prefix of a norm's parameters in Transformer Engine's fused modules -> in megatron-core's local modules."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step's hidden states and weight gradients by layer, FP32 on the CPU."""

    hidden: dict[int, torch.Tensor]
    gradient: dict[int, torch.Tensor]


def resolved(recipe: str, *, emulate: bool, layers: int, hidden: int = 512, sequence: int = 256) -> Any:
    """The run of one arm; weights are stored in 16 bits, since FP8 storage is not emulated."""
    container = ConfigContainer(
        mixed_precision={"recipe": recipe, "fp8_param_gather": False} if "fp8" in recipe else recipe,
        emulate=emulate,
        model={"num_layers": layers, "hidden_size": hidden, "num_attention_heads": hidden // 64, "ffn_hidden_size": 4 * hidden, "vocab_size": 384,
               "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        optimizer={"lr": 1e-30, "weight_decay": 0.0, "clip_grad": 0.0},
        ddp={"use_distributed_optimizer": True},
        train={"train_iters": 1000, "micro_batch_size": 2, "global_batch_size": 2},
        data={"seq_length": sequence},
    )  # fmt: skip
    return container.resolved(world_size=1)


def canonical(name: str) -> str:
    """A parameter's name among megatron-core's local modules."""
    for fused, local in FUSED:
        name = name.replace(fused, local)
    return name


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of the parameters by canonical name, on the CPU."""
    return {canonical(name): parameter.detach().to("cpu", copy=True) for name, parameter in engine.named_parameters()}


def install(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """Copies them into another engine, main weights included."""
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            parameter.copy_(weights[canonical(name)])
    engine.optimizer.reload_model_params()


def trace(engine: Any, steps: int, sequence: int) -> list[Step]:
    """The results of each of `steps` steps; the batches are the same for every engine."""
    hidden: dict[int, torch.Tensor] = {}
    hooks = []
    for name, module in engine.model[0].named_modules():
        if found := LAYER.search(name):

            def keep(module: Any, args: Any, output: Any, layer: int = int(found[1])) -> None:
                hidden[layer] = (output[0] if isinstance(output, tuple) else output).detach().float().cpu()

            hooks.append(module.register_forward_hook(keep))
    out = []
    for step in range(steps):
        ids = torch.randint(0, 256, (2, sequence + 1), generator=torch.Generator().manual_seed(step))
        positions = torch.arange(sequence)[None].expand(2, -1)
        batch = {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "position_ids": positions,
            "loss_mask": torch.ones(2, sequence),
        }
        engine.train_step(itertools.repeat(batch), microbatches=1)
        out.append(Step(hidden=dict(hidden), gradient=gradients(engine)))
    for hook in hooks:
        hook.remove()
    return out


def gradients(engine: Any) -> dict[int, torch.Tensor]:
    """Layer -> the gradients of its linears' weights, flat."""
    parts: dict[int, list[torch.Tensor]] = {}
    for name, parameter in sorted((canonical(name), parameter) for name, parameter in engine.named_parameters()):
        if (found := re.match(r"decoder\.layers\.(\d+)\..*linear_\w+\.weight$", name)) is not None:
            parts.setdefault(int(found[1]), []).append(parameter.main_grad.detach().float().flatten().cpu())
    return {layer: torch.cat(flat) for layer, flat in parts.items()}


def apart(a: list[Step], b: list[Step]) -> list[dict[str, float]]:
    """One row per layer: the largest relative difference over the steps, of `b` from `a`."""
    rows = []
    for layer in sorted(a[0].hidden):
        row = {"layer": float(layer)}
        for what in ("hidden", "gradient"):
            pairs = [(getattr(x, what)[layer], getattr(y, what)[layer]) for x, y in zip(a, b, strict=True)]
            row[what] = max(float((y - x).norm() / x.norm()) for x, y in pairs)
        rows.append(row)
    return rows


def traced(
    build: Callable[[], Any], weights: dict[str, torch.Tensor] | None, steps: int, sequence: int = 256
) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """(trace, the weights it ran with) of the engine that `build` makes, closed afterwards; weights: None: the engine's own."""
    cuda = torch.cuda.is_available()
    with device_layer(cuda, fused_adam=CpuFusedAdam):
        engine = build()
        try:
            if weights is not None:
                install(engine, weights)
            return trace(engine, steps, sequence), weights_of(engine)
        finally:
            engine.close()


def agreement(recipe: str, *, layers: int, steps: int, hidden: int = 512, sequence: int = 256) -> dict[str, Any]:
    """The table of one recipe."""
    size = {"layers": layers, "hidden": hidden, "sequence": sequence}
    plain = resolved("bf16_mixed", emulate=False, **size)
    local, weights = traced(lambda: McoreEngine.build(plain, backend=CpuSpecProvider), None, steps, sequence)
    engine, _ = traced(lambda: build_engine(plain), weights, steps, sequence)
    real, _ = traced(lambda: build_engine(resolved(recipe, emulate=False, **size)), weights, steps, sequence)
    emulated, _ = traced(lambda: build_engine(resolved(recipe, emulate=True, **size)), weights, steps, sequence)
    return {
        "recipe": recipe,
        "emulated": apart(real, emulated),
        "without": apart(real, engine),
        "floor": apart(engine, local),
    }


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"### {report['recipe']}",
        "",
        "| layer | hidden states | weight gradients | floor (hidden, gradients) | without quantization (hidden, gradients) |",
        "|--:|--:|--:|--:|--:|",
    ]
    for e, f, w in zip(report["emulated"], report["floor"], report["without"], strict=True):
        pair = lambda row: f"{row['hidden']:.2e}, {row['gradient']:.2e}"  # noqa: E731
        lines.append(f"| {e['layer']:.0f} | {e['hidden']:.2e} | {e['gradient']:.2e} | {pair(f)} | {pair(w)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Prints the tables; writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_agreement.py needs a CUDA device with Transformer Engine; there is none here")
    start_process_group(True)
    reports = []
    for recipe in args.recipes:
        size = {"hidden": args.hidden, "sequence": args.sequence}
        reports.append(agreement(recipe, layers=args.layers, steps=args.steps, **size))
        print(table(reports[-1]), flush=True)
        if args.out:  # after each recipe: a run that is stopped leaves what it measured
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    stop_process_group()


if __name__ == "__main__":
    main()
