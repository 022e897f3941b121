"""Meaning: a training stack's precision settings as facts that every stack has. mpbridge's is derived from the policy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.facts import OptimizerFacts
from mpbridge.common.formats import DType, say
from mpbridge.common.traits import DEFAULT, traits
from mpbridge.interop.stacks.optimizers import ADAM, MOMENTS, Optimizer
from mpbridge.planning.memory.keeps import keeps, updater, wires
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import LossScale, PrecisionPolicy
from mpbridge.precision.regions import Gemms, Quant, Region
from mpbridge.precision.resolve import resolve
from mpbridge.precision.wording import region_rule, region_text

Sharded = Literal["nothing", "optimizer", "gradients", "everything"]
"""What data parallelism shards: nothing (DDP), optimizer states (ZeRO 1), also gradients (ZeRO 2), also parameters (ZeRO 3, FSDP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Storage, arithmetic and communication of one setup. dtypes are storage formats; UINT8 moments are FP8 with a scale."""

    storage: DType
    """Resident parameters, except those of quantized linears (see `quantization`)."""
    compute: DType
    """Weights as the forward pass reads them."""
    autocast: DType | None = None
    """torch autocast; None: off."""
    main: DType | None = None
    """A copy of the weights that the optimizer updates; None: it updates the parameters themselves."""
    remainders: bool = False
    """The copy is 16 extra bits per BF16 parameter instead of a full FP32 tensor."""
    wire: DType
    """Gradients in the all-reduce or reduce-scatter."""
    accumulator: DType
    optimizer_reads: DType | None = None
    """Gradients as the optimizer reads them; None: as accumulated. Wider than the accumulator: a copy."""
    exp_avg: DType = DType.FP32
    exp_avg_sq: DType = DType.FP32
    optimizer: Optimizer = ADAM
    sharded: Sharded = "nothing"
    loss_scale: LossScale | None = None
    regions: tuple[Region, ...] = (Region(),)
    """Quantization by module and layer; the first match decides."""
    reuse_grad_buffer: bool = False
    """MXFP8 parameters are gathered through the gradient buffer."""
    output: DType | None = None
    """What a wrapped module returns; None: as computed."""
    pipeline: DType | None = None
    """Activations between pipeline stages; None: as computed."""
    keep_fp32: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    """Globs over parameters that stay FP32."""
    logits: DType | None = None
    """Here and in the facts below, None means that the model's own code decides."""
    router: DType | None = None
    residual_fp32: bool | None = None
    softmax_fp32: bool | None = None
    note: str = ""

    @property
    def master(self) -> DType:
        """The dtype of the weights that updates are added to."""
        return self.main or self.storage

    def in_force(self, name: str) -> Any:
        """A row of STATED, derived from the other facts if it is not stated; None: the model's own code decides, or 'as computed'.

        Without mixed precision everything is FP32. torch autocast computes softmax in FP32, and leaves the residual stream there unless parameters
        are cast when they are gathered. Pipeline stages send the residual stream.
        """
        value, whole = getattr(self, name), self.compute is DType.FP32
        if whole and name in ("softmax_fp32", "residual_fp32"):
            return True
        if value is not None:
            return value
        if name == "softmax_fp32" and self.autocast is not None:
            return True
        cast = self.sharded == "everything" or self.storage is not DType.FP32
        if name == "residual_fp32" and self.autocast is not None and not cast:
            return True
        return DType.FP32 if name == "pipeline" and self.residual_fp32 and not whole else None

    @property
    def quantization(self) -> str:
        """The regions as one line, first match first; 'none' if nothing is quantized."""
        if all(not region.rules.distinct for region in self.regions):
            return "none"
        return "; ".join(f"{region_text(region)}: {region_rule(region)}" for region in self.regions)

    @property
    def held(self) -> Mapping[str, int]:
        """row -> bytes per parameter of a dense model before anything is divided; gradients that the optimizer reads count where they are a copy."""
        read = self.optimizer_reads or self.accumulator
        return {
            "storage": self.storage.bytes,
            "accumulator": self.accumulator.bytes,
            "main": 0 if self.main is None else 2 if self.remainders else self.main.bytes,
            "optimizer_reads": read.bytes if read.bytes > self.accumulator.bytes else 0,
            "exp_avg": self.exp_avg.bytes if self.optimizer.exp_avg else 0,
            "exp_avg_sq": self.exp_avg_sq.bytes if self.optimizer.exp_avg_sq else 0,
        }

    @property
    def bytes(self) -> tuple[int, int]:
        """(a, b) of a + b/N bytes per parameter of a dense model: what every rank keeps, and what N ranks share."""
        held = dict(self.held)
        params, grads = held.pop("storage"), held.pop("accumulator")
        parts = (sum(held.values()), grads, params)
        shared = sum(parts[: ("nothing", "optimizer", "gradients", "everything").index(self.sharded)])
        return sum(parts) - shared, shared

    @property
    def bytes_text(self) -> str:
        """'18', '6 + 12/N' or '16/N'."""
        whole, shared = self.bytes
        return " + ".join(part for part in (str(whole) if whole else "", f"{shared}/N" if shared else "") if part)


def updated_itself(storage: DType, compute: DType | None = None, wire: DType | None = None, **more: Any) -> Meaning:
    """A setup as torch's optimizers have it: the stored parameters are updated themselves, and gradients and moments have their dtype."""
    return Meaning(
        storage=storage, compute=compute or storage, wire=wire or storage, accumulator=storage, **{"exp_avg": storage, "exp_avg_sq": storage, **more}
    )  # fmt: skip


def with_quant(meaning: Meaning, quant: Quant | None, ends: tuple[int, int] | None = None) -> Meaning:
    """`meaning` with one quantization, and layers at the start and end that it leaves out."""
    edges = () if ends is None or quant is None else (Region(first=ends[0], last=ends[1]),)
    return dataclasses.replace(meaning, regions=(*edges, Region(quant=quant)))


LABELS: Mapping[str, str] = MappingProxyType({
    "storage": "stored parameters", "compute": "weights in the forward pass", "autocast": "torch autocast", "main": "main weights",
    "wire": "gradients on the wire", "accumulator": "gradient accumulator", "optimizer_reads": "gradients that the optimizer reads",
    "exp_avg": "first moment", "exp_avg_sq": "second moment", "quantization": "quantized linears", "loss_scale": "loss scale",
    "sharded": "sharded over data parallelism", "bytes": "bytes per parameter (dense, Adam)",
})  # fmt: skip
"""Row of a comparison -> its label."""
STATED: Mapping[str, tuple[str, str]] = MappingProxyType({
    "reuse_grad_buffer": ("MXFP8 gather through the gradient buffer", "reuse_grad_buf_for_mxfp8_param_ag"),
    "output": ("returned by a wrapped module", "output_dtype"), "pipeline": ("activations between pipeline stages", "pipeline_dtype"),
    "keep_fp32": ("parameters kept in FP32", "keep_fp32"), "frozen": ("parameters that are not trained", "frozen"),
    "logits": ("logits", "logit_dtype"), "router": ("experts' router", "moe_router_dtype"),
    "residual_fp32": ("residual stream in FP32", "fp32_residual_connection"),
    "softmax_fp32": ("attention's softmax in FP32", "attention_softmax_in_fp32"),
})  # fmt: skip
"""Rows shown only if a policy states them: their label, and the setting that states them."""
OPEN = ("logits", "router", "residual_fp32", "softmax_fp32")
"""Rows of STATED that None leaves to the model's own code."""
LAYOUT = ("storage", "main", "optimizer_reads", "sharded", "bytes", "reuse_grad_buffer")
"""Rows that may differ without changing a step's arithmetic, provided that `master` agrees."""


def of_policy(policy: PrecisionPolicy, *, engine: str = DEFAULT, sharded: Sharded | None = None) -> Meaning:
    """A policy's meaning on an engine of mpbridge, for a parameter stored in 16 or 32 bits.

    sharded: None: what the engine shards by default; for megatron-core, with the distributed optimizer.
    """
    settled, kind = policy.settled(), traits(engine)
    optional = kind.distributed_optimizer == "optional"
    # megatron-core's distributed optimizer always has FP32 shards, so parameters that are their own main weights do not use it
    whole = settled.narrow_alone
    divided: Sharded = sharded or ("everything" if not optional else "nothing" if whole else "optimizer")
    name = updater("adam", settled, kind)
    optimizer = OptimizerFacts(name=name, distributed=optional and divided != "nothing" and not whole)
    kept = keeps(settled, kind, optimizer)
    grads, main = settled.accumulate or kept["grads"].dtype, kept.get("main_params")
    read = kept["main_grads"].dtype if "main_grads" in kept else grads
    return Meaning(
        storage=settled.params, compute=settled.compute, autocast=settled.autocast,
        main=None if main is None else DType.FP32 if main.dtype is DType.INT16 else main.dtype,
        remainders=main is not None and main.dtype is DType.INT16,
        wire=wires(settled)["gradients"], accumulator=grads, optimizer_reads=None if read is grads else read,
        exp_avg=kept["exp_avg"].dtype, exp_avg_sq=kept["exp_avg_sq"].dtype, sharded=divided, loss_scale=settled.loss_scale,
        regions=settled.regions, reuse_grad_buffer=settled.reuse_grad_buffer, **stated(settled),
    )  # fmt: skip


def stated(policy: PrecisionPolicy) -> dict[str, Any]:
    """The facts that a Meaning has only if the policy states them: dtypes of activations, and those of the model."""
    found = {name: getattr(policy, name) for name in STATED if name != "reuse_grad_buffer"}
    return found | {name: None for name in ("output", "pipeline") if found[name] is policy.compute}


def rows(meaning: Meaning) -> dict[str, str]:
    """Every row of LABELS as text, and those of STATED that are set."""
    values = {name: getattr(meaning, name) for name in LABELS if name not in ("bytes", "loss_scale")}
    shown = {name: say(value) for name, value in values.items()}
    if meaning.main is None or meaning.remainders:
        shown["main"] = "none: the parameters" if meaning.main is None else "16-bit remainders"
    shown["optimizer_reads"] = say(meaning.optimizer_reads or meaning.accumulator)
    shown |= {name: f"none: {meaning.optimizer.name}" for name in MOMENTS if not meaning.optimizer.keeps(name)}
    shown["loss_scale"] = _scale(meaning.loss_scale)
    shown["bytes"] = meaning.bytes_text
    found = {name: shown[name] for name in LABELS}
    defaults = {name: Meaning.__dataclass_fields__[name].default for name in STATED}
    return found | {name: stated_text(meaning, name) for name in STATED if getattr(meaning, name) != defaults[name]}


def label(row: str, *meanings: Meaning) -> str:
    """What people read for a row of these meanings."""
    if row == "stored":
        return "quantized weights at rest"
    text = LABELS[row] if row in LABELS else STATED[row][0]
    names = dict.fromkeys(meaning.optimizer.name for meaning in meanings)
    return text.replace("Adam", " and ".join(names)) if row == "bytes" and names else text


def stated_text(meaning: Meaning, name: str) -> str:
    """The effective value of a row of STATED as text."""
    value = meaning.in_force(name)
    if name in ("keep_fp32", "frozen"):
        return ", ".join(value) or "none"
    return say(value) if value is not None else "as computed" if name in ("output", "pipeline") else "the model's own"


def differences(ours: Meaning, theirs: Meaning) -> dict[str, tuple[str, str]]:
    """row -> (ours, theirs) wherever the two differ. Storage of quantized weights counts as layout, not as quantization.

    Rows of STATED count if either states them.
    """
    a, b = rows(ours), rows(theirs)
    found = {name: (a[name], b[name]) for name in LABELS if a[name] != b[name]}
    for name in STATED:
        said = getattr(ours, name) is not None or getattr(theirs, name) is not None
        if said and ours.in_force(name) != theirs.in_force(name):
            found[name] = stated_text(ours, name), stated_text(theirs, name)
    if arithmetic_of(ours.regions) == arithmetic_of(theirs.regions):
        found.pop("quantization", None)
        if ours.regions != theirs.regions and stored(ours.regions) != stored(theirs.regions):
            found["stored"] = (stored(ours.regions), stored(theirs.regions))
    return found


def arithmetic_differs(ours: Meaning, theirs: Meaning) -> bool:
    """Whether a step's arithmetic differs: any row outside LAYOUT, or weights updated in another dtype."""
    rest = [name for name in differences(ours, theirs) if name not in (*LAYOUT, "stored")]
    return bool(rest) or ours.master is not theirs.master


def arithmetic_of(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """The regions without settings that affect only storage."""
    return tuple(changed(region, _computed) for region in regions)


def changed(region: Region, change: Callable[[Quant], Quant | None]) -> Region:
    """A region with every rule of its GEMMs changed."""

    def of(quant: Quant | None) -> Quant | None:
        return None if quant is None else change(quant)

    one = region.gemms
    gemms = one and Gemms(fprop=of(one.fprop), dgrad=of(one.dgrad), wgrad=of(one.wgrad))
    return dataclasses.replace(region, quant=of(region.quant), gemms=gemms)


def stored(regions: tuple[Region, ...]) -> str:
    """How quantized weights are stored: 'low format' or '16 bit'."""
    low = any(quant.stored for region in regions for quant in region.rules.distinct)
    return "low format" if low else "16 bit"


def _computed(quant: Quant) -> Quant:
    """A Quant without storage and without settings that its scaling does not use."""
    plain = dataclasses.replace(quant, stored=False)
    if quant.row.history:
        return plain
    return dataclasses.replace(plain, margin=0, amax_history=1, amax_algo="most_recent", wgrad=True)


def _scale(scale: LossScale | None) -> str:
    if scale is None:
        return "none"
    if scale.static is not None:
        return f"static {say(scale.static)}"
    text = f"dynamic from {say(scale.initial)}, window {scale.window:g}, hysteresis {scale.hysteresis}"
    return text if scale.minimum == 1 else f"{text}, minimum {scale.minimum:g}"


_BASE = frozenset({"bf16", "fp16", "fp32", "grad_reduce_in_fp32"})


def described(
    fields: Mapping[str, Any], contradicts: list[str], *, engine: str = DEFAULT, sharded: Sharded | None = None
) -> Meaning:
    """The meaning of MixedPrecisionConfig fields; if they are refused, the meaning of most of them, with the refusal and the omissions in `contradicts`."""
    # quantization details come last, after the facts that readers look for first
    optional = sorted((name for name in fields if name not in _BASE), key=lambda name: name.startswith(("fp8", "fp4")))
    quantized = tuple(name for name in optional if name.startswith(("fp8", "fp4", "first_", "num_layers")))
    fewer = [left for count in (1, 2) for left in itertools.combinations(optional, count)]
    for left in dict.fromkeys(((), *fewer, quantized, tuple(optional))):
        rest = {name: value for name, value in fields.items() if name not in left}
        try:
            meaning = of_policy(resolve(MixedPrecisionConfig.from_data(rest)), engine=engine, sharded=sharded)
        except MpbridgeError as error:
            contradicts += [] if left else [str(error)]
            continue
        if left:
            contradicts.append(f"not described: {', '.join(f'{name}={say(fields[name])}' for name in left)}")
        return meaning
    base = DType.BF16 if fields.get("bf16") else DType.FP16 if fields.get("fp16") else DType.FP32
    wire = DType.FP32 if fields.get("grad_reduce_in_fp32", True) else base
    main = None if base is DType.FP32 else DType.FP32
    contradicts.append("only storage and communication are described")
    return Meaning(storage=base, compute=base, main=main, wire=wire, accumulator=wire, sharded=sharded or "optimizer")
