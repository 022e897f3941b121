"""Hugging Face accelerate: a recipe as an Accelerator with FSDP2, and its YAML, read.

Read at 1.15.0: accelerator.py, utils/dataclasses.py, utils/fsdp_utils.py. What FSDP upcasts and reduces in changed between versions. Its autocast
stays on with FSDP1, but not with FSDP2 (observed by scripts/evidence/witness_stacks.py). Its YAML cannot name a reduction dtype, so the policy is Python.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mpbridge.common.errors import DataError, brief, cut, nearest
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks import deepspeed
from mpbridge.interop.stacks import sharded_torch as native
from mpbridge.interop.stacks.base import Export, Fragment, Imported, Request, engine_with, exported
from mpbridge.interop.stacks.meaning import Meaning, updated_itself, with_quant
from mpbridge.interop.stacks.reading import Reader, imported, raise_faults
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant

NAME = "accelerate"
VERSIONS = {"1.15": "1.15.0"}
SCALINGS = {"delayed": "TERecipeKwargs", "mxfp8": "TERecipeKwargs", "tensorwise": "AORecipeKwargs"}
EXPERTS = "only torch.nn.Linear is converted, which can include the router; experts in 3-D parameters stay as they are"
DELAYED = "most_recent cannot be set: it is accelerate's default, which accelerate drops, and Transformer Engine's default is max; the rest are TE's defaults"


def export(request: Request) -> Export:
    """Python that creates the Accelerator; the model is loaded in FP32 unless the recipe keeps no FP32 weights."""
    policy = request.policy
    theirs = _nearest(policy)
    quant = theirs.regions[-1].quant
    by_te = quant is not None and SCALINGS[quant.scaling] == "TERecipeKwargs"
    lines = native.output_layer(quant if by_te else None, "accelerate's convert_model")
    theirs = native.noted(theirs, lines)
    more = {"quantization": DELAYED} if quant is not None and quant.row.history else {}
    code = Fragment(name="python", text=native.commented(NAME, theirs, _python(policy, theirs)))
    return exported(request, NAME, theirs, [code, *native.environment([quant] if quant else ())], lines, more)


def _nearest(policy: PrecisionPolicy) -> Meaning:
    quant, settled = policy.quant, policy.settled()
    words = {"tensorwise": native.TORCHAO["tensorwise"]}
    if quant is not None:
        words["mxfp8"] = Quant(format="e4m3", scaling="mxfp8", options=quant.options)
        # TERecipeKwargs drops a value that equals accelerate's own default, and Transformer Engine's applies. The defaults agree (hybrid, 1024, margin 0)
        # except for the algorithm: most_recent is dropped, and max is used
        words["delayed"] = dataclasses.replace(quant, stored=False, amax_algo="max", attention="none")
    regions = native.regions_there(policy, words, edges=quant is not None and quant.scaling == "tensorwise")
    theirs = native.torch_meaning(policy, hands_on=True, regions=regions)
    own = settled.params is DType.FP32 or settled.main_params is settled.params
    if settled.autocast is not None and own and quant is None:
        # autocast over parameters that are their own main weights needs torch's DDP: FSDP2 has none
        theirs = native.torch_meaning(policy, autocast=True)
        theirs = dataclasses.replace(theirs, wire=theirs.storage, sharded="nothing")
    scale = native.torch_scaler(policy) if _mode(theirs) == "fp16" else None
    return dataclasses.replace(theirs, loss_scale=scale)


def _mode(theirs: Meaning) -> str:
    """The value of mixed_precision: 'no' for a module that is not FP32, or computes only in FP32."""
    if theirs.regions[-1].quant is not None:
        return "fp8"
    full = (theirs.storage is not DType.FP32 and theirs.autocast is None) or theirs.compute is DType.FP32
    return "no" if full else theirs.compute.short


def _python(policy: PrecisionPolicy, theirs: Meaning) -> str:
    quant, scale, sharded = theirs.regions[-1].quant, theirs.loss_scale, theirs.sharded != "nothing"
    used = () if quant is None else (SCALINGS[quant.scaling],)
    handlers = [] if quant is None else [_handler(quant)]
    handlers += [] if scale is None else [f"GradScalerKwargs({native.scaler_arguments(scale)})"]
    ao = used == ("AORecipeKwargs",)
    plugin = [
        "plugin = FullyShardedDataParallelPlugin(", "    fsdp_version=2,", "    mixed_precision_policy=MixedPrecisionPolicy(",
        f"        param_dtype=torch.{theirs.compute.value}, reduce_dtype=torch.{theirs.wire.value},"
        f" output_dtype=torch.{(theirs.output or theirs.compute).value},", "    ),", ")",
    ]  # fmt: skip
    arguments = [f'mixed_precision="{_mode(theirs)}"', *(["fsdp_plugin=plugin"] if sharded else ())]
    arguments += [f"kwargs_handlers=[{', '.join(handlers)}]"] if handlers else []
    return "\n".join([
        "import torch", "from accelerate import Accelerator" + (", FullyShardedDataParallelPlugin" if sharded else ""),
        *(["from torch.distributed.fsdp import MixedPrecisionPolicy"] if sharded else ()),
        *(f"from accelerate.utils import {name}" for name in used), *(["from torchao.float8 import Float8LinearConfig"] if ao else ()),
        *(["from accelerate.utils import GradScalerKwargs"] if scale is not None else ()), "",
        *(native.filter_lines(policy, "model.config.num_hidden_layers") if ao else ()),
        f"model.to(torch.{theirs.storage.value})", *(plugin if sharded else ()), f"accelerator = Accelerator({', '.join(arguments)})",
    ])  # fmt: skip


def _handler(quant: Quant) -> str:
    if quant.scaling == "tensorwise":
        config = 'Float8LinearConfig.from_recipe_name("tensorwise")'
        return f"AORecipeKwargs(config={config}, module_filter_func=quantized)"
    if quant.scaling == "mxfp8":
        return 'TERecipeKwargs(fp8_format="E4M3", use_mxfp8_block_scaling=True)'
    words = [f'fp8_format="{quant.format.upper()}"', f"amax_history_len={quant.amax_history}"]
    words += [f'amax_compute_algo="{quant.amax_algo}"', *([f"margin={quant.margin}"] if quant.margin else ())]
    words += [] if quant.wgrad else ["override_linear_precision=(False, False, True)"]
    return f"TERecipeKwargs({', '.join(words)})"


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
        why = "Megatron-LM trains, and its own arguments decide: pass those (--from megatron-lm)"
        raise DataError(f"distributed_type=MEGATRON_LM: {why}")
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
        fields = {**fields, **native.quant_fields(meaning.regions)}
    else:
        meaning = with_quant(_meaning(read, word, kind), quant)
        fields = native.fields_of(meaning, read)
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
        sharded="everything" if sharded and (second or not whole) else "nothing", loss_scale=native.TORCH_SCALER if word == "fp16" else None,
    )  # fmt: skip


def _deepspeed(read: Reader, word: str) -> tuple[Meaning, dict[str, Any]]:
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
    where = "fp8_config.override_linear_precision"  # of (fprop, dgrad, wgrad)
    given, taken = read.at(where, [False, False, False]), ([False, False, False], [False, False, True])
    if not isinstance(given, (list, tuple)) or list(given) not in taken:
        expected = "[false, false, false] or [false, false, true], all that Transformer Engine takes"
        read.faults.append(f"{where}={brief(given)}: expected {expected}")
        given = taken[0]
    return Quant(
        format="hybrid" if form == "hybrid" else "e4m3", scaling="delayed", amax_history=int(history), amax_algo="max", margin=int(margin), wgrad=not given[2]
    )  # fmt: skip
