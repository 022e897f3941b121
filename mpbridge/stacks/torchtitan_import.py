"""torchtitan's arguments, its TOML of earlier versions and the names of its configs as what they mean. Read at b5bcd76c.

A config_registry function is Python and is not run: only what its name says is taken from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mpbridge.errors import BadValue, DataError
from mpbridge.formats import DType
from mpbridge.precision.policy import Quant, Region
from mpbridge.stacks.base import Imported, engine_with
from mpbridge.stacks.meaning import Meaning
from mpbridge.stacks.reading import Reader, raise_faults
from mpbridge.stacks.torch_import import fields_of
from mpbridge.stacks.torchtitan import NAME

_OLD = ("float8", "mx", "quantize", "model.converters")
"""Sections of TOML files before converters moved into Python."""


def read(words: Iterable[str], *, version: str) -> Imported:
    """What `--section.key value` arguments mean, `--config NAME` included. Raises BadValue for words that are none."""
    data: dict[str, Any] = {}
    items = iter(words)
    for word in items:
        if not word.startswith("--"):
            raise BadValue(f"{word!r} is not an option: expected --section.key VALUE")
        path, equals, value = word[2:].replace("-", "_").partition("=")
        data[path] = value if equals else next(items, None)
    return read_data(data, version=version)


def read_data(data: Any, *, version: str) -> Imported:
    """What the settings mean under FSDP2. Raises DataError for what is no mapping, BadValue with every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"a torchtitan configuration is a mapping, found {type(data).__name__}")
    read_ = Reader(data)
    cannot: list[str] = []
    inert: list[str] = []
    contradicts: list[str] = []
    assumed = ["FSDP2 shards: without it its mixed precision is autocast"]
    storage = read_.dtype("training.dtype", DType.FP32) or DType.FP32
    compute = read_.dtype("training.mixed_precision_param", DType.BF16) or DType.BF16
    reduce = read_.dtype("training.mixed_precision_reduce", DType.FP32) or DType.FP32
    if DType.FP16 in (storage, compute):
        contradicts.append("float16: training.dtype and mixed_precision_param know bfloat16 and float32 only")
    if reduce is not DType.FP32:
        contradicts.append(f"training.mixed_precision_reduce={reduce.value}: its parser takes float32 only")
        reduce = DType.FP32
    quant = _quant(read_, cannot, inert, assumed)
    states = storage
    if read_.at("optimizer.implementation") == "fused_opt_states_bf16":
        states = DType.BF16
    meaning = Meaning(
        storage=storage,
        compute=compute,
        wire=reduce,
        accumulator=storage,
        exp_avg=states,
        exp_avg_sq=states,
        sharded="everything",
    )
    if quant is not None:
        meaning = dataclasses.replace(meaning, regions=(Region(quant=quant),))
    raise_faults(read_.faults, "this torchtitan configuration")
    fields = fields_of(meaning, cannot, quant)
    if states is not storage:
        cannot.append("both moments in BF16 beside FP32 parameters: its own optimizer, on CUDA")
    return Imported(
        stack=NAME, version=version, fields=fields, engine=engine_with("optimizer"), meaning=meaning, inert=tuple(inert),
        contradicts=tuple(contradicts), cannot_express=tuple(cannot), assumed=tuple(assumed),
    )  # fmt: skip


def _quant(read_: Reader, cannot: list[str], inert: list[str], assumed: list[str]) -> Quant | None:
    name = str(read_.at("config") or "")
    converters = read_.at("model.converters")
    listed = [str(one) for one in converters] if isinstance(converters, (list, tuple)) else []
    word = next((word for word in ("nvfp4", "mxfp8", "float8") if word in name), "")
    word = word or next((found for mark, found in (("mx", "mxfp8"), ("float8", "float8")) if mark in listed), "")
    if not word:
        inert.extend(
            f"{section}: without a converter in model.converters nothing reads it"
            for section in _OLD[:3]
            if read_.section(section)
        )
        return None
    assumed.append(f"quantized linears are what {name or 'model.converters'} names: {word}")
    if "pct_layers" in name:
        cannot.append(
            f"{name}: a share of the last layers stays in BF16; give the model's depth and num_layers_at_end_in_bf16"
        )
    if word == "nvfp4":
        return Quant(format="e2m1", scaling="nvfp4")
    if word == "mxfp8":
        return Quant(format="e4m3", scaling="mxfp8")
    recipe = read_.at("float8.recipe_name", read_.at("quantize.linear.float8.recipe_name", "rowwise"))
    if listed and recipe in (None, "tensorwise"):
        return Quant(format="hybrid", scaling="tensorwise")
    return Quant(format="e4m3", scaling="rowwise_gw_hp" if recipe == "rowwise_with_gw_hp" else "rowwise")
