"""Hugging Face transformers: TrainingArguments and the model's loading dtype, written, and read from a command line or saved JSON.

Read at 5.23.0: training_args.py passes bf16 and fp16 to accelerate; `from_pretrained` keeps the checkpoint's dtype unless it is set.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mpbridge.common.errors import DataError, cut
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Export, Fragment, Imported, Request, compared, engine_with, updated_by
from mpbridge.interop.stacks.data_comment import commented
from mpbridge.interop.stacks.known_keys import known, with_rest
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.reading import Reader, options_of, raise_faults, stray
from mpbridge.interop.stacks.sharded_torch import SPELL, TORCH_SCALER, fields_of, torch_meaning

NAME = "transformers"
VERSIONS = {"5.23": "5.23.0"}
DEFAULT_VERSION = "5.23"
_FSDP1 = ("no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""Strategies that FSDP2 does not have."""
_EVALUATION = ("bf16_full_eval", "fp16_full_eval")


def export(request: Request) -> Export:
    """Python with the two deciding settings: the loading dtype and the arguments. Data parallelism is torch's DDP."""
    full = torch_meaning(request.policy)
    mixed = full.storage is DType.FP32 and full.compute is not DType.FP32
    cast = full.compute if mixed else request.policy.settled().autocast
    said = {"dtype": SPELL[full.storage], "optim": "adamw_torch"} | ({} if cast is None else {cast.short: True})
    theirs = read_data(said, version=request.version).meaning
    flag = "" if cast is None else f", {cast.short}=True"
    code = "\n".join(
        [
            "import torch",
            "from transformers import AutoModelForCausalLM, TrainingArguments",
            "",
            "# without a dtype the model keeps that of its checkpoint, and with BF16 weights no FP32 copy exists",
            f'model = AutoModelForCausalLM.from_pretrained("MODEL", dtype=torch.{said["dtype"]})',
            f'arguments = TrainingArguments(output_dir="out", optim="{said["optim"]}"{flag})',
        ]
    )
    lines = compared(request.ours, theirs, NAME)
    piece = Fragment(name="python", text=commented(NAME, theirs, code))
    return Export(stack=NAME, version=request.version, pieces=(piece,), meaning=theirs, lines=lines)


def read(words: Iterable[str], *, version: str) -> Imported:
    """The meaning of `--bf16 --fsdp full_shard ...`; `--torch_dtype`/`--dtype` of the example scripts is the loading dtype."""
    data, strays = options_of(words)
    found = read_data(data, version=version)
    return dataclasses.replace(found, unknown=(*(stray(word, _options()) for word in strays), *found.unknown))


def _options() -> list[str]:
    return [f"--{name}" for name in known(NAME)[""]]


def read_data(data: Any, *, version: str) -> Imported:
    """The arguments' meaning. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    if not isinstance(data, Mapping):
        raise DataError(f"TrainingArguments are a mapping, found {type(data).__name__}")
    read_ = Reader(data)
    contradicts: list[str] = []
    cannot: list[str] = []
    inert: list[str] = []
    assumed: list[str] = []
    bf16, fp16 = read_.flag("bf16"), read_.flag("fp16")
    if bf16 and fp16:
        contradicts.append("bf16 and fp16: TrainingArguments refuses both together")
    storage = read_.dtype("dtype", read_.dtype("torch_dtype"))
    if storage is None:
        assumed.append(
            "since version 5 the loading dtype is the checkpoint's ('auto'): assumed to be float32 (dtype=...)"
        )
        storage = DType.FP32
    cpu = read_.flag("use_cpu")
    if cpu and fp16:
        inert.append("fp16: on a CPU (use_cpu) accelerate, which runs the training, silently trains in FP32")
        fp16 = False
    base = DType.BF16 if bf16 else DType.FP16 if fp16 else None
    sharded = _sharded(read_, assumed)
    if sharded and cpu:
        contradicts.append("fsdp with use_cpu: accelerate shards only over devices; described as DDP")
        sharded = None
    sharded, whole = _by_strategy(read_, sharded, contradicts)
    cannot += [] if cpu else _tf32(read_)
    raise_faults(read_.faults, "these TrainingArguments")
    meaning = _meaning(storage, base, sharded)
    meaning = dataclasses.replace(meaning, sharded="nothing") if whole else meaning
    if fp16:
        meaning = dataclasses.replace(meaning, loss_scale=TORCH_SCALER)
    inert += [f"{name}: evaluation only" for name in _EVALUATION if read_.at(name) and read_.flag(name)]
    file = read_.at("deepspeed")
    undecided = (f"deepspeed={cut(file)} decides: pass that file (--from deepspeed)",) if file else ()
    fields = fields_of(meaning, cannot)
    found = Imported(
        stack=NAME, version=version, fields=fields, engine=engine_with("optimizer") if sharded is not None else DEFAULT, meaning=meaning, inert=tuple(inert),
        contradicts=tuple(contradicts), cannot_express=tuple(cannot), undecided=undecided, assumed=tuple(assumed),
    )  # fmt: skip
    return with_rest(_updated(found, read_), read_, own=" unless the script itself reads it")


def _updated(found: Imported, read: Reader) -> Imported:
    """`found` under the optimizer of `optim`."""
    momentum = re.search(r"\bmomentum\s*=\s*([^,\s]+)", read.text("optim_args"))
    return updated_by(found, read.text("optim", "adamw_torch_fused"), "optim", momentum=momentum and momentum[1])


def _sharded(read: Reader, assumed: list[str]) -> int | None:
    """The FSDP version, enabled by `fsdp` and named by `fsdp_config`; None: nothing is sharded."""
    if not read.at("fsdp"):
        return None
    config = read.at("fsdp_config")
    if isinstance(config, str):
        assumed.append(
            f"fsdp_config={cut(config)}: a file that is not read; assumed to be FSDP2, the default since version 5"
        )
        return 2
    said = [read.at(f"fsdp_config.{name}") for name in ("version", "fsdp_version")]
    if said == [None, None]:
        read.default("fsdp_config.version", 2)
    return 1 if "1" in map(str, said) else 2


def _by_strategy(read: Reader, sharded: int | None, contradicts: list[str]) -> tuple[int | None, bool]:
    """(the FSDP version, whether nothing is divided) under the strategies in `fsdp`; FSDP2 refuses those of FSDP1."""
    given = read.at("fsdp")
    words = given if isinstance(given, (list, tuple)) else str(given or "").split()
    first = [word for word in (str(one).lower() for one in words) if word in _FSDP1]
    if sharded == 2 and first:
        contradicts.append(
            f"fsdp={first[0]} under FSDP2: Transformers refuses it; described as FSDP1 (fsdp_config.version=1)"
        )
        sharded = 1
    return sharded, sharded is not None and "no_shard" in first


def _tf32(read: Reader) -> list[str]:
    """A line if TF32 is switched on, by its own argument or by torch_compile."""
    asked = read.at("tf32") is not None
    on = asked and read.flag("tf32")
    compiled = any([read.at("torch_compile_backend"), read.at("torch_compile_mode")])
    compiled = compiled or (read.at("torch_compile") is not None and read.flag("torch_compile"))
    effect = "FP32 matrix multiplications run in TF32 on CUDA (10-bit mantissas)"
    if on:
        return [f"tf32: {effect}"]
    return (
        [f"torch_compile switches TF32 on: {effect}; tf32=false keeps it off"]
        if compiled and not asked and not read.flag("fp16")
        else []
    )


def _meaning(storage: DType, base: DType | None, sharded: int | None) -> Meaning:
    if base is None:
        return Meaning(
            storage=storage, compute=storage, wire=storage, accumulator=storage, exp_avg=storage, exp_avg_sq=storage,
            sharded="nothing" if sharded is None else "everything",
        )  # fmt: skip
    if (
        sharded is not None
    ):  # accelerate upcasts the stored parameters and reduces in the 16-bit dtype; autocast stays on over FSDP1 alone
        return Meaning(
            storage=DType.FP32, compute=base, autocast=base if sharded == 1 else None, wire=base, accumulator=DType.FP32,
            sharded="everything",
        )  # fmt: skip
    return Meaning(
        storage=storage,
        compute=base,
        autocast=base,
        wire=storage,
        accumulator=storage,
        exp_avg=storage,
        exp_avg_sq=storage,
    )
