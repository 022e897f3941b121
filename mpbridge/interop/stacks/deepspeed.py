"""DeepSpeed's JSON, written and read. Read at 0.19.8: runtime/config.py, runtime/engine.py, runtime/precision_config.py.

The wire and the accumulator have separate settings, whose defaults changed between versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import cut
from mpbridge.common.formats import DType
from mpbridge.interop.stacks.base import Export, Fidelity, Fragment, Imported, Line, Request, exported
from mpbridge.interop.stacks.meaning import Meaning, Sharded
from mpbridge.interop.stacks.reading import Reader, base_field, imported, known
from mpbridge.interop.stacks.sharded_torch import TORCH_SCALER, scale_fields
from mpbridge.precision.policy import LossScale, PrecisionPolicy

NAME = "deepspeed"
VERSIONS = {"0.19": "0.19.8"}
OVERFLOW = "check_grad_overflow is also on for bf16: such a step is skipped, as in mpbridge; Megatron-LM's own loop stops"  # fmt: skip
"""The default reaction to overflowing gradients (mpbridge's is training.checkpointer.Nonfinite)."""


def export(request: Request) -> Export:
    """The JSON on ZeRO 1, whose accumulator can be FP32."""
    policy = request.policy.settled()
    config = _config(policy)
    if request.optimizer == "sgd":
        config["optimizer"] = {"type": "SGD", "params": {"momentum": request.updates["sgd_momentum"]}}
    theirs = read_data(config, version=request.version).meaning
    low = {policy.exp_avg, policy.exp_avg_sq} - {None, DType.FP32}
    skips = policy.mixed and theirs.main is DType.FP32 and policy.loss_scale is None
    rows: tuple[tuple[Any, Fidelity, str, str], ...] = (
        (low and theirs.exp_avg is DType.FP32, "different", "moments", "bf16_optimizer_states requires bf16_master_weights_and_grads: BF16 moments imply BF16 weights"),
        (theirs.autocast is not None, "exact", "wire", "torch_autocast reduces in its own dtype regardless of communication_data_type"),
        (skips, "exact", "non-finite gradients", OVERFLOW),
    )  # fmt: skip
    lines = [Line(fidelity=kind, fact=fact, text=text) for applies, kind, fact, text in rows if applies]
    piece = Fragment(name="ds_config.json", text=json.dumps(config, indent=2))
    return exported(request, NAME, theirs, [piece], lines)


def _config(policy: PrecisionPolicy) -> dict[str, Any]:
    if policy.autocast is not None and policy.params is DType.FP32 and policy.loss_scale is None:
        return {"torch_autocast": {"enabled": True, "dtype": policy.compute.value}, "zero_optimization": {"stage": 1}}
    config: dict[str, Any] = {}
    if policy.compute is DType.BF16:
        config["bf16"] = {"enabled": True}
        if policy.main_params is policy.params is DType.BF16:
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    elif policy.compute is DType.FP16:
        config["fp16"] = _fp16(policy.loss_scale)
    config["zero_optimization"] = {"stage": 1}
    if policy.mixed:
        config["communication_data_type"] = policy.reduce.short
        config["data_types"] = {"grad_accum_dtype": (policy.accumulate or policy.reduce).short}
    return config


def _fp16(scale: LossScale | None) -> dict[str, Any]:
    """Its section, whose initial scale is a power of two, and whose window and minimum are whole and above 0."""
    found: dict[str, Any] = {"enabled": True}
    if scale is None or scale.static is not None:
        return found if scale is None else found | {"loss_scale": scale.static}
    return found | {
        "loss_scale": 0, "initial_scale_power": round(math.log2(scale.initial)), "loss_scale_window": max(1, round(scale.window)),
        "hysteresis": scale.hysteresis, "min_loss_scale": max(1, round(scale.minimum)),
    }  # fmt: skip


SHARDED: Mapping[int, Sharded] = {0: "nothing", 1: "optimizer", 2: "gradients", 3: "everything"}
"""ZeRO's stage -> what is divided."""
_INERT = ("grad_accum_dtype", "fp8", "mixed_precision", "precision", "dtype")
_REMOVED = frozenset({
    "amp", "compression_training", "quantize_training", "eigenvalue", "sparse_gradients", "sparse_attention", "elasticity", "graph_harvesting",
    "curriculum_learning", "progressive_layer_drop", "nebula",
})  # fmt: skip
"""Sections of earlier versions that its configuration refuses by name (runtime/config.py)."""
_COMPRESSED = {
    "zero_quantized_weights": "parameters are gathered in blockwise 8 bits",
    "zero_quantized_nontrainable_weights": "frozen parameters are stored and gathered in 8 bits",
    "zero_quantized_gradients": "gradients are reduced in blockwise 4 bits, regardless of the wire shown",
}
"""ZeRO++: what it quantizes in communication."""
_SENT = ("fp32", "fp16", "bf16")
"""Values that communication_data_type accepts."""


def read_data(data: Any, *, version: str) -> Imported:
    """The settings' meaning on that version's engine. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    read = Reader.of(data, "a DeepSpeed configuration")
    read.note("assumed", f"DeepSpeed {version}: the wire's default differs between versions")
    meaning, fields = meaning_and_fields(read)
    kind, momentum = (read.at(f"optimizer.{name}") for name in ("type", "params.momentum"))
    return imported(read, NAME, version, meaning, fields, optimizer=kind, where="optimizer.type", momentum=momentum)


def meaning_and_fields(read: Reader) -> tuple[Meaning, dict[str, Any]]:
    """What its sections mean, and as which fields; also where they stand in another stack's file."""
    read.whole |= _REMOVED & read.data.keys()
    bf16, fp16 = read.flag("bf16.enabled") or read.flag("bfloat16.enabled"), read.flag("fp16.enabled")
    base = DType.BF16 if bf16 else DType.FP16 if fp16 else DType.FP32
    autocast = read.dtype("torch_autocast.dtype", DType.BF16) if read.flag("torch_autocast.enabled") else None
    stage = read.number("zero_optimization.stage", 0)
    if stage not in SHARDED:
        read.faults.append(f"zero_optimization.stage={stage:g}: expected 0, 1, 2 or 3")
    read.note("contradicts", "bf16.enabled and fp16.enabled: DeepSpeed refuses both together", bf16 and fp16)
    # the engine's communication_data_type, which it may refuse, and gradient accumulation follow the model's dtype unless they are set
    word, sent = (
        str(read.at("communication_data_type", "")).lower(),
        read.dtype("communication_data_type", base) or base,
    )
    wire = sent if word in _SENT or sent.short in _SENT else base
    accumulator = read.dtype("data_types.grad_accum_dtype", base) or base
    # whether the 16-bit parameters are their own main weights
    own = read.flag(f"{base.short}.{base.short}_master_weights_and_grads") if bf16 or fp16 else False
    moments, wide = DType.BF16 if read.flag("bf16.bf16_optimizer_states") else DType.FP32, base is DType.FP32
    meaning = Meaning(
        storage=base, compute=autocast or base, autocast=autocast, wire=autocast or wire, accumulator=accumulator,
        # ZeRO updates a copy of every parameter, even of FP32 ones (zero/stage_1_and_2.py, stage3.py: clone)
        main=None if own or (wide and stage < 1) else DType.FP32, optimizer_reads=None if own or wide or accumulator is DType.FP32 else DType.FP32,
        exp_avg=moments, exp_avg_sq=moments, sharded=SHARDED.get(int(stage), "everything"),
        # torch_autocast uses torch's scaler regardless of the fp16 section
        loss_scale=TORCH_SCALER if autocast is DType.FP16 else scale_of(read, "fp16.") if fp16 else None,
    )  # fmt: skip
    _notes(read, meaning, int(stage), wire, own=own)
    return meaning, _fields(meaning, wire, own=own)


def _notes(read: Reader, said: Meaning, stage: int, wire: DType, *, own: bool) -> None:
    """What DeepSpeed refuses or ignores, and what mpbridge has no setting for: autocast's wire by module, and applying a non-finite step."""
    base, sent, asked = said.storage.short, read.at("communication_data_type"), read.dtype("data_types.param_dtype")
    bf16, wide, low = said.storage is DType.BF16, said.storage is DType.FP32, said.exp_avg is DType.BF16
    safe, kind = read.at("torch_autocast.lower_precision_safe_modules"), str(read.at("optimizer.type", ""))
    some = ", ".join(map(str, safe)) if isinstance(safe, list) else str(safe)
    refused = (f"{one}.{key}" for one in ("bf16", "fp16") for key in read.section(one) if key not in known(NAME)[one])
    apex = "; in earlier versions Apex AMP, which trains in FP16"
    read.note_rows(
        *(("inert", True, f"{key}: unknown at the top level, accepted and ignored") for key in _INERT if key in read.data),
        *(("contradicts", True, f"{key}: DeepSpeed refuses unknown keys there") for key in refused),
        *(("contradicts", True, f"{key}: removed from DeepSpeed, which refuses it{apex if key == 'amp' else ''}") for key in sorted(_REMOVED & read.data.keys())),
        ("contradicts", asked not in (None, said.storage),
         f"data_types.param_dtype={asked and asked.short} with a model in {base}: DeepSpeed refuses it; described as {base}"),
        ("contradicts", sent is not None and str(sent).lower() not in _SENT,
         f"communication_data_type={cut(sent)}: DeepSpeed refuses it (it takes {', '.join(_SENT)}); described as {wire.short}"),
        ("contradicts", low and not own, "bf16_optimizer_states needs bf16_master_weights_and_grads"),
        ("contradicts", (own or low) and stage < 1, f"{base}_master_weights_and_grads needs ZeRO 1 or higher"),
        ("contradicts", said.autocast is not None and not wide,
         f"torch_autocast with {base}.enabled: autocast is meant for FP32 parameters; these are stored in {base}"),
        ("contradicts", said.accumulator is DType.FP32 and not wide and stage == 0,
         "data_types.grad_accum_dtype=fp32 without ZeRO: DeepSpeed does not implement it"),
        ("cannot_express", said.autocast is not None and safe is not None,
         f"torch_autocast.lower_precision_safe_modules: only gradients of {cut(some)} are reduced in {said.autocast and said.autocast.short}, the others in FP32"),
        *(("cannot_express", read.flag(f"zero_optimization.{key}"), f"zero_optimization.{key}: {text}") for key, text in _COMPRESSED.items()),
        ("cannot_express", kind.lower().startswith(("onebit", "zeroone")),
         f"optimizer.type={cut(kind)}: after its warm-up, momenta are reduced in 1 bit; the wire shown is that of the warm-up"),
        ("assumed", bf16 and read.at("bf16.check_grad_overflow") is None, f"non-finite gradients: {OVERFLOW}"),
        ("cannot_express", bf16 and not read.flag("bf16.check_grad_overflow", default=True),
         "bf16.check_grad_overflow=false: a step whose gradients overflow is applied; mpbridge skips it"),
    )  # fmt: skip


def _fields(meaning: Meaning, wire: DType, *, own: bool) -> dict[str, Any]:
    base, wide = meaning.storage, wire is DType.FP32
    fields: dict[str, Any] = {**base_field(meaning.compute), "grad_reduce_in_fp32": wide}
    if base is DType.FP32 and meaning.compute is not DType.FP32:
        fields |= {"params_dtype": "fp32", "main_params_dtype": "fp32", "autocast_enabled": True}
        fields["grad_reduce_in_fp32"] = meaning.wire is DType.FP32
    if wire is not meaning.accumulator and meaning.autocast is None:
        fields["grad_accumulation_dtype"] = meaning.accumulator.short
    if own:
        fields |= {"main_params_dtype": base.short, "grad_reduce_in_fp32": wide}
        fields |= {"exp_avg_dtype": meaning.exp_avg.short, "exp_avg_sq_dtype": meaning.exp_avg_sq.short}
        fields |= {} if wide else {"main_grads_dtype": base.short}
    return fields if meaning.loss_scale is None else fields | scale_fields(meaning.loss_scale)


def scale_of(read: Reader, under: str = "") -> LossScale:
    """The loss scale of an fp16 section with its keys `under` a path; Lightning's DeepSpeedStrategy has the same keys and defaults."""
    static, power = read.number(f"{under}loss_scale", 0), read.number(f"{under}initial_scale_power", 16, largest=127)
    usual = {"min_loss_scale": 1, "loss_scale_window": 1000, "hysteresis": 2}
    minimum, window, hysteresis = (read.number(f"{under}{name}", value) for name, value in usual.items())
    return LossScale(static=float(static) or None, initial=2.0**power, minimum=minimum, window=window, hysteresis=int(hysteresis))  # fmt: skip
