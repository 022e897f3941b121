"""Interprets Megatron-LM's arguments from a command line, a launch script or a checkpoint. Nothing is executed or unpickled.

Read at d98e8a64 (core 0.20.0): validate_args, get_megatron_optimizer_config and get_megatron_ddp_config decide what reaches a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mpbridge.common.errors import BadValue, DataError, cut
from mpbridge.common.formats import say
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks import megatron_lm_arguments as arguments
from mpbridge.interop.stacks.base import Imported, engine_with
from mpbridge.interop.stacks.meaning import Sharded, described
from mpbridge.interop.stacks.megatron_lm_arguments import MODULES_FILE, NAME, Arguments
from mpbridge.interop.stacks.megatron_modules import rules_of
from mpbridge.interop.stacks.optimizers import NO_DTYPES, OFFLOADED, at_ours, host_settings
from mpbridge.interop.stacks.reading import PRECISION, imported, raise_faults
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.scalings import SCALINGS

_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
_STATES = ("main_params", "main_grads", "exp_avg", "exp_avg_sq")
_WRAPPED = ("fsdp_main_params", "fsdp_main_grads", "fsdp_grad_comm")


def read(words: Iterable[str], *, version: str, rules: Any = None) -> Imported:
    """The meaning of a command line. rules: the data of --te-precision-config-file. Raises BadValue naming every option whose value cannot be read."""
    given = arguments.parse(list(words), version)
    raise_faults(given.read.faults, "these arguments")
    given.values["loss_scale"] = given["loss_scale"] or None  # 0 is a dynamic scale there
    return _meaning(given, rules)


def read_data(data: Any, *, version: str) -> Imported:
    """The meaning of MODEL_ARGS in one of its test cases: option -> value. Raises DataError for anything but a mapping."""
    options_ = data.get("MODEL_ARGS", data) if isinstance(data, Mapping) else None
    if not isinstance(options_, Mapping):
        raise DataError(f"expected a mapping with MODEL_ARGS, found {type(data).__name__}")
    if options_ and not any(str(name).startswith("--") for name in options_):
        some = ", ".join(cut(name) for name in list(options_)[:4])
        expected = "MODEL_ARGS, a mapping of options as --bf16: is it another stack's?"
        raise DataError(f"no option of Megatron-LM is in it (found {some}): expected {expected}")
    given = {str(name): value for name, value in options_.items() if value is not False and value is not None}
    words = [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]
    return read(words, version=version)


def read_values(given: Mapping[str, Any], *, version: str) -> Imported:
    """The meaning of a checkpoint's namespace: Megatron-LM's `args`, by its own names, after validate_args."""
    names, words, faults = arguments.by_dest(), list[str](), list[str]()
    stated = {option for name, option in names.items() if name in given}
    own = arguments.own_settings(version)
    for name, value in given.items():
        option, setting = names.get(name), at_ours(own, name)
        if setting is not None and setting.option and value is not None:
            stated.add(setting.option)
            words += setting.flags(value).split(maxsplit=1) if value != setting.default else []
        if option is None or value is None or value is False:
            continue
        if option in arguments.SWITCHES and value is not True:
            faults.append(f"{name}={cut(repr(value))}: expected True or False")
            continue
        text = arguments.spelled(value)
        if value is True or text != str(arguments.VALUES[option][1]):
            words += [option] if value is True else [option, text]
    if given.get("use_layer_wise_distributed_optimizer") is True:  # what validate_args makes of the option
        words += ["--use-distributed-optimizer"]
    raise_faults(faults, "these arguments")
    found = read(words, version=version)
    # what a namespace holds is said, also where it is the parser's own value
    rest = tuple(line for line in found.in_force if stated.isdisjoint(word.rstrip(":") for word in line.split()))
    return dataclasses.replace(found, in_force=rest)


def _meaning(given: Arguments, rules: Any) -> Imported:
    read_, trained = given.read, given.trained
    read_.note_rows(*_notes(given), *trained.notes("--optimizer"))
    fields = _fields(given) | _modules(given, rules)
    sharded: Sharded = "optimizer" if trained.divided else "nothing"
    engine = kind = DEFAULT
    if given.on("megatron_fsdp"):
        engine, sharded = engine_with("wrapper"), arguments.STRATEGIES[given.strategy]
        kind = engine
    elif given.on("fsdp2"):  # under which it keeps its layout: 16-bit parameters and FP32 main weights
        engine, sharded = engine_with("optimizer"), "everything"
    meaning = described(fields, read_.notes["contradicts"], engine=kind, sharded=sharded)
    precise = [one for one in given.other if PRECISION.search(one.replace("-", "_"))]
    read_.notes["assumed"] += [f"{one}: concerns precision, but decides nothing that is read here" for one in precise]
    found = imported(
        read_, NAME, given.version, meaning, fields, engine=engine, optimizer=given["optimizer"], where="--optimizer", momentum=trained["sgd_momentum"],
        trained=trained,
    )  # fmt: skip
    other = tuple(one for one in given.other if one not in precise)
    return dataclasses.replace(found, other=other, in_force=tuple(_in_force(given)))


def _modules(given: Arguments, rules: Any) -> dict[str, Any]:
    """`modules` by the file that the arguments name; what is undecided is noted."""
    file, made = given["modules_file"], {}
    if file is not None and rules is None:
        text = "rules by module are in that file: put it where the script, or --args, names it"
        given.read.note("undecided", f"{MODULES_FILE} {cut(file)}: {text}")
    try:
        made = {} if rules is None else rules_of(rules, base=given.base, outside=not (given["fp8"] or given["fp4"]))
    except BadValue as error:
        given.read.note("undecided", f"{MODULES_FILE} {cut(file)}: {error}")
    return {"modules": made} if made else {}


def _fields(given: Arguments) -> dict[str, Any]:
    fields = {given.base: True, "grad_reduce_in_fp32": _reduces_in_fp32(given)} | _quantized(given)
    if given.on("fp16") or given["loss_scale"] is not None:
        defaults = MixedPrecisionConfig.__dataclass_fields__
        fields |= {name: given[name] for name in ("loss_scale", *_SCALE) if given[name] != defaults[name].default}
    fields |= _states(given)
    wide = given.on("softmax", "scaled_by_layer")  # validate_args switches it on with the latter
    # Transformer Engine's attention does not read it; the local implementation's does, and no flag means off, where megatron-core's class has it on
    narrow = given["transformer_impl"] == "local" and given.base != "fp32" and not wide
    model = {
        "fp32_residual_connection": True if given.on("residual") else None, "attention_softmax_in_fp32": False if narrow else None,
        "moe_router_dtype": given["router"], "logit_dtype": given["logits"],
    }  # fmt: skip
    return fields | {name: value for name, value in model.items() if value is not None}


def _states(given: Arguments) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if given.on("aware"):
        fields["use_precision_aware_optimizer"] = True
        fields |= {f"{name}_dtype": given[name] for name in _STATES if name != "main_grads" or given[name] != "fp32"}
        fields |= OFFLOADED if given.on("offload") else {}
    main, wire, asked = given["fsdp_main_grads"], given["fsdp_grad_comm"], given["fsdp_main_params"]
    if given.on("megatron_fsdp") and wire not in ("auto", main):
        fields["grad_accumulation_dtype"] = given.base if main == "auto" else main
    if given.on("megatron_fsdp") and given.base != "fp32":  # its flag replaces --main-params-dtype
        fields["main_params_dtype"] = given.base if asked == "auto" else asked
    return fields


def _reduces_in_fp32(given: Arguments) -> bool:
    """ddp.grad_reduce_in_fp32 after validate_args, or what the sharding engine does instead."""
    if given.on("megatron_fsdp") and given.dtypes:
        main, wire = given["fsdp_main_grads"], given["fsdp_grad_comm"]
        return bool((main if wire == "auto" else wire) == "fp32") or given.base == "fp32"
    if given.on("fsdp2"):
        return given.base == "fp32"
    if given.on("bf16"):
        return not given.on("reduce_bf16") and (given.on("accumulate") or given["main_grads"] == "fp32")
    return given.on("accumulate")


def _quantized(given: Arguments) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for low in ("fp8", "fp4"):
        if given[low] is not None and not (low == "fp4" and given.never_fp4):
            fields |= {low: given[low], f"{low}_recipe": given[f"{low}_recipe"], f"{low}_param": given.on(f"{low}_stored")}  # fmt: skip
            factory = f"{low}_quantizer_factory"
            fields |= {factory: given[factory]} if given[factory] else {}
    if given["fp8"] is not None and given["fp8_recipe"] == "delayed":
        fields |= {name: given[name] for name in _DELAYED} | {"fp8_wgrad": not given.on("no_wgrad")}
    if given["fp8"] is not None and given.on("reuse"):
        fields["reuse_grad_buf_for_mxfp8_param_ag"] = not given.on("megatron_fsdp")
    if (given["fp8"] or given["fp4"]) and given.on("edges"):
        fields["first_last_layers_bf16"] = True
        fields |= {"num_layers_at_start_in_bf16": given["first"], "num_layers_at_end_in_bf16": given["last"]}
    return fields


def _notes(given: Arguments) -> Iterator[tuple[str, Any, str]]:
    """(kind, whether it applies, text): what the parser refuses, accepts without effect, or leaves to a file; and what mpbridge cannot express."""
    said, on, fp8, fp4, recipe = given.said, given.on, given["fp8"], given["fp4"], given["fp8_recipe"]
    aware, wide, low, edges = on("aware"), on("accumulate"), on("reduce_bf16"), on("edges")
    alone, moves, stored = "fp8_recipe" in said and fp8 is None, aware and recipe != "delayed", on("fp8_stored")
    fsdp, divided = on("megatron_fsdp"), on("distributed", "megatron_fsdp", "fsdp2")
    narrow = any(given[name] != "fp32" for name in _STATES)
    unread = any(given[name] != "fp32" for name in _STATES if name != "main_grads")
    local, offload = given["transformer_impl"] == "local", on("offload")
    yield from (
        ("inert", alone and not moves, "--fp8-recipe without --fp8-format: nothing is quantized"),
        ("inert", alone and moves, f"--fp8-recipe {recipe} without --fp8-format quantizes nothing, but moves the main weights from FusedAdam to megatron-core"),
        ("inert", fp4 and given.never_fp4, f"--fp4-format with Mamba layers: every linear runs in {given.base.upper()}, since a hybrid of megatron-core before 0.17 never enters the FP4 context"),
        ("inert", {*_DELAYED} & said and (fp8 is None or recipe != "delayed"), "--fp8-amax-* and --fp8-margin have an effect only under delayed scaling"),
        ("inert", "fp8_interval" in said, "--fp8-interval: Transformer Engine no longer reads it"),
        ("inert", {"first", "last"} & said and not edges, "--num-layers-at-*-in-bf16 without --first-last-layers-bf16"),
        ("inert", edges and fp8 is None and fp4 is None, "--first-last-layers-bf16 without a quantization"),
        ("inert", on("softmax") and not local, "--attention-softmax-in-fp32: Transformer Engine's attention does not read it"),
        ("inert", wide and low, "--accumulate-allreduce-grads-in-fp32 with --grad-reduce-in-bf16: BF16 wins"),
        ("inert", wide and (on("fsdp2") or (fsdp and given.dtypes)), "--accumulate-allreduce-grads-in-fp32: the sharding engine does not read it"),
        ("inert", low and on("fp16"), "--grad-reduce-in-bf16 under --fp16: gradients are reduced in FP16"),
        ("inert", {*_STATES} & said and not aware and all(given[name] == "fp32" for name in {*_STATES} & said),
         "--main-*-dtype and --exp-avg-*-dtype have an effect only with --use-precision-aware-optimizer"),
        ("inert", {*_SCALE} & said and not on("fp16"), "details of dynamic loss scaling without --fp16"),
        ("inert", {*_WRAPPED} & said and not fsdp, "--megatron-fsdp-*-dtype without --use-megatron-fsdp"),
        ("contradicts", on("bf16") and on("fp16"), "--bf16 and --fp16: the parser refuses both together"),
        ("contradicts", aware and not divided, "--use-precision-aware-optimizer without --use-distributed-optimizer: megatron-core refuses it"),
        ("contradicts", aware and given["optimizer"] != "adam",
         f"--use-precision-aware-optimizer with --optimizer {cut(given['optimizer'])}: megatron-core takes only adam"),
        ("contradicts", narrow and not aware, "16-bit optimizer states without --use-precision-aware-optimizer: the parser refuses them"),
        ("inert", offload and unread, f"--main-params-dtype and --exp-avg-*-dtype with --optimizer-cpu-offload: {NO_DTYPES}"),
        ("contradicts", offload and not aware, "--optimizer-cpu-offload without --use-precision-aware-optimizer: the parser refuses it"),
        ("cannot_express", offload, f"--optimizer-cpu-offload: {host_settings(given['offload_fraction'])}"),
        ("contradicts", wide and given["main_grads"] == "bf16", "--main-grads-dtype bf16 with --accumulate-allreduce-grads-in-fp32: the parser refuses it"),
        ("contradicts", fp8 and fp4, "--fp8-format and --fp4-format: megatron-core refuses both together"),
        *(("contradicts", given[f"{one}_recipe"] != "custom" and all(row.core != given[f"{one}_recipe"] for row in SCALINGS.values()),
           f"--{one}-recipe {cut(given[f'{one}_recipe'])}: the parser has no such recipe") for one in ("fp8", "fp4")),
        ("contradicts", on("fsdp2") and fsdp, "--use-torch-fsdp2 with --use-megatron-fsdp: described as Megatron-FSDP"),
        ("contradicts", fp8 == "hybrid" and recipe == "mxfp8",
         "--fp8-format hybrid with --fp8-recipe mxfp8: gradients are quantized to E5M2, which diverged and was withdrawn (Megatron-Bridge#638)"),
        ("contradicts", edges and fp8 and recipe == "delayed", "--first-last-layers-bf16 with delayed scaling: megatron-core refuses it"),
        ("contradicts", stored and fp8 is None, "--fp8-param-gather without --fp8-format"),
        ("contradicts", stored and not divided, "--fp8-param-gather needs --use-distributed-optimizer or an FSDP engine"),
        ("contradicts", local and (fp8 or fp4), "--transformer-impl local with FP8: accepted, but nothing is quantized"),
        ("cannot_express", on("fp8_output_proj"), "--fp8-output-proj: the output layer in MXFP8"),
        ("cannot_express", on("fp16_loss"), "--fp16-lm-cross-entropy: model.fp16_lm_cross_entropy, not a precision field of a recipe"),
        ("assumed", given.base == "fp32", "neither --bf16 nor --fp16: everything in FP32"),
        ("undecided", given["yaml"] is not None,
         f"--yaml-cfg {cut(given['yaml'])}: that file decides: pass the arguments that Megatron-LM prints at start (--args)"),
    )  # fmt: skip


def _in_force(given: Arguments) -> Iterator[str]:
    """'--option value' of each option that is read beside what is said, then what validate_args or an engine settles where no flag of its own is given."""
    said, on, fp8 = given.said, given.on, given["fp8"] is not None
    engine = on("megatron_fsdp", "fsdp2")
    read_beside = (
        (("optimizer", "transformer_impl"), True), (_SCALE, on("fp16") and given["loss_scale"] is None),
        (("fp8_recipe",), fp8), (_DELAYED, fp8 and given["fp8_recipe"] == "delayed"), (("fp4_recipe",), given["fp4"] is not None),
        (("first", "last"), (given["fp8"] or given["fp4"]) and on("edges")), (_STATES, on("aware")), (("offload_fraction",), on("offload")), (_WRAPPED, on("megatron_fsdp") and given.dtypes),
    )  # fmt: skip
    asked = {name for names, applies in read_beside if applies for name in names} - said
    for option, (name, _) in arguments.VALUES.items():
        value = given[name]
        if name in asked:  # whole numbers as they are typed
            yield f"{option} {say(int(value) if isinstance(value, float) and value.is_integer() else value)}"
    for one in given.trained.read:
        if one.name not in given.own and one.option and not isinstance(one.default, bool):
            yield one.told(one.default)
    reduction = not engine and not on("accumulate", "reduce_bf16")
    if reduction and on("bf16") and given["main_grads"] == "fp32":
        yield "--accumulate-allreduce-grads-in-fp32 (its parser switches it on under --bf16)"
    elif reduction and on("fp16"):
        yield "no --accumulate-allreduce-grads-in-fp32: gradients are reduced in FP16"
    if given.base != "fp32" and not on("aware") and not engine:
        yield "no --use-precision-aware-optimizer: main weights and moments are FP32"
    if on("megatron_fsdp") and "strategy" not in said:
        yield f"--data-parallel-sharding-strategy {given.strategy}"
    if not engine and not given.trained.divided:
        yield "no --use-distributed-optimizer: every rank keeps all states"
