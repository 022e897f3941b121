"""Interprets Hugging Face accelerate's YAML, and the options of `accelerate launch`, which are its settings. Read at 1.15.0; what FSDP upcasts and reduces in changed between versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from mpbridge.common.errors import DataError, brief, cut, nearest
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks import deepspeed, megatron_lm_import
from mpbridge.interop.stacks.accelerate import NAME
from mpbridge.interop.stacks.base import Imported, engine_with, updated_by
from mpbridge.interop.stacks.known_keys import known, with_rest
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.megatron_lm_options import DEFAULT_VERSION as LM_VERSION
from mpbridge.interop.stacks.reading import Reader, options_of, raise_faults, stray
from mpbridge.interop.stacks.sharded_torch import TORCH_SCALER, fields_of, quant_fields
from mpbridge.precision.policy import Quant, Region

WORDS = {"no": DType.FP32, "fp16": DType.FP16, "bf16": DType.BF16, "fp8": DType.BF16}
"""Value of mixed_precision -> compute dtype."""
_KINDS = frozenset({
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU", "TPU_FSDP",
    "FSDP", "DEEPSPEED", "MEGATRON_LM",
})  # fmt: skip
"""Its DistributedType, and two names of earlier versions."""
_MACHINE = {
    "fp16": "a GPU: on a CPU accelerate silently trains in FP32 under fp16",
    "fp8": "a GPU with FP8: on other GPUs accelerate silently trains in FP16 under fp8",
}
"""Value of mixed_precision -> the machine that it requires."""
_DIVIDES = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
"""FSDP1's keys for what is sharded; NO_SHARD is its third strategy."""
_QUESTIONNAIRE = {"amax_history_length": "amax_history_len", "amax_compute_algorithm": "amax_compute_algo"}
"""Keys of fp8_config that commands/config/cluster.py writes -> those that the environment of TERecipeKwargs has."""
_READS_USE_CPU = ("NO", "MULTI_CPU")
"""Types whose launcher passes use_cpu on: utils/launch.py sets ACCELERATE_USE_CPU only for them."""


def read(words: Iterable[str], *, version: str) -> Imported:
    """The meaning of `accelerate launch`'s options: `--mixed_precision fp8 --use_fsdp ...`."""
    data, strays, undecided = _as_file(words)
    found = read_data(data, version=version)
    unknown = (*(stray(word, ()) for word in strays), *found.unknown)
    return dataclasses.replace(found, unknown=unknown, undecided=(*undecided, *found.undecided))


def read_data(data: Any, *, version: str) -> Imported:
    """The file's meaning for a model loaded in FP32. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"an accelerate configuration is a mapping, found {type(data).__name__}")
    read = Reader(data)
    word = read.text("mixed_precision", "no").lower()
    word = "no" if word in ("none", "false") else word  # YAML reads a bare no as false
    if word not in WORDS:
        read.faults.append(f"mixed_precision={brief(word)}: expected {', '.join(WORDS)}")
    raise_faults(read.faults, "this accelerate configuration")
    kind = read.text("distributed_type", "NO").upper()
    assumed = [
        "the model is loaded in FP32",
        f"accelerate {version}: what FSDP upcasts differs between versions",
    ]
    word, inert = _on_a_cpu(read, word, kind)
    inert += tuple(
        f"fp8_config.{key}: `accelerate config` writes this key, but nothing reads it; the one that is read is {read_key}"
        for key, read_key in _QUESTIONNAIRE.items()
        if read.at(f"fp8_config.{key}") is not None
    )
    assumed += [_MACHINE[word]] if word in _MACHINE and not _cpu(read, kind) else []
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        found = (_deepspeed if kind == "DEEPSPEED" else _megatron)(read, word, version, assumed)
        return dataclasses.replace(found, inert=(*inert, *found.inert))
    cannot: list[str] = []
    contradicts: list[str] = []
    meaning, quant = _meaning(read, word, kind, cannot, contradicts)
    fields = fields_of(meaning, cannot, quant)
    raise_faults(read.faults, "this accelerate configuration")
    engine = engine_with("optimizer") if kind == "FSDP" else DEFAULT
    found = Imported(
        stack=NAME, version=version, fields=fields, engine=engine, meaning=meaning, cannot_express=tuple(cannot),
        undecided=_installed(read, word), inert=inert, contradicts=tuple(contradicts), assumed=tuple(assumed),
    )  # fmt: skip
    return with_rest(updated_by(found, None), read)


def _meaning(
    read: Reader, word: str, kind: str, cannot: list[str], contradicts: list[str]
) -> tuple[Meaning, Quant | None]:
    """(meaning of the value, its quantization)."""
    if kind not in _KINDS:
        near = nearest(kind, _KINDS, most=1)
        hint = f"; nearest: {near[0]}" if near else ""
        contradicts.append(f"distributed_type={cut(kind)}: accelerate has no such type{hint}; described as DDP")
    base = WORDS[word]
    sharded = kind in ("FSDP", "TPU_FSDP")
    second = sharded and read.number("fsdp_config.fsdp_version", 1) == 2
    meaning = _fsdp(word, base, second=second) if sharded else _ddp(word, base)
    whole = {str(read.at(f"fsdp_config.{key}", "")).upper() for key in _DIVIDES} & {"NO_SHARD", "3"}
    if sharded and whole and not second:
        meaning = dataclasses.replace(meaning, sharded="nothing")
    backend = str(read.at("dynamo_config.dynamo_backend", "NO")).upper()
    if word == "no" and backend != "NO":
        cannot.append(
            f"dynamo_config.dynamo_backend={cut(backend)}: with mixed_precision=no accelerate switches TF32 on for CUDA"
        )
    if word == "fp16":
        return dataclasses.replace(meaning, loss_scale=TORCH_SCALER), None
    quant = _quantized(read, cannot) if word == "fp8" else None
    if quant is None:
        return meaning, None
    if quant.scaling != "tensorwise" and _cpu(read, kind):
        contradicts.append("fp8_config.backend=TE on a CPU (use_cpu): Transformer Engine runs only on GPUs")
    return dataclasses.replace(meaning, regions=(Region(quant=quant),)), quant


def _cpu(read: Reader, kind: str) -> bool:
    """Whether the file trains on a CPU: `use_cpu` has an effect only in the launchers of one process and of several CPUs."""
    return kind in _READS_USE_CPU and read.flag("use_cpu")


def _on_a_cpu(read: Reader, word: str, kind: str) -> tuple[str, tuple[str, ...]]:
    """(the effective value of mixed_precision, what has no effect) under `use_cpu`."""
    if _cpu(read, kind) and word == "fp16":
        return "no", ("mixed_precision=fp16: on a CPU (use_cpu) accelerate silently trains in FP32",)
    if kind not in _READS_USE_CPU and read.flag("use_cpu"):
        return word, (f"use_cpu: the launcher of {cut(kind)} does not pass it on",)
    if kind == "MULTI_CPU" and not read.flag("use_cpu"):
        return word, ("distributed_type=MULTI_CPU without use_cpu: each process uses a GPU if there is one",)
    return word, ()


def _ddp(word: str, base: DType) -> Meaning:
    """One process or DDP: gradients and moments have the stored dtype, and autocast is on unless mixed_precision is 'no'."""
    return Meaning(
        storage=DType.FP32,
        compute=base,
        autocast=None if word == "no" else base,
        wire=DType.FP32,
        accumulator=DType.FP32,
    )


def _fsdp(word: str, base: DType, *, second: bool) -> Meaning:
    """Parameters are upcast to FP32 under any mixed_precision, gathered and reduced in the 16-bit dtype; autocast only with FSDP1."""
    autocast = None if word == "no" or second else base
    return Meaning(
        storage=DType.FP32, compute=base, autocast=autocast, wire=base, accumulator=DType.FP32, sharded="everything"
    )


def _quantized(read: Reader, cannot: list[str]) -> Quant | None:
    """The quantization of mixed_precision=fp8 under `fp8_config`; None for an unknown backend."""
    backend = (read.text("fp8_config.backend") or "TE").upper()
    if backend == "AO":
        cannot.append(
            "fp8_config.backend=AO: the first and the last linear of the model are not quantized; here layers at the ends and the output layer are not"
        )
        if read.flag("fp8_config.enable_fsdp_float8_all_gather", default=True):
            cannot.append("fp8_config.enable_fsdp_float8_all_gather: parameters are gathered in FP8 and stored in FP32")
        return Quant(format="hybrid", scaling="tensorwise")
    if backend != "TE":
        cannot.append(f"fp8_config.backend={backend}")
        return None
    cannot.append("fp8_config.backend=TE: the output layer is quantized too; here it never is")
    if read.flag("fp8_config.use_mxfp8_block_scaling"):
        return Quant(format="e4m3", scaling="mxfp8")
    form = read.text("fp8_config.fp8_format", "HYBRID").lower()
    if form not in ("hybrid", "e4m3"):
        cannot.append(f"fp8_config.fp8_format={form}: Transformer Engine trains in HYBRID or E4M3; described as E4M3")
    # values equal to accelerate's own defaults are dropped before Transformer Engine sees them, and its default algorithm is max
    history = int(read.number("fp8_config.amax_history_len", 1024))
    margin = int(read.number("fp8_config.margin", 0))
    return Quant(
        format="hybrid" if form == "hybrid" else "e4m3", scaling="delayed", amax_history=history, amax_algo="max", margin=margin,
        wgrad=not _overridden(read),
    )  # fmt: skip


def _installed(read: Reader, word: str) -> tuple[str, ...]:
    """A line if what is installed decides who quantizes (accelerator.py takes the first that it finds)."""
    if word != "fp8" or read.at("fp8_config.backend") is not None:
        return ()
    return (
        "mixed_precision=fp8 without fp8_config.backend: accelerate takes the first of torchao, Transformer Engine and MS-AMP that is installed: say AO or TE",
    )


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
    file, stage = read.at("deepspeed_config.deepspeed_config_file"), read.at("deepspeed_config.zero_stage")
    if stage is None:
        stage = 2
        read.default("deepspeed_config.zero_stage", stage)
    undecided: tuple[str, ...] = () if file is None else (f"{cut(file)} decides: pass that file (--from deepspeed)",)
    undecided += _installed(read, word)
    data: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    base = "bf16" if word == "fp8" else word  # fp8 converts the linears of a BF16 model
    data |= {base: {"enabled": True}} if base in ("bf16", "fp16") else {}
    inner = deepspeed.read_data(data, version="0.19")
    if word == "fp8":
        cannot = list(inner.cannot_express)
        quant = _quantized(read, cannot)
        meaning = dataclasses.replace(inner.meaning, regions=(Region(quant=quant),))
        fields = {**inner.fields, **quant_fields(quant)}
        inner = dataclasses.replace(inner, meaning=meaning, fields=fields, cannot_express=tuple(cannot))
    found = dataclasses.replace(inner, stack=NAME, version=version, undecided=undecided, assumed=tuple(assumed))
    return with_rest(updated_by(found, None), read)


def _megatron(read: Reader, word: str, version: str, assumed: list[str]) -> Imported:
    """Megatron-LM's own training under accelerate: mixed_precision becomes --bf16 or --fp16, its arguments decide the rest."""
    words = [f"--{word}"] if word in ("bf16", "fp16") else []
    words += (
        ["--use-distributed-optimizer"]
        if read.flag("megatron_lm_config.megatron_lm_use_distributed_optimizer", default=True)
        else []
    )
    inner = megatron_lm_import.read(words, version=LM_VERSION)
    assumed = [
        f"Megatron-LM {LM_VERSION} trains, which has no autocast: mixed_precision becomes its --{word}; the script plugin's other_megatron_args are not in this file"
        if words
        else "Megatron-LM trains",
        *assumed[1:],
    ]
    if word == "fp8":
        inner = dataclasses.replace(
            inner,
            contradicts=(
                *inner.contradicts,
                "mixed_precision=fp8 under MEGATRON_LM sets no Megatron-LM flag; described as FP32",
            ),
        )
    return with_rest(dataclasses.replace(inner, stack=NAME, version=version, assumed=tuple(assumed)), read)


_TYPES: Mapping[str, str] = {
    "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU",
}  # fmt: skip
"""Option -> distributed_type, in the order in which the launcher asks for them."""
_SECTIONS = ("fsdp_config", "deepspeed_config", "megatron_lm_config")


def launch_options(program: Sequence[str], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options in a command, and notes on the arguments of the script that it starts."""
    names = [PurePath(word).name for word in program]
    at = next((at for at, name in enumerate(names) if name in ("launch", "accelerate.commands.launch")), -1)
    own = [word.partition("=")[0] for word in words if word.startswith("--")]
    shown = ", ".join(cut(name) for name in own[:6]) + (", ..." if len(own) > 6 else "")
    notes = [f"{names[-1]} has options of its own, which are not read: {shown}"] if own else []
    return [word for word in program[at + 1 : -1] if word not in ("-m", "--module")], notes


def _as_file(words: Iterable[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """(the configuration that the options amount to, stray words, what decides and is not read)."""
    given, strays = options_of(words)
    keys, undecided = known(NAME), list[str]()
    made: dict[str, Any] = {}
    for option, value in given.items():
        section = next((one for one in _SECTIONS if option in keys[one]), None)
        if option in _TYPES:
            if str(value).lower() != "false":
                made.setdefault("distributed_type", _TYPES[option])
        elif option == "config_file":
            undecided.append(
                f"--config_file {cut(value)} decides what is not said here, but is not read: pass that file"
            )
        elif section is not None:
            made.setdefault(section, {})[option] = value
        elif option.startswith("dynamo_"):
            made.setdefault("dynamo_config", {})[option] = value
        elif option.startswith("fp8_"):
            key = option if option == "fp8_format" else option.removeprefix("fp8_")
            made.setdefault("fp8_config", {})[key] = _truths(value) if key == "override_linear_precision" else value
        else:
            made["use_cpu" if option == "cpu" else option] = value
    return made, strays, undecided


def _truths(value: Any) -> Any:
    """'false,false,true' as a list."""
    return (
        [word.strip().lower() in ("true", "1", "yes") for word in value.split(",")] if isinstance(value, str) else value
    )
