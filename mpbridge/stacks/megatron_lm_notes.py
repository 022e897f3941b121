"""What is to be said about a Megatron-LM command line beside its meaning: settings without effect, contradictions, and what has no word here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpbridge.formats import dtype


@dataclass
class Parsed:
    """A command line taken apart."""

    values: dict[str, Any] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def on(self, name: str) -> bool:
        """Whether a switch was given."""
        return bool(self.values.get(name))


def inert(read: Parsed, values: Mapping[str, Any]) -> list[str]:
    """Settings that its parser takes and nothing reads, or reads elsewhere than a user would think."""
    said, off, found = read.said, values["fp8"] is None, []

    def note(condition: bool, text: str) -> None:
        if condition:
            found.append(text)

    aware = read.on("aware")
    note(
        "fp8_recipe" in said and off and not (aware and values["fp8_recipe"] != "delayed"),
        "--fp8-recipe without --fp8-format: nothing is quantized",
    )
    note(
        "fp8_recipe" in said and off and aware and values["fp8_recipe"] != "delayed",
        f"--fp8-recipe {values['fp8_recipe']} without --fp8-format quantizes nothing, yet moves the main weights from FusedAdam to megatron-core",
    )
    amax = {"fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin"} & said
    note(
        bool(amax) and (off or values["fp8_recipe"] != "delayed"),
        "--fp8-amax-* and --fp8-margin act under delayed scaling only",
    )
    note("fp8_interval" in said, "--fp8-interval: Transformer Engine no longer reads it")
    note(
        bool({"first", "last"} & said) and not read.on("edges"),
        "--num-layers-at-*-in-bf16 without --first-last-layers-bf16",
    )
    note(read.on("edges") and off and values["fp4"] is None, "--first-last-layers-bf16 without a quantization")
    note(
        values["fp8_recipe"] == "mxfp8" and values["fp8"] == "hybrid",
        "--fp8-format hybrid under mxfp8: all operands are E4M3",
    )
    note(
        read.on("softmax") and values["transformer_impl"] != "local",
        "--attention-softmax-in-fp32: Transformer Engine's attention does not read it",
    )
    note(
        read.on("accumulate") and read.on("reduce_bf16"),
        "--accumulate-allreduce-grads-in-fp32 beside --grad-reduce-in-bf16: BF16 wins",
    )
    note(
        read.on("accumulate") and (read.on("fsdp2") or read.on("megatron_fsdp")),
        "--accumulate-allreduce-grads-in-fp32: the sharding engine does not read it",
    )
    note(
        read.on("reduce_bf16") and read.on("fp16"), "--grad-reduce-in-bf16 under --fp16: gradients are reduced in FP16"
    )
    states = {"main_params", "main_grads", "exp_avg", "exp_avg_sq"} & said
    note(
        bool(states) and not aware and all(values[name] == "fp32" for name in states),
        "--main-*-dtype and --exp-avg-*-dtype act under --use-precision-aware-optimizer only",
    )
    scale = {"initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"} & said
    note(bool(scale) and not read.on("fp16"), "details of dynamic loss scaling without --fp16")
    fsdp = {"fsdp_main_params", "fsdp_main_grads", "fsdp_grad_comm"} & said
    note(bool(fsdp) and not read.on("megatron_fsdp"), "--megatron-fsdp-*-dtype without --use-megatron-fsdp")
    return found


def contradictions(read: Parsed, values: Mapping[str, Any]) -> list[str]:
    """What its parser asserts away, or would train as something that no reader expects."""
    found = []
    if read.on("bf16") and read.on("fp16"):
        found.append("--bf16 and --fp16: the parser refuses both together")
    if values["fp8"] and values["fp4"]:
        found.append("--fp8-format and --fp4-format: megatron-core refuses both together")
    low = [name for name in ("main_params", "exp_avg", "exp_avg_sq", "main_grads") if values[name] != "fp32"]
    if low and not read.on("aware"):
        found.append("16-bit optimizer states without --use-precision-aware-optimizer: the parser refuses them")
    if read.on("edges") and values["fp8"] and values["fp8_recipe"] == "delayed":
        found.append("--first-last-layers-bf16 with delayed scaling: megatron-core refuses it")
    if read.on("accumulate") and values["main_grads"] == "bf16":
        found.append("--main-grads-dtype bf16 with --accumulate-allreduce-grads-in-fp32: the parser refuses it")
    if read.on("fp8_stored") and values["fp8"] is None:
        found.append("--fp8-param-gather without --fp8-format")
    if read.on("fp8_stored") and not (read.on("distributed") or read.on("megatron_fsdp") or read.on("fsdp2")):
        found.append("--fp8-param-gather needs --use-distributed-optimizer or an FSDP engine")
    if values["transformer_impl"] == "local" and (values["fp8"] or values["fp4"]):
        found.append("--transformer-impl local with FP8: accepted, and nothing is quantized")
    return found


def cannot_express(read: Parsed, values: Mapping[str, Any]) -> list[str]:
    """What it says and mpbridge has no setting for."""
    found = []
    if values["modules_file"] is not None:
        found.append(f"--te-precision-config-file {values['modules_file']}: rules by module are in that file")
    if read.on("fp8_output_proj"):
        found.append("--fp8-output-proj: the output layer in MXFP8")
    if read.on("fp16_loss"):
        found.append("--fp16-lm-cross-entropy: model.fp16_lm_cross_entropy, not a precision field of a recipe")
    if read.on("megatron_fsdp") and values["fsdp_main_params"] not in ("fp32", "auto"):
        found.append(f"main weights in {dtype(values['fsdp_main_params']).short} under Megatron-FSDP")
    return found
