"""From the facts of a torch-native setup to fields of MixedPrecisionConfig; what has no field is named."""

from __future__ import annotations

from typing import Any

from mpbridge.formats import DType
from mpbridge.precision.policy import Quant
from mpbridge.stacks.meaning import Meaning
from mpbridge.stacks.reading import base_field


def fields_of(meaning: Meaning, cannot: list[str], quant: Quant | None = None) -> dict[str, Any]:
    """MixedPrecisionConfig fields that say `meaning` on an FSDP engine of ours; what they cannot say is added to `cannot`."""
    if meaning.storage.bytes < meaning.compute.bytes:
        cannot.append(
            f"storage in {meaning.storage.short} with compute in {meaning.compute.short}: narrower than the arithmetic"
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
    elif meaning.remainders:
        fields |= {"use_precision_aware_optimizer": True, "store_param_remainders": True, "main_params_dtype": "fp32"}
        fields |= {"exp_avg_dtype": _state(meaning.exp_avg), "exp_avg_sq_dtype": _state(meaning.exp_avg_sq)}
    if fields.get("main_grads_dtype") and meaning.wire is DType.FP32:
        del fields["main_grads_dtype"]
    if meaning.output is not None:
        fields["output_dtype"] = meaning.output.short
    if meaning.autocast is not None:
        fields |= {"autocast_enabled": True, "autocast_dtype": meaning.autocast.short}
    fields |= quant_fields(quant)
    return fields


def _state(dtype: DType) -> str:
    return "fp8" if dtype is DType.UINT8 else dtype.short


def quant_fields(quant: Quant | None) -> dict[str, Any]:
    """The fields of one quantization."""
    if quant is None:
        return {}
    low = f"fp{quant.bits}"
    fields: dict[str, Any] = {low: quant.format, f"{low}_recipe": quant.scaling}
    if quant.scaling == "delayed":
        fields |= {"fp8_amax_history_len": quant.amax_history, "fp8_amax_compute_algo": quant.amax_algo}
        fields |= {} if quant.wgrad else {"fp8_wgrad": False}
    return fields
