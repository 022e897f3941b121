"""torchtitan: a recipe as arguments, plus a config_registry function if linears are quantized; and its arguments, the TOML of earlier versions and the
names of its configs, read.

Read at b5bcd76c: config/configs.py, components/quantization/{float8,mx,nvfp4}.py. A config_registry function is never run: it is read as text
(`read_made`), or only its name is used (`--config NAME`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import DataError, brief, cut
from mpbridge.common.formats import DType
from mpbridge.interop.stacks import sharded_torch as native
from mpbridge.interop.stacks.base import Export, Fragment, Imported, Line, Request, engine_with, exported
from mpbridge.interop.stacks.meaning import updated_itself, with_quant
from mpbridge.interop.stacks.python_values import SourceObject, Unknown, known_fields, short
from mpbridge.interop.stacks.reading import Reader, imported, options_of, raise_faults, unknown_of
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant

NAME = "torchtitan"
VERSIONS = {"main": "b5bcd76c"}


@dataclass(frozen=True, slots=True)
class Converters:
    """What quantizes to one scaling there."""

    linears: str
    quant: Quant
    """What it runs."""
    experts: str = ""
    """What quantizes the grouped GEMMs of experts likewise, which finds nothing in a dense model; '' for none."""
    lacks: str = ""
    """Why none."""


CONVERTERS: Mapping[str, Converters] = MappingProxyType({
    "mxfp8": Converters("MXFP8LinearConverter", Quant(format="e4m3", scaling="mxfp8"), "MXFP8GroupedExpertsConverter"),
    "nvfp4": Converters("NVFP4LinearConverter", Quant(format="e2m1", scaling="nvfp4"), lacks="it has no converter of experts to NVFP4"),
    "rowwise": Converters("Float8LinearConverter", Quant(format="e4m3", scaling="rowwise"), "Float8GroupedExpertsConverter"),
    "rowwise_gw_hp": Converters(
        "Float8LinearConverter", Quant(format="e4m3", scaling="rowwise_gw_hp"), lacks="its Float8GroupedExpertsConverter quantizes the weight gradients' GEMM too"
    ),
})  # fmt: skip
"""Scaling -> its converters, of those with one name the default first; written and read."""
GATE = "router.gate"
"""The experts' router in its models: a Linear, which no recipe quantizes."""
PARTS = ("attention", "feed_forward", "moe.shared_experts.w")
"""Substrings of its names for every Linear of a layer but the router and the gate of shared experts."""


def experts(policy: PrecisionPolicy) -> str:
    """What happens there to the experts of a mixture, if it is not what happens here; '' if it is."""
    quant = policy.quant
    assert quant is not None  # called only for quantized recipes
    row, (first, last) = CONVERTERS[quant.scaling], policy.ends or (0, 0)
    text = f"except in the first {first} and the last {last} layers, in every layer there"
    alone = "" if policy.ends is None else f"{text}: {row.experts} selects no layers"
    return alone if row.experts else f"in {policy.compute.short.upper()} there: {row.lacks}"


def export(request: Request) -> Export:
    """Arguments, and Python for converters, since quantization has no command-line options."""
    policy = request.policy
    lines = []
    if policy.compute is DType.FP16:  # its parser does not accept float16: the nearest dtype is written
        text = "training.dtype and mixed_precision_param accept only bfloat16 and float32"
        lines.append(Line(fidelity="impossible", fact="fp16", text=f"{text}; nearest: BF16, as written here"))
        policy = dataclasses.replace(policy, compute=DType.BF16, params=DType.FP32, main_params=DType.FP32)
    # mixed_precision_reduce takes float32 only
    quants = {scaling: row.quant for scaling, row in CONVERTERS.items()}
    theirs = native.torch_meaning(policy, wire=DType.FP32, regions=native.regions_there(policy, quants, edges=True))
    theirs = dataclasses.replace(theirs, router=DType.FP32)
    moments = policy.settled()
    low = DType.BF16 in (moments.exp_avg, moments.exp_avg_sq) and theirs.storage is DType.FP32
    if low:
        theirs = dataclasses.replace(theirs, exp_avg=DType.BF16, exp_avg_sq=DType.BF16)
    words = [f"--training.dtype {theirs.storage.value}", f"--training.mixed_precision_param {theirs.compute.value}"]
    words += ["--training.mixed_precision_reduce float32"]
    words += ["--optimizer.implementation fused_opt_states_bf16"] if low else []
    pieces = [Fragment(name="arguments", text=" \\\n".join(words))]
    if theirs.regions[-1].quant is not None:
        if policy.ends is not None and CONVERTERS[theirs.regions[-1].quant.scaling].experts:
            theirs = dataclasses.replace(theirs, note=f"experts: {experts(policy)}")
        pieces.append(Fragment(name="config_registry.py", text=native.commented(NAME, theirs, _python(policy))))
    return exported(request, NAME, theirs, pieces, lines)


def _python(policy: PrecisionPolicy) -> str:
    """A function for a model's config_registry: a converter of linears, which are chosen by substrings of their names, and one of experts."""
    quant = policy.quant
    assert quant is not None  # called only for quantized recipes
    row = CONVERTERS[quant.scaling]
    given = {row.linears: _chosen(quant, policy.ends)}
    if row.experts:  # 128 rows per expert: what its kernel needs on SM100
        given[row.experts] = ["pad_multiple=128"] if quant.scaling == "mxfp8" else []
    lines: list[str] = []
    for converter, arguments in given.items():
        written = [f"            {one}," for one in (*arguments, "model_compile_enabled=config.compile.enable")]
        lines += [f"        {converter}.Config(", *written, "        ),"]
    return "\n".join([
        f"from torchtitan.components.quantization import {', '.join(sorted(given))}", "", "",
        "def quantized(config, registry, flavor):", "    converters = [", *lines, "    ]",
        "    config.model_spec = registry(flavor, converters=converters)", "    return config",
    ])  # fmt: skip


def _chosen(quant: Quant, ends: tuple[int, int] | None) -> list[str]:
    """The arguments of a converter that choose its recipe and its linears. ends: layers at the start and end that it leaves out."""
    first, last = ends or (0, 0)
    depth = "len(config.model_spec.model.layers)"
    if quant.scaling in ("rowwise", "rowwise_gw_hp"):
        name = "rowwise" if quant.scaling == "rowwise" else "rowwise_with_gw_hp"
        outer = f', *(f"layers.{{i}}." for i in (*range({first}), *range({depth} - {last}, {depth})))' if ends else ""
        return [f'recipe_name="{name}"', f'filter_fqns=["lm_head", "{GATE}"{outer}]']
    parts = ", ".join(f'"{part}"' for part in PARTS)
    if not ends:
        return [f"fqns=[{parts}]"]
    # the dot behind a number keeps layers.1 from covering layers 10 to 19
    covered = f'f"layers.{{i}}.{{part}}" for i in range({first}, {depth} - {last}) for part in ({parts})'
    return [f"fqns=[{covered}]"]


def read(words: Iterable[str], *, version: str) -> Imported:
    """The meaning of `--section.key value` arguments, including `--config NAME`. Raises BadValue for stray words."""
    data, strays = options_of(words)
    faults = [f"{brief(word)} is not an option: expected --section.key VALUE" for word in strays]
    faults += [f"--{name} has no value" for name in ("config", *_WORDS) if data.get(name) is True]
    raise_faults(faults, "these arguments of torchtitan")
    return read_data(data, version=version)


def read_data(data: Any, *, version: str) -> Imported:
    """The settings' meaning under FSDP2. Raises DataError for anything but a mapping, BadValue listing every value that cannot be read."""
    read_ = Reader.of(data, "a torchtitan configuration")
    quant = _quant(read_)
    ends, name = _filtered(read_) if quant is not None else None, "optimizer.name"  # of versions before its groups
    return _found(read_, version, quant, ends, read_.at(name), name)


def _found(read_: Reader, version: str, quant: Quant | None, ends: tuple[int, int] | None, optimizer: Any, where: str) -> Imported:  # fmt: skip
    storage = read_.dtype("training.dtype", DType.FP32) or DType.FP32
    compute = read_.dtype("training.mixed_precision_param", DType.BF16) or DType.BF16
    reduce = read_.dtype("training.mixed_precision_reduce", DType.FP32) or DType.FP32
    low = read_.at("optimizer.implementation") == "fused_opt_states_bf16"
    states = DType.BF16 if low else storage
    whole = read_.number("parallelism.data_parallel_shard_degree", -1) == 1
    read_.note_rows(
        ("assumed", True, "FSDP2 installs the policy at every sharding degree, including 1 (its docstrings still mention autocast)"),
        ("contradicts", DType.FP16 in (storage, compute), "float16: training.dtype and mixed_precision_param accept only bfloat16 and float32"),
        ("contradicts", reduce is not DType.FP32, f"training.mixed_precision_reduce={reduce.value}: its parser takes float32 only"),
        ("cannot_express", states is not storage, "both moments in BF16 with FP32 parameters: its own optimizer, on CUDA"),
    )  # fmt: skip
    sharded = "nothing" if whole else "everything"
    meaning = updated_itself(storage, compute, DType.FP32, exp_avg=states, exp_avg_sq=states, sharded=sharded)
    meaning = with_quant(meaning, quant, ends)
    fields, engine = native.fields_of(meaning, read_), engine_with("optimizer")
    return imported(read_, NAME, version, meaning, fields, engine=engine, optimizer=optimizer, where=where)


_WORDS = (
    "training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce", "optimizer.implementation",
)  # fmt: skip
"""Precision options that take a word."""
OPAQUE = frozenset({"model_registry", "nvfp4_bf16_tail_fqns"})
"""Functions of which the arguments are read, not the body."""
LINEARS = {row.linears: row.quant for row in reversed([*CONVERTERS.values()])}
"""Converter -> what it runs by default."""
_EXPERTS = {row.experts: scaling for scaling, row in CONVERTERS.items() if row.experts}
"""Converter of experts -> the scaling of their grouped GEMMs."""


def read_made(made: Any, notes: Iterable[str], *, name: str, version: str) -> Imported:
    """The meaning of the Trainer.Config that a config_registry function returns, from the function's text. Raises DataError if it returns none."""
    if not isinstance(made, SourceObject) or not {"training", "model_spec"} & made.attributes.keys():
        raise DataError(f"{name}: no Trainer.Config can be determined from its text")
    not_known: list[str] = []
    read_ = Reader({})
    for section in ("training", "optimizer"):
        wanted = [path.partition(".")[2] for path in _WORDS if path.startswith(f"{section}.")]
        value = made.attributes.get(section)
        inside = value.attributes if isinstance(value, SourceObject) else {}
        read_.notes["unknown"] += unknown_of(NAME, section, inside)
        read_.data = {**read_.data, section: known_fields(value, wanted, not_known, section)}
    spec = made.attributes.get("model_spec")
    given = spec.attributes.get("converters") if isinstance(spec, SourceObject) else None
    at = {**{one: made.attributes.get(one) for one in ("training", "optimizer")}, "model_spec": spec, "converters": given}  # fmt: skip
    not_known += [f"{where} = {one.text}" for where, one in at.items() if isinstance(one, Unknown)]
    quant = _converted(given if isinstance(given, list) else [], read_)
    read_.notes["undecided"] += [f"{one}: known only at run time; left at its default" for one in not_known]
    read_.notes["assumed"] += dict.fromkeys(notes)
    return _found(read_, version, quant, None, _updater(made.attributes.get("optimizer")), "optimizer.param_groups")


def _updater(optimizer: Any) -> str | None:
    """Of its param_groups the optimizer that is not Adam, since that one updates the matrices. None: the text tells none."""
    groups = optimizer.attributes.get("param_groups") if isinstance(optimizer, SourceObject) else None
    listed = groups if isinstance(groups, list) else []
    said = [one.attributes.get("optimizer_name") for one in listed if isinstance(one, SourceObject)]
    names = sorted((name for name in said if isinstance(name, str)), key=lambda name: name.startswith("Adam"))
    return names[0] if names else None


def _converted(converters: list[Any], read: Reader) -> Quant | None:
    """What a model_registry's converters make of the linears; what no recipe can say is noted: modules, and a mixture's experts and router otherwise."""
    quant, gate, experts = None, "", ""
    for one in converters:
        word = one.callee.removesuffix(".Config").rpartition(".")[2] if isinstance(one, SourceObject) else ""
        if word in _EXPERTS:
            experts = _EXPERTS[word]
        elif word not in LINEARS:
            lost = f"a converter that its text does not determine: {short(one)}"
            read.cannot(f"{word}: no setting of a recipe" if word else lost)
        else:
            said = one.attributes
            high = said.get("recipe_name") == "rowwise_with_gw_hp"
            quant = CONVERTERS["rowwise_gw_hp"].quant if high else LINEARS[word]
            gate = word if _covers_gate(said) else ""
            _filters(word, said, read)
    linears = "the linears are not quantized" if quant is None else f"the linears have {quant.scaling}"
    read.note_rows(
        ("assumed", quant is not None and not experts, "a dense model: no converter covers the experts of a mixture"),
        ("cannot_express", experts and (quant is None or experts != quant.scaling),
         f"{CONVERTERS[experts].experts if experts else experts}: the experts' grouped GEMMs run in {experts}; {linears}"),
        ("cannot_express", experts and gate, f"{gate}: the experts' router ({GATE}) is quantized too; here it never is"),
    )  # fmt: skip
    return quant


def _covers_gate(said: Mapping[str, Any]) -> bool:
    covered, left = said.get("fqns"), said.get("filter_fqns")

    def named(given: Any) -> bool:
        words = [one for one in given if isinstance(one, str)] if isinstance(given, list) else []
        return any(one in f"layers.0.moe.{GATE}" for one in words)

    # of a list whose names only running would tell, `left` alone says something
    told = any(isinstance(one, str) for one in covered) if isinstance(covered, list) else covered
    return named(covered) if told else not named(left)


def _name(one: Any) -> str:
    """A module's name, or the expression that gives it when the file runs."""
    if isinstance(one, SourceObject):
        return f"{short(one)}(...)"
    return one if isinstance(one, str) else short(one)


def _filters(word: str, said: Mapping[str, Any], read: Reader) -> None:
    """Notes the modules that a converter covers; mpbridge covers the linears of the layers."""
    covered, left = said.get("fqns"), said.get("filter_fqns")
    computed = isinstance(covered, (Unknown, SourceObject))
    listed = [_name(one) for one in covered] if isinstance(covered, list) else [_name(covered)]
    # every linear of a layer: 'layers', or PARTS, also in the wording of torchtitan's own configurations
    own = sorted(one.removesuffix(".w").removeprefix("moe.") for one in listed)
    every = covered == ["layers"] or own == ["attention", "feed_forward", "shared_experts"]
    others = [_name(one) for one in left or [] if one not in ("lm_head", GATE)] if isinstance(left, list) else []
    read.note_rows(
        ("cannot_express", said.get("emulate") is True, f"{word}: emulate=True computes torchao's tensorwise default regardless of its recipe"),
        ("cannot_express", computed, f"{word}: {_TAIL}"),
        ("cannot_express", not computed and covered and not every, f"{word}: only linears whose names contain {', '.join(listed)}"),
        ("cannot_express", not covered and (not isinstance(left, list) or "lm_head" not in left),
         f"{word}: the output layer (lm_head) is quantized too; here it never is"),
        ("cannot_express", others, f"{word}: left out by substring: {', '.join(others)}"),
    )  # fmt: skip


_TAIL = "a fraction of the last layers stays in BF16; set the model's depth and num_layers_at_end_in_bf16"
_FILTERS = ("float8.filter_fqns", "mx.filter_fqns", "quantize.linear.float8.filter_fqns", "quantize.linear.mx.filter_fqns")  # fmt: skip


def _converters(read_: Reader) -> list[str]:
    """The listed converters, separated by commas on a command line."""
    given = read_.at("model.converters")
    if isinstance(given, str):
        return [one.strip() for one in given.split(",")]
    return [str(one) for one in given] if isinstance(given, (list, tuple)) else []


def _filtered(read_: Reader) -> tuple[int, int] | None:
    """Layers at the ends that a filter of versions with TOML leaves out of the converter; None without one."""
    where = next((path for path in _FILTERS if read_.at(path) is not None), None)
    if where is None and not _converters(read_):
        return None
    said = read_.at(where) if where is not None else []
    names = [one.strip() for one in said.split(",")] if isinstance(said, str) else said
    # its models call it `output`
    listed = ["lm_head" if one == "output" else one for one in (names if isinstance(names, (list, tuple)) else [])]
    return native.left_out(listed, where or "model.converters", read_)


def _quant(read_: Reader) -> Quant | None:
    name, listed = str(read_.at("config") or ""), _converters(read_)
    for one in listed:
        text = f"model.converters={cut(one)}: not a converter that is read here"
        read_.cannot(text, one not in ("float8", "mx"))
    word = next((word for word in ("nvfp4", "mxfp8", "float8") if word in name), "")
    word = word or next((found for mark, found in (("mx", "mxfp8"), ("float8", "float8")) if mark in listed), "")
    for section in () if word else ("float8", "mx", "quantize"):  # of TOML files before converters moved into Python
        text = f"{section} has no effect without a converter in model.converters"
        read_.note("inert", text, read_.section(section))
    if not word:
        return None
    read_.note("assumed", f"quantized linears are what {name or 'model.converters'} names: {word}")
    read_.cannot(f"{name}: {_TAIL}", "pct_layers" in name)
    if word != "float8":
        return CONVERTERS[word].quant
    recipe = read_.at("float8.recipe_name", read_.at("quantize.linear.float8.recipe_name"))
    if recipe is None:
        recipe = "tensorwise" if listed else "rowwise"  # torchao's own, in versions with TOML; the converter's since
        read_.default("float8.recipe_name", recipe)
    if listed and recipe == "tensorwise":
        gathers = read_.flag("float8.enable_fsdp_float8_all_gather")
        read_.cannot("float8.enable_fsdp_float8_all_gather: FP8 on the wire with 16 or 32-bit storage", gathers)
        return native.TORCHAO["tensorwise"]
    return CONVERTERS["rowwise_gw_hp" if recipe == "rowwise_with_gw_hp" else "rowwise"].quant
