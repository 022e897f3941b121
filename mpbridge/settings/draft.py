"""How checked sections become a fully resolved configuration for one world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mpbridge.common.errors import BadValue, Contradiction, MpbridgeError
from mpbridge.common.facts import ModelShape, OptimizerFacts, Parallel, RunFacts, Versions
from mpbridge.common.probe import environment, installed
from mpbridge.common.traits import DEFAULT, engine_names, known, traits
from mpbridge.planning.memory.keeps import updater
from mpbridge.precision.inert import inert
from mpbridge.precision.registry import recipes
from mpbridge.precision.schedule import spans
from mpbridge.precision.sync.plan import Plan, plain, plan
from mpbridge.settings.schema import defaults
from mpbridge.settings.shape import model_shape, padded_vocabulary, parallel_of, shape_faults, vocabulary
from mpbridge.settings.stages import DEFAULT_TARGET, Stage, is_fast, is_played, played
from mpbridge.settings.training import batch_faults, data_faults, fitting_batch, nonfinite_faults, training_faults

FaultFinder = Callable[[Mapping[str, dict[str, Any]]], list[str]]
"""Finds faults in the sections of a run."""
_ONE_FACT = ("use_distributed_optimizer", "overlap_param_gather")
"""Fields that megatron-core has in two config classes, for ddp and optimizer."""


BROUGHT = "required by the recipe"
"""Origin of a setting outside the plan that the recipe fills in if it was not set."""


def filled(section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over the section's defaults."""
    return defaults(section, latent=bool(given.get("multi_latent_attention"))) | dict(given)


def joined(
    sections: Mapping[str, dict[str, Any]], engine: str | None, faults: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(model, optimizer and ddp as megatron-core needs them, the parallel sizes): settings with two homes are written to both.

    Disagreements between the two are added to `faults`.
    """
    model, optimizer, ddp = dict(sections["model"]), dict(sections["optimizer"]), dict(sections["ddp"])
    for name in _ONE_FACT:
        said = {section[name] for section in (ddp, optimizer) if name in section}
        if len(said) == 2:
            faults.append(
                f"ddp.{name}={ddp[name]} and optimizer.{name}={optimizer[name]} are the same setting: drop one of them"
            )
        elif said:
            ddp[name] = optimizer[name] = said.pop()
    _join_engine(ddp, engine, faults)
    parallel = dict(sections["parallel"])
    for name in defaults("parallel"):
        if name in model and name in parallel and model[name] != parallel[name]:
            faults.append(
                f"parallel.{name}={parallel[name]} and model.{name}={model[name]} are the same setting: drop one of them"
            )
        elif name in model:
            parallel[name] = model[name]
        elif name in parallel:
            model[name] = parallel[name]
    return {"model": model, "optimizer": optimizer, "ddp": ddp}, filled("parallel", parallel)


def _join_engine(ddp: dict[str, Any], engine: str | None, faults: list[str]) -> None:
    """Also sets the engine's switch in the ddp section, where megatron-core has one."""
    own = known(engine or DEFAULT)
    for other in (traits(name) for name in engine_names()):
        switch = other.ddp_switch
        if not switch or own is None:
            continue
        if own.name != other.name and ddp.get(switch):
            faults.append(f"ddp.{switch}=True and engine={engine}: set engine={other.name}")
        elif own.name == other.name and ddp.get(switch) is False:
            faults.append(f"ddp.{switch}=False and engine={engine}: drop one of them")
        elif own.name == other.name:
            ddp[switch] = True
    if own is not None and own.distributed_optimizer == "always" and ddp.get("use_distributed_optimizer") is False:
        faults.append(
            f"ddp.use_distributed_optimizer=False and engine={engine}, which always shards the states: drop it"
        )
    for name, value in (own.ddp_defaults if own is not None else {}).items():
        ddp.setdefault(name, value)


def lengths(model: Mapping[str, Any], data: Mapping[str, Any], tensor: int, faults: list[str]) -> tuple[int, int, int]:
    """(vocab_size, seq_length, max_sequence_length); what is not given is derived from the others or from the tokenizer."""
    seq, most = data["seq_length"], model["max_sequence_length"]
    if seq is None and most is None:
        faults.append("data.seq_length is missing (model.max_sequence_length can be set instead)")
    elif seq is not None and most is not None and seq > most:
        faults.append(
            f"data.seq_length={seq} is above model.max_sequence_length={most}: the model has no positions for it"
        )
    return _rows(model["vocab_size"], data, tensor, faults), seq or most or 1, most or seq or 1


def _rows(given: int | None, data: Mapping[str, Any], tensor: int, faults: list[str]) -> int:
    """Rows of the embedding: as given, otherwise as many as the tokenizer's files require."""
    step = int(data["vocab_divisible_by"]) * tensor
    if given is not None:
        if given % tensor:
            cure = padded_vocabulary(given, step)
            faults.append(
                f"model.vocab_size={given} cannot be divided among {tensor} tensor-parallel ranks: pad it to {cure}"
            )
        return given
    try:
        return padded_vocabulary(vocabulary(data), step)
    except MpbridgeError as error:
        faults.append(str(error))
        return step


@dataclass(slots=True, kw_only=True)
class Draft:
    """Checked sections on the way to a Run."""

    emulate: bool | str
    target: str | None
    te: str | None
    """As in ConfigContainer."""
    given: Mapping[str, dict[str, Any]]
    """Every section as its author wrote it, in canonical plain form."""
    stages: tuple[Stage, ...]
    engine: str
    origin: Mapping[str, str]
    faults: list[str]

    def resolved(
        self, world_size: int, machine: Any, versions: Versions | None, training: bool, also: FaultFinder | None = None
    ) -> dict[str, Any] | None:
        """The fields of a Run except its container, or None if there are faults. also: finds further faults in the sections with their defaults filled in."""
        machine, versions = self._machine(machine, versions)
        inputs, sizes = joined(self.given, self.engine, self.faults)
        brought = self._bring_along(inputs)
        full = {
            name: filled(name, self.given[name])
            for name in ("train", "data", "scheduler", "checkpoint", "logger", "audit")
        }
        if inputs["model"].get("hybrid_override_pattern"):
            inputs["model"] = {
                "is_hybrid_model": True,
                "num_layers": len(inputs["model"]["hybrid_override_pattern"]),
            } | inputs["model"]
        model = filled("model", inputs["model"])
        self._add(shape_faults(model))
        parallel = self._parallel(sizes, world_size)
        if parallel is not None and "global_batch_size" not in self.given["train"]:
            full["train"]["global_batch_size"] = fitting_batch(full["train"], parallel)
        rows, seq, most = lengths(model, full["data"], parallel.tensor if parallel else 1, self.faults)
        self._add(training_faults(full | inputs, parallel) if training else batch_faults(full["train"], parallel))
        self._add([*data_faults(full["data"]), *nonfinite_faults(full["train"], full["checkpoint"])])
        if also is not None:
            self._add(also(full | inputs | {"model": model | {"vocab_size": rows}, "engine": {"name": self.engine}}))
        if len(self.stages) > 1 and full["train"]["train_iters"]:
            self._fit_schedule(full["train"], seq)
        if self.faults or not self.stages or parallel is None:
            return None
        full["data"]["seq_length"] = seq
        train = full["train"]
        train["micro_batch_size"] = train["micro_batch_size"] or train["global_batch_size"] // parallel.data
        planned = self._plan(inputs, versions := versions or installed())
        shape = model_shape(model, vocab_size=rows, seq_length=seq)
        facts = self._facts(shape, parallel, inputs, planned, train, versions=versions, machine=machine)
        filled_in = {name: model[name] for name in GPT_FILLED}
        inputs["model"] = filled_in | inputs["model"] | {"vocab_size": rows, "max_sequence_length": most}
        return {
            "recipe": self.stages[0].recipe,
            "policy": self.stages[0].policy,
            "plan": planned,
            "facts": facts,
            "inputs": inputs,
            "origin": dict(self.origin) | brought,
            "emulate": is_fast(self.emulate),
            "played": (self.target or DEFAULT_TARGET) if is_played(self.emulate) else None,
            "te": self.te,
            "stages": self.stages,
            **full,
        }

    def _machine(self, machine: Any, versions: Versions | None) -> tuple[Any, Versions | None]:
        """The machine and the versions that apply: the simulated ones if the run simulates a machine."""
        if is_played(self.emulate) and not self.faults:
            try:
                return played(self.target, self.te)
            except MpbridgeError as error:
                self.faults.append(str(error))
        return machine, versions

    def _facts(
        self,
        shape: ModelShape,
        parallel: Parallel,
        inputs: Mapping[str, dict[str, Any]],
        planned: Plan,
        train: dict[str, Any],
        *,
        versions: Versions,
        machine: Any,
    ) -> RunFacts:
        """What rules, memory and estimates ask about the run."""
        optimizer = _after("optimizer", inputs, planned)
        return RunFacts(
            shape=shape,
            parallel=parallel,
            engine=self.engine,
            realization=planned.realization,
            optimizer=OptimizerFacts(
                name=updater(optimizer["optimizer"], self.stages[0].policy, traits(self.engine)),
                distributed=optimizer["use_distributed_optimizer"],
                cpu_offload=optimizer["optimizer_cpu_offload"],
                overlap_param_gather_with_step=optimizer["overlap_param_gather_with_optimizer_step"],
                settings=optimizer,
            ),
            model=_after("model", inputs, planned),
            ddp=_after("ddp", inputs, planned),
            micro_batch_size=train["micro_batch_size"],
            global_batch_size=train["global_batch_size"],
            versions=versions,
            machine=machine,
            played=is_played(self.emulate),
            inert=_inert(self.stages),
            environment=environment(),
        )

    def _bring_along(self, inputs: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Fills in what the recipe requires and the author did not set. Returns setting -> where it came from. An explicit false is rejected by a rule."""
        aware = (
            bool(self.stages)
            and bool(self.stages[0].policy.precision_aware)
            and "use_precision_aware_optimizer" not in inputs["optimizer"]
        )
        optional = traits(self.engine).distributed_optimizer == "optional"
        if not aware or not optional or "use_distributed_optimizer" in inputs["ddp"]:
            return {}
        # megatron-core 0.16.1 supports FusedAdam's own main weights in its distributed optimizer only
        for section in ("optimizer", "ddp"):
            inputs[section]["use_distributed_optimizer"] = True
        return {"ddp.use_distributed_optimizer": BROUGHT}

    def _plan(self, inputs: Mapping[str, dict[str, Any]], versions: Versions) -> Plan:
        policy = self.stages[0].policy
        return plan(
            policy,
            model=self.given["model"],
            optimizer=inputs["optimizer"],
            ddp=inputs["ddp"],
            origin=self.origin,
            realization="emulated" if is_fast(self.emulate) and policy.quantized else "native",
            core=versions.megatron_core,
        )

    def _add(self, found: Iterable[str]) -> None:
        """Adds faults that are new, except "x is missing" if x was given and already has a fault."""
        for new in found:
            if new not in self.faults and not any(
                old.startswith(f"{new.partition(' is missing')[0]}=") for old in self.faults
            ):
                self.faults.append(new)

    def _fit_schedule(self, train: dict[str, Any], seq: int) -> None:
        try:
            spans(self.stages, steps=train["train_iters"], tokens_per_step=train["global_batch_size"] * seq)
        except Contradiction as error:
            self.faults += [f"mixed_precision: {fault}" for fault in error.faults]

    def _parallel(self, sizes: dict[str, Any], world_size: int) -> Parallel | None:
        try:
            return parallel_of(sizes, world_size)
        except BadValue as error:
            self.faults.append(f"parallel: {error}")
            return None


GPT_FILLED = ("position_embedding_type", "rotary_base", "rotary_percent", "share_embeddings_and_output_weights")
"""GPTModel's arguments that are always present in a Run's inputs."""


def _inert(stages: tuple[Stage, ...]) -> tuple[str, ...]:
    """What the author added to a recipe without effect."""
    known = [(stage, recipes.get(stage.recipe)) for stage in stages]
    found = [words for stage, entry in known for words in inert(stage.config, entry.make() if entry else None)]
    # the optimizer section may be what makes the optimizer precision-aware
    if any(stage.config.store_param_remainders and not stage.policy.precision_aware for stage in stages):
        found.append("store_param_remainders=true (read with use_precision_aware_optimizer=true only)")
    return tuple(dict.fromkeys(found))


def _after(target: str, inputs: Mapping[str, dict[str, Any]], planned: Plan) -> dict[str, Any]:
    """The section with its defaults and the plan's writes applied, in plain types."""
    return filled(target, inputs[target]) | {name: plain(value) for name, value in planned.of(target).items()}
