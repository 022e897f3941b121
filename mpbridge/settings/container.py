"""ConfigContainer: everything about a run in one object, set from Python, a file or the command line."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mpbridge.common.errors import BadValue, Contradiction, UnknownName
from mpbridge.common.files import why, write
from mpbridge.common.formats import say
from mpbridge.common.shipped import label
from mpbridge.common.traits import DEFAULT, engine_names, traits
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.schedule import Span, shares, spans
from mpbridge.settings.draft import BROUGHT, Draft, FaultFinder, joined
from mpbridge.settings.load import COMMAND_LINE, TOP, dump_yaml, read
from mpbridge.settings.schema import SECTIONS, Section, as_mapping, checked
from mpbridge.settings.sections import OWN
from mpbridge.settings.shape import smallest_world
from mpbridge.settings.stages import Stage, as_plain, emulation_faults, read_stages

if TYPE_CHECKING:
    from mpbridge.common.facts import RunFacts, Versions
    from mpbridge.precision.policy import PrecisionPolicy
    from mpbridge.precision.sync.plan import Plan
    from mpbridge.settings import typed

__all__ = ["COMMAND_LINE", "ConfigContainer", "Run", "Stage"]

Precision = str | Path | MixedPrecisionConfig | Mapping[str, Any] | Sequence[Any] | None


def _section(name: str) -> Any:
    return field(default_factory=functools.partial(Section, name, {}))


@dataclass(kw_only=True, eq=False)
class ConfigContainer:
    """Sections of plain settings, and the recipe. Sections may also be megatron-core's config objects.

    A section given as a mapping is copied; its settings are read and set as keys or as attributes (`config.optimizer.lr = 3e-4`).
    Mutable until `resolved` makes a frozen Run of it. Two containers are equal when `as_data` is.
    """

    mixed_precision: Precision = None
    """A recipe name or file, a MixedPrecisionConfig, {recipe: name, field: value ...}, or a list of such mappings with `until`."""
    model: typed.ModelField = _section("model")
    optimizer: typed.OptimizerField = _section("optimizer")
    scheduler: typed.SchedulerField = _section("scheduler")
    ddp: typed.DDPField = _section("ddp")
    parallel: typed.ParallelField = _section("parallel")
    train: typed.TrainField = _section("train")
    data: typed.DataField = _section("data")
    checkpoint: typed.CheckpointField = _section("checkpoint")
    logger: typed.LoggerField = _section("logger")
    audit: typed.AuditField = _section("audit")
    engine: str | None = None
    """One of `mpbridge.common.traits.engine_names`; None: the engine that the recipe is meant for, otherwise megatron-core's own."""
    emulate: bool | str = False
    """True or 'fast': mpbridge.numerics computes the quantized GEMMs on megatron-core's local modules. 'te': Transformer Engine's own Python code on
    mpbridge's CPU kernels, with exactly the modules that `target` would build."""
    target: str | None = None
    """The machine that emulate='te' simulates; None: h100."""
    te: str | None = None
    """The Transformer Engine release of an emulated run, as '2.11'; None: the installed one."""
    origin: dict[str, str] = field(default_factory=dict, repr=False)
    """'optimizer.lr' -> the file or command line that set it; settings without an entry were set in Python."""
    dropped: tuple[str, ...] = field(default=(), repr=False)
    """Sentences on what an earlier layer had added to a recipe that a later one replaced."""
    trusted: bool = field(default=True, repr=False)
    """False: a recipe that is code (module:function) is refused."""

    if not TYPE_CHECKING:  # seen by mypy, these would accept any name

        def __new__(cls, **given: Any) -> Self:
            """Refuses an unknown section with the nearest name, where Python would raise a bare TypeError."""
            for name in given:
                if name not in cls.__dataclass_fields__:
                    raise UnknownName("section of ConfigContainer", name, TOP)
            return super().__new__(cls)

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in type(self).__dataclass_fields__:
                raise UnknownName("section of ConfigContainer", name, TOP)
            if name in SECTIONS and isinstance(value, Mapping):
                value = Section(name, value)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            public = [n for n in dir(type(self)) if n[0] != "_"]
            raise UnknownName("section or method of ConfigContainer", name, [*public, *TOP])

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        overrides: Iterable[str] = (),
        *,
        check: bool = True,
        trusted: bool | None = None,
    ) -> Self:
        """The container described by a YAML file and 'section.key=value' overrides; precedence: defaults < file < overrides.

        check: raise Contradiction with every unknown key, wrong type and contradiction now; False leaves that to `resolved`, which then reports everything in one message.
        trusted: whether a recipe that is code (file.py:function) may run; None: only if an override names it, since the file may come from anywhere.
        Raises BadValue for a file that cannot be read.
        """
        overrides = list(overrides)
        layers = read(path, overrides)
        if trusted is None:
            named = (text.partition("=")[0].strip() for text in overrides)
            trusted = not {"mixed_precision", "mixed_precision.recipe"}.isdisjoint(named)
        made = cls(**layers.tree, origin=layers.origin, dropped=tuple(layers.notes), trusted=trusted)
        faults = [*layers.faults, *made.faults()] if check or layers.faults else []
        if faults:
            named_file = f" {label(Path(path))}" if path else ""
            raise Contradiction(faults, subject=f"the configuration{named_file} cannot be used")
        return made

    def may_be_code(self, setting: str) -> bool:
        """Whether the command line or Python set it ('data.tokenizer'), and not a file, which may come from anywhere: only then may it name code to run."""
        source = self.origin.get(setting)
        return source == COMMAND_LINE or (source is None and (self.trusted or bool(self.origin)))

    def faults(self) -> list[str]:
        """Every fault that does not depend on the number of processes; empty if there is none."""
        return self._draft().faults

    def resolved(
        self,
        world_size: int = 1,
        machine: Any = None,
        versions: Versions | None = None,
        *,
        training: bool = True,
        also: FaultFinder | None = None,
    ) -> Run:
        """The frozen Run on `world_size` processes. Raises Contradiction with every fault.

        machine: the common.machines.Machine that will run it; None: unknown. versions: None: those installed here.
        training: False does not require what only training needs (train_iters, a learning rate). also: finds further faults in the sections,
        with their defaults filled in; they are raised together with the others.
        """
        draft = self._draft()
        made = draft.resolved(world_size, machine, versions, training, also)
        if made is None:
            raise Contradiction(draft.faults, subject="the configuration cannot be used")
        return Run(container=self, **made)

    def smallest_world(self) -> int:
        """The fewest processes that the parallel sizes allow; 1 if they are not numbers (`resolved` then reports it)."""
        draft = self._draft()
        return smallest_world(joined(draft.given, draft.engine, [])[1])

    def _draft(self) -> Draft:
        faults: list[str] = []
        given = {name: checked(name, as_mapping(name, getattr(self, name), faults), faults) for name in SECTIONS}
        stages = read_stages(self.mixed_precision, given, faults, trusted=self.trusted, engine=self.engine)
        faults += emulation_faults(self.emulate, self.target, self.te)
        engine, origin = self._engine(stages, given["ddp"], faults), self._sources(given)
        return Draft(container=self, given=given, stages=stages, engine=engine, origin=origin, faults=faults)

    def _engine(self, stages: tuple[Stage, ...], ddp: Mapping[str, Any], faults: list[str]) -> str:
        if self.engine is not None:
            names = engine_names()
            if self.engine in names:
                return str(self.engine)
            faults.append(f"engine={self.engine!r}: {UnknownName('engine', str(self.engine), names)}")
            return DEFAULT
        wanted = [*dict.fromkeys(stage.engine for stage in stages if stage.engine is not None)]
        if len(wanted) > 1:
            among = ", ".join(wanted)
            faults.append(f"mixed_precision: the stages are meant for different engines ({among}): set engine=")
        if wanted:
            return wanted[-1]
        switched = (name for name in engine_names() if (switch := traits(name).ddp_switch) and ddp.get(switch))
        return next(switched, DEFAULT)

    def _sources(self, given: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        out: dict[str, str] = {}
        for section, values in given.items():
            whole, here = getattr(self, section), f"the {section} section"
            in_python = here if isinstance(whole, Mapping) else f"the {type(whole).__name__} given as {section}"
            out |= {f"{section}.{name}": self.origin.get(f"{section}.{name}", in_python) for name in values}
        return out | {name: source for name, source in self.origin.items() if name.partition(".")[0] not in SECTIONS}

    def _repr_html_(self) -> str:
        """HTML for notebooks: what was set, by section."""
        from mpbridge.common.tables import table

        data = {name: one if isinstance(one, Mapping) else {"": one} for name, one in self.as_data().items()}
        rows = [(section, name, value) for section, values in data.items() for name, value in values.items()]
        return table("ConfigContainer", ("section", "setting", "value"), rows).html()

    def as_data(self) -> dict[str, Any]:
        """What was set, in canonical plain form: `ConfigContainer(**data)` equals this one. Raises Contradiction for values without such a form."""
        faults: list[str] = []
        out = {} if self.mixed_precision is None else {"mixed_precision": as_plain(self.mixed_precision)}
        out |= {"engine": self.engine} if self.engine is not None else {}
        out |= {name: value for name in ("emulate", "target", "te") if (value := getattr(self, name))}
        for name in SECTIONS:
            values = checked(name, as_mapping(name, getattr(self, name), faults), faults)
            objects = {key: value for key, value in values.items() if not _is_plain(value)}
            why_not = "is a Python object, which cannot be written to a file"
            faults += [f"{name}.{key}={value!r} {why_not}" for key, value in objects.items()]
            out |= {name: values} if values else {}
        if faults:
            raise Contradiction(faults, subject="the configuration cannot be written to a file")
        return out

    def to_yaml(self) -> str:
        """The configuration as YAML, which `load` reads back as an equal container."""
        return dump_yaml(self.as_data())

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_yaml()`. Raises BadValue when the file cannot be written."""
        try:
            write(Path(path), self.to_yaml())
        except OSError as error:
            raise BadValue(f"configuration {path} cannot be written: {why(error)}") from None

    def copy(self) -> Self:
        """An independent container; megatron-core's config objects are shared."""
        sections: dict[str, Any] = {name: getattr(self, name) for name in SECTIONS}
        own = {name: copy.copy(value) for name, value in sections.items() if isinstance(value, OWN.get(name, Section))}
        return dataclasses.replace(self, origin=dict(self.origin), **sections | own)

    def __eq__(self, other: object) -> bool:
        return self.as_data() == other.as_data() if isinstance(other, ConfigContainer) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, (str, int, float, type(None)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is run. The mappings are this Run's own copies, to be read only."""

    container: ConfigContainer
    recipe: str
    """Canonical name of the (first) recipe; 'custom' for a config without a name."""
    policy: PrecisionPolicy
    """Settled: every optimizer fact is decided."""
    plan: Plan
    facts: RunFacts
    inputs: Mapping[str, dict[str, Any]]
    """model, optimizer, ddp: what the author wrote, without the recipe, with GPTModel's arguments and the parallel sizes filled in."""
    train: dict[str, Any]
    data: dict[str, Any]
    scheduler: dict[str, Any]
    checkpoint: dict[str, Any]
    logger: dict[str, Any]
    audit: dict[str, Any]
    """These five sections with their defaults filled in."""
    origin: Mapping[str, str]
    """'optimizer.lr' -> where its value came from, for every value that is not a default."""
    emulate: bool = False
    """Whether mpbridge.numerics rounds."""
    played: str | None = None
    """The machine that Transformer Engine simulates on the CPU (emulate='te'); None: no simulation."""
    te: str | None = None
    """The Transformer Engine release that was requested."""
    stages: tuple[Stage, ...] = field(default=(), repr=False)
    """One per recipe of the run; `policy` is the first one's, and `at` resolves another one."""

    @property
    def brought(self) -> tuple[str, ...]:
        """Settings that the recipe also sets, as 'ddp.use_distributed_optimizer=true'."""
        names = [name.partition(".") for name, source in self.origin.items() if source == BROUGHT]
        return tuple(f"{section}.{key}={say(self.inputs[section][key])}" for section, _, key in names)

    @property
    def replaced(self) -> tuple[str, ...]:
        """Sentences on what was written for another recipe, or by this one's author, and does not hold for this run."""
        rules = dict.fromkeys((stage.recipe, stage.replaced) for stage in self.stages if stage.replaced)
        how = "are replaced by `modules`, which is one setting: repeat those that should stay"
        return (*self.container.dropped, *(f"{name}'s rules for {', '.join(globs)} {how}" for name, globs in rules))

    @property
    def engine(self) -> str:
        """One of `traits.engine_names`."""
        return self.facts.engine

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.facts.parallel.world_size

    @property
    def _length(self) -> dict[str, int]:
        return {
            "steps": int(self.train["train_iters"] or 0),
            "tokens_per_step": int(self.train["global_batch_size"]) * self.facts.shape.seq_length,
        }

    @property
    def spans(self) -> tuple[Span[Stage], ...]:
        """The stages as step ranges. Raises Contradiction if they do not fit the run's length."""
        return spans(self.stages, **self._length)

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Each stage's share of the steps; None: not known, since the run's length is not set."""
        return shares(self.stages, **self._length)

    def at(self, index: int) -> Run:
        """This run in the recipe of its stage `index`, resolved as if that were its only one: with its own plan, facts and the settings that it brings along.

        The container and the list of stages are unchanged. Raises Contradiction.
        """
        if len(self.stages) < 2:
            return self
        given: Any = self.container.mixed_precision
        part = given[index]
        container = self.container.copy()
        container.mixed_precision = (
            {name: value for name, value in part.items() if name != "until"} if isinstance(part, Mapping) else part
        )
        container.engine = self.engine
        # what training needs was required, or not, of the whole run
        made = container.resolved(self.world_size, self.facts.machine, self.facts.versions, training=False)
        return dataclasses.replace(
            made, container=self.container, stages=self.stages, checkpoint=self.checkpoint, logger=self.logger
        )

    def by_stage(self) -> tuple[Run, ...]:
        """The run `at` each of its stages; itself alone without a schedule."""
        return tuple(self.at(index) for index in range(max(1, len(self.stages))))
