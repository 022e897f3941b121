"""--target and related options: the machine and versions in question, this one or another."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.cli._schedule import lost_states, stage_names
from mpbridge.cli.options import arg, container, resolved
from mpbridge.common.errors import BadValue, UnknownName
from mpbridge.common.facts import Parallel, RunFacts, Versions
from mpbridge.common.machines import Machine, machine
from mpbridge.common.probe import installed, this_machine
from mpbridge.common.transformer_engine import RELEASES
from mpbridge.common.versions import release
from mpbridge.planning.capability import ASSUMED
from mpbridge.planning.estimate.constants import Constants, read_machine
from mpbridge.planning.estimate.predict import longer
from mpbridge.planning.memory.by_role import REFERENCE
from mpbridge.planning.memory.overheads import left_out_of_memory, left_out_of_time
from mpbridge.planning.outlook import Outlook, Schedule
from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.settings.other_recipe import is_list, with_recipe
from mpbridge.settings.stages import emulation_faults, is_played, played

OPTIONS = {
    "cuda": "cuda", "te": "transformer_engine", "mcore": "megatron_core", "torch": "torch", "cublaslt": "cublaslt",
}  # fmt: skip
"""Option -> the field of Versions that it sets."""
_EXAMPLES = {
    "cuda": ("11.8", "12.1", "12.4", "12.6", "12.8", "12.9", "13.0"),
    "te": ("1.13", *(f"2.{minor}" for minor in range(11)), *(f"{major}.{minor}" for major, minor in RELEASES)),
    "mcore": ("0.13.1", "0.14.0", "0.15.0", "0.16.0", "0.16.1", "0.17.0"),
    "torch": ("2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"),
    "cublaslt": ("12.1.3", "12.8", "12.9"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMachine:
    """The machine and versions in question."""

    machine: Machine
    versions: Versions
    here: bool
    """Whether it is this machine with its installed versions."""
    assumed: tuple[str, ...] = ()
    """Versions that were not given: 'transformer engine 2.11.0'."""
    constants: Constants | None = None
    """Efficiencies from a --machine-file; None: the shipped ones."""

    def facts(self, facts: RunFacts) -> RunFacts:
        """The run's facts on this target; this machine's environment variables do not apply to another one."""
        changes: dict[str, Any] = {"machine": self.machine, "versions": self.versions}
        return dataclasses.replace(facts, **(changes if self.here else changes | {"environment": {}}))

    def outlook(self, made: Run) -> Outlook:
        """Whether the run is valid here, fits, and how long its step takes."""
        runs = made.by_stage()
        first, *others = stages = tuple(
            Outlook(policy=one.policy, facts=self.facts(one.facts), using=self.constants, name=name)
            for name, one in zip(stage_names(made), runs, strict=True)
        )
        if not others:
            return first
        return Schedule(
            policy=first.policy, facts=first.facts, using=self.constants, stages=stages, shares=made.shares, changes=tuple(lost_states(runs))
        )  # fmt: skip

    def line(self) -> str:
        """A one-line description."""
        have = ", ".join(_named(self.versions).values()) or "nothing installed"
        assumed = f" (assumed: {', '.join(self.assumed)})" if self.assumed else ""
        return f"{self.machine.label} with {have}{assumed}"


def asked(args: argparse.Namespace, **more: Any) -> tuple[TargetMachine, Run]:
    """The machine in question, for emulate=te the one that it plays, and the run on it, from the shared arguments. more: see `resolved`. Raises Contradiction with every fault."""
    where = target(args)
    if where.here:
        box = container(args)
        if is_played(box.emulate) and not [*emulation_faults(box.emulate, box.target, box.te)]:
            machine_, versions = played(box.target, box.te)
            where = dataclasses.replace(where, machine=machine_, versions=versions)
    return where, resolved(args, machine=where.machine, versions=where.versions, **more)


def on_target(
    box: ConfigContainer, world: int, where: TargetMachine, *, recipe: str | None = None, **changes: Any
) -> Run:
    """The run of a configuration, with another recipe or other values of its fields, on the target; what only training needs is not required."""
    if recipe is not None:
        changes["mixed_precision"] = with_recipe(box.mixed_precision, recipe)
    other = dataclasses.replace(box, **changes)
    return other.resolved(world, machine=where.machine, versions=where.versions, training=False)


def left_batches(made: Run) -> list[str]:
    """The batch sizes that follow from the layout: a global one that is a default, a micro batch that is a rank's whole share."""
    train = made.container.train
    left = {"global_batch_size": "train.global_batch_size" not in made.origin, "micro_batch_size": train.get("micro_batch_size", 1) is None}  # fmt: skip
    return [name for name, follows in left.items() if follows]


def reference(made: Run, where: TargetMachine, *, stage: int = 0) -> Run:
    """bf16_mixed in the same layout on the target, training what that stage trains. Raises MpbridgeError if it is not valid there."""
    given: Any = made.container.mixed_precision
    one = given[stage] if is_list(given) else given
    changes = {"mixed_precision": with_recipe(one, REFERENCE), "engine": made.engine}
    return on_target(made.container, made.world_size, where, **changes, emulate=False, target=None, te=None)


def sizes_of(sizes: Parallel) -> str:
    """The parallel sizes in words."""
    virtual = f" x {sizes.virtual_pipeline}" if sizes.virtual_pipeline else ""
    return f"tensor {sizes.tensor}, pipeline {sizes.pipeline}{virtual}, context {sizes.context}, expert {sizes.expert}, data {sizes.data}"


def left_out(facts: RunFacts) -> dict[str, None]:
    """What predictions of memory and time omit for this run, as sentences in order."""
    return dict.fromkeys((*left_out_of_memory(facts), *left_out_of_time(facts), *filter(None, [longer(facts)])))


TARGET = (
    arg("--target GPU", "the machine that will run it: h100, b200, rtx4090, sm_90 ... (default: this one)"),
    arg("--machine-file FILE", "a machine measured by `mpbridge calibrate`, instead of --target"),
    *(
        arg(f"--{option} X.Y", f"version of {field.replace('_', ' ')} there (default: as installed; for a --target 'none' means absent)")
        for option, field in OPTIONS.items()
    ),
)  # fmt: skip
"""The machine that a verb is about."""


def target(args: argparse.Namespace) -> TargetMachine:
    """The machine and versions that the arguments name. Raises UnknownName with the nearest names."""
    said = {option: text for option in OPTIONS if (text := getattr(args, option)) is not None}
    given = {OPTIONS[option]: _version(option, text) for option, text in said.items()}
    if getattr(args, "machine_file", None) is not None:
        if args.target is not None:
            raise BadValue(f"--target {args.target} and --machine-file {args.machine_file}: use only one of them")
        read, held = read_machine(Path(args.machine_file))
        versions = dataclasses.replace(installed(), **given)
        return TargetMachine(machine=read, versions=versions, here=False, constants=held)
    if args.target is None:
        return TargetMachine(machine=this_machine(), versions=dataclasses.replace(installed(), **given), here=not given)
    found = machine(args.target)
    core = installed().megatron_core or ASSUMED.megatron_core  # its config classes are those that the run is built from
    base = dataclasses.replace(ASSUMED, megatron_core=core)
    base = base if found.gpu else dataclasses.replace(base, transformer_engine=None, cuda=None)
    assumed = tuple(text for name, text in _named(base).items() if name not in given)
    return TargetMachine(machine=found, versions=dataclasses.replace(base, **given), here=False, assumed=assumed)


def _named(versions: Versions) -> dict[str, str]:
    """Field -> 'transformer engine 2.11.0' of what is there, apart from Python."""
    found = dataclasses.asdict(versions)
    return {name: f"{name.replace('_', ' ')} {value}" for name, value in found.items() if value and name != "python"}


def _version(option: str, text: str) -> str | None:
    if text.strip().lower() in ("none", "no", "-"):
        return None
    try:
        release(text)
    except BadValue:
        raise UnknownName(f"version of {OPTIONS[option].replace('_', ' ')}", text, _EXAMPLES[option]) from None
    return text
