"""Reads the mixed_precision setting (a name, a config object, a mapping with additions, or a list of stages) and how it is realized without the recipe's hardware:
by the fast emulation, or by Transformer Engine's own Python code on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue, Contradiction, MpbridgeError, UnknownName
from mpbridge.common.facts import BESIDE_ADAM, OPTIMIZERS, Versions
from mpbridge.common.formats import DType, plain
from mpbridge.common.machines import Machine, machine
from mpbridge.common.probe import installed
from mpbridge.common.traits import DEFAULT, known
from mpbridge.common.transformer_engine import Package, choose, played_versions, tried
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.recipe import engine_for
from mpbridge.precision.registry import describe, extended_rules, get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.precision.schedule import Mark
from mpbridge.settings.other_recipe import is_list

WAYS = (False, True, "fast", "te")
DEFAULT_TARGET = "h100"


def is_fast(emulate: Any) -> bool:
    """Whether mpbridge.numerics does the rounding."""
    return emulate in (True, "fast")


def is_played(emulate: Any) -> bool:
    """Whether Transformer Engine simulates a machine on the CPU."""
    return bool(emulate == "te")


def emulation_faults(emulate: Any, target: Any, te: Any) -> Iterator[str]:
    """Faults of the three top-level settings."""
    if not any(emulate is way or (isinstance(way, str) and emulate == way) for way in WAYS):
        yield f"emulate={emulate!r}: expected true, false, fast or te"
    if target is not None and not is_played(emulate):
        yield f"target={target} without emulate=te: a target machine applies only when Transformer Engine runs on the CPU"
    if te is not None and not emulate:
        yield f"te={te} without emulate: a release can be chosen for emulated runs only; a GPU run uses the installed one"
    if te is not None and not isinstance(te, str):
        yield f"te={te}: expected a string, because 2.20 and 2.2 are the same number: write it in quotes, as in te=\"'2.20'\""
        return
    try:
        if te is not None:
            tried(te)
        if target is not None and machine(str(target)).arch is None:
            yield f"target={target}: expected a GPU, as in h100 or b200"
    except MpbridgeError as error:
        yield str(error)


@functools.cache
def package(te: str | None) -> Package:
    """The Transformer Engine package of a simulated run. Raises Refused, UnknownName."""
    return choose(te)


def played(target: str | None, te: str | None) -> tuple[Machine, Versions]:
    """The machine and the versions for which such a run is resolved."""
    return machine(target or DEFAULT_TARGET), played_versions(installed(), package(te))


UNNAMED = "custom"
"""Name of a policy without a recipe name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The part of a run that one recipe covers."""

    recipe: str
    """Canonical name, or 'custom'."""
    config: MixedPrecisionConfig
    """The recipe with its additions."""
    policy: PrecisionPolicy
    until: Any = None
    """Where it ends, as its author wrote it (`precision.schedule.Mark`); None: at the end of the run."""
    engine: str | None = None
    """The engine that the recipe is meant for."""
    replaced: tuple[str, ...] = ()
    """Globs of the recipe's own rules that its author's `modules` took the place of."""


def read_stages(
    value: Any, given: Mapping[str, Mapping[str, Any]], faults: list[str], *, trusted: bool = True, engine: str | None = None
) -> tuple[Stage, ...]:  # fmt: skip
    """The stages of a mixed_precision setting, one if it is not a list; what is not valid is added to `faults`.

    given: the sections, of which the optimizer's settles what the recipe leaves open. engine: the author's choice; None: the recipe's. trusted: False
    refuses recipes that are the configuration's own code (a function in a module or file), for configurations that came with a checkpoint.
    """
    if value is None or value == [] or value == {}:
        how = "give a recipe's name, as in mixed_precision=bf16_mixed (names: mpbridge list)"
        faults.append(f"mixed_precision is missing: {how}")
        return ()
    if is_list(value):
        parts = {f"mixed_precision[{i}]": part for i, part in enumerate(value)}
    else:
        parts = {"mixed_precision": value}
    found, optimizer, layers = [], given["optimizer"], given["model"].get("num_layers")
    for i, (place, whole) in enumerate(parts.items(), start=1):
        part, until = _split_until(whole, place, needed=i < len(parts), allowed=len(parts) > 1, faults=faults)
        before = len(faults)
        try:
            name, preferred, config, replaced = _authored(part, place, faults, trusted)
            # what an author adds may call for another engine
            preferred = preferred or engine_for(resolve(config))
            config = with_storage(config, engine=engine or preferred, optimizer=str(optimizer.get("optimizer", "adam")))
            policy = resolve(config, optimizer=optimizer, layers=layers)
            if len(faults) == before and (until is not None or i == len(parts)):
                found.append(Stage(recipe=name, config=config, policy=policy, until=until, engine=preferred, replaced=replaced))  # fmt: skip
        except MpbridgeError as error:
            faults += [f"{place}: {fault}" for fault in (error.faults if isinstance(error, Contradiction) else [error])]
    return tuple(found)


def as_plain(value: Any) -> Any:
    """A mixed_precision setting in plain YAML types, in the shortest spelling."""
    if isinstance(value, MixedPrecisionConfig):
        return value.as_data() or {"bf16": False}  # without a field it would read as no recipe at all
    if isinstance(value, Mapping):
        out = {str(name): str(item) if isinstance(item, Path) else plain(item) for name, item in value.items()}
        return out["recipe"] if set(out) == {"recipe"} else out
    if isinstance(value, Path):
        return str(value)
    return [as_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _split_until(part: Any, place: str, *, needed: bool, allowed: bool, faults: list[str]) -> tuple[Any, Any]:
    if not isinstance(part, Mapping) or "until" not in part:
        text = f"{place}: every stage but the last needs `until`: a step, '90%', '1000 steps' or '3B tokens'"
        faults += [text] if needed else []
        return part, None
    rest, until = {name: item for name, item in part.items() if name != "until"}, part["until"]
    if not allowed:
        faults.append(f"{place}.until={until!r}: only the stages of a list have an end")
    elif not needed:
        faults.append(f"{place}.until={until!r}: the last stage runs to the end")
    else:
        try:
            Mark.parse(until)
            return rest, until
        except BadValue as error:
            faults.append(f"{place}: {error}")
    return rest, None


def _authored(
    part: Any, place: str, faults: list[str], trusted: bool
) -> tuple[str, str | None, MixedPrecisionConfig, tuple[str, ...]]:
    """(recipe name, the engine that it prefers, config, the recipe's rules that were replaced) of what an author wrote for one stage. Raises MpbridgeError."""
    if isinstance(part, MixedPrecisionConfig):
        return UNNAMED, None, part.derive(), ()
    if not isinstance(part, (str, Path, Mapping)):
        raise BadValue(
            f"found {part!r}, expected a recipe's name or file, a mapping with `recipe:`, or a MixedPrecisionConfig"
        )
    additions = dict(part) if isinstance(part, Mapping) else {}
    given = additions.pop("recipe", None) if isinstance(part, Mapping) else part
    if not isinstance(given, (str, Path, int, type(None))) or isinstance(given, bool):
        raise Contradiction([f"recipe={given!r}: expected a recipe's name"])
    if given is None:
        return UNNAMED, None, _added(MixedPrecisionConfig(), additions, place, faults), ()
    config, entry = get_mixed_precision_config(str(given), code=trusted), describe(str(given))
    made = _added(config, additions, place, faults)
    rules = dict.fromkeys((*extended_rules(str(given)), *(config.modules or {})))
    return entry.name, entry.prefers, made, tuple(glob for glob in rules if glob not in (made.modules or {}))


def _added(
    config: MixedPrecisionConfig, additions: dict[Any, Any], place: str, faults: list[str]
) -> MixedPrecisionConfig:
    """`config` with every addition that is valid; the others are added to `faults`."""
    good: dict[str, Any] = {}
    for name, value in additions.items():
        try:
            MixedPrecisionConfig.from_data({name: value})
            good[str(name)] = value
        except UnknownName as error:
            faults.append(f"{place}.{name}: {error}")
        except MpbridgeError as error:
            faults.append(f"{place}: {error}")
    try:
        return config.derive(**good)
    except Contradiction as error:
        faults += [f"{place}: {clash}" for clash in error.faults]
        return config


TORCHS = tuple(name for name in OPTIMIZERS if name not in ("adam", *BESIDE_ADAM))
"""Values of optimizer.optimizer that are torch's own on the FSDP2 engine; "adam" is FusedAdam if the recipe's states need it."""


def with_storage(config: MixedPrecisionConfig, *, engine: str | None, optimizer: str) -> MixedPrecisionConfig:
    """`config` with FP32 storage if FSDP2 would otherwise train 16-bit storage, not set by the author, with one of torch's optimizers.

    torch's optimizers keep their states in the parameters' dtype; FusedAdam keeps its own states. An explicit setting always wins.
    Rule: NeMo AutoModel PR 2248, precision_warnings.py.
    """
    stored, found = config.stored(), known(engine or DEFAULT)
    low = stored["bf16"] or stored["fp16"]
    torchs = found is not None and found.main_weights == "optimizer" and optimizer in TORCHS
    if not torchs or not low or stored["params_dtype"] is not None:
        return config
    return config.derive(params_dtype=DType.FP32, main_params_dtype=stored["main_params_dtype"] or DType.FP32)
