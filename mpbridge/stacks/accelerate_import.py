"""Hugging Face accelerate's YAML as what it means. Read at 1.15.0; what FSDP upcasts and reduces in changed between versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpbridge.errors import DataError, brief, cut, nearest
from mpbridge.formats import DType
from mpbridge.precision.policy import Quant, Region
from mpbridge.stacks import deepspeed_import, megatron_lm_import
from mpbridge.stacks.accelerate import NAME
from mpbridge.stacks.base import Imported, engine_with
from mpbridge.stacks.known_keys import with_rest
from mpbridge.stacks.meaning import Meaning
from mpbridge.stacks.megatron_lm import DEFAULT_VERSION as LM_VERSION
from mpbridge.stacks.reading import Reader, raise_faults
from mpbridge.stacks.sharded_torch import TORCH_SCALER
from mpbridge.stacks.torch_import import fields_of
from mpbridge.traits import DEFAULT

WORDS = {"no": DType.FP32, "fp16": DType.FP16, "bf16": DType.BF16, "fp8": DType.BF16}
"""Its words of mixed_precision and what each computes in."""
_KINDS = frozenset({
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU", "TPU_FSDP",
    "FSDP", "DEEPSPEED", "MEGATRON_LM",
})  # fmt: skip
"""Its DistributedType, and two names of earlier versions."""
_MACHINE = {
    "fp16": "a GPU: on a CPU accelerate trains FP32 under fp16, without a word",
    "fp8": "a GPU with FP8: on another accelerate trains FP16 under fp8, without a word",
}
"""What the machine must be for a word to mean what it says."""


def read_data(data: Any, *, version: str) -> Imported:
    """What the file means for a model loaded in FP32. Raises DataError for what is no mapping, BadValue with every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"an accelerate configuration is a mapping, found {type(data).__name__}")
    read = Reader(data)
    word = read.text("mixed_precision", "no").lower()
    word = "no" if word in ("none", "false") else word  # YAML reads a bare no as false
    if word not in WORDS:
        read.faults.append(f"mixed_precision={brief(word)}: expected {', '.join(WORDS)}")
    raise_faults(read.faults, "this accelerate configuration")
    kind = read.text("distributed_type", "NO").upper()
    assumed = ["the model is loaded in FP32", f"accelerate {version}: what FSDP upcasts differs between versions"]
    assumed += [_MACHINE[word]] if word in _MACHINE else []
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        return (_deepspeed if kind == "DEEPSPEED" else _megatron)(read, word, version, assumed)
    cannot: list[str] = []
    contradicts = []
    if kind not in _KINDS:
        near = nearest(kind, _KINDS, most=1)
        contradicts.append(
            f"distributed_type={cut(kind)}: accelerate has no such type{f'; nearest: {near[0]}' if near else ''}; described as DDP"
        )
    base = WORDS[word]
    second = str(read.at("fsdp_config.fsdp_version", 1)) == "2"
    meaning = _fsdp(base, second=second) if kind in ("FSDP", "TPU_FSDP") else _ddp(base)
    quant = quantized(read, cannot) if word == "fp8" else None
    if quant is not None:
        meaning = dataclasses.replace(meaning, regions=(Region(quant=quant),))
    if base is DType.FP16:
        meaning = dataclasses.replace(meaning, loss_scale=TORCH_SCALER)
    fields = fields_of(meaning, cannot, quant)
    if base is DType.FP16:
        fields |= {"initial_loss_scale": 2.0**16, "loss_scale_window": 2000, "hysteresis": 1}
    raise_faults(read.faults, "this accelerate configuration")
    if meaning.accumulator not in (meaning.wire, meaning.storage):  # torch FSDP2 adds up in the stored dtype
        cannot.append(f"gradients travel in {meaning.wire.short} and accumulate in {meaning.accumulator.short}")
    engine = engine_with("optimizer") if kind == "FSDP" else DEFAULT
    found = Imported(
        stack=NAME, version=version, fields=fields, engine=engine, meaning=meaning, cannot_express=tuple(cannot),
        contradicts=tuple(contradicts), assumed=tuple(assumed),
    )  # fmt: skip
    return with_rest(found, read)


def _ddp(base: DType) -> Meaning:
    autocast = None if base is DType.FP32 else base
    return Meaning(storage=DType.FP32, compute=base, autocast=autocast, wire=DType.FP32, accumulator=DType.FP32)


def _fsdp(base: DType, *, second: bool) -> Meaning:
    """Parameters upcast to FP32, gathered and reduced in the 16-bit dtype; autocast on top of FSDP1 only."""
    autocast = None if base is DType.FP32 or second else base
    return Meaning(
        storage=DType.FP32, compute=base, autocast=autocast, wire=base, accumulator=DType.FP32, sharded="everything"
    )


def quantized(read: Reader, cannot: list[str]) -> Quant | None:
    """What mixed_precision=fp8 runs under `fp8_config`; None for a backend that it does not have."""
    backend = str(read.at("fp8_config.backend", "TE")).upper()
    if backend == "AO":
        if read.flag("fp8_config.enable_fsdp_float8_all_gather", default=True):
            cannot.append("fp8_config.enable_fsdp_float8_all_gather: parameters travel in FP8 and rest in FP32")
        return Quant(format="hybrid", scaling="tensorwise")
    if backend != "TE":
        cannot.append(f"fp8_config.backend={backend}")
        return None
    if read.flag("fp8_config.use_mxfp8_block_scaling"):
        return Quant(format="e4m3", scaling="mxfp8")
    form = str(read.at("fp8_config.fp8_format", "HYBRID")).lower()
    if form not in ("hybrid", "e4m3"):
        cannot.append(f"fp8_config.fp8_format={form}: Transformer Engine trains in HYBRID or E4M3; described as E4M3")
    # values equal to accelerate's own defaults are dropped before Transformer Engine sees them, and its default algorithm is max
    history = int(read.number("fp8_config.amax_history_length", read.number("fp8_config.amax_history_len", 1024)))
    return Quant(
        format="hybrid" if form == "hybrid" else "e4m3", scaling="delayed", amax_history=history, amax_algo="max",
        wgrad=not _overridden(read),
    )  # fmt: skip


def _overridden(read: Reader) -> bool:
    """Whether weight gradients stay in high precision: the last of override_linear_precision's (fprop, dgrad, wgrad)."""
    where = "fp8_config.override_linear_precision"
    given = read.at(where, [False, False, False])
    if list(given) not in ([False, False, False], [False, False, True]) if isinstance(given, (list, tuple)) else True:
        read.faults.append(
            f"{where}={brief(given)}: expected [false, false, false] or [false, false, true], all that Transformer Engine takes"
        )
        return False
    return bool(given[2])


def _deepspeed(read: Reader, word: str, version: str, assumed: list[str]) -> Imported:
    file, stage = read.at("deepspeed_config.deepspeed_config_file"), read.at("deepspeed_config.zero_stage", 2)
    if file is not None:
        assumed.append(f"{cut(file)} decides: give that file (--from deepspeed)")
    data: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    data |= {word: {"enabled": True}} if word in ("bf16", "fp16") else {}
    inner = deepspeed_import.read_data(data, version="0.19")
    return with_rest(dataclasses.replace(inner, stack=NAME, version=version, assumed=tuple(assumed)), read)


def _megatron(read: Reader, word: str, version: str, assumed: list[str]) -> Imported:
    """Megatron-LM's own training under accelerate: the word becomes --bf16 or --fp16, and its arguments do the rest."""
    words = [f"--{word}"] if word in ("bf16", "fp16") else []
    words += (
        ["--use-distributed-optimizer"]
        if read.flag("megatron_lm_config.megatron_lm_use_distributed_optimizer", default=True)
        else []
    )
    inner = megatron_lm_import.read(words, version=LM_VERSION)
    assumed = [
        f"Megatron-LM {LM_VERSION} trains, which knows no autocast: mixed_precision is its --{word}; other_megatron_args of the script's plugin are not here"
        if words
        else "Megatron-LM trains",
        *assumed[1:],
    ]
    if word == "fp8":
        inner = dataclasses.replace(
            inner,
            contradicts=(
                *inner.contradicts,
                "mixed_precision=fp8 under MEGATRON_LM: no flag of it follows; described as FP32",
            ),
        )
    return with_rest(dataclasses.replace(inner, stack=NAME, version=version, assumed=tuple(assumed)), read)
