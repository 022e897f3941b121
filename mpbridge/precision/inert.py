"""Settings of a config without effect: set by its author, but the meaning is the same without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpbridge.errors import MpbridgeError
from mpbridge.formats import say
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.resolve import resolve


@dataclass(frozen=True, slots=True)
class _Condition:
    """A condition without which some fields are not read."""

    name: str
    """The condition as displayed."""
    holds: Callable[[MixedPrecisionConfig], bool]
    """Whether a config meets it: then a value equal to the derived one is redundant, but not without effect."""
    fields: tuple[str, ...]


_CONDITIONS = (
    _Condition(
        "fp8",
        lambda c: c.fp8 is not None,
        ("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "fp8_quantizer_factory"),
    ),
    _Condition("fp4", lambda c: c.fp4 is not None, ("fp4_recipe", "fp4_quantizer_factory")),
    _Condition("fp8 or fp4", lambda c: c.fp8 is not None or c.fp4 is not None, ("first_last_layers_bf16",)),
    _Condition(
        "first_last_layers_bf16=true",
        lambda c: c.first_last_layers_bf16,
        ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    ),
    _Condition("autocast_enabled=true", lambda c: c.autocast_enabled, ("autocast_dtype",)),
    _Condition(
        "fp16 and no static loss_scale",
        lambda c: c.fp16 and c.loss_scale is None,
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    ),
)  # fmt: skip
_READ_WITH = {field: condition for condition in _CONDITIONS for field in condition.fields}
_USUAL = {"fp8_recipe": "delayed", "fp4_recipe": "nvfp4"}
"""megatron-core's own defaults, which Megatron-LM's arguments always include."""


def inert(config: MixedPrecisionConfig, base: MixedPrecisionConfig | None = None) -> tuple[str, ...]:
    """The fields of `config` that could be omitted, each as 'fp8_recipe=mxfp8 (read only with fp8)'; base: what its author started from."""
    start, found = (base or MixedPrecisionConfig()).stored(), []
    for name, value in config.given().items():
        condition = _READ_WITH.get(name)
        if condition is None or condition.holds(config) or value == start[name] or value == _USUAL.get(name):
            continue
        try:
            same = resolve(config.derive(**{name: start[name]})) == resolve(config)
        except MpbridgeError:  # it cannot be omitted, or the config is refused anyway
            continue
        if same:
            found.append(f"{name}={say(value)} (read only with {condition.name})")
    return tuple(found)
