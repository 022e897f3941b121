"""Settings of a config that change nothing: what its author wrote, and what would be the same without it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mpbridge.errors import MpbridgeError
from mpbridge.formats import say
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.resolve import resolve

NEEDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad"), "fp8"),
        "fp8_quantizer_factory": "fp8",
        "fp4_recipe": "fp4",
        "fp4_quantizer_factory": "fp4",
        "first_last_layers_bf16": "fp8 or fp4",
        "num_layers_at_start_in_bf16": "first_last_layers_bf16=true",
        "num_layers_at_end_in_bf16": "first_last_layers_bf16=true",
        "autocast_dtype": "autocast_enabled=true",
        **dict.fromkeys(("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "fp16 and no static loss_scale"),
    }
)  # fmt: skip
"""Field -> without what nothing reads it."""
_USUAL = {"fp8_recipe": "delayed", "fp4_recipe": "nvfp4"}
"""megatron-core's own defaults: Megatron-LM's arguments always carry them, and mean nothing by it."""


def _read(config: MixedPrecisionConfig, need: str) -> bool:
    """Whether what reads a field is there: then a value that equals the derived one is said twice, and not without effect."""
    return {
        "fp8": config.fp8 is not None,
        "fp4": config.fp4 is not None,
        "fp8 or fp4": config.fp8 is not None or config.fp4 is not None,
        "first_last_layers_bf16=true": config.first_last_layers_bf16,
        "autocast_enabled=true": config.autocast_enabled,
        "fp16 and no static loss_scale": config.fp16 and config.loss_scale is None,
    }[need]


def inert(config: MixedPrecisionConfig, base: MixedPrecisionConfig | None = None) -> tuple[str, ...]:
    """The fields of `config` that could be left out, each as 'fp8_recipe=mxfp8 (read with fp8 only)'; base: what its author started from."""
    start, found = (base or MixedPrecisionConfig()).stored(), []
    for name, value in config.given().items():
        if name not in NEEDS or _read(config, NEEDS[name]) or value == start[name] or value == _USUAL.get(name):
            continue
        try:
            same = resolve(config.derive(**{name: start[name]})) == resolve(config)
        except MpbridgeError:  # it cannot be left out, or the whole is refused anyway
            continue
        if same:
            found.append(f"{name}={say(value)} (read with {NEEDS[name]} only)")
    return tuple(found)
