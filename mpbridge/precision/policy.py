"""PrecisionPolicy: a config's meaning. Frozen and hashable; one field per fact; derived facts are properties."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.formats import DType, dtype
from mpbridge.precision.globs import DECODER, is_adapter, place
from mpbridge.precision.regions import Gemms, Quant, Region, as_plain, region_from, uses_later_fields

__all__ = ["SCHEMA", "Gemms", "LossScale", "PrecisionPolicy", "Quant", "Region"]

SCHEMA = 2
"""Schema of `as_data`: increase it when a field changes meaning, so that old fingerprints are not compared with new ones. Schema 2 adds layers, rules per
GEMM and options in regions, and an accumulator separate from the wire; a policy without these is written as schema 1, byte for byte as before."""

_LATER = ("accumulate", "frozen")
"""Facts that schema 1 does not have: written only where they are stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Static, or dynamic: halved after `hysteresis` overflows, doubled after `window` good steps."""

    static: float | None = None
    initial: float = 2.0**32
    minimum: float = 1.0
    window: float = 1000.0
    hysteresis: int = 2

    @property
    def dynamic(self) -> bool:
        """Whether overflowing steps are skipped and the scale adapts."""
        return self.static is None

    def skips(self, to: float | None = None) -> int:
        """Number of overflowing, skipped steps until the initial scale has dropped to `to` (None: the minimum); 0 for a static scale.

        The first `hysteresis - 1` overflows leave the scale unchanged, each further one halves it (megatron-core's DynamicGradScaler)."""
        end = max(self.minimum, to or self.minimum)
        if not (self.dynamic and end < self.initial):
            return 0
        return self.hysteresis - 1 + math.ceil(math.log2(self.initial / end))


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Every precision fact of a run. None in an optimizer fact: the optimizer's own section decides (see `settled`)."""

    compute: DType
    """16/32-bit GEMMs and activations."""
    params: DType
    """Resident parameters: the copy that the forward pass reads."""
    gather: DType | None = None
    """Parameters on the wire; None: as stored."""
    reduce: DType
    """Gradients in the buckets and on the wire."""
    accumulate: DType | None = None
    """Gradients while micro-batches accumulate; None: as they are reduced."""
    main_grads: DType | None = None
    """Gradients as the optimizer reads them."""
    main_params: DType | None = None
    """Weights that the optimizer updates."""
    precision_aware: bool | None = None
    """FusedAdam owns main weights and state dtypes."""
    remainders: bool | None = None
    """Main weights as 16-bit remainders of BF16 parameters; None: the optimizer section's own (Transformer Engine: on)."""
    exp_avg: DType | None = None
    """First moment; UINT8 = FP8 with a scale."""
    exp_avg_sq: DType | None = None
    pipeline: DType
    """Activations between stages."""
    output: DType
    """What a wrapped module returns."""
    autocast: DType | None = None
    """torch autocast; None: off."""
    loss_scale: LossScale | None = None
    regions: tuple[Region, ...] = (Region(),)
    """The first match decides; the last one covers every linear of every layer."""
    reuse_grad_buffer: bool = False
    """MXFP8 parameter gather through the gradient buffer."""
    keep_fp32: tuple[str, ...] = ()
    """Globs over parameter names that stay FP32."""
    frozen: tuple[str, ...] = ()
    """Globs over parameter names that are not trained; adapters always are."""
    logits: DType | None = None
    """None: the model's own."""
    router: DType | None = None
    residual_fp32: bool | None = None
    softmax_fp32: bool | None = None

    def _repr_html_(self) -> str:
        """HTML for notebooks."""
        from mpbridge.common.tables import fields

        return fields("precision policy", self).html()

    @property
    def quant(self) -> Quant | None:
        """The rule of the linears that no narrower region matches."""
        return self.regions[-1].quant

    @property
    def fp8(self) -> Quant | None:
        """`quant` when its elements have eight bits."""
        return self.quant if self.quant is not None and self.quant.bits == 8 else None

    @property
    def fp4(self) -> Quant | None:
        """`quant` when its elements have four bits."""
        return self.quant if self.quant is not None and self.quant.bits == 4 else None

    @property
    def narrowest(self) -> str:
        """Format of the linears' operands, as `Machine.flops` names it."""
        return self.compute.short if self.quant is None else f"fp{self.quant.bits}"

    @functools.cached_property
    def quants(self) -> tuple[Quant, ...]:
        """Every distinct rule of any region, in order."""
        return tuple(dict.fromkeys(quant for region in self.regions for quant in region.rules.distinct))

    @functools.cached_property
    def quantized(self) -> bool:
        """Whether any region quantizes."""
        return any(rule is not None for region in self.regions for rule in region.rules)

    @property
    def stored(self) -> bool:
        """Whether weights are stored in a low format."""
        return any(quant.stored for quant in self.quants)

    @property
    def narrow_alone(self) -> bool:
        """Whether the optimizer updates 16-bit parameters without a wider copy ("full BF16")."""
        return own_main(self) and self.params is not DType.FP32

    @property
    def mixed(self) -> bool:
        """Whether compute is narrower than FP32."""
        return self.compute is not DType.FP32

    def returned(self, stages: int, wide: bool) -> bool:
        """Whether modules return `output` though nothing casts it: the compute dtype, or FP32 where several stages send a `wide` (FP32) residual stream."""
        return self.output is self.compute or (wide and stages > 1 and self.output is DType.FP32)

    @property
    def ends(self) -> tuple[int, int] | None:
        """(first, last): number of layers at each end that are not quantized; None if there is no such region."""
        return next(((region.first or 0, region.last or 0) for region in self.regions if region.ends), None)

    @property
    def all_frozen(self) -> bool:
        """Whether `frozen` covers the whole base, so that only adapters are in gradient buffers and gathers."""
        return "*" in self.frozen

    @property
    def module_regions(self) -> tuple[Region, ...]:
        """The regions from `modules`: all except the edge layers' and the last one."""
        return tuple(region for region in self.regions[:-1] if not region.ends)

    def gemms_at(self, module: str, layer: int | None, layers: int, path: str = "") -> Gemms:
        """The rules of the three GEMMs of `module` ('self_attention.linear_qkv') in 0-based `layer` of `layers`.

        layer: None in multi-token prediction. path: the module's full path; None: that of the decoder's layer."""
        path = path or ("" if layer is None else f"{DECODER.format(layer)}{module}")
        last = len(self.regions) - 1
        for index, region in enumerate(self.regions):
            if region.covers(module, layer, layers, path):
                # megatron-core opens no FP4 context in multi-token prediction (multi_token_prediction.py, 0.16.1): FP4 there only by name
                ahead = layer is None and index == last and region.quant is not None and region.quant.bits == 4
                return Gemms(fprop=None, dgrad=None, wgrad=None) if ahead else region.rules
        return Gemms(fprop=None, dgrad=None, wgrad=None)

    def at(self, module: str, layer: int | None, layers: int, path: str = "") -> Quant | None:
        """Like `gemms_at`, if only whether a linear is quantized matters: the first rule among its GEMMs; None: high precision."""
        return self.gemms_at(module, layer, layers, path).first

    def of_path(self, path: str, layers: int) -> Gemms:
        """The rules of the linear at a full path ('decoder.layers.3.mlp.linear_fc1'); high precision outside the layers and in adapters."""
        where = place(path)
        if where is None or is_adapter(path):
            return Gemms(fprop=None, dgrad=None, wgrad=None)
        return self.gemms_at(*where, layers, path)

    def bf16_layers(self, layers: int) -> tuple[int, ...]:
        """0-based global ids of the layers that the edge-layer switch excludes from quantization."""
        if self.ends is None:
            return ()
        first, last = self.ends
        return tuple(i for i in range(layers) if i < first or i >= layers - last)

    def settled(self, optimizer: Mapping[str, Any] | object | None = None) -> PrecisionPolicy:
        """This policy with open optimizer facts filled from the optimizer's section (a mapping or a config object), else FP32."""

        def own(field: str, default: Any) -> Any:
            found = optimizer.get(field) if isinstance(optimizer, Mapping) else getattr(optimizer, field, None)
            return default if found is None else found

        aware = own("use_precision_aware_optimizer", False) if self.precision_aware is None else self.precision_aware

        def state(fact: str) -> Any:
            # megatron-core reads these only with a precision-aware optimizer (optimizer_config.py: all must be FP32 otherwise)
            return getattr(self, fact) or (dtype(own(f"{fact}_dtype", DType.FP32)) if aware else DType.FP32)

        remainders = bool(own("store_param_remainders", True)) if self.remainders is None else self.remainders
        return dataclasses.replace(
            self,
            precision_aware=bool(aware),
            remainders=remainders,
            **{fact: state(fact) for fact in ("main_grads", "main_params", "exp_avg", "exp_avg_sq")},
        )

    def as_data(self) -> dict[str, Any]:
        """Every field as JSON types, {"schema": ..., ...}. Defaults are included, so that a fingerprint does not change meaning with a default."""
        data = {name: value for name, value in as_plain(self).items() if value or name not in _LATER}
        later = uses_later_fields(self.regions) or any(name in data for name in _LATER)
        return {"schema": SCHEMA if later else 1, **data}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """The policy from `as_data`'s data. Raises BadValue for another schema."""
        if data.get("schema") not in (1, SCHEMA):
            raise BadValue(f"policy schema {data.get('schema')!r}: this mpbridge reads schemas 1 to {SCHEMA}")
        fields = {k: v for k, v in data.items() if k != "schema"}
        dtypes = {k: dtype(v) for k, v in fields.items() if isinstance(v, str)}
        regions = tuple(region_from(region) for region in fields["regions"])
        scale = LossScale(**fields["loss_scale"]) if fields["loss_scale"] else None
        globs = {name: tuple(fields.get(name, ())) for name in ("keep_fp32", "frozen")}
        return cls(**(fields | dtypes | {"regions": regions, "loss_scale": scale} | globs))

    def fingerprint(self) -> str:
        """sha256 of the canonical JSON of `as_data`."""
        import hashlib  # slow to import

        text = json.dumps(self.as_data(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def own_main(policy: PrecisionPolicy) -> bool:
    """Whether the parameters themselves are updated: main weights in their dtype, without a copy."""
    return updates_parameters(policy.main_params, policy.params, stored=policy.stored)


def updates_parameters(main_params: DType | None, params: DType, *, stored: bool) -> bool:
    """Whether main weights of that dtype (None: FP32) are the parameters themselves. stored: weights are stored in a low format."""
    return (main_params or DType.FP32) is params and not stored
