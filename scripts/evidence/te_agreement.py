"""Compares `--emulate` with `--emulate te`, linear by linear, with the same weights, inputs and output gradients.

    python scripts/evidence/te_agreement.py [--te 2.11] [--machine b200] [--recipes NAME ...] [--steps 3] [--json FILE]

For each recipe the run is trained twice, with Transformer Engine's own modules and emulated on megatron-core's local ones, from the same weights and at a learning rate too small to change them.
In the second run every linear (with the norm before it, which Transformer Engine's modules contain) is given its input and output gradient from the first run, so that what is
compared is what one layer computes: output, input gradient, weight gradient. Operands with equal codes give equal exact products; only the order may differ in which their FP32
sums are computed, before one rounding to BF16. So a difference has a bound on any CPU (see `bound_of`), and a difference beyond it means that one of the two is wrong. Stochastic
rounding draws different random numbers in each, so it is off.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import te_folders  # noqa: F401  # it says where Transformer Engine lies
import torch

from mpbridge import ConfigContainer, transformer_engine_on_cpu
from mpbridge.common.errors import Refused

RECIPES = (
    "bf16_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_subchannel_scaling_mixed",
    "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed",
)  # fmt: skip
MIXED = {
    "MXFP8 forward, NVFP4 backward": ("mxfp8", "nvfp4", "nvfp4"), "NVFP4 forward, MXFP8 backward": ("nvfp4", "mxfp8", "mxfp8"),
    "MXFP8, weight gradients in BF16": ("mxfp8", "mxfp8", "bf16"), "BF16 forward, MXFP8 backward": ("bf16", "mxfp8", "mxfp8"),
    "NVFP4, tensorwise, blockwise": ("nvfp4", "tensorwise", "blockwise"),
}  # fmt: skip
"""Rules for the GEMMs fprop, dgrad and wgrad of every linear; Transformer Engine 2.19 and later."""
SQUARES = "MXFP8, square weights"
"""The recipe with weights of one scale per 32x32 elements; Transformer Engine 2.20 and later."""
BLOCKS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_proj": None,
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "mlp.linear_fc2": None,
}
"""Linear of a layer -> the norm before it, a separate module among megatron-core's local ones."""
FUSED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""Prefix of a norm's parameters in Transformer Engine's modules -> in the local modules."""
WHAT = ("y", "dx", "dw")


def resolved(recipe: str, emulate: str, *, machine: str, te: str, layers: int = 2, hidden: int = 256) -> Any:
    """The run of one arm. Weights are stored in 16 bits, as in every emulated run."""
    played = {"emulate": "te", "target": machine, "te": te} if emulate == "te" else {"emulate": "fast", "te": te}
    if recipe == "bf16_mixed" and emulate != "te":
        played = {}
    options = {"fp8_options": {"square_weights": True}} if recipe == SQUARES else {}
    recipe = "bf16_with_mxfp8_mixed" if recipe == SQUARES else recipe
    gather: dict[str, Any] = {"fp8_param_gather": False} if "fp8" in recipe else {}
    gather |= {"reuse_grad_buf_for_mxfp8_param_ag": False} if "mxfp8" in recipe else {}
    edges = {"first_last_layers_bf16": False} if "fp8" in recipe else {}
    named: dict[str, Any] = {"recipe": recipe, **gather, **edges, **options}
    if recipe in MIXED:
        rule = dict(zip(("fprop", "dgrad", "wgrad"), MIXED[recipe], strict=True))
        named = {"recipe": "bf16_mixed", "modules": {"self_attention.*": rule, "mlp.*": rule}}
    container = ConfigContainer(
        mixed_precision=named,
        model={"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 4, "ffn_hidden_size": 2 * hidden, "vocab_size": 384, "gated_linear_unit": True,
               "activation_func": "silu", "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False, "hidden_dropout": 0.0,
               "attention_dropout": 0.0, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False},
        optimizer={"lr": 1e-30, "weight_decay": 0.0, "clip_grad": 0.0},
        ddp={"use_distributed_optimizer": True},
        train={"train_iters": 1000, "micro_batch_size": 2, "global_batch_size": 2},
        data={"seq_length": 64},
        **played,
    )  # fmt: skip
    return container.resolved(world_size=1)


def canonical(name: str) -> str:
    """A parameter's name among megatron-core's local modules."""
    for fused, local in FUSED:
        name = name.replace(fused, local)
    return name


class Given(torch.autograd.Function):
    """Replaces a tensor's values with another's; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return other.view_as(mine).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@dataclasses.dataclass
class Linear:
    """Inputs and outputs of one linear in one step."""

    x: torch.Tensor | None = None
    y: torch.Tensor | None = None
    dy: torch.Tensor | None = None
    dx: torch.Tensor | None = None
    dw: torch.Tensor | None = None


class Tape:
    """Records every linear of a step; given another tape, plays its inputs and output gradients."""

    def __init__(self, engine: Any, given: dict[str, Linear] | None = None) -> None:
        self.seen: dict[str, Linear] = {}
        self.given, self.hooks = given, []
        modules = {re.sub(r"^(module\.)+", "", name): module for name, module in engine.model[0].named_modules()}
        for name in modules:
            if (found := re.fullmatch(r"(decoder\.layers\.\d+)\.(.+)", name)) is None or found[2] not in BLOCKS:
                continue
            norm = BLOCKS[found[2]]
            before = modules.get(f"{found[1]}.{norm}") if norm else None
            # Transformer Engine's module contains the norm; an IdentityOp is in its place
            first = before if before is not None and any(True for _ in before.parameters()) else modules[name]
            self._watch(name, first, modules[name])

    def _watch(self, name: str, first: Any, last: Any) -> None:
        linear = self.seen[name] = Linear()
        given = self.given[name] if self.given is not None else None

        def enter(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = Given.apply(args[0], args[0].detach() if given is None else given.x)
            linear.x = x.detach().clone()
            x.register_hook(lambda grad: setattr(linear, "dx", grad.detach().clone()))
            return (x, *args[1:])

        def leave(module: Any, args: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            linear.y = y.detach().clone()

            def incoming(grad: torch.Tensor) -> torch.Tensor:
                played = grad if given is None else given.dy.view_as(grad)
                linear.dy = played.detach().clone()
                return played

            y.register_hook(incoming)

        self.hooks += [first.register_forward_pre_hook(enter), last.register_forward_hook(leave)]

    def close(self, engine: Any) -> dict[str, Linear]:
        """The recorded tensors, with the step's weight gradients."""
        for hook in self.hooks:
            hook.remove()
        for name, parameter in engine.named_parameters():
            if name.removesuffix(".weight") in self.seen:
                self.seen[name.removesuffix(".weight")].dw = parameter.main_grad.detach().float().clone()
        return self.seen


def steps_of(
    engine: Any, steps: int, given: list[dict[str, Linear]] | None = None
) -> tuple[list[dict[str, Linear]], list[Operands]]:
    """Every step's linears, and the operands of an emulated engine; the batches are the same for every engine."""
    out, operands = [], [Operands() for _ in range(steps)]
    emulation = getattr(engine, "emulation", None)
    for step in range(steps):
        ids = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(step))
        batch = {
            "tokens": ids[:, :-1], "labels": ids[:, 1:], "position_ids": torch.arange(64)[None].expand(2, -1), "loss_mask": torch.ones(2, 64),
        }  # fmt: skip
        tape = Tape(engine, None if given is None else given[step])
        if emulation is not None:
            emulation.observer = operands[step]
        engine.train_step(itertools.repeat(batch), microbatches=1)
        out.append(tape.close(engine))
    return out, operands


class Operands:
    """An observer of the emulation: the sizes of the operands that a step's GEMMs multiply, rotated and quantized as they are."""

    def __init__(self) -> None:
        self.sizes: dict[tuple[str, str, str], torch.Tensor] = {}

    def see(self, slot: str, gemm: str, side: str, high: torch.Tensor, operand: Any, quantizer: Any) -> None:
        """Called with each operand as it is made; one that serves two GEMMs is made once."""
        self.sizes[slot, gemm, side] = operand.dequantized().double()

    def of(self, slot: str, gemm: str, side: str) -> torch.Tensor | None:
        """The operand in float64, in its tensor's own layout; None: that linear is not quantized."""
        gemms = (gemm, "fprop", "dgrad")
        return next((self.sizes[key] for other in gemms if (key := (slot, other, side)) in self.sizes), None)


def spacing_of(values: torch.Tensor) -> torch.Tensor:
    """Distance to the next BF16 number."""
    return torch.exp2(torch.floor(torch.log2(values.abs().clamp_min(2.0**-126))) - 7)


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm before a linear, in float64."""

    x: torch.Tensor
    """[rows, features]."""
    gain: torch.Tensor
    eps: float = 1e-5

    @property
    def inverse(self) -> torch.Tensor:
        """Reciprocal root mean square of each row."""
        return torch.rsqrt(self.x.square().mean(1, keepdim=True) + self.eps)

    def output(self) -> torch.Tensor:
        """[rows, features]."""
        return self.x * self.inverse * self.gain

    def spread(self, sizes: torch.Tensor) -> torch.Tensor:
        """The largest input gradient that output gradients of these sizes can have: each element of the backward pass,
        r (gain g - n mean(gain g n)) with n = r x, is linear in g.
        """
        normal = (self.x * self.inverse).abs()
        scaled = self.gain.abs() * sizes
        return self.inverse * (scaled + normal * (scaled * normal).mean(1, keepdim=True))


UNIT = 2.0**-24
"""FP32 rounds by at most this, relative to the result."""


def order_of_sums(terms: int, sizes: torch.Tensor) -> torch.Tensor:
    """How far apart two FP32 sums of the same products may be, whatever their order: each is off by at most (terms - 1) UNIT times the sum of the
    products' sizes (Higham, Accuracy and Stability of Numerical Algorithms, 4.2); multiplying by the operands' factors rounds three times more.
    """
    return 2 * (terms + 2) * UNIT * sizes


def bound_of(
    what: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(how far apart two results of a linear may be before they are rounded, the result itself) if only the order of FP32 sums differs.

    The operands of the GEMM [tokens, inputs], [outputs, inputs], [tokens, outputs] are float64. For 'dx' behind a norm, the GEMM's results are
    rounded to BF16 (two neighbours at most, beyond the sums), and the norm's backward pass spreads that difference and adds its own: two sums over
    the features, which enter each term by the reciprocal root mean square, and less than 16 single operations.
    """
    left, right = {"y": (x, w.t()), "dx": (dy, w), "dw": (dy.t(), x)}[what]
    exact = left @ right
    apart = order_of_sums(left.shape[1], left.abs() @ right.abs())
    if what != "dx" or norm is None:
        return apart, exact
    apart = apart + spacing_of(exact.abs() + apart)
    own = 2 * (2 * exact.shape[1] + 16) * UNIT * norm.spread(exact.abs() + apart)
    return norm.spread(apart) + own, exact


def bounds(name: str, one: Linear, weights: dict[str, torch.Tensor], operands: Operands) -> dict[str, torch.Tensor]:
    """The bound of each tensor of a linear in one step, without the last rounding to BF16."""
    x, dy = (tensor.reshape(-1, tensor.shape[-1]).double() for tensor in (one.x, one.dy))
    block, linear = re.fullmatch(r"(decoder\.layers\.\d+)\.(.+)", name).groups()
    norm = Norm(x, weights[f"{block}.{BLOCKS[linear]}.weight"].double()) if BLOCKS[linear] else None
    plain = {
        "x": x if norm is None else norm.output().bfloat16().double(),
        "w": weights[f"{name}.weight"].double(),
        "dy": dy,
    }

    def operand(gemm: str, side: str) -> torch.Tensor:
        found = operands.of(name, gemm, side)
        return plain[side] if found is None else found

    gemms = {"y": "fprop", "dx": "dgrad", "dw": "wgrad"}
    return {
        what: bound_of(what, *(operand(gemm, side) for side in ("x", "w", "dy")), norm)[0]
        for what, gemm in gemms.items()
    }


def rows_of(
    real: list[dict[str, Linear]],
    ours: list[dict[str, Linear]],
    weights: dict[str, torch.Tensor],
    operands: list[Operands],
) -> list[dict[str, Any]]:
    """One row per linear and tensor: elements, number of differing ones, largest difference in BF16 units in the last place, over all steps."""
    found = {
        (name, what): {"linear": name, "tensor": what, "elements": 0, "different": 0, "ulp": 0.0, "beyond": 0}
        for name in real[0]
        for what in WHAT
    }
    for theirs, mine, multiplied in zip(real, ours, operands, strict=True):
        for name in theirs:
            allowed = bounds(name, theirs[name], weights, multiplied)
            for what in WHAT:
                a, b = (getattr(tape[name], what).double().reshape(allowed[what].shape) for tape in (theirs, mine))
                apart, spacing = (a - b).abs(), spacing_of(torch.maximum(a.abs(), b.abs()))
                row = found[name, what]
                row["elements"] += a.numel()
                row["different"] += int((apart > 0).sum())
                row["ulp"] = max(row["ulp"], float((apart / spacing).max()))
                row["beyond"] += int((apart > allowed[what] + spacing).sum())
    return list(found.values())


def compared(recipe: str, *, machine: str, te: str, steps: int) -> list[dict[str, Any]]:
    """The rows of one recipe. Requires an entered `transformer_engine_on_cpu` and a process group."""
    from mpbridge.backend.devices import device_layer
    from mpbridge.backend.engines.mcore import McoreEngine
    from mpbridge.backend.engines.registry import build_engine
    from mpbridge.backend.models.local_spec import CpuSpecProvider

    with device_layer(True):
        engine = build_engine(resolved(recipe, "te", machine=machine, te=te))
        try:
            weights = {canonical(name): parameter.detach().clone() for name, parameter in engine.named_parameters()}
            real, _ = steps_of(engine, steps)
        finally:
            engine.close()
        run = resolved(recipe, "fast", machine=machine, te=te)
        engine = McoreEngine.build(run, backend=CpuSpecProvider) if recipe == "bf16_mixed" else build_engine(run)
        try:
            with torch.no_grad():
                for name, parameter in engine.named_parameters():
                    parameter.copy_(weights[name])
            engine.optimizer.reload_model_params()
            ours, operands = steps_of(engine, steps, real)
        finally:
            engine.close()
    return rows_of(real, ours, weights, operands)


def summary(recipe: str, rows: list[dict[str, Any]]) -> str:
    """One line of the table."""
    cells = []
    for what in WHAT:
        mine = [row for row in rows if row["tensor"] == what]
        different, count = sum(row["different"] for row in mine), sum(row["elements"] for row in mine)
        cells.append(
            "equal" if not different else f"{different / count:.1e}, {max(row['ulp'] for row in mine):.0f} ulp"
        )
    beyond = sum(row["beyond"] for row in rows)
    return f"| {recipe} | {' | '.join(cells)} | {beyond} |"


HEAD = "| recipe | outputs | input gradients | weight gradients | beyond the bound |\n|---|---|---|---|--:|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--te", default="2.11")
    parser.add_argument("--machine", default="b200")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", action="store_true", help="also print every linear")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"] = "1"  # read by Transformer Engine at import
    found: dict[str, list[dict[str, Any]]] = {}
    with transformer_engine_on_cpu(args.machine, te=args.te):
        from mpbridge.training.process import process_group

        with process_group(False):
            print(HEAD)
            for recipe in args.recipes:
                try:
                    found[recipe] = compared(recipe, machine=args.machine, te=args.te, steps=args.steps)
                except Refused as reason:  # the machine cannot run this recipe; the others go on
                    print(f"| {recipe} | not compared: {reason} | | | |", flush=True)
                    continue
                print(summary(recipe, found[recipe]), flush=True)
                for row in found[recipe] if args.rows else ():
                    print("   ", row)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not found or any(row["beyond"] for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
