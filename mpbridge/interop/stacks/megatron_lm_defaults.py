"""What of Megatron-LM's defaults decides a fact of a command line that is silent about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.formats import say
from mpbridge.interop.stacks.megatron_lm_notes import Parsed

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
