"""Reads a Python training setup for torch FSDP2, accelerate, Lightning or transformers, as `export` writes it, from its text; never runs it.

Only the file's top level is read, or the named function. A script whose settings come from elsewhere is refused.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import DataError, brief
from mpbridge.common.formats import DType
from mpbridge.interop.stacks import accelerate_import, fsdp2, lightning_import, transformers_import
from mpbridge.interop.stacks.base import Imported, engine_with, updated_by
from mpbridge.interop.stacks.meaning import Meaning
from mpbridge.interop.stacks.optimizers import CLASSES
from mpbridge.interop.stacks.python_module import Module
from mpbridge.interop.stacks.python_text import Reading
from mpbridge.interop.stacks.python_values import Dotted, SourceObject, Unknown, plain, without_unknown
from mpbridge.interop.stacks.reading import Reader, in_force, raise_faults
from mpbridge.interop.stacks.sharded_torch import TORCH_SCALER
from mpbridge.interop.stacks.torch_import import fields_of
from mpbridge.precision.policy import LossScale
from mpbridge.precision.regions import Quant, Region

MARKS: Mapping[str, str] = MappingProxyType(
    {
        "lightning": "FSDPStrategy|TransformerEnginePrecision|Trainer",
        "accelerate": "Accelerator",
        "transformers": "TrainingArguments",
        "fsdp2": "fully_shard",
    }
)
"""Stack -> its characteristic calls; a file belongs to the first stack of which it has one."""
_WORDS = {word: fsdp2.TORCHAO[scaling] for scaling, word in fsdp2.SCALINGS.items()}
"""torchao's recipe name -> what it runs."""


@dataclass
class PythonScript:
    """The calls of a file, and the assumptions made to read them."""

    reading: Reading
    module: Module
    name: str
    assumed: list[str] = field(default_factory=list)
    cannot: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    """Arguments that were asked for and are not said -> the package's own value."""

    def made(self, *names: str) -> SourceObject | None:
        """The last object or call of one of these names ('Class', 'Class.method')."""
        found = [
            (one, doubt)
            for one, doubt in self.reading.calls
            if f".{one.callee}".endswith(tuple(f".{n}" for n in names))
        ]
        if not found:
            return None
        one, doubt = found[-1]
        self.assumed += [f"{one.callee}(...) under `{doubt}`: assumed to be executed"] if doubt else []
        if any(other.attributes != one.attributes for other, _ in found):
            self.assumed.append(f"{one.callee}(...): the last of {len(found)}")
        return one

    def data(self, made: SourceObject | None) -> dict[str, Any]:
        """The keyword arguments of a call as plain data; unknown ones are left at their defaults, with a note."""
        unknown: list[str] = []
        said = {} if made is None else {name: _of_torch(value) for name, value in made.attributes.items()}
        kept = without_unknown({name: plain(value) for name, value in said.items()}, unknown)
        self.assumed += [f"{one}: known only at run time; left at its default" for one in unknown]
        return kept

    def reader(self, made: SourceObject | None) -> Reader:
        """Keyword arguments, for reading."""
        read = Reader(self.data(made), self.faults)
        if made is not None:  # of what is not made nothing is in force
            read.silent, read.under = self.silent, f"{made.callee.rpartition('.')[2]}."
        return read

    def storage(self) -> DType:
        """The dtype of the last `model.to(dtype)`."""
        casts = [
            one.arguments[0].path
            for one, _ in self.reading.calls
            if one.callee.endswith(".to") and len(one.arguments) == 1 and isinstance(one.arguments[0], Dotted)
        ]
        said = Reader({"to": casts[-1]} if casts else {}, self.faults).dtype("to")
        if said is None:
            self.assumed.append("the model is loaded in FP32")
        return said or DType.FP32

    def torchao(self) -> tuple[Quant | None, tuple[int, int] | None]:
        """(torchao's quantization, layers at the ends that its filter excludes)."""
        made = self.made("Float8LinearConfig.from_recipe_name", "MXFP8TrainingOpConfig.from_recipe")
        if made is None:
            return None, None
        word = "mxfp8" if "MXFP8" in made.callee else str(made.arguments[0]) if made.arguments else "tensorwise"
        if word not in _WORDS:
            self.faults.append(f"from_recipe_name({brief(word)}): expected {', '.join(_WORDS)}")
            return None, None
        return _WORDS[word], self._ends()

    def _ends(self) -> tuple[int, int] | None:
        """From `first <= int(number) < depth - last` of the filter `quantized(module, name)`."""
        node = self.module.functions.get("quantized")
        for one in ast.walk(node) if node is not None else ():
            if isinstance(one, ast.Compare) and [type(op) for op in one.ops] == [ast.LtE, ast.Lt]:
                low, high = one.left, one.comparators[-1]
                last = high.right if isinstance(high, ast.BinOp) and isinstance(high.op, ast.Sub) else None
                ends = (_number(low), _number(last))
                if None not in ends:
                    return ends if any(ends) else None  # type: ignore[return-value]
        self.cannot.append(
            "which linears torchao converts: there is no filter quantized(module, name) as export writes it; assumed to be those of all layers"
        )
        return None


def _number(node: ast.expr | None) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _of_torch(value: Any) -> Any:
    """A value; a name that is not torch's (an argument of the script) is unknown."""
    return Unknown(value.path) if isinstance(value, Dotted) and not value.path.startswith("torch.") else value


def recognize(text: str) -> str | None:
    """The stack that a text sets up; None if it is none of these."""
    return next(
        (
            stack
            for stack, names in MARKS.items()
            if (stack == "fsdp2" or stack in text) and re.search(rf"\b({names})\(", text)
        ),
        None,
    )


def read(script: PythonScript, stack: str, version: str) -> Imported:
    """The setup's meaning. Raises DataError if the deciding calls are missing, BadValue listing every value that cannot be read."""
    found = _READ[stack](script, version)
    if stack != "transformers":  # whose arguments name it
        made = script.made(*CLASSES)
        momentum = script.data(made).get("momentum")
        found = updated_by(found, made and made.callee, "optimizer", momentum=momentum)
    raise_faults(script.faults, f"this {stack} setup")
    known = ("fully_shard", "convert_to_float8_training", "quantize_", "torch.", ".to(", "from_pretrained")
    notes = [note for note in script.reading.notes if not any(one in note.partition(": is not in")[0] for one in known)]
    return dataclasses.replace(
        found,
        cannot_express=(*found.cannot_express, *(line for line in script.cannot if line not in found.cannot_express)),
        assumed=tuple(dict.fromkeys((*script.assumed, *found.assumed, *notes))),
    )


def _needs(script: PythonScript, stack: str, *names: str) -> SourceObject:
    found = script.made(*names)
    if found is None:
        raise DataError(
            f"{script.name}: it has no {' or '.join(names)}(...): a training script would have to be executed; for {stack}, setups that"
            " `mpbridge export` writes are read as text"
        )
    return found


def _fsdp2(script: PythonScript, version: str) -> Imported:
    _needs(script, "fsdp2", "fully_shard")
    storage = script.storage()
    autocast = script.reader(script.made("torch.autocast")).dtype("dtype")
    meaning = _sharded(script, script.reader(script.made("MixedPrecisionPolicy")), storage, storage)
    meaning = _with_adam(script, dataclasses.replace(meaning, autocast=autocast))
    scaler = script.made("ShardedGradScaler")
    if scaler is not None:
        meaning = dataclasses.replace(meaning, loss_scale=_scale(script.reader(scaler)))
    return _found(script, fsdp2.NAME, version, meaning, *script.torchao())


def _sharded(script: PythonScript, policy: Reader, storage: DType, default: DType) -> Meaning:
    """FSDP2 with a MixedPrecisionPolicy: gradients are reduced in the compute dtype unless it sets another."""
    compute = policy.dtype("param_dtype", default) or default
    output = policy.dtype("output_dtype", compute)
    handed = None if output is compute else output
    return Meaning(
        storage=storage, compute=compute, wire=policy.dtype("reduce_dtype", compute) or compute, accumulator=storage,
        exp_avg=storage, exp_avg_sq=storage, sharded="everything", output=handed, pipeline=handed,
    )  # fmt: skip


def _with_adam(script: PythonScript, meaning: Meaning) -> Meaning:
    """Transformer Engine's FusedAdam with master weights keeps FP32 in addition to 16-bit parameters; torch's optimizers update what is stored."""
    made = script.made("FusedAdam")
    if made is None:
        return meaning
    said = script.reader(made)
    moments = (
        said.dtype("exp_avg_dtype", DType.FP32) or DType.FP32,
        said.dtype("exp_avg_sq_dtype", DType.FP32) or DType.FP32,
    )
    kept = dataclasses.replace(meaning, exp_avg=moments[0], exp_avg_sq=moments[1])
    if not said.flag("master_weights") or meaning.storage is DType.FP32:
        return kept
    return dataclasses.replace(kept, main=DType.FP32, remainders=said.flag("store_param_remainders"))


def _scale(said: Reader) -> LossScale:
    return dataclasses.replace(
        TORCH_SCALER,
        initial=said.number("init_scale", TORCH_SCALER.initial),
        window=said.number("growth_interval", TORCH_SCALER.window),
    )


def _found(
    script: PythonScript, stack: str, version: str, meaning: Meaning, quant: Quant | None, ends: tuple[int, int] | None
) -> Imported:
    if quant is not None:
        edges = (Region(first=ends[0], last=ends[1]),) if ends else ()
        meaning = dataclasses.replace(meaning, regions=(*edges, Region(quant=quant)))
    fields = fields_of(meaning, script.cannot, quant, ends)
    scale = meaning.loss_scale
    if scale is not None and fields:
        fields |= {"initial_loss_scale": scale.initial, "loss_scale_window": scale.window, "hysteresis": 1}
    return Imported(
        stack=stack,
        version=version,
        fields=fields,
        engine=engine_with("optimizer"),
        meaning=meaning,
        cannot_express=tuple(script.cannot),
        in_force=in_force(script.silent),
    )


def _accelerate(script: PythonScript, version: str) -> Imported:
    made = _needs(script, "accelerate", "Accelerator")
    said = script.reader(made)
    word, on_a_cpu = said.text("mixed_precision", "no"), said.flag("cpu")
    if word not in accelerate_import.WORDS:
        script.faults.append(f"mixed_precision={brief(word)}: expected {', '.join(accelerate_import.WORDS)}")
    plugin, storage = script.made("FullyShardedDataParallelPlugin"), script.storage()
    if plugin is None or on_a_cpu:  # a CPU's processes are never sharded there
        kind = {"distributed_type": "NO", "use_cpu": True} if on_a_cpu else {"distributed_type": "MULTI_GPU"}
        return accelerate_import.read_data({"mixed_precision": word, **kind}, version=version, storage=storage)
    base = {"fp16": DType.FP16, "no": storage}.get(word, DType.BF16)
    # accelerate upcasts what it shards unless mixed_precision is "no"
    policy = script.reader(script.made("MixedPrecisionPolicy", "MixedPrecision"))
    meaning = _sharded(script, policy, storage if word == "no" else DType.FP32, base)
    if str(script.reader(plugin).at("fsdp_version", 1)) != "2" and word != "no":
        meaning = dataclasses.replace(meaning, autocast=base)  # which stays on over FSDP1 alone
    if word == "fp16":
        meaning = dataclasses.replace(meaning, loss_scale=_scale(script.reader(script.made("GradScalerKwargs"))))
    quant, ends = script.torchao()
    engine = script.made("TERecipeKwargs")
    if engine is not None and word == "fp8":
        quant = accelerate_import.quantized(Reader({"fp8_config": script.data(engine)}, script.faults), script.cannot)
    return _found(script, "accelerate", version, meaning, quant if word == "fp8" else None, ends)


def _lightning(script: PythonScript, version: str) -> Imported:
    made = _needs(script, "lightning", "Trainer")
    data = script.data(SourceObject(attributes={name: _by_class(value) for name, value in made.attributes.items()}))
    return lightning_import.read_data({"trainer": data}, version=version)


def _by_class(value: Any) -> Any:
    """An object as Lightning's YAML writes it: class_path and init_args."""
    if isinstance(value, SourceObject):
        return {
            "class_path": value.callee,
            "init_args": {name: _by_class(inner) for name, inner in value.attributes.items()},
        }
    return [_by_class(one) for one in value] if isinstance(value, (list, tuple)) else plain(_of_torch(value))


def _transformers(script: PythonScript, version: str) -> Imported:
    made = _needs(script, "transformers", "TrainingArguments")
    loaded = script.data(script.made("from_pretrained"))
    return transformers_import.read_data(
        script.data(made) | {name: loaded[name] for name in ("dtype", "torch_dtype") if name in loaded}, version=version
    )


_READ: Mapping[str, Callable[[PythonScript, str], Imported]] = MappingProxyType(
    {"fsdp2": _fsdp2, "accelerate": _accelerate, "lightning": _lightning, "transformers": _transformers}
)
