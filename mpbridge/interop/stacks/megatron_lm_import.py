"""Interprets Megatron-LM's arguments from a command line, a launch script or a checkpoint. Nothing is executed or unpickled.

Read at d98e8a64 (core 0.20.0): validate_args, get_megatron_optimizer_config and get_megatron_ddp_config decide what reaches a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import BadValue, DataError, cut, nearest
from mpbridge.common.formats import DType, dtype
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.base import Imported, engine_with, updated_by
from mpbridge.interop.stacks.described import described
from mpbridge.interop.stacks.known_keys import PRECISION
from mpbridge.interop.stacks.meaning import Sharded
from mpbridge.interop.stacks.megatron_lm_notes import Parsed, cannot_express, contradictions, in_force, inert
from mpbridge.interop.stacks.megatron_lm_options import CORE, NAME, options
from mpbridge.interop.stacks.megatron_modules import rules_of
from mpbridge.interop.stacks.reading import MOST_SUGGESTED, stray
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.megatron_spec.versions import SINCE_017

MODULES_FILE = "--te-precision-config-file"
_VALUES: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        # option -> (name, its default)
        "--loss-scale": ("loss_scale", None),
        "--initial-loss-scale": ("initial_loss_scale", 2.0**32),
        "--min-loss-scale": ("min_loss_scale", 1.0),
        "--loss-scale-window": ("loss_scale_window", 1000.0),
        "--hysteresis": ("hysteresis", 2),
        "--fp8-format": ("fp8", None),
        "--fp8-recipe": ("fp8_recipe", "delayed"),
        "--fp8-margin": ("fp8_margin", 0),
        "--fp8-interval": ("fp8_interval", 1),
        "--fp8-amax-history-len": ("fp8_amax_history_len", 1),
        "--fp8-amax-compute-algo": ("fp8_amax_compute_algo", "most_recent"),
        "--fp8-quantizer-factory": ("fp8_quantizer_factory", None),
        "--fp4-format": ("fp4", None),
        "--fp4-recipe": ("fp4_recipe", "nvfp4"),
        "--fp4-quantizer-factory": ("fp4_quantizer_factory", None),
        "--num-layers-at-start-in-bf16": ("first", 1),
        "--num-layers-at-end-in-bf16": ("last", 1),
        MODULES_FILE: ("modules_file", None),
        "--main-grads-dtype": ("main_grads", "fp32"),
        "--main-params-dtype": ("main_params", "fp32"),
        "--exp-avg-dtype": ("exp_avg", "fp32"),
        "--exp-avg-sq-dtype": ("exp_avg_sq", "fp32"),
        "--megatron-fsdp-main-params-dtype": ("fsdp_main_params", "fp32"),
        "--megatron-fsdp-main-grads-dtype": ("fsdp_main_grads", "auto"),
        "--megatron-fsdp-grad-comm-dtype": ("fsdp_grad_comm", "auto"),
        "--moe-router-dtype": ("router", None),
        "--output-logit-dtype": ("logits", None),
        "--transformer-impl": ("transformer_impl", "transformer_engine"),
        "--data-parallel-sharding-strategy": ("strategy", None),
        "--optimizer": ("optimizer", "adam"),
        "--sgd-momentum": ("sgd_momentum", 0.9),
        "--yaml-cfg": ("yaml", None),
    }
)
_SWITCHES: Mapping[str, str] = MappingProxyType(
    {
        "--bf16": "bf16",
        "--fp16": "fp16",
        "--accumulate-allreduce-grads-in-fp32": "accumulate",
        "--grad-reduce-in-bf16": "reduce_bf16",
        "--no-fp8-wgrad": "no_wgrad",
        "--disable-fp8-wgrad": "no_wgrad",
        "--fp8-param-gather": "fp8_stored",
        "--fp4-param-gather": "fp4_stored",
        "--first-last-layers-bf16": "edges",
        "--use-precision-aware-optimizer": "aware",
        "--use-distributed-optimizer": "distributed",
        "--use-megatron-fsdp": "megatron_fsdp",
        "--use-torch-fsdp2": "fsdp2",
        "--use-custom-fsdp": "megatron_fsdp",
        "--fp32-residual-connection": "residual",
        "--attention-softmax-in-fp32": "softmax",
        "--apply-query-key-layer-scaling": "scaled_by_layer",
        "--reuse-grad-buf-for-mxfp8-param-ag": "reuse",
        "--fp8-output-proj": "fp8_output_proj",
        "--fp16-lm-cross-entropy": "fp16_loss",
    }
)
_STRATEGIES: Mapping[str, Sharded] = MappingProxyType(
    {"no_shard": "nothing", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "everything"}
)
"""Megatron-FSDP's --data-parallel-sharding-strategy -> what is divided."""
_INTEGERS = ("hysteresis", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "first", "last")
_FLOATS = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "sgd_momentum")


def read(words: Iterable[str], *, version: str, assumed: tuple[str, ...] = (), rules: Any = None) -> Imported:
    """The meaning of a command line. rules: the data of --te-precision-config-file. Raises BadValue naming every option whose value cannot be read."""
    parsed = _parse(list(words), version)
    if parsed.faults:
        raise BadValue("\n".join(["these arguments cannot be read:", *(f"  - {fault}" for fault in parsed.faults)]))
    return _meaning(parsed, version=version, assumed=assumed, rules=rules)


def read_data(data: Any, *, version: str) -> Imported:
    """The meaning of MODEL_ARGS in one of its test cases: option -> value. Raises DataError for anything but a mapping."""
    options_ = data.get("MODEL_ARGS", data) if isinstance(data, Mapping) else None
    if not isinstance(options_, Mapping):
        raise DataError(f"expected a mapping with MODEL_ARGS, found {type(data).__name__}")
    if options_ and not any(str(name).startswith("--") for name in options_):
        some = ", ".join(cut(name) for name in list(options_)[:4])
        raise DataError(
            f"no option of Megatron-LM is in it (found {some}): expected MODEL_ARGS, a mapping of options as --bf16: is it another stack's?"
        )
    words: list[str] = []
    for name, value in options_.items():
        if value is not False and value is not None:
            words += [str(name)] if value is True else [str(name), str(value)]
    return read(words, version=version)


def read_values(given: Mapping[str, Any], *, version: str, assumed: tuple[str, ...] = ()) -> Imported:
    """The meaning of a checkpoint's namespace: Megatron-LM's `args`, by its own names, after validate_args."""
    by_dest = _by_dest()
    words: list[str] = []
    faults: list[str] = []
    stated = {option for name, option in by_dest.items() if name in given}
    for name, value in given.items():
        option = by_dest.get(name)
        if option is None or value is None or value is False:
            continue
        if option in _SWITCHES and value is not True:
            faults.append(f"{name}={cut(repr(value))}: expected True or False")
            continue
        text = _spelled(value)
        if value is True or text != str(_VALUES[option][1]):
            words += [option] if value is True else [option, text]
    if faults:
        raise BadValue("\n".join(["these arguments cannot be read:", *(f"  - {fault}" for fault in faults)]))
    found = read(words, version=version, assumed=assumed)
    # what a namespace holds is said, also where it is the parser's own value
    rest = tuple(line for line in found.in_force if stated.isdisjoint(word.rstrip(":") for word in line.split()))
    return dataclasses.replace(found, in_force=rest)


def _spelled(value: Any) -> str:
    """A value in its option's spelling: dtypes are fp32, bf16, fp16 and, for moments, fp8."""
    text = str(value)
    if not text.startswith("torch."):
        return text
    found = dtype(text)
    return "fp8" if found is DType.UINT8 else found.short


def _by_dest() -> Mapping[str, str]:
    """Attribute of args -> the option that sets it."""
    known = {option: option[2:].replace("-", "_") for option in (*_VALUES, *_SWITCHES)}
    special = {"--fp8-format": "fp8", "--fp4-format": "fp4", "--output-logit-dtype": "logit_dtype"}
    dropped = ("--disable-fp8-wgrad", "--no-fp8-wgrad", "--use-custom-fsdp")
    return {name: option for option, name in (known | special).items() if option not in dropped}


def _parse(words: list[str], version: str) -> Parsed:
    read, known = Parsed(dtypes=SINCE_017.holds(CORE[version])), options(version)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            if word.strip() and not word.endswith(".py"):
                read.unknown.append(stray(word, known if len(read.unknown) < MOST_SUGGESTED else ()))
            continue
        name, equals, attached = word.partition("=")
        values: list[str] = [attached] if equals else []
        if name not in known:
            near = nearest(name, known, most=1) if len(read.unknown) < MOST_SUGGESTED else ()
            whole = (
                f" (quoted as one word: its parser needs {cut(name.split()[0])} and its value as separate words)"
                if " " in name
                else ""
            )
            read.unknown.append(cut(name) + (whole or (f" (nearest: {near[0]})" if near else "")))
            continue
        arity = known[name]
        while not equals and position < len(words) and not _is_option(words[position]):
            if arity == 0 or (isinstance(arity, int) and len(values) >= arity):
                break
            values.append(words[position])
            position += 1
        _store(read, name, values)
    return read


def _is_option(word: str) -> bool:
    return word.startswith("--") or (
        word.startswith("-") and not word[1:2].isdigit() and len(word) > 1 and word[1] != "."
    )


def _store(read: Parsed, option: str, values: list[str]) -> None:
    if option in _SWITCHES:
        if values:
            read.faults.append(f"{option}={cut(values[0])}: it takes no value")
        read.values[_SWITCHES[option]] = True
        read.said.add(_SWITCHES[option])
    elif option in _VALUES:
        name = _VALUES[option][0]
        if not values or values[0] == "":
            read.faults.append(f"{option} has no value: pass the script's variables with --env NAME=VALUE")
            return
        try:
            convert = int if name in _INTEGERS else float if name in _FLOATS else str
            read.values[name] = convert(values[0])
        except ValueError:
            read.faults.append(f"{option} {cut(values[0])}: expected a {'whole ' if name in _INTEGERS else ''}number")
        if name == "strategy" and values[0] not in _STRATEGIES:
            read.faults.append(f"{option} {cut(values[0])}: expected {', '.join(_STRATEGIES)}")
        read.said.add(name)
    else:
        read.other.append(option)


def _meaning(read: Parsed, *, version: str, assumed: tuple[str, ...], rules: Any = None) -> Imported:
    values = dict(_VALUES.values()) | read.values
    values["loss_scale"] = values["loss_scale"] or None  # 0 is a dynamic scale there
    inert_, contradicts, more = inert(read, values), contradictions(read, values), []
    fields, undecided = _fields(read, values), list(_yaml(values["yaml"]))
    if values["modules_file"] is not None:
        modules, open_ = _modules(
            values, rules, base="bf16" if read.on("bf16") else "fp16" if read.on("fp16") else "fp32"
        )
        fields |= modules
        undecided += open_
    engine = DEFAULT
    if read.on("megatron_fsdp") or read.on("fsdp2"):
        engine = engine_with("wrapper" if read.on("megatron_fsdp") else "optimizer")
    sharded: Sharded = "everything" if engine != DEFAULT else "optimizer" if read.on("distributed") else "nothing"
    # Megatron-FSDP's default: everything since its flags for dtypes, nothing before
    strategy = values["strategy"] or ("optim_grads_params" if read.dtypes else "no_shard")
    if read.on("megatron_fsdp"):
        sharded = _STRATEGIES[strategy]
    # under torch's FSDP2 it keeps its layout: 16-bit parameters and FP32 main weights
    kind = engine if read.on("megatron_fsdp") else DEFAULT
    meaning = described(fields, contradicts, engine=kind, sharded=sharded)
    if not (read.on("bf16") or read.on("fp16")):
        more.append("neither --bf16 nor --fp16: everything in FP32")
    precise = [one for one in read.other if PRECISION.search(one.replace("-", "_"))]
    open_ = [f"{one}: concerns precision, but decides nothing that is read here" for one in precise]
    found = Imported(
        stack=NAME, version=version, fields=fields, engine=engine, meaning=meaning, inert=tuple(inert_),
        contradicts=tuple(contradicts), cannot_express=tuple(cannot_express(read, values)), unknown=tuple(read.unknown),
        other=tuple(one for one in read.other if one not in precise), undecided=tuple(undecided), assumed=(*assumed, *more, *open_),
        in_force=in_force(read, values, _VALUES, strategy=strategy),
    )  # fmt: skip
    return updated_by(found, values["optimizer"], "--optimizer", momentum=values["sgd_momentum"])


def _modules(values: Mapping[str, Any], rules: Any, *, base: str) -> tuple[dict[str, Any], list[str]]:
    """`modules` by the file that the arguments name, and what is undecided."""
    told = f"{MODULES_FILE} {cut(values['modules_file'])}"
    if rules is None:
        return {}, [f"{told}: rules by module are in that file: put it where the script, or --args, names it"]
    try:
        made = rules_of(rules, base=base, outside=not (values["fp8"] or values["fp4"]))
    except BadValue as error:
        return {}, [f"{told}: {error}"]
    return ({"modules": made} if made else {}), []


def _yaml(file: Any) -> tuple[str, ...]:
    return (
        ()
        if file is None
        else (
            f"--yaml-cfg {cut(file)}: that file decides: pass the arguments that Megatron-LM prints at start (--args)",
        )
    )


def _fields(read: Parsed, values: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    base = "bf16" if read.on("bf16") else "fp16" if read.on("fp16") else "fp32"
    fields[base] = True
    fields["grad_reduce_in_fp32"] = _reduces_in_fp32(read, values)
    fields |= _quantized(read, values)
    if read.on("fp16") or values["loss_scale"] is not None:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
            if values[name] != MixedPrecisionConfig.__dataclass_fields__[name].default:
                fields[name] = values[name]
    fields |= _states(read, values, base)
    if read.on("residual"):
        fields["fp32_residual_connection"] = True
    wide = read.on("softmax") or read.on("scaled_by_layer")  # validate_args switches it on with the latter
    # Transformer Engine's attention does not read it; the local implementation's does, and no flag means off, where megatron-core's class has it on
    if values["transformer_impl"] == "local" and base != "fp32" and not wide:
        fields["attention_softmax_in_fp32"] = False
    if values["router"] is not None:
        fields["moe_router_dtype"] = values["router"]
    if values["logits"] is not None:
        fields["logit_dtype"] = values["logits"]
    return fields


def _states(read: Parsed, values: Mapping[str, Any], base: str) -> dict[str, Any]:
    """The states that the optimizer or the sharding wrapper keeps."""
    fields: dict[str, Any] = {}
    if read.on("aware"):
        fields["use_precision_aware_optimizer"] = True
        for name in ("main_params", "exp_avg", "exp_avg_sq"):
            fields[f"{name}_dtype"] = values[name]
        if values["main_grads"] != "fp32":
            fields["main_grads_dtype"] = values["main_grads"]
    main, wire = values["fsdp_main_grads"], values["fsdp_grad_comm"]
    if read.on("megatron_fsdp") and wire not in ("auto", main):
        fields["grad_accumulation_dtype"] = base if main == "auto" else main
    if read.on("megatron_fsdp") and base != "fp32":  # its flag replaces --main-params-dtype
        asked = values["fsdp_main_params"]
        fields["main_params_dtype"] = base if asked == "auto" else asked
    return fields


def _reduces_in_fp32(read: Parsed, values: Mapping[str, Any]) -> bool:
    """ddp.grad_reduce_in_fp32 after validate_args, or what the sharding engine does instead."""
    if read.on("megatron_fsdp") and read.dtypes:
        main = values["fsdp_main_grads"]
        wire = values["fsdp_grad_comm"] if values["fsdp_grad_comm"] != "auto" else main
        return bool(wire == "fp32") or not (read.on("bf16") or read.on("fp16"))
    if read.on("fsdp2"):
        return not (read.on("bf16") or read.on("fp16"))
    if read.on("bf16"):
        if read.on("reduce_bf16"):
            return False
        return read.on("accumulate") or values["main_grads"] == "fp32"
    return read.on("accumulate")


def _quantized(read: Parsed, values: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if values["fp8"] is not None:
        fields |= {"fp8": values["fp8"], "fp8_recipe": values["fp8_recipe"], "fp8_param": read.on("fp8_stored")}
        if values["fp8_quantizer_factory"]:
            fields["fp8_quantizer_factory"] = values["fp8_quantizer_factory"]
        if values["fp8_recipe"] == "delayed":
            fields |= {name: values[name] for name in ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")}
            fields["fp8_wgrad"] = not read.on("no_wgrad")
        if read.on("reuse"):
            fields["reuse_grad_buf_for_mxfp8_param_ag"] = not read.on("megatron_fsdp")
    if values["fp4"] is not None:
        fields |= {"fp4": values["fp4"], "fp4_recipe": values["fp4_recipe"], "fp4_param": read.on("fp4_stored")}
        if values["fp4_quantizer_factory"]:
            fields["fp4_quantizer_factory"] = values["fp4_quantizer_factory"]
    if (values["fp8"] or values["fp4"]) and read.on("edges"):
        fields["first_last_layers_bf16"] = True
        fields["num_layers_at_start_in_bf16"] = values["first"]
        fields["num_layers_at_end_in_bf16"] = values["last"]
    return fields
