"""Notes on a Megatron-LM command line: settings without effect, contradictions, what mpbridge cannot express, and which defaults decide where it is silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpbridge.common.errors import cut
from mpbridge.common.formats import say
from mpbridge.precision.scalings import SCALINGS


@dataclass
class Parsed:
    """A parsed command line."""

    dtypes: bool = True
    """Whether Megatron-FSDP has its own dtype flags in that version."""
    values: dict[str, Any] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def on(self, name: str) -> bool:
        """Whether a switch was given."""
        return bool(self.values.get(name))


ConditionalNote = tuple[bool, str]
"""(whether it applies, the note)."""


def inert(read: Parsed, values: Mapping[str, Any]) -> list[str]:
    """Settings that its parser accepts but nothing reads, or that act elsewhere than expected."""
    rows = (*_inert_quantization(read, values), *_inert_reduction(read, values), *_inert_states(read, values))
    return [text for applies, text in rows if applies]


def _inert_quantization(read: Parsed, values: Mapping[str, Any]) -> Iterator[ConditionalNote]:
    said, off, recipe = read.said, values["fp8"] is None, values["fp8_recipe"]
    alone = "fp8_recipe" in said and off
    moves = read.on("aware") and recipe != "delayed"
    yield alone and not moves, "--fp8-recipe without --fp8-format: nothing is quantized"
    yield (
        alone and moves,
        f"--fp8-recipe {recipe} without --fp8-format quantizes nothing, but moves the main weights from FusedAdam to megatron-core",
    )
    amax = {"fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin"} & said
    yield (
        bool(amax) and (off or recipe != "delayed"),
        "--fp8-amax-* and --fp8-margin have an effect only under delayed scaling",
    )
    yield "fp8_interval" in said, "--fp8-interval: Transformer Engine no longer reads it"
    edges = read.on("edges")
    yield bool({"first", "last"} & said) and not edges, "--num-layers-at-*-in-bf16 without --first-last-layers-bf16"
    yield edges and off and values["fp4"] is None, "--first-last-layers-bf16 without a quantization"


def _inert_reduction(read: Parsed, values: Mapping[str, Any]) -> Iterator[ConditionalNote]:
    yield (
        read.on("softmax") and values["transformer_impl"] != "local",
        "--attention-softmax-in-fp32: Transformer Engine's attention does not read it",
    )
    wide, low = read.on("accumulate"), read.on("reduce_bf16")
    yield wide and low, "--accumulate-allreduce-grads-in-fp32 with --grad-reduce-in-bf16: BF16 wins"
    yield (
        wide and (read.on("fsdp2") or (read.on("megatron_fsdp") and read.dtypes)),
        "--accumulate-allreduce-grads-in-fp32: the sharding engine does not read it",
    )
    yield low and read.on("fp16"), "--grad-reduce-in-bf16 under --fp16: gradients are reduced in FP16"


def _inert_states(read: Parsed, values: Mapping[str, Any]) -> Iterator[ConditionalNote]:
    states = {"main_params", "main_grads", "exp_avg", "exp_avg_sq"} & read.said
    yield (
        bool(states) and not read.on("aware") and all(values[name] == "fp32" for name in states),
        "--main-*-dtype and --exp-avg-*-dtype have an effect only with --use-precision-aware-optimizer",
    )
    scale = {"initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"} & read.said
    yield bool(scale) and not read.on("fp16"), "details of dynamic loss scaling without --fp16"
    fsdp = {"fsdp_main_params", "fsdp_main_grads", "fsdp_grad_comm"} & read.said
    yield bool(fsdp) and not read.on("megatron_fsdp"), "--megatron-fsdp-*-dtype without --use-megatron-fsdp"


def contradictions(read: Parsed, values: Mapping[str, Any]) -> list[str]:
    """Settings that its parser refuses, or that train something unexpected."""
    rows = (*_contradicting_dtypes(read, values), *_contradicting_quantization(read, values))
    return [text for applies, text in rows if applies]


def _contradicting_dtypes(read: Parsed, values: Mapping[str, Any]) -> Iterator[ConditionalNote]:
    yield read.on("bf16") and read.on("fp16"), "--bf16 and --fp16: the parser refuses both together"
    divided = read.on("distributed") or read.on("megatron_fsdp") or read.on("fsdp2")
    yield (
        read.on("aware") and not divided,
        "--use-precision-aware-optimizer without --use-distributed-optimizer: megatron-core refuses it",
    )
    yield (
        read.on("aware") and values["optimizer"] != "adam",
        f"--use-precision-aware-optimizer with --optimizer {cut(values['optimizer'])}: megatron-core takes only adam",
    )
    low = any(values[name] != "fp32" for name in ("main_params", "exp_avg", "exp_avg_sq", "main_grads"))
    yield (
        low and not read.on("aware"),
        "16-bit optimizer states without --use-precision-aware-optimizer: the parser refuses them",
    )
    yield (
        read.on("accumulate") and values["main_grads"] == "bf16",
        "--main-grads-dtype bf16 with --accumulate-allreduce-grads-in-fp32: the parser refuses it",
    )


def _contradicting_quantization(read: Parsed, values: Mapping[str, Any]) -> Iterator[ConditionalNote]:
    fp8, fp4, stored = values["fp8"], values["fp4"], read.on("fp8_stored")
    yield bool(fp8 and fp4), "--fp8-format and --fp4-format: megatron-core refuses both together"
    for low in ("fp8", "fp4"):
        recipe = values[f"{low}_recipe"]
        known = recipe == "custom" or any(row.core == recipe for row in SCALINGS.values())
        yield not known, f"--{low}-recipe {cut(recipe)}: the parser has no such recipe"
    yield (
        read.on("fsdp2") and read.on("megatron_fsdp"),
        "--use-torch-fsdp2 with --use-megatron-fsdp: described as Megatron-FSDP",
    )
    delayed = bool(fp8) and values["fp8_recipe"] == "delayed"
    yield (
        fp8 == "hybrid" and values["fp8_recipe"] == "mxfp8",
        "--fp8-format hybrid with --fp8-recipe mxfp8: gradients are quantized to E5M2, which diverged and was withdrawn (Megatron-Bridge#638)",
    )
    yield read.on("edges") and delayed, "--first-last-layers-bf16 with delayed scaling: megatron-core refuses it"
    yield stored and fp8 is None, "--fp8-param-gather without --fp8-format"
    sharded = read.on("distributed") or read.on("megatron_fsdp") or read.on("fsdp2")
    yield stored and not sharded, "--fp8-param-gather needs --use-distributed-optimizer or an FSDP engine"
    yield (
        values["transformer_impl"] == "local" and bool(fp8 or fp4),
        "--transformer-impl local with FP8: accepted, but nothing is quantized",
    )


def cannot_express(read: Parsed, values: Mapping[str, Any]) -> list[str]:
    """Settings for which mpbridge has no equivalent."""
    found = []
    if read.on("fp8_output_proj"):
        found.append("--fp8-output-proj: the output layer in MXFP8")
    if read.on("fp16_loss"):
        found.append("--fp16-lm-cross-entropy: model.fp16_lm_cross_entropy, not a precision field of a recipe")
    return found


_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
_STATES = ("main_params", "main_grads", "exp_avg", "exp_avg_sq")
_WRAPPED = ("fsdp_main_params", "fsdp_main_grads", "fsdp_grad_comm")


def in_force(
    read: Parsed, values: Mapping[str, Any], options: Mapping[str, tuple[str, Any]], *, strategy: str
) -> tuple[str, ...]:
    """'--option value' of each option that is read, decides something beside the others, and is not said.

    values: with the parser's defaults. options: option -> (name in `values`, its default). strategy: Megatron-FSDP's, as it is in force.
    """
    asked = {name for names in _asked(read, values) for name in names} - read.said
    spelled = [f"{option} {_text(values[name])}" for option, (name, _) in options.items() if name in asked]
    return (*spelled, *_settled(read, values, strategy))


def _text(value: Any) -> str:
    """A value as it is typed: whole numbers without a fraction."""
    return say(int(value) if isinstance(value, float) and value.is_integer() else value)


def _asked(read: Parsed, values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Names of values that something reads beside what is said."""
    yield ("optimizer",)
    if values["optimizer"] == "sgd":
        yield ("sgd_momentum",)
    if read.on("fp16") and values["loss_scale"] is None:
        yield _SCALE
    if values["fp8"] is not None:
        yield ("fp8_recipe",)
        if values["fp8_recipe"] == "delayed":
            yield _DELAYED
    if values["fp4"] is not None:
        yield ("fp4_recipe",)
    if (values["fp8"] or values["fp4"]) and read.on("edges"):
        yield ("first", "last")
    if read.on("aware"):
        yield _STATES
    if read.on("megatron_fsdp") and read.dtypes:
        yield _WRAPPED
    yield ("transformer_impl",)


def _settled(read: Parsed, values: Mapping[str, Any], strategy: str) -> Iterator[str]:
    """What validate_args or an engine settles where no flag of its own is given."""
    low, engine = read.on("bf16") or read.on("fp16"), read.on("megatron_fsdp") or read.on("fsdp2")
    reduction = not engine and not {"accumulate", "reduce_bf16"} & read.said
    if reduction and read.on("bf16") and values["main_grads"] == "fp32":
        yield "--accumulate-allreduce-grads-in-fp32 (its parser switches it on under --bf16)"
    elif reduction and read.on("fp16"):
        yield "no --accumulate-allreduce-grads-in-fp32: gradients are reduced in FP16"
    if low and not read.on("aware") and not engine:
        yield "no --use-precision-aware-optimizer: main weights and moments are FP32"
    if read.on("megatron_fsdp") and "strategy" not in read.said:
        yield f"--data-parallel-sharding-strategy {strategy}"
    if not engine and not read.on("distributed"):
        yield "no --use-distributed-optimizer: every rank keeps all states"
