"""DeepSpeed's JSON as what it means. Read at 0.19.8; defaults of the wire and the accumulator changed between versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbridge.errors import DataError
from mpbridge.formats import DType
from mpbridge.precision.policy import LossScale
from mpbridge.stacks.base import Imported
from mpbridge.stacks.deepspeed import NAME
from mpbridge.stacks.meaning import Meaning, Sharded
from mpbridge.stacks.reading import Reader, base_field, raise_faults
from mpbridge.traits import DEFAULT

_SHARDED: Mapping[int, Sharded] = {0: "nothing", 1: "optimizer", 2: "gradients", 3: "everything"}
_INERT = ("grad_accum_dtype", "fp8", "mixed_precision", "precision", "dtype")


def read_data(data: Any, *, version: str) -> Imported:
    """What the settings mean on that version's engine. Raises DataError for what is no mapping, BadValue with every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"a DeepSpeed configuration is a mapping, found {type(data).__name__}")
    read = Reader(data)
    bf16 = read.flag("bf16.enabled") or read.flag("bfloat16.enabled")
    fp16, autocast = read.flag("fp16.enabled"), read.flag("torch_autocast.enabled")
    contradicts: list[str] = []
    inert: list[str] = []
    if bf16 and fp16:
        contradicts.append("bf16.enabled and fp16.enabled: DeepSpeed refuses both together")
    stage = int(read.number("zero_optimization.stage", 0))
    base = DType.BF16 if bf16 else DType.FP16 if fp16 else DType.FP32
    # the engine's communication_data_type and gradient accumulation follow the model's dtype unless they are set
    wire = read.dtype("communication_data_type", base) or base
    accumulator = read.dtype("data_types.grad_accum_dtype", base) or base
    own = read.flag("bf16.bf16_master_weights_and_grads")
    low = read.flag("bf16.bf16_optimizer_states")
    if low and not own:
        contradicts.append("bf16_optimizer_states needs bf16_master_weights_and_grads")
    if (own or low) and stage < 1:
        contradicts.append("bf16_master_weights_and_grads needs ZeRO 1 or higher")
    if accumulator is DType.FP32 and base is not DType.FP32 and stage == 0:
        contradicts.append("data_types.grad_accum_dtype=fp32 without ZeRO: not implemented there")
    inert += [f"{key}: unknown at the top level, accepted and ignored" for key in _INERT if key in data]
    autocast_dtype = read.dtype("torch_autocast.dtype", DType.BF16) if autocast else None
    scale = _scale(read) if fp16 else None
    meaning = Meaning(
        storage=base,
        compute=autocast_dtype or base,
        autocast=autocast_dtype,
        main=None if own or base is DType.FP32 else DType.FP32,
        wire=autocast_dtype or wire,
        accumulator=accumulator,
        optimizer_reads=DType.FP32 if not own and accumulator is not DType.FP32 and base is not DType.FP32 else None,
        exp_avg=DType.BF16 if low else DType.FP32,
        exp_avg_sq=DType.BF16 if low else DType.FP32,
        sharded=_SHARDED.get(stage, "everything"),
        loss_scale=scale,
    )
    raise_faults(read.faults, "this DeepSpeed configuration")
    fields: dict[str, Any] = {**base_field(meaning.compute), "grad_reduce_in_fp32": wire is DType.FP32}
    if base is DType.FP32 and meaning.compute is not DType.FP32:
        fields |= {"params_dtype": "fp32", "main_params_dtype": "fp32", "autocast_enabled": True}
        fields["grad_reduce_in_fp32"] = meaning.wire is DType.FP32
    if wire is not accumulator and not autocast:
        fields["grad_accumulation_dtype"] = accumulator.short
    if own:
        fields |= {"main_params_dtype": "bf16", "grad_reduce_in_fp32": wire is DType.FP32}
        fields |= {"exp_avg_dtype": meaning.exp_avg.short, "exp_avg_sq_dtype": meaning.exp_avg_sq.short}
        fields |= {} if wire is DType.FP32 else {"main_grads_dtype": "bf16"}
    if scale is not None:
        fields |= _scale_fields(scale)
    return Imported(
        stack=NAME, version=version, fields=fields, engine=DEFAULT, meaning=meaning, inert=tuple(inert),
        contradicts=tuple(contradicts), assumed=(f"DeepSpeed {version}: the wire's default differs between versions",),
    )  # fmt: skip


def _scale(read: Reader) -> LossScale:
    static = read.number("fp16.loss_scale", 0)
    return LossScale(
        static=static or None,
        initial=2.0 ** read.number("fp16.initial_scale_power", 16),
        minimum=read.number("fp16.min_loss_scale", 1),
        window=read.number("fp16.loss_scale_window", 1000),
        hysteresis=int(read.number("fp16.hysteresis", 2)),
    )


def _scale_fields(scale: LossScale) -> dict[str, Any]:
    fields: dict[str, Any] = {"initial_loss_scale": scale.initial, "min_loss_scale": scale.minimum}
    fields |= {"loss_scale_window": scale.window, "hysteresis": scale.hysteresis}
    return fields | ({} if scale.static is None else {"loss_scale": scale.static})
