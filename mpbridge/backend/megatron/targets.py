"""megatron-core's configs: constructed once from inputs and a plan (build), or changed in an existing script (apply). Both refuse to run a recipe as something else."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mpbridge.common.errors import (
    BadValue,
    Contradiction,
    MpbridgeError,
    Refused,
    StalePlan,
    UnknownName,
    UpstreamRefused,
)
from mpbridge.common.facts import Versions
from mpbridge.common.formats import DType, dtype
from mpbridge.common.machines import Machine
from mpbridge.common.machines import machine as named
from mpbridge.common.probe import installed, this_machine
from mpbridge.planning.capability import refuse_unless_native
from mpbridge.planning.rules.hybrid import silent_on
from mpbridge.precision.config import GLOBS
from mpbridge.precision.megatron_spec.precision_field import TARGETS, ModuleRules
from mpbridge.precision.sync.apply import commit, refusal, spelled
from mpbridge.precision.sync.plan import Plan, Receipt
from mpbridge.precision.sync.targets import is_inputs, same
from mpbridge.precision.sync.unkept import refuse_unkept
from mpbridge.settings.schema import ACTIVATIONS
from mpbridge.settings.sections import GPT, YARN

if TYPE_CHECKING:
    from mpbridge.settings.container import Run


log = logging.getLogger("mpbridge")

GPT_ARGUMENTS = frozenset({*GPT.__dataclass_fields__, "parallel_output"})
"""Keys of the model section that are GPTModel's own arguments rather than fields of TransformerConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The configs that an engine is built from."""

    model: Any
    """TransformerConfig or MLATransformerConfig."""
    optimizer: Any
    """OptimizerConfig."""
    ddp: Any
    """DistributedDataParallelConfig."""
    gpt: Mapping[str, Any]
    """Keys of the model section that are GPTModel's own arguments."""


def build(
    inputs: Mapping[str, Any], plan: Plan, *, machine: Machine | str | None = None, versions: Versions | None = None
) -> Targets:
    """megatron-core's configs, constructed once from `inputs` with the plan's writes applied.

    inputs: {"model", "optimizer", "ddp"} -> mapping (or a live config, which is then written in place); "parallel" is merged into the model.
    machine, versions: what will run it; None: the local ones.
    Raises Refused if that machine would run the recipe as something else, UnknownName or Contradiction for fields that do not exist,
    StalePlan if inputs changed since the plan was made, UpstreamRefused if megatron-core's own validation rejects the values.
    """
    _refuse_unable(plan, machine, versions)
    live: dict[str, Any] = {name: inputs[name] for name in TARGETS if name in inputs and not is_inputs(inputs[name])}
    if live:
        writes = tuple(write for write in plan.writes if write.target in live)
        commit(dataclasses.replace(plan, writes=writes, targets=live), spell=_compile)
    sections: dict[str, dict[str, Any]] = {name: dict(inputs.get(name) or {}) for name in TARGETS if name not in live}
    if "model" in sections:
        sections["model"] |= inputs.get("parallel") or {}
    classes = _classes(bool(sections.get("model", {}).get("multi_latent_attention")))
    gpt = _gpt_arguments(sections.get("model", {}), classes["model"])
    _refuse_unknown(sections, classes)
    made = live | {name: _construct(name, classes[name], section, plan) for name, section in sections.items()}
    _add_yarn(made["model"], gpt)
    return Targets(gpt=MappingProxyType(gpt), **made)


def apply(
    plan: Plan,
    *,
    machine: Machine | str | None = None,
    versions: Versions | None = None,
    on_conflict: Literal["warn", "error"] = "warn",
    emulated: bool = False,
) -> Receipt:
    """Writes `plan` onto its live objects, all or nothing; pass the receipt to the next plan's `after`.

    emulated: the caller attaches mpbridge.numerics; a plan for emulation is refused without it, because it would train in 16 bits.
    on_conflict: "warn" logs the author's values that are overridden, on rank 0; "error" raises Conflict. What no field expresses is refused, or logged
    where `wrap` does it: keep_fp32 and frozen.
    Raises Refused, Conflict, StalePlan, UpstreamRefused, BadValue.
    """
    if plan.realization == "emulated" and not emulated and plan.policy is not None and plan.policy.quantized:
        raise Refused(
            "this plan leaves quantization to mpbridge.numerics and writes none to megatron-core: attach the emulation and call "
            "apply(plan, emulated=True), or plan with realization='native'"
        )
    if emulated and plan.realization == "native" and plan.policy is not None and plan.policy.quantized:
        raise BadValue("apply(emulated=True) got a native plan: make it with plan(..., realization='emulated')")
    _refuse_unable(plan, machine, versions)
    _refuse_unspoken(plan, versions or installed())
    receipt = commit(plan, on_conflict=on_conflict, spell=_compile)
    overridden = "\n".join(f"  {write}" for write in plan.conflicts)
    said = [f"the recipe overrides values that were set:\n{overridden}"] if overridden else []
    said += [
        f"no field of megatron-core expresses {name}={list(globs)}: mpbridge.wrap does that to the built model, nobody else"
        for name in GLOBS
        if (globs := getattr(plan.policy, name, ()))
    ]
    for line in said if os.environ.get("RANK", "0") == "0" else ():  # only on torchrun's rank 0
        log.warning("%s", line)
    return receipt


def _refuse_unspoken(plan: Plan, versions: Versions) -> None:
    """Raises Refused for a scaling that no megatron-core field can express, since it runs in linears that mpbridge's own engines insert; for a model that
    the installed megatron-core would train as something else without a message; and as `refuse_unkept` does."""
    if plan.policy is None:
        return
    native = plan.realization == "native"
    unspoken = dict.fromkeys(quant.scaling for quant in plan.policy.quants if native and quant.row.core is None)
    if unspoken:
        raise Refused(
            f"megatron-core has no setting for {', '.join(unspoken)} scaling, so this script's linears would train in 16 bits;"
            " train it with mpbridge, whose engines put such GEMMs into the linears"
        )
    refuse_unkept(plan, versions.megatron_core)
    live = plan.targets.get("model")
    if native and live is not None and (why := silent_on(plan.policy, live, versions)):
        raise Refused(why)


def _refuse_unable(plan: Plan, machine: Machine | str | None, versions: Versions | None) -> None:
    """Raises Refused if that machine, or the one of that name, would run a quantized policy as something else. What is not given is taken from the local one."""
    there = named(machine) if isinstance(machine, str) else machine
    if plan.policy is not None and plan.realization != "emulated" and plan.policy.quantized:
        refuse_unless_native(plan.policy, there or this_machine(), versions or installed())


def _compile(rules: Any, config: Any) -> Any:
    return importlib.import_module("mpbridge.backend.megatron.quant_recipe").compile_rules(rules, config)


def _classes(latent: bool) -> dict[str, type]:
    # imported here rather than at the top: importing megatron-core takes seconds, and a refusal should not
    transformer = importlib.import_module("megatron.core.transformer.transformer_config")
    return {
        "model": transformer.MLATransformerConfig if latent else transformer.TransformerConfig,
        "optimizer": importlib.import_module("megatron.core.optimizer").OptimizerConfig,
        "ddp": importlib.import_module("megatron.core.distributed").DistributedDataParallelConfig,
    }


def _gpt_arguments(section: dict[str, Any], config: type) -> dict[str, Any]:
    """Moves GPTModel's own arguments out of the model section; those that the config also has (MLA's rotary_base) stay in both."""
    own = {name: section[name] for name in GPT_ARGUMENTS if name in section}
    for name in own:
        if name not in _fields(config):
            del section[name]
    return own


def _add_yarn(config: Any, gpt: dict[str, Any]) -> None:
    """Moves yarn_* from GPTModel's arguments onto the config object, where GPTModel and its attention look for them (they are not fields of any class).

    Only with YaRN: attention scales sines and cosines of every model whose config has such an attribute.
    """
    given = {name: gpt.pop(name) for name in YARN if name in gpt}
    if gpt.get("position_embedding_type") == "yarn":
        plain = GPT()
        for name in YARN:
            setattr(config, name, given.get(name, getattr(plain, name)))


def _fields(config: type) -> Mapping[str, Any]:
    return {field.name: field for field in dataclasses.fields(config) if field.init}


def _refuse_unknown(sections: Mapping[str, Mapping[str, Any]], classes: Mapping[str, type]) -> None:
    faults = [
        UnknownName(f"field of {classes[name].__name__}", field, _fields(classes[name]))
        for name, section in sections.items()
        for field in section
        if field not in _fields(classes[name])
    ]
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise Contradiction(map(str, faults), subject="megatron-core does not have these settings")


def _construct(name: str, config: type, section: dict[str, Any], plan: Plan) -> Any:
    fields = _fields(config)
    values = {field: _value(f"{name}.{field}", value, fields[field]) for field, value in section.items()}
    rules: list[tuple[str, Any]] = []
    for write in plan.writes:
        if write.target != name:
            continue
        now = section.get(write.field)
        if now is not None and not same(_value(write.name, now, fields[write.field]), write.before):
            raise StalePlan(f"{write.name} is {now!r} now and was {write.before!r} when the plan was made: plan again")
        if isinstance(write.after, ModuleRules):
            rules.append((write.field, write.after))  # compiled once the config is complete
        else:
            values[write.field] = spelled(write.after, None, None)
    try:
        made = config(**values)
    except MpbridgeError:
        raise
    except Exception as fault:
        raise UpstreamRefused(refusal(name, fault)) from fault
    for field, value in rules:
        setattr(made, field, spelled(value, made, _compile))
    return made


def _value(where: str, value: Any, field: Any) -> Any:
    """An input in the form that megatron-core takes; accepts dtypes in any spelling, functions and enumerations by name."""
    if isinstance(value, (str, DType)) and "torch.dtype" in str(field.type):
        try:
            return dtype(value).torch()
        except BadValue as fault:
            raise BadValue(f"{where}: {fault}") from None
    if isinstance(value, str) and field.name == "activation_func":
        if value not in ACTIVATIONS:
            raise UnknownName("activation function", value, ACTIVATIONS)
        module, _, function = ACTIVATIONS[value].partition(":")
        return getattr(importlib.import_module(module), function)
    if isinstance(value, str) and field.name == "attention_backend":
        backends = importlib.import_module("megatron.core.transformer.enums").AttnBackend.__members__
        if value not in backends:
            raise UnknownName("attention backend", value, backends)
        return backends[value]
    return value


_CPU_DEFAULTS = {
    # its kernel needs CUDA; megatron-core's own default is True
    "masked_softmax_fusion": False,
    # the full weight is drawn and then sliced, so that initialisation does not depend on tensor parallelism
    "use_cpu_initialization": True,
}
"""Model fields that a CPU run sets if the author has not."""

_COMPILED = ("bias_dropout_fusion", "bias_activation_fusion", "cross_entropy_loss_fusion")
"""Model fields that use torch.compile, which needs a C++ compiler on a CPU."""


def sections(run: Run, *, cuda: bool) -> dict[str, dict[str, Any]]:
    """The run's inputs; on a CPU with the CPU defaults below the author's values."""
    inputs = {name: dict(run.inputs[name]) for name in ("model", "optimizer", "ddp")}
    if not cuda:
        inputs["model"] = _CPU_DEFAULTS | inputs["model"]
        _drop_compiled(inputs["model"])
    return inputs


def _drop_compiled(model: dict[str, Any]) -> None:
    """Switches fusions off if there is no compiler for them. On a CPU they save too little to justify a refusal: 343 against 344 ms per step of gpt_tiny."""
    wanted = [field for field in _COMPILED if model.get(field)]
    if wanted and not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))):
        left = ", model.".join(wanted)
        log.warning("no C++ compiler (g++, clang++ or $CXX) for torch.compile: model.%s left off", left)
        model.update(dict.fromkeys(wanted, False))


def build_targets(run: Run, *, cuda: bool, inputs: Mapping[str, dict[str, Any]] | None = None) -> Targets:
    """megatron-core's configs and GPTModel's own arguments, with the run's plan written into them once.

    inputs: what to build from; None: `sections`. Raises Refused if this machine would run the recipe as something else: a run may
    have been resolved for another machine.
    """
    here = this_machine() if cuda else named("cpu")
    return build(sections(run, cuda=cuda) if inputs is None else inputs, run.plan, machine=here, versions=installed())
