"""Translates the facts of a torch-native setup to fields of MixedPrecisionConfig, and names those without a field."""

from __future__ import annotations

import re
from typing import Any

from mpbridge.common.errors import cut
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.reading import base_field
from mpbridge.precision.policy import LossScale, Quant


def fields_of(
    meaning: Meaning, cannot: list[str], quant: Quant | None = None, ends: tuple[int, int] | None = None
) -> dict[str, Any]:
    """MixedPrecisionConfig fields that express `meaning` on one of mpbridge's FSDP engines; what they cannot express is added to `cannot`."""
    if meaning.storage.bytes < meaning.compute.bytes:
        cannot.append(
            f"storage in {meaning.storage.short} with compute in {meaning.compute.short}: storage is narrower than the arithmetic"
        )
        return {}
    fields: dict[str, Any] = {
        **base_field(meaning.compute),
        "params_dtype": meaning.storage.short,
        "grad_reduce_in_fp32": meaning.wire is DType.FP32,
    }
    if meaning.main is None and meaning.compute is not DType.FP32:
        fields["main_params_dtype"] = meaning.storage.short
        if meaning.storage is not DType.FP32:
            fields |= {"exp_avg_dtype": meaning.exp_avg.short, "exp_avg_sq_dtype": meaning.exp_avg_sq.short}
            fields["main_grads_dtype"] = meaning.storage.short
    elif meaning.main is not None and (meaning.remainders or {meaning.exp_avg, meaning.exp_avg_sq} != {DType.FP32}):
        kept = {"store_param_remainders": meaning.remainders, "main_params_dtype": meaning.main.short}
        fields |= {"use_precision_aware_optimizer": True, **kept}
        fields |= {"exp_avg_dtype": _state(meaning.exp_avg), "exp_avg_sq_dtype": _state(meaning.exp_avg_sq)}
    if fields.get("main_grads_dtype") and meaning.wire is DType.FP32:
        del fields["main_grads_dtype"]
    if meaning.output is not None:
        fields["output_dtype"] = meaning.output.short
    if meaning.autocast is not None:
        fields |= {"autocast_enabled": True, "autocast_dtype": meaning.autocast.short}
    fields |= quant_fields(quant, ends)
    return fields


def scale_fields(scale: LossScale) -> dict[str, Any]:
    """The fields of a loss scale."""
    fields: dict[str, Any] = {"initial_loss_scale": scale.initial}
    fields |= {"min_loss_scale": scale.minimum} if scale.minimum else {}  # torch's has none
    fields |= {"loss_scale_window": scale.window, "hysteresis": scale.hysteresis}
    return fields | ({} if scale.static is None else {"loss_scale": scale.static})


def left_out(names: Any, who: str, cannot: list[str], assumed: list[str]) -> tuple[int, int] | None:
    """Layers at the start and end that a substring filter leaves in high precision; None if it names no layers that way.

    Everything else that the filter excludes is added to `cannot`: in mpbridge only linears of layers are quantized, never the output layer.
    """
    listed = [str(one) for one in names] if isinstance(names, (list, tuple)) else []
    if "lm_head" not in listed and not any("lm_head" in one or one in "lm_head" for one in listed if one):
        cannot.append(f"{who}: the output layer (lm_head) is quantized too; here it never is")
    numbers = sorted({int(found[1]) for one in listed if (found := _LAYER.fullmatch(one))})
    others = [one for one in listed if one != "lm_head" and not _LAYER.fullmatch(one)]
    if others:
        cannot.append(f"{who}: left out by substring: {', '.join(map(cut, others))}")
    if not numbers:
        return None
    first = next((at for at, number in enumerate(numbers) if number != at), len(numbers))
    rest = numbers[first:]
    if rest != list(range(rest[0], rest[0] + len(rest))) if rest else False:
        cannot.append(f"{who}: excludes layers {', '.join(map(str, rest))}, which are not at one end")
        return None
    if rest:
        assumed.append(f"{who}: layers {rest[0]} to {rest[-1]} are assumed to be the model's last")
    return first, len(rest)


_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
"""A layer in a substring filter, with the dot after its number."""


def _state(dtype: DType) -> str:
    return "fp8" if dtype is DType.UINT8 else dtype.short


def quant_fields(quant: Quant | None, ends: tuple[int, int] | None = None) -> dict[str, Any]:
    """The fields of one quantization. ends: layers at the start and end that are excluded."""
    if quant is None:
        return {}
    low = f"fp{quant.bits}"
    fields: dict[str, Any] = {low: quant.format, f"{low}_recipe": quant.scaling}
    if quant.scaling == "delayed":
        fields |= {"fp8_amax_history_len": quant.amax_history, "fp8_amax_compute_algo": quant.amax_algo}
        fields |= {"fp8_margin": quant.margin} if quant.margin else {}
        fields |= {} if quant.wgrad else {"fp8_wgrad": False}
    if ends is not None:
        fields |= {"first_last_layers_bf16": True}
        fields |= {"num_layers_at_start_in_bf16": ends[0], "num_layers_at_end_in_bf16": ends[1]}
    return fields
