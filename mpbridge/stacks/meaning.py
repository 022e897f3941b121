"""Meaning: what a training stack's precision settings amount to, in facts that every stack has. Ours is derived from the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mpbridge.formats import DType, say
from mpbridge.precision.policy import LossScale, PrecisionPolicy, Quant, Region

Sharded = Literal["nothing", "optimizer", "gradients", "everything"]
"""What data parallelism divides: nothing (DDP), optimizer states (ZeRO 1), gradients too (ZeRO 2), parameters too (ZeRO 3, FSDP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Storage, arithmetic and communication of one setup. dtypes are storage formats; UINT8 moments are FP8 with a scale."""

    storage: DType
    """Resident parameters, those of quantized linears apart (see `quantization`)."""
    compute: DType
    """Weights as the forward pass reads them."""
    autocast: DType | None = None
    """torch autocast; None: off."""
    main: DType | None = None
    """A copy of the weights that the optimizer updates; None: it updates the parameters themselves."""
    remainders: bool = False
    """The copy is 16 more bits beside BF16 parameters instead of a whole FP32 tensor."""
    wire: DType
    """Gradients in the all-reduce or reduce-scatter."""
    accumulator: DType
    """Gradients while micro-batches add up."""
    optimizer_reads: DType | None = None
    """Gradients as the optimizer reads them; None: as accumulated. Wider than the accumulator: a copy."""
    exp_avg: DType = DType.FP32
    exp_avg_sq: DType = DType.FP32
    sharded: Sharded = "nothing"
    loss_scale: LossScale | None = None
    regions: tuple[Region, ...] = (Region(),)
    """Quantization by module and layer, first match decides."""
    note: str = ""
    """What no other field says."""

    @property
    def master(self) -> DType:
        """The weights that updates are added to."""
        return self.main or self.storage

    @property
    def quantization(self) -> str:
        """The regions in words; 'none' where nothing is quantized."""
        return quantization_text(self.regions)

    @property
    def bytes(self) -> tuple[int, int]:
        """(a, b) of a + b/N bytes per parameter of a dense model under Adam: what every rank keeps, and what N ranks share."""
        read = self.optimizer_reads or self.accumulator
        states = self.exp_avg.bytes + self.exp_avg_sq.bytes
        states += 0 if self.main is None else 2 if self.remainders else self.main.bytes
        states += read.bytes if read.bytes > self.accumulator.bytes else 0
        parts = {"params": self.storage.bytes, "grads": self.accumulator.bytes, "states": states}
        divided: Mapping[Sharded, tuple[str, ...]] = {
            "nothing": (),
            "optimizer": ("states",),
            "gradients": ("states", "grads"),
            "everything": ("states", "grads", "params"),
        }
        shared = sum(size for name, size in parts.items() if name in divided[self.sharded])
        return sum(parts.values()) - shared, shared

    @property
    def bytes_text(self) -> str:
        """'18', '6 + 12/N' or '16/N'."""
        whole, shared = self.bytes
        return " + ".join(part for part in (str(whole) if whole else "", f"{shared}/N" if shared else "") if part)


LABELS: Mapping[str, str] = MappingProxyType(
    {
        "storage": "stored parameters",
        "compute": "weights in the forward pass",
        "autocast": "torch autocast",
        "main": "main weights",
        "wire": "gradients on the wire",
        "accumulator": "gradient accumulator",
        "optimizer_reads": "gradients that the optimizer reads",
        "exp_avg": "first moment",
        "exp_avg_sq": "second moment",
        "quantization": "quantized linears",
        "loss_scale": "loss scale",
        "sharded": "sharded over data parallelism",
        "bytes": "bytes per parameter (dense, Adam)",
    }
)
"""Row of a comparison -> what people read."""

LAYOUT = ("storage", "main", "optimizer_reads", "sharded", "bytes")
"""Rows that may differ while the arithmetic of a step stays the same, provided that `master` agrees."""


def of_policy(policy: PrecisionPolicy, *, engine: str = "mcore", sharded: Sharded | None = None) -> Meaning:
    """What a policy means on an engine of ours. sharded: None: what the engine divides by default (mcore: the distributed optimizer)."""
    settled = policy.settled()
    wide = settled.main_params or DType.FP32
    own = wide is settled.params and not settled.stored
    # torch FSDP2 reduces in one dtype and keeps the sum in the parameter's own (_fsdp_collectives.py, foreach_reduce)
    accumulator = settled.params if engine == "fsdp2" else settled.reduce
    aware = bool(settled.precision_aware)
    # a precision-aware optimizer reads the buckets as they are; otherwise main weights get a gradient of their own dtype
    reads = accumulator if aware or own else (settled.main_grads or DType.FP32)
    fused = aware and engine != "megatron_fsdp"
    return Meaning(
        storage=settled.params,
        compute=settled.compute,
        autocast=settled.autocast,
        main=None if own else wide,
        remainders=fused and bool(settled.remainders) and settled.params is DType.BF16 and wide is DType.FP32,
        wire=settled.reduce,
        accumulator=accumulator,
        optimizer_reads=None if reads is accumulator else reads,
        exp_avg=settled.exp_avg or DType.FP32,
        exp_avg_sq=settled.exp_avg_sq or DType.FP32,
        sharded=sharded or ("optimizer" if engine == "mcore" else "everything"),
        loss_scale=settled.loss_scale,
        regions=settled.regions,
    )


def quantization_text(regions: tuple[Region, ...]) -> str:
    """Regions as one line, first match first."""
    if all(region.quant is None for region in regions):
        return "none"
    return "; ".join(f"{_where(region)}: {_quant(region.quant)}" for region in regions)


def rows(meaning: Meaning) -> dict[str, str]:
    """Every row of LABELS as text."""
    values = {name: getattr(meaning, name) for name in LABELS if name not in ("bytes", "loss_scale")}
    shown = {name: say(value) for name, value in values.items()}
    shown["main"] = (
        "none: the parameters" if meaning.main is None else "16-bit remainders" if meaning.remainders else shown["main"]
    )
    shown["optimizer_reads"] = say(meaning.optimizer_reads or meaning.accumulator)
    shown["loss_scale"] = _scale(meaning.loss_scale)
    shown["bytes"] = meaning.bytes_text
    return {name: shown[name] for name in LABELS}


def differences(ours: Meaning, theirs: Meaning) -> dict[str, tuple[str, str]]:
    """row -> (ours, theirs) wherever the two are not the same. Storage of quantized weights counts as layout, not as quantization."""
    a, b = rows(ours), rows(theirs)
    found = {name: (a[name], b[name]) for name in LABELS if a[name] != b[name]}
    if arithmetic_regions(ours.regions) == arithmetic_regions(theirs.regions):
        found.pop("quantization", None)
        if ours.regions != theirs.regions and stored(ours.regions) != stored(theirs.regions):
            found["stored"] = (stored(ours.regions), stored(theirs.regions))
    return found


def arithmetic_differs(ours: Meaning, theirs: Meaning) -> bool:
    """Whether a step computes something else: any row apart from LAYOUT, or weights that are updated in another dtype."""
    rest = [name for name in differences(ours, theirs) if name not in (*LAYOUT, "stored")]
    return bool(rest) or ours.master is not theirs.master


def arithmetic_regions(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """The regions without what decides storage only."""
    return tuple(
        region if region.quant is None else dataclasses.replace(region, quant=_computed(region.quant))
        for region in regions
    )


def stored(regions: tuple[Region, ...]) -> str:
    """Whether quantized weights rest in their format: 'low format' or '16 bit'."""
    return "low format" if any(region.quant is not None and region.quant.stored for region in regions) else "16 bit"


def _computed(quant: Quant) -> Quant:
    """A Quant without storage, and without the settings that its scaling never reads."""
    plain = dataclasses.replace(quant, stored=False)
    if quant.scaling != "delayed":
        plain = dataclasses.replace(plain, margin=0, amax_history=1, amax_algo="most_recent", wgrad=True)
    return plain


def _where(region: Region) -> str:
    ends = [f"first {region.first}" if region.first else "", f"last {region.last}" if region.last else ""]
    layers = " and ".join(part for part in ends if part)
    modules = "" if region.modules == "*" else region.modules
    text = " of ".join(part for part in (modules, f"{layers} layers" if layers else "") if part)
    return text or "all linears"


def _quant(quant: Quant | None) -> str:
    if quant is None:
        return "16 bit"
    extra = (
        f" (history {quant.amax_history}, {quant.amax_algo}{f', margin {quant.margin}' if quant.margin else ''})"
        if quant.scaling == "delayed"
        else ""
    )
    return f"{quant.format} {quant.scaling}{extra}" + (", stored so" if quant.stored else "")


def _scale(scale: LossScale | None) -> str:
    if scale is None:
        return "none"
    if scale.static is not None:
        return f"static {say(scale.static)}"
    return f"dynamic from {say(scale.initial)}, window {scale.window:g}, hysteresis {scale.hysteresis}"
