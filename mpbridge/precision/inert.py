"""Settings of a config without effect: set by its author, but the meaning is the same without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.formats import say
from mpbridge.precision.config import ROWS, MixedPrecisionConfig
from mpbridge.precision.resolve import resolve

CONDITIONS: Mapping[str, Callable[[MixedPrecisionConfig], bool]] = MappingProxyType(
    {
        "fp8": lambda c: c.fp8 is not None,
        "fp4": lambda c: c.fp4 is not None,
        "fp8 or fp4": lambda c: c.fp8 is not None or c.fp4 is not None,
        "first_last_layers_bf16=true": lambda c: c.first_last_layers_bf16,
        "autocast_enabled=true": lambda c: c.autocast_enabled,
        "fp16 and no static loss_scale": lambda c: c.fp16 and c.loss_scale is None,
    }
)
"""A condition as displayed -> whether a config meets it: then a value equal to the derived one is redundant, but not without effect."""


def inert(config: MixedPrecisionConfig, base: MixedPrecisionConfig | None = None) -> tuple[str, ...]:
    """The fields of `config` that could be omitted, each as 'fp8_recipe=mxfp8 (read only with fp8)'; base: what its author started from."""
    start, found = (base or MixedPrecisionConfig()).stored(), []
    for name, value in config.given().items():
        row = ROWS.get(name)  # None: a field of a subclass
        if row is None or not row.read_with or CONDITIONS[row.read_with](config) or value in (start[name], row.usual):
            continue
        try:
            same = resolve(config.derive(**{name: start[name]})) == resolve(config)
        except MpbridgeError:  # it cannot be omitted, or the config is refused anyway
            continue
        if same:
            found.append(f"{name}={say(value)} (read only with {row.read_with})")
    return tuple(found)
