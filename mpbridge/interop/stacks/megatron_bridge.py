"""Megatron Bridge: a recipe as the precision part of its run_config.yaml; and its recipe functions, read from their text.

Read at 067f987d: `MixedPrecisionConfig` (training/mixed_precision.py) takes precedence over the same fields of ddp, optimizer and model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import DataError
from mpbridge.common.facts import BESIDE_ADAM
from mpbridge.common.formats import DType
from mpbridge.interop.stacks import megatron_bridge_import as reader
from mpbridge.interop.stacks.base import Export, Fragment, Imported, Line, Request, exported
from mpbridge.interop.stacks.megatron_bridge_import import CORE, FIELDS, NAME, read_data
from mpbridge.interop.stacks.megatron_modules import in_core, reasons, softmax_of
from mpbridge.interop.stacks.optimizers import at_ours, settings
from mpbridge.interop.stacks.python_values import SourceObject, Unknown, is_known, known_fields
from mpbridge.interop.stacks.reading import unknown_of
from mpbridge.interop.stacks.sharded_torch import environment
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Region
from mpbridge.precision.registry import get_mixed_precision_config, key, recipes

VERSIONS = {"0.6": "main, 067f987d"}


def export(request: Request) -> Export:
    """The mixed_precision section, and what only the model, optimizer and ddp sections can express."""
    import yaml

    policy, fsdp = request.policy, request.main_weights == "wrapper"
    there = {name: at_ours(settings(CORE), name) for name in request.updates}
    updates = {one.name: request.updates[name] for name, one in there.items() if one is not None}
    updates |= {"optimizer": request.optimizer} if request.optimizer != "adam" else {}
    sections = {
        "mixed_precision": _section(request), "optimizer": _optimizer(policy) | updates,
        "ddp": _ddp(policy, fsdp) | ({"use_distributed_optimizer": False} if request.optimizer in BESIDE_ADAM else {}),
        "model": _model(policy, softmax_of(request, core=CORE)),
    }  # fmt: skip
    text = yaml.safe_dump({name: values for name, values in sections.items() if values}, sort_keys=False)
    # its meaning, with the options that only the environment tells, and the softmax that is its default too
    quant = in_core(policy.quant, request, CORE)
    regions = (*(region for region in policy.regions[:-1] if region.ends and quant), Region(quant=quant))
    found = read_data(sections, version=request.version).meaning
    theirs = dataclasses.replace(found, regions=regions, softmax_fp32=policy.softmax_fp32)
    pieces = [Fragment(name="run_config.yaml", text=text.rstrip()), *environment(policy.quants)]
    why = {**reasons(request, CORE), **_moved(policy)}
    said = [name for name, one in there.items() if one is not None]
    return exported(request, NAME, theirs, pieces, _unsayable(request), why, said=said)


def torch_dtype(dtype: DType) -> dict[str, Any]:
    """A torch dtype as its run_config.yaml writes one."""
    return {"_target_": f"torch.{dtype.value}", "_call_": False}


def _section(request: Request) -> dict[str, Any]:
    config, policy = request.config, request.policy
    values: dict[str, Any] = {"_target_": reader.TARGET}
    said, quant = config.stored(), in_core(policy.quant, request, CORE)
    # effective fields whose defaults differ between stacks are always written
    always = {"initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"} if policy.loss_scale else set()
    if quant is not None and config.first_last_layers_bf16:
        always |= {"num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}
    if quant is not None and quant.row.history:
        always |= {"fp8_amax_history_len", "fp8_amax_compute_algo"}
    for name, default in FIELDS.items():
        value = torch_dtype(said[name]) if isinstance(said[name], DType) else said[name]
        if name.startswith("num_layers_at") and config.first_last_layers_bf16:
            value = 1 if value is None else value  # None means one layer here and is not a valid value there
        if value is not None and (value != default or name in always):
            values[name] = value
    if policy.quant is not None and quant is None:
        values = {name: value for name, value in values.items() if not name.startswith(("fp8", "fp4"))}
    if quant is not None:
        values[f"fp{quant.bits}_recipe"] = quant.scaling
    values["grad_reduce_in_fp32"] = policy.reduce is DType.FP32
    values |= {"params_dtype": torch_dtype(policy.compute), "pipeline_dtype": torch_dtype(policy.pipeline)}
    return {name: value for name, value in values.items() if name not in ("fp8_param", "fp4_param")}


def _optimizer(policy: PrecisionPolicy) -> dict[str, Any]:
    if not policy.precision_aware:
        return {}
    states = {name: getattr(policy, name) for name in ("main_params", "main_grads", "exp_avg", "exp_avg_sq")}
    dtypes = {f"{name}_dtype": torch_dtype(dtype) for name, dtype in states.items() if dtype is not None}
    kept = {} if policy.remainders is None else {"store_param_remainders": policy.remainders}
    return {"use_precision_aware_optimizer": True, **dtypes, **kept}


def _ddp(policy: PrecisionPolicy, fsdp: bool) -> dict[str, Any]:
    dtypes = {"main_params": policy.main_params or DType.FP32, "main_grads": policy.accumulate or policy.reduce, "grad_comm": policy.reduce}  # fmt: skip
    wrapped = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    wrapped |= {f"megatron_fsdp_{name}_dtype": torch_dtype(dtype) for name, dtype in dtypes.items()}
    return {"use_distributed_optimizer": True} | (wrapped if fsdp else {})


def _model(policy: PrecisionPolicy, softmax: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if policy.router is not None:
        found["moe_router_dtype"] = policy.router.short
    if policy.residual_fp32 is not None:
        found["fp32_residual_connection"] = policy.residual_fp32
    found["attention_softmax_in_fp32"] = softmax
    if policy.quant is not None and policy.quant.factory:
        found[f"fp{policy.quant.bits}_quantizer_factory"] = policy.quant.factory
    return found


def _unsayable(request: Request) -> Iterator[Line]:
    policy, wrapper = request.policy, request.main_weights == "wrapper"
    if policy.params is policy.settled().main_params and policy.params is not DType.FP32 and not wrapper:
        text = "its optimizers always create FP32 main weights for 16-bit parameters; nearest: those, as written here"
        yield Line(fidelity="impossible", fact="main_params_dtype", text=text)
    if wrapper and _moved(policy):
        yield Line(fidelity="different", fact="main weights", text=_moved(policy)["main"])


def _moved(policy: PrecisionPolicy) -> dict[str, str]:
    """Why main weights that FusedAdam would keep as remainders are whole there."""
    text = "its setup() copies fp8_recipe to the optimizer though FP8 is off, which moves them from FusedAdam to megatron-core: set cfg.optimizer.fp8_recipe after setup"
    return {"main": text} if policy.precision_aware and not policy.quantized else {}


OPAQUE = frozenset({"get_mixed_precision_config"})
"""Functions of which the arguments are read, not the body."""
_SECTIONS: Mapping[str, frozenset[str]] = MappingProxyType({
    "mixed_precision": frozenset(FIELDS),
    "optimizer": frozenset({*reader.OPTIMIZER, "use_distributed_optimizer", "use_layer_wise_distributed_optimizer", "optimizer", *settings(CORE)}),
    "ddp": frozenset({
        "grad_reduce_in_fp32", "use_distributed_optimizer", "use_megatron_fsdp", "megatron_fsdp_main_params_dtype",
        "megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype",
    }),
    "model": frozenset({*reader.MODEL, "bf16", "fp16", "fp8", "fp8_param", "fp8_recipe", "fp4", "first_last_layers_bf16"}),
    "dist": frozenset({"use_megatron_fsdp"}),
})  # fmt: skip
"""The fields that are read from a recipe function's sections."""


def read_made(made: Any, notes: Iterable[str], *, name: str, version: str) -> Imported:
    """The meaning of the ConfigContainer that a recipe function returns, from the function's text. Raises DataError if the text does not determine its precision."""
    if not isinstance(made, SourceObject) or "mixed_precision" not in made.attributes:
        raise DataError(f"{name}: its text does not determine the mixed_precision of what it returns")
    data, not_known, unknown = dict[str, Any](), list[str](), list[str]()
    if made.attributes.get("peft") is not None:
        data["peft"] = "..."
    for section, wanted in _SECTIONS.items():
        value = made.attributes.get(section)
        if isinstance(value, Unknown) and section in ("optimizer", "ddp"):
            not_known.append(f"{section} = {value.text}")
        if section == "mixed_precision":
            value = _named_recipe(value, name)
        if isinstance(value, SourceObject):
            unknown += unknown_of(NAME, section, value.attributes)
            rules = {"quant_recipe": "..."} if value.attributes.get("quant_recipe") is not None else {}
            data[section] = known_fields(value, wanted, not_known, section) | rules
        elif isinstance(value, str):
            data[section] = value
    found = read_data(data, version=version)
    open_ = [f"{one}: known only at run time; left at its default" for one in not_known]
    if not is_known(made):
        open_.append(f"{made.callee}(...), which it starts from, is not in this checkout: what it sets beside")
    low = found.meaning.quantization
    # three of recipes/nemotronh/h100: nemotronh_47b and 56b, nemotron_nano_12b_v2
    misnamed = "_bf16_config" in name and low != "none"
    said = (f"{name} says BF16, and its GEMMs are quantized: {low}",) if misnamed else ()
    return dataclasses.replace(
        found, unknown=(*found.unknown, *unknown), contradicts=(*found.contradicts, *said), undecided=(*found.undecided, *open_), assumed=(*found.assumed, *dict.fromkeys(notes))
    )  # fmt: skip


def _named_recipe(value: Any, name: str) -> Any:
    """mixed_precision as a recipe's name, or as an object created by a call, with the attributes set on it since."""
    if isinstance(value, Unknown):
        raise DataError(f"{name}: mixed_precision = {value.text}: known only at run time")
    if not isinstance(value, SourceObject) or value.callee.endswith("MixedPrecisionConfig"):
        return value
    last = value.callee.rpartition(".")[2]
    asked = value.arguments[0] if last in OPAQUE and value.arguments else last
    if not isinstance(asked, str) or key(asked) not in recipes:
        why = "no recipe has that name, and its source is not in this checkout"
        raise DataError(f"{name}: mixed_precision = {value.callee}(...): {why}")
    said = get_mixed_precision_config(key(asked)).derive(**reader.DIFFERS.get(key(asked), {})).stored()
    base = {field: said[field].short if isinstance(said[field], DType) else said[field] for field in FIELDS}
    stated = {field: one for field, one in base.items() if one is not None}
    return SourceObject(callee=reader.TARGET, attributes=stated | value.attributes)
