"""The formats in which engines serve quantized weights: one row per quantization method and scaling, and whether a recipe's weights fit it unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.facts import RunFacts
from mpbridge.planning.memory.layers import te_layers
from mpbridge.precision.globs import MTP_PROJECTION
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant
from mpbridge.settings.huggingface.tensors import Mapped, mapped
from mpbridge.settings.huggingface.written import family_for

Layout = Literal["tensor", "channel", "blocks", "lines"]
"""Extent of a weight_scale: the tensor; an output row; 128 x 128 elements; a piece of a row."""
FP8 = "F8_E4M3"
"""Codes of eight bits, in safetensors' spelling."""
BLOCK_SCALE = "_scale_inv"
"""After the name of a weight: that of its scales by blocks."""
METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp8")
"""quant_method in config.json, which is also what vLLM and SGLang take as --quantization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFormat:
    """How a folder stores weights of one scaling under one quantization method."""

    method: str
    scalings: tuple[str, ...]
    """The scalings of recipes whose codes and scales it holds."""
    layout: Layout
    along: int = 0
    """Elements of a row per scale; 0: the whole row."""
    codes: str = "weight"
    scale: str = "weight_scale"
    scale_dtype: str
    """In safetensors' spelling. U8: E8M0 bytes."""
    scale_axes: int = 2
    """0: []; 1: [rows]; 2: [rows or row blocks, blocks]; 4: [row blocks, 1, blocks, 1]."""
    second: str = ""
    """Name of the second-level scale of NVFP4; '': none."""
    divides: bool = False
    """Whether the second-level scale is a divisor, [1], rather than a multiplier, []."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """quantization_config without the list of modules in high precision."""
    kept: str
    """Its key for that list."""
    activations: str
    """How engines quantize the other operand."""
    engines: tuple[str, ...]
    """Those that read it."""
    experts: tuple[str, ...] | None = None
    """Those of them that read sets of experts in it; None: all."""

    @property
    def name(self) -> str:
        """For messages: 'compressed-tensors MXFP8'."""
        fp8 = {"tensor": "FP8 by tensor", "channel": "FP8 by channel", "blocks": "FP8 by 128 x 128 blocks"}
        return f"{self.method} {'NVFP4' if self.second else fp8.get(self.layout, 'MXFP8')}"

    @property
    def single(self) -> str:
        """Name of the scale that a tensor has one of and fused linears share; '': none."""
        return self.scale if self.layout == "tensor" else self.second

    def read_by(self, quantized: Iterable[str]) -> tuple[str, ...]:
        """The engines that read a folder with those quantized modules."""
        every = self.experts is None or not any(".experts." in name for name in quantized)
        return self.engines if every else self.experts or ()

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Suffix -> (dtype in safetensors' spelling, shape) of the tensors of a linear [rows, columns]."""
        packed = bool(self.second)
        tall = -(-rows // 128) if self.layout == "blocks" else rows
        wide = -(-columns // self.along) if self.along else 1
        scale = {0: (), 1: (tall,), 2: (tall, wide), 4: (tall, 1, wide, 1)}[self.scale_axes]
        codes = ("U8", (rows, columns // 2)) if packed else (FP8, (rows, columns))
        found = {self.codes: codes, self.scale: (self.scale_dtype, scale)}
        return found | ({self.second: ("F32", (1,) if self.divides else ())} if packed else {})


def _group(format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """compressed-tensors' config with one group for every linear."""
    common = {"symmetric": True, "type": "float"}
    group = {
        "targets": ["Linear"], "weights": {**common, "dynamic": False, **weights}, "format": format,
        "input_activations": None if inputs is None else {**common, "dynamic": True, **inputs}, "output_activations": None,
    }  # fmt: skip
    said = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return said | {"config_groups": {"group_0": group}}


def _algorithm(name: str, size: int | None) -> Mapping[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": name, **({"group_size": size} if size else {})}


_MX = {"num_bits": 8, "group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}
_FP4 = {"num_bits": 4, "group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
_TOKENS = "dynamic, one scale per token"
_PIECES = "dynamic, one FP32 scale per 128 features of a token"
_BF16 = "BF16 (an engine that quantizes them needs a static scale, which training does not record)"
_CT: Mapping[str, Any] = {"method": "compressed-tensors", "kept": "ignore"}
_MO: Mapping[str, Any] = {"method": "modelopt", "kept": "ignore"}

FORMATS: tuple[ServedFormat, ...] = (
    ServedFormat(
        method="fp8", scalings=("blockwise",), layout="blocks", along=128, scale=f"weight{BLOCK_SCALE}", scale_dtype="F32",
        config={"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        kept="modules_to_not_convert", activations=f"{_PIECES}, or powers of two where an engine follows scale_fmt", engines=("vllm", "sglang", "trtllm"),
    ),
    ServedFormat(
        **_CT, scalings=("tensorwise", "rowwise", "rowwise_gw_hp"), layout="channel", scale_dtype="F32", activations=_TOKENS,
        config=_group("float-quantized", {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token"}), engines=("vllm", "sglang", "trtllm"),
    ),
    ServedFormat(
        **_CT, scalings=("blockwise",), layout="blocks", along=128, scale_dtype="F32", activations=_PIECES,
        config=_group("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
                      {"num_bits": 8, "strategy": "group", "group_size": 128}),
        engines=("vllm", "sglang", "trtllm"),
    ),
    ServedFormat(
        **_CT, scalings=("mxfp8",), layout="lines", along=32, scale_dtype="U8", activations="dynamic, MXFP8",
        config=_group("mxfp8-quantized", _MX, _MX), engines=("vllm",),
    ),
    ServedFormat(
        **_CT, scalings=("nvfp4",), layout="lines", along=16, codes="weight_packed", scale_dtype="F8_E4M3", second="weight_global_scale", divides=True,
        config=_group("nvfp4-pack-quantized", _FP4, None), activations=_BF16, engines=("vllm", "sglang"),
    ),
    ServedFormat(
        **_MO, scalings=("tensorwise", "rowwise", "rowwise_gw_hp"), layout="channel", scale_dtype="F32", scale_axes=1,
        config=_algorithm("FP8_PER_CHANNEL_PER_TOKEN", None), activations=_TOKENS, engines=("vllm", "trtllm"),
        experts=("trtllm",),
    ),
    ServedFormat(
        **_MO, scalings=("blockwise",), layout="blocks", along=128, scale_dtype="F32", scale_axes=4,
        config=_algorithm("FP8_PB_WO", None), activations=_PIECES, engines=("vllm",),
        experts=(),
    ),
    ServedFormat(
        **_MO, scalings=("mxfp8",), layout="lines", along=32, scale_dtype="U8", config=_algorithm("MXFP8", 32),
        activations="dynamic, MXFP8", engines=("vllm", "sglang", "trtllm"),
    ),
    ServedFormat(
        **_MO, scalings=("nvfp4",), layout="lines", along=16, scale_dtype="F8_E4M3", second="weight_scale_2",
        config=_algorithm("W4A16_NVFP4", 16), activations=_BF16, engines=("vllm",),
    ),
    ServedFormat(
        method="mxfp8", scalings=("mxfp8",), layout="lines", along=32, scale=f"weight{BLOCK_SCALE}", scale_dtype="U8",
        config={"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]},
        kept="modules_to_not_convert", activations="dynamic, MXFP8", engines=("sglang", "trtllm"),
    ),
)  # fmt: skip
"""Sources: compressed-tensors 0.20 quantization/quant_scheme.py, vLLM 0.33 model_executor/layers/quantization, SGLang 0.5.23 layers/quantization,
TensorRT-LLM at 008e0af, _torch/models/modeling_utils.py, ModelOpt 0.47 torch/export. vLLM's ModelOptFp8MoEMethod gives a set of experts one scale per
tensor whatever the algorithm."""

FOREIGN: tuple[ServedFormat, ...] = (
    ServedFormat(
        **_CT, scalings=(), layout="tensor", scale_axes=0, scale_dtype="F32", activations="one scale per tensor", engines=("vllm", "sglang", "trtllm"),
        config=_group("float-quantized", {"num_bits": 8, "strategy": "tensor"}, {"num_bits": 8, "strategy": "tensor"}),
    ),
    ServedFormat(
        **_MO, scalings=(), layout="tensor", scale_axes=0, scale_dtype="F32", config=_algorithm("FP8", None),
        activations="static, one scale per tensor", engines=("vllm", "sglang", "trtllm"),
    ),
)  # fmt: skip
"""Formats of other tools' folders that are read and never written: their scales of activations are static, or tensorwise training's scales fit another row."""

FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
)  # fmt: skip
"""Linears of a folder that engines compute as one, with one scheme and one second-level scale."""


UNREAD = f".{MTP_PROJECTION}"
"""The end of linears that engines compute in high precision whatever a list says: an nn.Linear (vLLM 0.33 models/deepseek_mtp.py, SGLang 0.5.23 models/deepseek_nextn.py), or always
excluded (TensorRT-LLM at 008e0af, _torch/model_config.py)."""


def group_of(module: str) -> str:
    """The name under which an engine fuses `module`: that of the first linear of its group, or its own."""
    stem, _, last = module.rpartition(".")
    if ".mixer" in stem and last == "up_proj":
        return module  # a hybrid's MLPs have no gate
    return next((f"{stem}.{group[0]}" for group in FUSED if last in group), module)


@dataclass(frozen=True, slots=True)
class Cast:
    """A parameter and the rule by which fprop quantizes it; None: high precision."""

    one: Mapped
    quant: Quant | None

    @property
    def served(self) -> Quant | None:
        """The rule of what a folder stores: `UNREAD` linears are in high precision there."""
        return None if self.one.name.endswith(f"{UNREAD}.weight") else self.quant


def casts(policy: PrecisionPolicy, facts: RunFacts, wanted: Sequence[Mapped]) -> list[Cast]:
    """Every parameter with its rule, in order."""

    def rule(one: Mapped) -> Quant | None:
        return policy.of_path(one.name.removesuffix(".weight"), facts.shape.num_layers).fprop if one.linear else None

    return [Cast(one, rule(one)) for one in wanted]


def chosen(method: str, found: Sequence[Cast], facts: RunFacts) -> ServedFormat:
    """The row of `method` that holds the weights. Raises BadValue with every reason why none does, and the methods that do."""
    scalings = _scalings(found)
    rows = [row for row in FORMATS if row.method == method and scalings and scalings <= set(row.scalings)]
    if rows:
        reasons = list(misfits(rows[0], found, facts))
    elif not scalings:
        reasons = ["the recipe quantizes no weight"]
    else:
        known = dict.fromkeys(name for row in FORMATS if row.method == method for name in row.scalings)
        held = f"{method} holds one of {', '.join(known)}"
        reasons = [f"the recipe's scaling is {' and '.join(sorted(scalings))}, and {held}"]
    if not reasons:
        return rows[0]
    shown = reasons[:5] + ([f"and {len(reasons) - 5} more"] if len(reasons) > 5 else [])
    others = ", ".join(row.name for row in fitting(found, facts))
    wide = "convert without --quantization writes them in high precision"
    cure = f"these weights fit {others}" if others else f"no served format holds these weights unchanged: {wide}"
    raise BadValue(f"the weights of training cannot be written as {method}: {'; '.join(shown)} ({cure})")


def _scalings(found: Sequence[Cast]) -> set[str]:
    return {cast.served.scaling for cast in found if cast.served is not None}


def fitting(found: Sequence[Cast], facts: RunFacts) -> list[ServedFormat]:
    """The formats that hold the codes and scales of training unchanged."""
    scalings = _scalings(found)
    return [row for row in FORMATS if scalings and scalings <= {*row.scalings} and not any(misfits(row, found, facts))]


def served_as(policy: PrecisionPolicy, facts: RunFacts, model: Mapping[str, Any]) -> str:
    """The formats in which a run's weights can be served unchanged, or why none can, in a sentence; '' for a recipe that quantizes nothing. model: the filled-in section."""
    if not policy.quantized:
        return ""
    if facts.shape.lora_rank:
        return "not unchanged: adapters are written alone, or merged into weights that are then quantized anew (mpbridge convert --adapters)"
    try:
        # the model's folder need not have a config.json that says everything: only the names of its linears matter here
        # thousands of experts: one of a layer stands for all, unless a rule names experts
        alike = facts.shape.experts and not any("expert" in region.modules for region in policy.regions)
        shape = dataclasses.replace(facts.shape, experts=1) if alike else facts.shape
        found = casts(policy, facts, list(mapped(family_for(model), shape, model)))
    except (KeyError, MpbridgeError) as error:
        return f"not decided: {'no family of Hugging Face models that is written here has ' * isinstance(error, KeyError)}{error}"
    scalings = _scalings(found)
    if not scalings:
        return "high precision: no weight of this model is quantized"
    rows = ", ".join(row.name for row in fitting(found, facts))
    if rows:
        return f"{rows}, with the codes and scales of training (mpbridge convert --quantization)"
    reasons = [next(misfits(row, found, facts)) for row in FORMATS if scalings <= set(row.scalings)]
    alone = f"{' and '.join(scalings)} scaling has no served format"
    other = alone if len(scalings) < 2 else "no format holds two scalings"
    return f"no format without quantizing anew: {reasons[0] if reasons else other}"


def misfits(row: ServedFormat, found: Sequence[Cast], facts: RunFacts) -> Iterator[str]:
    """Every reason why `row` cannot hold the weights of that run, each once."""
    quantized = [(cast.one, cast.served) for cast in found if cast.served is not None]
    yield from dict.fromkeys(reason for one, quant in quantized for reason in _misfits(row, one, quant, facts))
    yield from _apart(row, found)


def ranks(one: Mapped, facts: RunFacts) -> int:
    """Over how many tensor-parallel ranks the parameter is split, each of which quantizes its own share."""
    parallel = facts.parallel
    if one.split is None or (one.name.endswith("_down_proj.weight") and te_layers(facts)):
        return 1
    return (parallel.expert_tensor or parallel.tensor) if one.expert else parallel.tensor


def _misfits(row: ServedFormat, one: Mapped, quant: Quant, facts: RunFacts) -> Iterator[str]:
    below = one.name.removesuffix(".weight").rpartition("layers.")[2].partition(".")[2]
    split = ranks(one, facts)
    if quant.row.history or quant.row.emulation is None:
        yield f"{quant.scaling} scales are not determined by the weights"
        return
    each = f"{below}: each of {split} tensor-parallel ranks has its own"
    if split > 1 and row.second:
        yield f"{each} second-level scale, and the format one per tensor"
    elif split > 1 and one.split == "row" and (quant.row.per_tensor or row.layout == "channel"):
        yield f"{each} scales for its columns, and the format one per row"
    columns = one.shape[1] // split
    if split > 1 and one.split == "row" and row.along and columns % row.along:
        yield f"{below}: blocks of {row.along} columns end at ranks of {columns} columns"
    if row.layout != "blocks":
        return
    rows = one.shape[0] // (split if one.split == "column" else 1)
    whole = rows if split > 1 and one.split == "column" else 0
    edge = {"whole": whole, "stacked": rows // 2, "qkv": facts.shape.kv_channels}[one.layout]
    if edge % 128:
        what = {"qkv": f"query, key and value at heads of {edge} rows", "stacked": f"gate and up at {edge} rows"}
        yield f"{below}: blocks of 128 rows span {what.get(one.layout, f'ranks at {edge} rows')}"


def _apart(row: ServedFormat, found: Sequence[Cast]) -> Iterator[str]:
    """Linears that engines fuse or give one scheme, and that training does not treat alike."""
    groups: dict[str, list[Cast]] = {}
    for cast in found:
        if cast.one.linear:
            module = cast.one.parts[0][0].removesuffix(".weight")
            stem, among, _ = module.rpartition(".experts.")
            groups.setdefault(f"{stem}.experts" if among else group_of(module), []).append(cast)
    for name, members in groups.items():
        if len({cast.quant for cast in members}) > 1:
            yield f"{name}: engines use one scheme for what the recipe treats differently"
        elif len(members) > 1 and members[0].quant is not None and row.second and not name.endswith(".experts"):
            yield f"{name}: engines use one second-level scale for linears that training scales apart"


def quantization_config(
    row: ServedFormat, quants: Sequence[Quant], kept: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """config.json's quantization_config. kept: full names of the modules in high precision."""
    config = {**row.config, row.kept: list(kept)}
    if row.method == "fp8" and all(quant.option("power_of_two", environment) for quant in quants):
        config["scale_fmt"] = "ue8m0"
    return config


INPUT_SCALES = ("input_scale", "input_global_scale")
"""Names of a linear's static scale of activations, which training does not record."""
STATIC = (*INPUT_SCALES, "output_scale", "q_scale", "k_scale", "v_scale")
"""The same with those of the key-value cache."""


CONTRACT = "contract.json"
"""What a folder that mpbridge wrote says of each tensor and of the run that trained it."""
LEGACY = "hf_quant_config.json"
"""ModelOpt's own file, which TensorRT-LLM reads."""


def legacy_config(row: ServedFormat, kept: Sequence[str]) -> dict[str, Any]:
    """The content of hf_quant_config.json."""
    algorithm = {name: row.config.get(name) for name in ("quant_algo", "group_size") if name in row.config}
    quantization = {**algorithm, "kv_cache_quant_algo": None, "exclude_modules": list(kept)}
    return {"producer": {"name": "modelopt"}, "quantization": quantization}
