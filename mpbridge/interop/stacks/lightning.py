"""Lightning: a recipe as a Trainer's strategy and precision; and a Trainer's arguments, or the trainer section of its CLI's YAML, read.

Read at 2.6.6: plugins/precision/{amp,half,fsdp}.py, strategies/fsdp.py. 'bf16-mixed' under FSDP reduces in BF16 unless the strategy has a policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpbridge.common.errors import BadValue, DataError, brief, cut, nearest
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks import deepspeed
from mpbridge.interop.stacks import sharded_torch as native
from mpbridge.interop.stacks.base import Export, Fragment, Imported, Request, engine_with, exported
from mpbridge.interop.stacks.meaning import Meaning, Sharded, updated_itself, with_quant
from mpbridge.interop.stacks.reading import Reader, imported, raise_faults
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant, Region

NAME = "lightning"
VERSIONS = {"2.6": "2.6.6"}
SCALINGS = {"delayed": "TransformerEnginePrecision"}
EXPERTS = "only torch.nn.Linear is replaced, which can include the router; experts in 3-D parameters stay as they are"
_CLASSES = {
    "TransformerEnginePrecision": "lightning.pytorch.plugins.precision",
    "FSDPStrategy": "lightning.pytorch.strategies",
    "MixedPrecision": "torch.distributed.fsdp",
}
"""Class -> the module that it is imported from."""


def export(request: Request) -> Export:
    """Python that creates the Trainer."""
    policy = request.policy
    said = _trainer(policy)
    theirs = read_data({"trainer": said}, version=request.version).meaning
    if "plugins" in said and policy.quant is not None:  # options that only the environment tells
        theirs = dataclasses.replace(theirs, regions=(Region(quant=dataclasses.replace(policy.quant, stored=False)),))
    quant = theirs.regions[-1].quant
    lines = native.output_layer(quant, "the plugin")
    theirs = native.noted(theirs, lines)
    code = Fragment(name="python", text=native.commented(NAME, theirs, _code(said)))
    return exported(request, NAME, theirs, [code, *native.environment([quant] if quant else ())], lines)


def _trainer(policy: PrecisionPolicy) -> dict[str, Any]:
    """The trainer's arguments as its YAML has them. FSDP gathers parameters in the compute dtype; the FP8 plugin's data parallelism is torch's DDP."""
    full, quant = native.torch_meaning(policy), policy.quant
    storage, compute, wire = (f"torch.{one.value}" for one in (full.storage, full.compute, full.wire))
    if quant is not None and quant.scaling in SCALINGS:
        plugin = {"weights_dtype": storage, "fallback_compute_dtype": compute, "recipe": _recipe(quant)}
        return {"plugins": [_object(SCALINGS[quant.scaling], plugin)]}
    if full.compute is DType.FP32:
        return {"precision": "32-true"}
    base = "16" if full.compute is DType.FP16 else "bf16"
    if full.storage is not DType.FP32:
        return {"strategy": _object("FSDPStrategy", {}), "precision": f"{base}-true"}
    # without this policy the precision would reduce gradients in 16 bits
    mixed = _object("MixedPrecision", {"param_dtype": compute, "reduce_dtype": wire, "buffer_dtype": compute})
    return {"strategy": _object("FSDPStrategy", {"mixed_precision": mixed}), "precision": f"{base}-mixed"}


def _object(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": f"{_CLASSES[name]}.{name}", "init_args": arguments}


def _recipe(quant: Quant) -> dict[str, Any]:
    recipe: dict[str, Any] = {"fp8_format": quant.format.upper(), "amax_history_len": quant.amax_history}
    recipe |= {"amax_compute_algo": quant.amax_algo, "margin": quant.margin}
    recipe |= {} if quant.wgrad else {"override_linear_precision": (False, False, True)}
    recipe |= {} if quant.attention == "none" else {"fp8_dpa": True}
    return recipe | ({"fp8_mha": True} if quant.attention == "multi_head" else {})


def _code(said: dict[str, Any]) -> str:
    body = ["trainer = Trainer(", *(f"    {name}={_text(value, 1)}," for name, value in said.items()), ")"]
    used = {name: source for name, source in _CLASSES.items() if any(f"{name}(" in line for line in body)}
    imports = [f"from {source} import {name}" for name, source in used.items()]
    torch = ["import torch"] if used else []
    return "\n".join([*torch, "from lightning.pytorch import Trainer", *imports, "", *body])


def _text(value: Any, depth: int) -> str:
    """A value as Python: a class with its arguments, a list, a mapping, a dtype or a word."""
    if isinstance(value, list):
        return f"[{', '.join(_text(one, depth) for one in value)}]"
    if isinstance(value, dict) and "class_path" in value:
        name, inner = value["class_path"].rpartition(".")[2], "    " * depth
        lines = [f"{inner}    {key}={_text(one, depth + 1)}," for key, one in value["init_args"].items()]
        return "\n".join([f"{name}(", *lines, f"{inner})"]) if lines else f"{name}()"
    return value if isinstance(value, str) and value.startswith("torch.") else repr(value).replace("'", '"')


_WORDS: Mapping[str, tuple[DType, bool]] = {
    # word -> (dtype, whether parameters are cast to it)
    "32": (DType.FP32, True), "32-true": (DType.FP32, True), "16": (DType.FP16, False), "16-mixed": (DType.FP16, False),
    "bf16": (DType.BF16, False), "bf16-mixed": (DType.BF16, False), "16-true": (DType.FP16, True), "bf16-true": (DType.BF16, True),
    "transformer-engine": (DType.BF16, True), "transformer-engine-float16": (DType.FP16, True),
    "64": (DType.FP64, True), "64-true": (DType.FP64, True),
}  # fmt: skip
_DELAYED = Quant(format="hybrid", scaling="delayed", amax_history=1024, amax_algo="max")
"""Transformer Engine's DelayedScaling() without arguments, as the precision strings create it."""
_PLUGINS: Mapping[str, str | None] = {
    # class of plugins/precision -> the argument with its precision string; None: not one of the modelled training precisions
    "HalfPrecision": "precision", "MixedPrecision": "precision", "FSDPPrecision": "precision", "DeepSpeedPrecision": "precision",
    "XLAPrecision": "precision", "DoublePrecision": None, "Precision": None, "BitsandbytesPrecision": None, "TransformerEnginePrecision": None,
}  # fmt: skip
_HOOKS: Mapping[str, DType] = {"fp16_compress_hook": DType.FP16, "bf16_compress_hook": DType.BF16}
"""torch's hooks for DDP that cast gradients before they are sent."""
_STRATEGIES = (
    "auto", "fsdp", "fsdp_cpu_offload", "single_device", "single_device_xla", "single_xla", "single_tpu", "xla", "xla_debug", "model_parallel",
    *(f"ddp{start}{unused}" for start in ("", "_spawn", "_fork", "_notebook")
      for unused in ("", "_find_unused_parameters_false", "_find_unused_parameters_true")),
    *(f"deepspeed{stage}" for stage in ("", "_stage_1", "_stage_2", "_stage_2_offload", "_stage_3", "_stage_3_offload", "_stage_3_offload_nvme")),
)  # fmt: skip
"""Its strategy names (StrategyRegistry.available_strategies), and its classes without 'Strategy'."""
_NEMO = ("megatron_amp_O2", "native_amp_init_scale", "native_amp_growth_interval", "tensor_model_parallel_size")
"""Keys of `model` in NeMo's files, which have Lightning's trainer beside them."""
_OTHERS = ("model", "data", "optimizer", "lr_scheduler", "config", "seed_everything", "ckpt_path")
"""Sections of its CLI beside the trainer."""


def read(words: Iterable[str], *, version: str) -> Imported:
    """The meaning of `precision=bf16-mixed strategy=fsdp`, or of `--trainer.precision bf16-mixed` as its CLI takes it. Raises BadValue."""
    data, rest, items = dict[str, Any](), dict[str, Any](), list(words)
    items = items[1:] if items[:1] and items[0] in ("fit", "validate", "test", "predict") else items
    while items:
        word = items.pop(0)
        name, equals, value = word.lstrip("-").removeprefix("trainer.").partition("=")
        if not equals:
            if not word.startswith("--") or not items or items[0].startswith("--"):
                raise BadValue(f"{brief(word)} is not an argument: expected name=value or --name value")
            value = items.pop(0)
        section = name.partition(".")[0]
        (rest if section in _OTHERS else data)[name] = value.strip("\"'")
    optimizer = {"optimizer": rest.pop("optimizer")} if "optimizer" in rest else {}
    found = read_data({"trainer": data, **optimizer}, version=version)
    file = rest.pop("config", None)
    decides = (f"--config {cut(file)} decides what is not said here, but is not read: pass that file",) if file else ()
    return dataclasses.replace(found, undecided=(*decides, *found.undecided), other=(*found.other, *map(cut, rest)))


@dataclass
class _Settings:
    """The trainer's precision and strategy."""

    read: Reader
    base: DType = DType.FP32
    cast: bool = True
    compute: DType | None = None
    """The dtype of what the FP8 plugin does not quantize; None: `base`."""
    quant: Quant | None = None
    strategy: str = "auto"
    """The strategy's name or class in lower case, without '_' and 'strategy'; 'auto' for one that is not Lightning's."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugin: bool = False
    """Whether a precision plugin decides instead of the string."""

    @property
    def fsdp(self) -> bool:
        """Whether parameters are sharded as in torch FSDP."""
        return self.strategy.startswith(("fsdp", "modelparallel"))


def read_data(data: Any, *, version: str) -> Imported:
    """A trainer's meaning for a module in FP32. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    inner = Reader.of(data, "a Lightning configuration").data.get("trainer", data)
    if not isinstance(inner, Mapping):
        raise DataError(f"trainer={brief(inner)}: expected a mapping of Trainer's arguments")
    read = Reader(inner)
    read.note("assumed", "the module is in FP32 when passed to the trainer")
    model = data.get("model") if isinstance(data.get("model"), Mapping) else {}
    own = [name for name in _NEMO if name in model]
    beside = [name for name in ("strategy", "plugins") if data.get("trainer") is not None and data.get(name)]
    read.note_rows(
        ("undecided", own, f"model.{cut(', '.join(own))}: of NeMo's Megatron models, which make their precision plugin and loss scale themselves: not one of the stacks"),
        ("undecided", beside, f"{', '.join(beside)} beside trainer: of the program that reads this file, not of Lightning's Trainer: move into trainer what it passes on"),
    )  # fmt: skip
    said = _Settings(read)
    _strategy(said)
    _precision(said)
    raise_faults(read.faults, "this Lightning configuration")
    _on_a_cpu(said)
    _refused(said)
    meaning, fields = _meaning(said)
    read.cannot("64-true: FP64 parameters and arithmetic", said.base is DType.FP64)
    kind, arguments = _class_of(data.get("optimizer") or "")
    return imported(
        read, NAME, version, meaning, {} if said.base is DType.FP64 else fields, engine=engine_with("optimizer") if said.fsdp else DEFAULT,
        optimizer=kind, momentum=arguments.get("momentum"), under="trainer",
    )  # fmt: skip


def _class_of(value: Any) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        return str(value), {}
    arguments = value.get("init_args") or {}
    return str(value.get("class_path", "")), arguments if isinstance(arguments, Mapping) else {}


def _strategy(said: _Settings) -> None:
    given = said.read.at("strategy")
    if given is None:
        said.read.default("strategy", "auto")
    said.read.whole |= {"strategy"} if isinstance(given, Mapping) else set()
    path, said.arguments = _class_of("auto" if given is None else given)
    name = path.rpartition(".")[2]
    said.strategy = name.lower().removesuffix("strategy").replace("_", "")
    if said.strategy not in {one.replace("_", "") for one in _STRATEGIES}:
        near = nearest(name.lower(), _STRATEGIES, most=1)
        said.strategy = "auto"
        told = f"strategy={cut(name)}: not a Lightning strategy{f'; nearest: {near[0]}' if near else ''}"
        instead = "described as one process or DDP, which may be wrong for a custom strategy"
        said.read.note("contradicts", f"{told}; {instead}")


def _precision(said: _Settings) -> None:
    """Sets the precision from the string, or from a precision plugin."""
    read = said.read
    plugin, arguments = _plugin(read)
    word = read.text("precision", "").lower()
    text = f"precision={word} with plugins: {plugin}: Lightning refuses both together"
    read.note("contradicts", text, plugin and word)
    said.plugin = bool(plugin)
    if plugin == "TransformerEnginePrecision":
        _transformer_engine(said, read.inner(arguments, "plugins"))
        return
    if plugin and _PLUGINS[plugin] is None and plugin != "Precision":
        word = "64-true" if plugin == "DoublePrecision" else "32-true"
        read.cannot(f"plugins: {plugin}: not modelled; described as {word}")
    elif plugin:
        word = str(arguments.get("precision") or word or "32-true").lower()
    if not word:  # null too is what Trainer takes for nothing said
        word = "32-true"
        read.default("precision", word)
    if word not in _WORDS:
        read.faults.append(f"precision={brief(word)}: expected one of {', '.join(_WORDS)}")
        return
    said.base, said.cast = _WORDS[word]
    if word.startswith("transformer-engine"):
        said.quant = _DELAYED
        read.note("assumed", "a plugin without a recipe: Transformer Engine's DelayedScaling with its defaults")


def _plugin(read: Reader) -> tuple[str, Mapping[str, Any]]:
    """(class, arguments) of the precision plugin; ('', {}) without one."""
    given = read.at("plugins")
    for at, one in enumerate(given if isinstance(given, (list, tuple)) else [given]):
        path, arguments = _class_of(one)
        name = path.rpartition(".")[2]
        if name in _PLUGINS:
            read.whole.add("plugins" if not isinstance(given, (list, tuple)) or len(given) == 1 else f"plugins.{at}")
            read.asked.add("plugins")
            return name, arguments
    return "", {}


def _transformer_engine(said: _Settings, read: Reader) -> None:
    """TransformerEnginePrecision: weights in one dtype, the rest under autocast, linears by DelayedScaling with the recipe's arguments."""
    said.base = read.dtype("weights_dtype", DType.BF16) or DType.BF16
    said.compute = read.dtype("fallback_compute_dtype", said.base) or said.base
    if read.at("weights_dtype") is None:
        read.faults.append("plugins: TransformerEnginePrecision without weights_dtype: Lightning refuses it")
    form, algorithm = read.text("recipe.fp8_format", "HYBRID").lower(), read.text("recipe.amax_compute_algo", "max")
    override, whole = read.at("recipe.override_linear_precision"), read.at("replace_layers") is False
    read.note_rows(
        ("cannot_express", form not in ("hybrid", "e4m3"), f"recipe.fp8_format={form}: Transformer Engine trains in HYBRID or E4M3; described as HYBRID"),
        ("cannot_express", algorithm not in ("max", "most_recent"), f"recipe.amax_compute_algo={cut(algorithm)}: a function; described as max"),
        ("cannot_express", whole, "replace_layers: false: only the model's own Transformer Engine modules are quantized"),
    )  # fmt: skip
    said.quant = Quant(
        format="e4m3" if form == "e4m3" else "hybrid", scaling="delayed", amax_history=int(read.number("recipe.amax_history_len", 1024)),
        amax_algo="most_recent" if algorithm == "most_recent" else "max", margin=int(read.number("recipe.margin", 0)),
        wgrad=not (isinstance(override, (list, tuple)) and list(override)[-1:] == [True]),
        attention="multi_head" if read.flag("recipe.fp8_mha") else "dot_product" if read.flag("recipe.fp8_dpa") else "none",
    )  # fmt: skip


def _on_a_cpu(said: _Settings) -> None:
    """Applies what Trainer does on a CPU: it refuses GPU-only settings, and trains BF16 under 16-mixed."""
    given = said.read.at("accelerator", "auto")
    name = _class_of("auto" if given is None else given)[0].rpartition(".")[2].lower().removesuffix("accelerator")
    said.read.whole |= {"accelerator"} if isinstance(given, Mapping) else set()
    mixed, cpu = said.base is DType.FP16 and not said.cast, name == "cpu"
    gpus = next((name for name in ("fsdp", "deepspeed") if said.strategy.startswith(name)), None)
    free = cpu and gpus is None and said.quant is None and not said.plugin
    # Trainer compares with the string, not with an object, so its autocast is for CUDA
    by_object = free and isinstance(given, Mapping) and not said.cast
    said.read.note_rows(
        ("assumed", mixed and name == "auto", "a GPU: on a CPU Lightning trains BF16 under 16"),
        ("contradicts", cpu and gpus, f"strategy={gpus} with accelerator=cpu: Lightning refuses it, since it needs a GPU"),
        ("contradicts", cpu and not gpus and said.quant, "transformer-engine with accelerator=cpu: Transformer Engine runs only on GPUs"),
        ("inert", by_object, "the precision: with a CPUAccelerator object (unlike the string accelerator=cpu) Lightning trains in FP32"),
        ("inert", free and mixed and not by_object, "precision=16-mixed: with accelerator=cpu Lightning warns and trains bf16-mixed"),
    )  # fmt: skip
    if by_object:
        said.base, said.cast = DType.FP32, True
    elif free and mixed:
        said.base = DType.BF16


def _refused(said: _Settings) -> None:
    """Notes what a strategy refuses, and that FSDP2's dtypes are set by the author under ModelParallelStrategy."""
    word, refuses = "64-true" if said.quant is None else "transformer-engine", said.strategy.startswith(("fsdp", "deepspeed"))  # fmt: skip
    parallel = "modelparallel" in said.strategy
    said.read.note_rows(
        ("contradicts", refuses and (said.quant is not None or said.base is DType.FP64),
         f"{word} with strategy={cut(said.strategy)}: Lightning refuses it; described as if it ran"),
        ("assumed", parallel, "ModelParallelStrategy leaves FSDP2's MixedPrecisionPolicy to configure_model: read as FSDP's"),
        ("contradicts", parallel and said.base is DType.FP16 and not said.cast, "16-mixed: ModelParallelStrategy refuses it"),
    )  # fmt: skip


def _meaning(said: _Settings) -> tuple[Meaning, dict[str, Any]]:
    base = said.base
    config = said.arguments.get("config") if "deepspeed" in said.strategy else None
    if config is not None:  # DeepSpeed's own settings decide; the precision's section is the fallback
        whole, section = isinstance(config, Mapping), {DType.BF16: "bf16", DType.FP16: "fp16"}.get(base)
        said.read.note("undecided", f"config={cut(config)} decides: pass that file (--from deepspeed)", not whole)
        data = ({} if section is None else {section: {"enabled": True}}) | (
            dict(config) if whole else {"zero_optimization": {"stage": 2}}
        )
        meaning, fields = deepspeed.meaning_and_fields(said.read.inner(data, "strategy.config"))
        return _with_quant(said, meaning), fields
    if "deepspeed" in said.strategy and base is not DType.FP32:
        said.read.note("assumed", "under DeepSpeed, mixed and true are the same")
        scale = deepspeed.scale_of(said.read.inner(said.arguments, "strategy")) if base is DType.FP16 else None
        stage = str(said.arguments.get("stage") or said.strategy.partition("deepspeedstage")[2][:1])
        if not stage:  # DeepSpeedStrategy's default
            stage = "2"
            said.read.default("strategy.stage", stage)
        zero = {str(number): divided for number, divided in deepspeed.SHARDED.items()}.get(stage, "everything")
        meaning = Meaning(
            storage=base, compute=base, main=DType.FP32, wire=base, accumulator=base, optimizer_reads=DType.FP32, sharded=zero, loss_scale=scale
        )  # fmt: skip
        scaled = {} if scale is None else native.scale_fields(scale)
        return _with_quant(said, meaning), {base.short: True, "grad_reduce_in_fp32": False, **scaled}
    sharded: Sharded = "everything" if said.fsdp else "nothing"
    if said.cast:
        meaning = updated_itself(base, wire=base if said.fsdp else _hooked(said), sharded=sharded)
    else:
        wire, scale = _hooked(said), native.TORCH_SCALER if base is DType.FP16 else None
        if said.fsdp:  # FSDPStrategy reduces in the precision's dtype unless it has a MixedPrecision
            policy = said.arguments.get("mixed_precision")
            given = policy.get("init_args", policy) if isinstance(policy, Mapping) else {}
            wire = said.read.inner(given, "strategy.mixed_precision").dtype("reduce_dtype", base) or base
        meaning = updated_itself(DType.FP32, base, wire, autocast=base, sharded=sharded, loss_scale=scale)
    meaning = _with_quant(said, meaning)
    return meaning, {} if base is DType.FP64 else native.fields_of(meaning, said.read)


def _with_quant(said: _Settings, meaning: Meaning) -> Meaning:
    """`meaning` with the linears of the FP8 plugin, which computes everything else under autocast."""
    compute = said.compute or said.base
    wide = dataclasses.replace(meaning, compute=compute, autocast=compute)
    return meaning if said.quant is None else with_quant(wide, said.quant)


def _hooked(said: _Settings) -> DType:
    """The wire dtype under DDP: the stored dtype, unless a communication hook casts gradients."""
    stored = said.base if said.cast else DType.FP32
    hook = said.arguments.get("ddp_comm_hook")
    if hook is None or not said.strategy.startswith("ddp"):
        return stored
    name = str(hook).rpartition(".")[2]
    said.read.cannot(f"ddp_comm_hook={cut(name)}: its effect on gradients on the wire is unknown", name not in _HOOKS)
    return _HOOKS.get(name, stored)
