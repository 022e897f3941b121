"""Interprets Hugging Face accelerate's YAML. Read at 1.15.0; what FSDP upcasts and reduces in changed between versions."""

from __future__ import annotations

from typing import Any

from mpbridge.common.errors import DataError, brief, cut, nearest
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks import deepspeed
from mpbridge.interop.stacks.accelerate import NAME
from mpbridge.interop.stacks.base import Imported, engine_with
from mpbridge.interop.stacks.known_keys import imported
from mpbridge.interop.stacks.meaning import Meaning, updated_itself, with_quant
from mpbridge.interop.stacks.reading import Reader, raise_faults
from mpbridge.interop.stacks.sharded_torch import TORCH_SCALER, fields_of, quant_fields
from mpbridge.precision.policy import Quant

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


def read_data(data: Any, *, version: str) -> Imported:
    """The file's meaning for a model loaded in FP32. Raises DataError for what is no mapping or no settings of accelerate, BadValue listing every value that cannot be read."""
    read = Reader.of(data, "an accelerate configuration")
    word, kind = read.text("mixed_precision", "no").lower(), read.text("distributed_type", "NO").upper()
    word = "no" if word in ("none", "false") else word  # YAML reads a bare no as false
    if word not in WORDS:
        read.faults.append(f"mixed_precision={brief(word)}: expected {', '.join(WORDS)}")
    raise_faults(read.faults, "this accelerate configuration")
    if kind == "MEGATRON_LM":
        raise DataError(
            "distributed_type=MEGATRON_LM: Megatron-LM trains, and its own arguments decide: pass those (--from megatron-lm)"
        )
    alone, asked = kind in _READS_USE_CPU, read.flag("use_cpu")
    cpu = alone and asked
    near = nearest(kind, _KINDS, most=1)
    installed = "the first of torchao, Transformer Engine and MS-AMP that is installed"
    unnamed = word == "fp8" and read.at("fp8_config.backend") is None
    read.note_rows(
        ("assumed", True, "the model is loaded in FP32"),
        ("assumed", True, f"accelerate {version}: what FSDP upcasts differs between versions"),
        ("assumed", word in _MACHINE and not cpu, _MACHINE.get(word, "")),
        ("inert", cpu and word == "fp16", "mixed_precision=fp16: on a CPU (use_cpu) accelerate silently trains in FP32"),
        ("inert", asked and not alone, f"use_cpu: the launcher of {cut(kind)} does not pass it on"),
        ("inert", kind == "MULTI_CPU" and not asked, "distributed_type=MULTI_CPU without use_cpu: each process uses a GPU if there is one"),
        *(("inert", read.at(f"fp8_config.{key}") is not None,
           f"fp8_config.{key}: `accelerate config` writes this key, but nothing reads it; the one that is read is {read_key}")
          for key, read_key in _QUESTIONNAIRE.items()),
        ("undecided", unnamed, f"mixed_precision=fp8 without fp8_config.backend: accelerate takes {installed}: say AO or TE"),
        ("contradicts", kind not in _KINDS,
         f"distributed_type={cut(kind)}: accelerate has no such type{f'; nearest: {near[0]}' if near else ''}; described as DDP"),
    )  # fmt: skip
    word = "no" if cpu and word == "fp16" else word
    quant = _quantized(read, cpu) if word == "fp8" else None
    if kind == "DEEPSPEED":
        meaning, fields = _deepspeed(read, word)
        meaning = with_quant(meaning, quant)
        fields = {**fields, **quant_fields(meaning.regions)}
    else:
        meaning = with_quant(_meaning(read, word, kind), quant)
        fields = fields_of(meaning, read)
    engine = engine_with("optimizer") if kind == "FSDP" else DEFAULT
    return imported(read, NAME, version, meaning, fields, engine=engine)


def _meaning(read: Reader, word: str, kind: str) -> Meaning:
    """FSDP upcasts parameters to FP32, and gathers and reduces them in 16 bits, with autocast over FSDP1 alone; DDP keeps the stored dtype under autocast."""
    base, sharded = WORDS[word], kind in ("FSDP", "TPU_FSDP")
    second = sharded and read.number("fsdp_config.fsdp_version", 1) == 2
    whole = {str(read.at(f"fsdp_config.{key}", "")).upper() for key in _DIVIDES} & {"NO_SHARD", "3"}
    backend = str(read.at("dynamo_config.dynamo_backend", "NO")).upper()
    text = f"dynamo_config.dynamo_backend={cut(backend)}: with mixed_precision=no accelerate switches TF32 on for CUDA"
    read.cannot(text, word == "no" and backend != "NO")
    return updated_itself(
        DType.FP32, base, base if sharded else DType.FP32, autocast=None if word == "no" or second else base,
        sharded="everything" if sharded and (second or not whole) else "nothing", loss_scale=TORCH_SCALER if word == "fp16" else None,
    )  # fmt: skip


def _deepspeed(read: Reader, word: str) -> tuple[Meaning, dict[str, Any]]:
    """DeepSpeed's settings as accelerate fills them in."""
    file, stage = read.at("deepspeed_config.deepspeed_config_file"), read.at("deepspeed_config.zero_stage")
    read.note("undecided", f"{cut(file)} decides: pass that file (--from deepspeed)", file is not None)
    if stage is None:
        stage = 2
        read.default("deepspeed_config.zero_stage", stage)
    base = "bf16" if word == "fp8" else word  # fp8 converts the linears of a BF16 model
    data = {"zero_optimization": {"stage": stage}} | ({base: {"enabled": True}} if base in ("bf16", "fp16") else {})
    return deepspeed.meaning_and_fields(read.inner(data, ""))


def _quantized(read: Reader, cpu: bool) -> Quant | None:
    """The quantization of mixed_precision=fp8 under `fp8_config`; None for an unknown backend."""
    backend = (read.text("fp8_config.backend") or "TE").upper()
    ao, te = backend == "AO", backend == "TE"
    gathers = ao and read.flag("fp8_config.enable_fsdp_float8_all_gather", default=True)
    blocks = te and read.flag("fp8_config.use_mxfp8_block_scaling")
    form = read.text("fp8_config.fp8_format", "HYBRID").lower() if te and not blocks else ""
    read.note_rows(
        ("cannot_express", ao, "fp8_config.backend=AO: the first and the last linear of the model are not quantized; here layers at the ends and the output layer are not"),
        ("cannot_express", gathers, "fp8_config.enable_fsdp_float8_all_gather: parameters are gathered in FP8 and stored in FP32"),
        ("cannot_express", te, "fp8_config.backend=TE: the output layer is quantized too; here it never is"),
        ("cannot_express", not ao and not te, f"fp8_config.backend={backend}"),
        ("cannot_express", form not in ("hybrid", "e4m3", ""), f"fp8_config.fp8_format={form}: Transformer Engine trains in HYBRID or E4M3; described as E4M3"),
        ("contradicts", te and cpu, "fp8_config.backend=TE on a CPU (use_cpu): Transformer Engine runs only on GPUs"),
    )  # fmt: skip
    if ao or blocks:
        return Quant(format="hybrid" if ao else "e4m3", scaling="tensorwise" if ao else "mxfp8")
    if not te:
        return None
    # values equal to accelerate's own defaults are dropped before Transformer Engine sees them, and its default algorithm is max
    history, margin = read.number("fp8_config.amax_history_len", 1024), read.number("fp8_config.margin", 0)
    return Quant(
        format="hybrid" if form == "hybrid" else "e4m3", scaling="delayed", amax_history=int(history), amax_algo="max", margin=int(margin),
        wgrad=not _overridden(read),
    )  # fmt: skip


def _overridden(read: Reader) -> bool:
    """Whether weight gradients stay in high precision: the last of override_linear_precision's (fprop, dgrad, wgrad)."""
    where = "fp8_config.override_linear_precision"
    given, taken = read.at(where, [False, False, False]), ([False, False, False], [False, False, True])
    if not isinstance(given, (list, tuple)) or list(given) not in taken:
        read.faults.append(
            f"{where}={brief(given)}: expected [false, false, false] or [false, false, true], all that Transformer Engine takes"
        )
        return False
    return bool(given[2])
