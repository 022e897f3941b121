"""How checked sections become a fully resolved configuration for one world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mpbridge.common.errors import Contradiction, MpbridgeError
from mpbridge.common.facts import OptimizerFacts, RunFacts, Versions
from mpbridge.common.probe import environment, installed
from mpbridge.common.traits import DEFAULT, engine_names, known, traits
from mpbridge.planning.memory.keeps import updater
from mpbridge.precision.inert import inert
from mpbridge.precision.registry import recipes
from mpbridge.precision.schedule import shares
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
_T = TypeVar("_T")


def filled(section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over the section's defaults."""
    return defaults(section, latent=bool(given.get("multi_latent_attention"))) | dict(given)


def joined(
    sections: Mapping[str, dict[str, Any]], engine: str | None, faults: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """(model, optimizer and ddp as megatron-core needs them, the parallel sizes): settings with two homes are written to both.

    Disagreements between the two are added to `faults`.
    """
    made = {name: dict(sections[name]) for name in ("model", "optimizer", "ddp", "parallel")}

    def same(name: str, one: str, other: str) -> None:
        said = {made[section][name] for section in (one, other) if name in made[section]}
        if len(said) == 2:
            both = f"{one}.{name}={made[one][name]} and {other}.{name}={made[other][name]}"
            faults.append(f"{both} are the same setting: drop one of them")
        elif said:
            made[one][name] = made[other][name] = said.pop()

    for name in _ONE_FACT:
        same(name, "ddp", "optimizer")
    _join_engine(made["ddp"], engine, faults)
    for name in defaults("parallel"):
        same(name, "parallel", "model")
    return made, filled("parallel", made.pop("parallel"))


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
        text = f"ddp.use_distributed_optimizer=False and engine={engine}, which always shards the states: drop it"
        faults.append(text)
    for name, value in (own.ddp_defaults if own is not None else {}).items():
        ddp.setdefault(name, value)


def lengths(model: Mapping[str, Any], data: Mapping[str, Any], tensor: int, faults: list[str]) -> tuple[int, int, int]:
    """(vocab_size, seq_length, max_sequence_length); what is not given is derived from the others or from the tokenizer."""
    seq, most, rows = data["seq_length"], model["max_sequence_length"], model["vocab_size"]
    step = int(data["vocab_divisible_by"]) * tensor
    if seq is None and most is None:
        faults.append("data.seq_length is missing (model.max_sequence_length can be set instead)")
    elif seq is not None and most is not None and seq > most:
        above = f"data.seq_length={seq} is above model.max_sequence_length={most}"
        faults.append(f"{above}: the model has no positions for it")
    if rows is not None and rows % tensor:
        cure = f"pad it to {padded_vocabulary(rows, step)}"
        faults.append(f"model.vocab_size={rows} cannot be divided among {tensor} tensor-parallel ranks: {cure}")
    elif rows is None:
        try:
            rows = padded_vocabulary(vocabulary(data), step)
        except MpbridgeError as error:
            faults.append(str(error))
            rows = step
    return rows, seq or most or 1, most or seq or 1


@dataclass(slots=True, kw_only=True)
class Draft:
    """Checked sections on the way to a Run."""

    container: Any
    """The ConfigContainer."""
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
        container, engine = self.container, self.engine
        is_simulated = is_played(container.emulate)
        if is_simulated and not self.faults:  # then its machine and its versions apply
            chosen = self._tried("", lambda: played(container.target, container.te))
            machine, versions = chosen or (machine, versions)
        inputs, sizes = joined(self.given, engine, self.faults)
        brought = self._bring_along(inputs)
        own = ("train", "data", "scheduler", "checkpoint", "logger", "audit")
        full = {name: filled(name, self.given[name]) for name in own}
        train, data, pattern = full["train"], full["data"], inputs["model"].get("hybrid_override_pattern")
        if pattern:
            inputs["model"] = {"is_hybrid_model": True, "num_layers": len(pattern)} | inputs["model"]
        model = filled("model", inputs["model"])
        self._add(shape_faults(model))
        parallel = self._tried(
            "parallel: ", lambda: parallel_of(sizes, world_size, model.get("pipeline_model_parallel_layout"))
        )
        if parallel is not None and "global_batch_size" not in self.given["train"]:
            train["global_batch_size"] = fitting_batch(train, parallel)
        rows, seq, most = lengths(model, data, parallel.tensor if parallel else 1, self.faults)
        self._add(training_faults(full | inputs, parallel) if training else batch_faults(train, parallel))
        self._add([*data_faults(data), *nonfinite_faults(train, full["checkpoint"])])
        if also is not None:
            self._add(also(full | inputs | {"model": model | {"vocab_size": rows}, "engine": {"name": engine}}))
        if len(self.stages) > 1:
            length = {"steps": train["train_iters"] or 0, "tokens_per_step": train["global_batch_size"] * seq}
            self._tried("mixed_precision: ", lambda: shares(self.stages, **length))
        if self.faults or not self.stages or parallel is None:
            return None
        data["seq_length"] = seq
        train["micro_batch_size"] = train["micro_batch_size"] or train["global_batch_size"] // parallel.data
        versions, policy = versions or installed(), self.stages[0].policy
        planned = plan(
            policy, model=self.given["model"], optimizer=inputs["optimizer"], ddp=inputs["ddp"], origin=self.origin, core=versions.megatron_core,
            realization="emulated" if is_fast(container.emulate) and policy.quantized else "native",
        )  # fmt: skip
        shape = model_shape(model, vocab_size=rows, seq_length=seq)
        facts = self._facts(inputs, planned, train, shape=shape, parallel=parallel, versions=versions, machine=machine)
        filled_in = {name: model[name] for name in GPT_FILLED}
        inputs["model"] = filled_in | inputs["model"] | {"vocab_size": rows, "max_sequence_length": most}
        return full | {
            "recipe": self.stages[0].recipe, "policy": policy, "plan": planned, "facts": facts, "inputs": inputs, "origin": dict(self.origin) | brought,
            "emulate": is_fast(container.emulate), "played": (container.target or DEFAULT_TARGET) if is_simulated else None, "te": container.te,
            "stages": self.stages,
        }  # fmt: skip

    def _facts(
        self, inputs: Mapping[str, dict[str, Any]], planned: Plan, train: Mapping[str, Any], **known: Any
    ) -> RunFacts:
        """What rules, memory and estimates ask about the run. known: its shape, parallel sizes, versions and machine."""
        optimizer, policy = _after("optimizer", inputs, planned), self.stages[0].policy
        return RunFacts(
            engine=self.engine, realization=planned.realization,
            optimizer=OptimizerFacts(
                name=updater(optimizer["optimizer"], policy, traits(self.engine)), distributed=optimizer["use_distributed_optimizer"],
                cpu_offload=optimizer["optimizer_cpu_offload"], overlap_param_gather_with_step=optimizer["overlap_param_gather_with_optimizer_step"],
                settings=optimizer,
            ),
            model=_after("model", inputs, planned), ddp=_after("ddp", inputs, planned), micro_batch_size=train["micro_batch_size"],
            global_batch_size=train["global_batch_size"], played=is_played(self.container.emulate), inert=_inert(self.stages), environment=environment(), **known,
        )  # fmt: skip

    def _bring_along(self, inputs: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Fills in what the recipe requires and the author did not set. Returns setting -> where it came from. An explicit false is rejected by a rule."""
        aware = bool(self.stages and self.stages[0].policy.precision_aware)
        said = "use_precision_aware_optimizer" in inputs["optimizer"] or "use_distributed_optimizer" in inputs["ddp"]
        if not aware or said or traits(self.engine).distributed_optimizer != "optional":
            return {}
        # megatron-core 0.16.1 supports FusedAdam's own main weights in its distributed optimizer only
        for section in ("optimizer", "ddp"):
            inputs[section]["use_distributed_optimizer"] = True
        return {"ddp.use_distributed_optimizer": BROUGHT}

    def _add(self, found: Iterable[str]) -> None:
        """Adds faults that are new, except "x is missing" if x was given and already has a fault."""
        for new in found:
            setting = f"{new.partition(' is missing')[0]}="
            if new not in self.faults and not any(old.startswith(setting) for old in self.faults):
                self.faults.append(new)

    def _tried(self, where: str, make: Callable[[], _T]) -> _T | None:
        """What `make` returns; None if it raises, which is added to the faults."""
        try:
            return make()
        except MpbridgeError as error:
            self.faults += [
                f"{where}{fault}" for fault in (error.faults if isinstance(error, Contradiction) else [error])
            ]
        return None


GPT_FILLED = ("position_embedding_type", "rotary_base", "rotary_percent", "share_embeddings_and_output_weights")
"""GPTModel's arguments that are always present in a Run's inputs."""


def _inert(stages: tuple[Stage, ...]) -> tuple[str, ...]:
    known = [(stage, recipes.get(stage.recipe)) for stage in stages]
    found = [words for stage, entry in known for words in inert(stage.config, entry.make() if entry else None)]
    # the optimizer section may be what makes the optimizer precision-aware
    if any(stage.config.store_param_remainders and not stage.policy.precision_aware for stage in stages):
        found.append("store_param_remainders=true (read with use_precision_aware_optimizer=true only)")
    return tuple(dict.fromkeys(found))


def _after(target: str, inputs: Mapping[str, dict[str, Any]], planned: Plan) -> dict[str, Any]:
    """The section with its defaults and the plan's writes applied, in plain types."""
    return filled(target, inputs[target]) | {name: plain(value) for name, value in planned.of(target).items()}
