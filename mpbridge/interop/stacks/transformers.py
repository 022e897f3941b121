"""Hugging Face transformers: TrainingArguments and the model's loading dtype, written, and read from a command line or saved JSON.

Read at 5.23.0: training_args.py passes bf16 and fp16 to accelerate; `from_pretrained` keeps the checkpoint's dtype unless it is set.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from mpbridge.common.errors import cut
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Export, Fragment, Imported, Request, engine_with, exported
from mpbridge.interop.stacks.meaning import updated_itself
from mpbridge.interop.stacks.reading import Reader, imported, known, options_of, stray
from mpbridge.interop.stacks.sharded_torch import TORCH_SCALER, commented, fields_of, torch_meaning

NAME = "transformers"
VERSIONS = {"5.23": "5.23.0"}
_FSDP1 = ("no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""Strategies that FSDP2 does not have."""
_LOADERS = (
    "finetuning_type", "dist_config", "model_class", "quantization_bit", "tensor_model_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip
"""Keys of programs that load a model by their own rules; LLaMA-Factory's, whose files have the keys of TrainingArguments beside them."""
_LOADS = frozenset({"dtype", "torch_dtype"})
"""Options of the example scripts, which are read beside TrainingArguments' own."""


def export(request: Request) -> Export:
    """Python with the two deciding settings: the loading dtype and the arguments. Data parallelism is torch's DDP."""
    full = torch_meaning(request.policy)
    mixed = full.storage is DType.FP32 and full.compute is not DType.FP32
    cast = full.compute if mixed else request.policy.settled().autocast
    sgd = {"optim": "sgd", "optim_args": f"momentum={request.updates.get('sgd_momentum')}"}
    optim = sgd if request.optimizer == "sgd" else {"optim": "adamw_torch"}
    said = {"dtype": full.storage.value, **optim} | ({} if cast is None else {cast.short: True})
    theirs = read_data(said, version=request.version).meaning
    given = ['output_dir="out"', *(f'{name}="{value}"' for name, value in optim.items())]
    given += [] if cast is None else [f"{cast.short}=True"]
    lines = [
        "import torch", "from transformers import AutoModelForCausalLM, TrainingArguments", "",
        "# without a dtype the model keeps that of its checkpoint, and with BF16 weights no FP32 copy exists",
        f'model = AutoModelForCausalLM.from_pretrained("MODEL", dtype=torch.{said["dtype"]})', f"arguments = TrainingArguments({', '.join(given)})",
    ]  # fmt: skip
    code = Fragment(name="python", text=commented(NAME, theirs, "\n".join(lines)))
    return exported(request, NAME, theirs, [code])


def read(words: Iterable[str], *, version: str) -> Imported:
    """The meaning of `--bf16 --fsdp full_shard ...`; `--torch_dtype`/`--dtype` of the example scripts is the loading dtype."""
    data, strays = options_of(words)
    found, names = read_data(data, version=version, saved=False), [f"--{name}" for name in known(NAME)[""]]
    return dataclasses.replace(found, unknown=(*(stray(word, names) for word in strays), *found.unknown))


def read_data(data: Any, *, version: str, saved: bool = True) -> Imported:
    """The arguments' meaning. saved: in a file, which does not tell how its program is launched. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    read_ = Reader.of(data, "TrainingArguments")
    bf16, fp16, cpu = read_.flag("bf16"), read_.flag("fp16"), read_.flag("use_cpu")
    storage, file = read_.dtype("dtype", read_.dtype("torch_dtype")), read_.at("deepspeed")
    version_, whole = _sharded(read_, cpu)
    theirs, names = [name for name in _LOADERS if storage is None and read_.at(name)], read_.data.keys()
    owned = not theirs and names.isdisjoint({"fsdp", "deepspeed"}) and names - known(NAME)[""] - _LOADS
    read_.note_rows(
        ("undecided", saved and owned, "the launcher of the program that reads this file: accelerate's own file may shard the model and keep main weights (FSDP, DeepSpeed); fsdp: null says that it does not"),
        ("undecided", theirs, f"{', '.join(theirs)}: of the program that reads this file, which chooses what the model is stored in and shards it (dtype=... says the first)"),
        ("contradicts", bf16 and fp16, "bf16 and fp16: TrainingArguments refuses both together"),
        ("undecided", storage is None and not theirs and not (version_ and (bf16 or fp16)), "the loading dtype: since version 5 that of the checkpoint, before it float32 (dtype=... says it)"),
        ("inert", cpu and fp16, "fp16: on a CPU (use_cpu) accelerate, which runs the training, silently trains in FP32"),
        ("undecided", file, f"deepspeed={cut(file)} decides: pass that file (--from deepspeed)"),
        *(("inert", read_.at(name) and read_.flag(name), f"{name}: evaluation only") for name in ("bf16_full_eval", "fp16_full_eval")),
    )  # fmt: skip
    fp16 = fp16 and not cpu
    if not cpu:
        _tf32(read_)
    base, stored = DType.BF16 if bf16 else DType.FP16 if fp16 else None, storage or DType.FP32
    # FSDP upcasts what is stored and reduces in 16 bits, with autocast over FSDP1 alone
    cast, upcast = base if version_ != 2 else None, base is not None and version_ is not None
    meaning = updated_itself(
        DType.FP32 if upcast else stored, base, base if upcast else None, autocast=cast, loss_scale=TORCH_SCALER if fp16 else None,
        sharded="nothing" if version_ is None or whole else "everything",
    )  # fmt: skip
    momentum = re.search(r"\bmomentum\s*=\s*([^,\s]+)", read_.text("optim_args"))
    return imported(
        read_, NAME, version, meaning, fields_of(meaning, read_), engine=DEFAULT if version_ is None else engine_with("optimizer"),
        optimizer=read_.text("optim", "adamw_torch_fused"), where="optim", momentum=momentum and momentum[1], own=" unless the script itself reads it",
    )  # fmt: skip


def _sharded(read: Reader, cpu: bool) -> tuple[int | None, bool]:
    """(the FSDP version, enabled by `fsdp` and named by `fsdp_config`; None: nothing is sharded, whether a strategy of FSDP1 divides nothing)."""
    given = read.at("fsdp")
    if not given:
        return None, False
    config = read.at("fsdp_config")
    said = [None, None] if isinstance(config, str) else [read.at(f"fsdp_config.{name}") for name in ("version", "fsdp_version")]  # fmt: skip
    if isinstance(config, str):
        text = f"fsdp_config={cut(config)}: a file that is not read; assumed to be FSDP2, the default since version 5"
        read.note("assumed", text)
    elif said == [None, None]:
        read.default("fsdp_config.version", 2)
    words = given if isinstance(given, (list, tuple)) else str(given).split()
    first = [word for word in (str(one).lower() for one in words) if word in _FSDP1]
    second = "1" not in map(str, said)
    read.note_rows(
        ("contradicts", cpu, "fsdp with use_cpu: accelerate shards only over devices; described as DDP"),
        ("contradicts", second and first and not cpu,
         f"fsdp={''.join(first[:1])} under FSDP2: Transformers refuses it; described as FSDP1 (fsdp_config.version=1)"),
    )  # fmt: skip
    return None if cpu else 2 if second and not first else 1, not cpu and "no_shard" in first


def _tf32(read: Reader) -> None:
    """Notes TF32 where it is switched on, by its own argument or by torch_compile."""
    asked, named = read.at("tf32") is not None, [read.at("torch_compile_backend"), read.at("torch_compile_mode")]
    compiled = any(named) or (read.at("torch_compile") is not None and read.flag("torch_compile"))
    effect = "FP32 matrix multiplications run in TF32 on CUDA (10-bit mantissas)"
    read.cannot(f"tf32: {effect}", asked and read.flag("tf32"))
    alone = compiled and not asked and not read.flag("fp16")
    read.cannot(f"torch_compile switches TF32 on: {effect}; tf32=false keeps it off", alone)
