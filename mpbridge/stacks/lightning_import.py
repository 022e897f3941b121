"""Lightning's trainer arguments or the trainer section of its CLI's YAML as what they mean. Read at 2.6.6."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mpbridge.errors import BadValue, DataError, brief
from mpbridge.formats import DType
from mpbridge.precision.policy import LossScale, Quant, Region
from mpbridge.stacks.base import Imported, engine_with
from mpbridge.stacks.known_keys import with_rest
from mpbridge.stacks.lightning import NAME
from mpbridge.stacks.meaning import Meaning, Sharded
from mpbridge.stacks.reading import Reader, raise_faults
from mpbridge.stacks.torch_import import fields_of
from mpbridge.traits import DEFAULT

_WORDS: Mapping[str, tuple[DType, bool]] = {
    # word -> (dtype, whether parameters are cast to it)
    "32": (DType.FP32, True), "32-true": (DType.FP32, True), "16": (DType.FP16, False), "16-mixed": (DType.FP16, False),
    "bf16": (DType.BF16, False), "bf16-mixed": (DType.BF16, False), "16-true": (DType.FP16, True), "bf16-true": (DType.BF16, True),
    "transformer-engine": (DType.BF16, True), "transformer-engine-float16": (DType.FP16, True),
}  # fmt: skip
_DELAYED = Quant(format="hybrid", scaling="delayed", amax_history=1024, amax_algo="max")
"""Transformer Engine's DelayedScaling() as it is made without arguments, which is what the words alone give."""


def read(words: Iterable[str], *, version: str) -> Imported:
    """What `precision=bf16-mixed strategy=fsdp` means; leading dashes and 'trainer.' may stand before. Raises BadValue."""
    data: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.lstrip("-").removeprefix("trainer.").partition("=")
        if not equals:
            raise BadValue(f"{brief(word)} is not an argument: expected name=value")
        data[name] = value.strip("\"'")
    return read_data({"trainer": data}, version=version)


def read_data(data: Any, *, version: str) -> Imported:
    """What a trainer means for a module in FP32. Raises DataError for what is no mapping, BadValue with every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"a Lightning configuration is a mapping, found {type(data).__name__}")
    read_ = Reader(data.get("trainer", data) if isinstance(data.get("trainer", data), Mapping) else {})
    word = str(read_.at("precision", "32-true")).lower()
    strategy = read_.at("strategy", "auto")
    read_.whole |= {"strategy"} if isinstance(strategy, Mapping) else set()
    name = str(strategy.get("class_path", "") if isinstance(strategy, Mapping) else strategy).lower().rsplit(".", 1)[-1]
    if word not in _WORDS:
        read_.faults.append(f"precision={brief(word)}: expected one of {', '.join(_WORDS)}")
    raise_faults(read_.faults, "this Lightning configuration")
    base, cast = _WORDS[word]
    cannot: list[str] = []
    assumed = ["the module is FP32 before the trainer sees it"]
    if base is DType.FP16:
        assumed.append("a GPU: on a CPU Lightning trains BF16 under 16")
    contradicts = _refused(base, cast, name, assumed)
    meaning = _meaning(base, cast, name, strategy, assumed)
    quant = _DELAYED if word.startswith("transformer-engine") else None
    if quant is not None:
        assumed.append("a plugin without a recipe: Transformer Engine's DelayedScaling as it is made without arguments")
        meaning = dataclasses.replace(meaning, autocast=base, regions=(Region(quant=quant),))
    fields = fields_of(meaning, cannot, quant) if meaning.main is None else _megatron_like(meaning)
    if meaning.accumulator not in (meaning.wire, meaning.storage):  # torch FSDP2 adds up in the stored dtype
        cannot.append(f"gradients travel in {meaning.wire.short} and accumulate in {meaning.accumulator.short}")
    found = Imported(
        stack=NAME, version=version, fields=fields, engine=engine_with("optimizer") if "fsdp" in name else DEFAULT, meaning=meaning,
        contradicts=contradicts, cannot_express=tuple(cannot), assumed=tuple(assumed),
    )  # fmt: skip
    return with_rest(found, read_, under="trainer")


def _refused(base: DType, cast: bool, strategy: str, assumed: list[str]) -> tuple[str, ...]:
    """What ModelParallelStrategy makes of a precision: no loss scaler, and FSDP2's dtypes are the author's."""
    if "modelparallel" not in strategy.replace("_", ""):
        return ()
    assumed.append("ModelParallelStrategy leaves FSDP2's MixedPrecisionPolicy to configure_model: read as FSDP's")
    return ("16-mixed: ModelParallelStrategy refuses it",) if base is DType.FP16 and not cast else ()


def _meaning(base: DType, cast: bool, strategy: str, given: Any, assumed: list[str]) -> Meaning:
    if "deepspeed" in strategy and base is not DType.FP32:
        assumed.append("under DeepSpeed mixed and true are the same settings")
        return Meaning(
            storage=base,
            compute=base,
            main=DType.FP32,
            wire=base,
            accumulator=base,
            optimizer_reads=DType.FP32,
            sharded=_zero(strategy, given),
        )
    sharded: Sharded = "everything" if "fsdp" in strategy or "modelparallel" in strategy else "nothing"
    if cast:
        return Meaning(
            storage=base, compute=base, wire=base, accumulator=base, exp_avg=base, exp_avg_sq=base, sharded=sharded
        )
    wire = DType.FP32 if sharded == "nothing" else _reduce(base, given, assumed)
    meaning = Meaning(
        storage=DType.FP32, compute=base, autocast=base, wire=wire, accumulator=DType.FP32, sharded=sharded
    )
    if base is DType.FP16:
        return dataclasses.replace(meaning, loss_scale=LossScale(initial=2.0**16, window=2000, hysteresis=1))
    return meaning


def _zero(strategy: str, given: Any) -> Sharded:
    """What ZeRO divides: by the stage in the strategy's name or among its arguments; DeepSpeedStrategy's own is 2."""
    arguments = given.get("init_args", {}) if isinstance(given, Mapping) else {}
    stage = str(arguments.get("stage", "") if isinstance(arguments, Mapping) else "")
    stage = stage or strategy.partition("deepspeed_stage_")[2][:1] or "2"
    stages: Mapping[str, Sharded] = {"0": "nothing", "1": "optimizer", "2": "gradients", "3": "everything"}
    return stages.get(stage, "everything")


def _reduce(base: DType, given: Any, assumed: list[str]) -> DType:
    """FSDPStrategy reduces in the precision's dtype unless it was given a MixedPrecision."""
    arguments = given.get("init_args", {}) if isinstance(given, Mapping) else {}
    policy = arguments.get("mixed_precision") if isinstance(arguments, Mapping) else None
    if not isinstance(policy, Mapping):
        return base
    inner = Reader(policy.get("init_args", policy))
    return inner.dtype("reduce_dtype", base) or base


def _megatron_like(meaning: Meaning) -> dict[str, Any]:
    return {meaning.storage.short: True, "grad_reduce_in_fp32": meaning.wire is DType.FP32}
