"""Megatron Bridge's `training.mixed_precision`, with the same names, on top of mpbridge's registry and plan.

`install()` installs this module under Bridge's name, before Bridge is imported; an existing script then runs on this registry. It differs
from Bridge where Bridge silently does the wrong thing: only fields that the plan owns are written, None is not copied over other values, twins that
contradict each other are refused, and a recipe that contradicts itself is an error at `finalize()`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from mpbridge.common.errors import BadValue, MpbridgeError, Refused, UnknownName
from mpbridge.common.formats import DType, dtype, say
from mpbridge.interop.stacks.megatron_bridge_import import FIELDS, BridgeFields, read_data
from mpbridge.precision import registry
from mpbridge.precision.config import TWINS, refuse_twins
from mpbridge.precision.config import MixedPrecisionConfig as OurConfig
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.megatron_spec.precision_field import ASKED, TARGETS, UNSET, Target
from mpbridge.precision.resolve import resolve
from mpbridge.precision.sync.plan import Plan, Write, plan
from mpbridge.precision.sync.unkept import refuse_unkept

BRIDGE = "megatron.bridge.training.mixed_precision"
_DTYPES = ("params_dtype", "pipeline_dtype", "autocast_dtype")
_TWINS = dict(TWINS) | {gather: stored for stored, gather in TWINS}
logger = logging.getLogger("mpbridge.compat")


class UnknownRecipe(UnknownName, ValueError):
    """No recipe of that name; also a ValueError, as Bridge raises."""

    def __init__(self, kind: str, given: str, known: Any) -> None:
        super().__init__(kind, given, known)
        self.args = (f"Unknown mixed-precision recipe {given!r}: {self.args[0]}",)


class UnknownField(UnknownName, ValueError):
    """No field of that name; also a ValueError, as is every error about a value here."""


@dataclasses.dataclass(kw_only=True)
class MixedPrecisionConfig(BridgeFields):
    """Bridge's 31 fields with Bridge's defaults; `ours()` is the equivalent config of mpbridge."""

    if not TYPE_CHECKING:

        def __new__(cls, **given: Any) -> Self:
            """Refuses twins that are given with different values: the fields alone do not tell a given false from the gather spelling's default."""
            refuse_twins(given)
            return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise UnknownField("field of MixedPrecisionConfig", name, self.__dataclass_fields__)
        object.__setattr__(self, name, value)
        twin = _TWINS.get(name)
        if twin is not None and "_made" in self.__dict__:
            object.__setattr__(self, twin, value)  # they are one setting: the last assignment sets both

    def __post_init__(self) -> None:
        for names in TWINS:
            value = any(getattr(self, name) for name in names)  # the default of the gather spelling counts as unset
            for name in names:
                object.__setattr__(self, name, value)
        self.__dict__["_made"] = True

    def __reduce__(self) -> tuple[Any, ...]:
        # by this module's name: a process of its own finds it there, whether `install` was called or not
        own = None if type(self) is MixedPrecisionConfig else type(self)
        return _unpickled, (own, {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init})

    def finalize(self) -> None:
        """Raises Contradiction, which is a ValueError, naming everything in these fields that does not fit together."""
        resolve(self.ours())

    def ours(self) -> OurConfig:
        """The config of mpbridge equivalent to these fields; settings without effect in Bridge are omitted."""
        values = {name: getattr(self, name) for name in FIELDS}
        for name in _DTYPES:
            if values[name] is not None:
                values[name] = dtype(values[name]).short
        autocast = values.pop("autocast_enabled")
        found = OurConfig.from_data(dict(read_data({"mixed_precision": values}, version="0.6").fields))
        # in Bridge it reaches no field; here it does what its name says
        return found.derive(autocast_enabled=True) if autocast else found

    def setup(self, model_config: Any, optimizer_config: Any = None, ddp_config: Any = None) -> Plan:
        """Writes the recipe's fields onto the given configs and logs each change; returns the plan. Raises BadValue for what no field expresses.

        They are planned together: what one says, such as ddp's use_megatron_fsdp, decides fields of another."""
        given = zip(TARGETS, (model_config, optimizer_config, ddp_config), strict=True)
        return _write(self, {target: config for target, config in given if config is not None})


def _unpickled(own: type[MixedPrecisionConfig] | None, values: dict[str, Any]) -> MixedPrecisionConfig:
    """A pickled config; of a class derived from ours where `own` says so."""
    return (own or MixedPrecisionConfig)(**values)


MixedPrecisionConfig.__module__ = BRIDGE  # Bridge writes `_target_` from it, and its loader accepts no other


def update_config_with_precision_overrides(mixed_precision_config: MixedPrecisionConfig, config: Any) -> Any:
    """`config` with the recipe's fields of that kind of config written onto it; of all kinds if its class is not one of megatron-core's."""
    kinds: Mapping[str, tuple[Target, ...]] = {
        "OptimizerConfig": ("optimizer",),
        "DistributedDataParallelConfig": ("ddp",),
        "TransformerConfig": ("model",),
    }
    names = [kind.__name__ for kind in type(config).__mro__]
    targets = next((found for name, found in kinds.items() if name in names), TARGETS)
    _write(mixed_precision_config, dict.fromkeys(targets, config))
    return config


def _write(mixed: MixedPrecisionConfig, configs: Mapping[Target, Any]) -> Plan:
    """The plan for the configs' current values; its writes are applied to the fields that they have. Raises BadValue as `refuse_unkept` does Refused."""
    now: dict[str, dict[str, Any]] = {target: {} for target in configs}
    for target, field in (*((row.target, row.field) for row in TABLE), *ASKED):
        if target in configs and _plain(configs[target], field):
            now[target][field] = getattr(configs[target], field)
    made = plan(resolve(mixed.ours()), **now)  # type: ignore[arg-type]
    try:
        refuse_unkept(made)
    except Refused as error:
        raise BadValue(str(error)) from None
    skipped: dict[str, list[str]] = {}
    done = set[tuple[int, str]]()  # one object may be every target
    for write in made.writes:
        config = configs[write.target]
        if not hasattr(config, write.field):
            skipped.setdefault(type(config).__name__, []).append(write.name)
        elif (id(config), write.field) not in done:
            done.add((id(config), write.field))
            _set(config, write)
    for name, fields in skipped.items():
        logger.info("%s has no %s: not written", name, ", ".join(fields))
    return made


def _plain(config: Any, field: str) -> bool:
    """Whether a config has the field, with a value that a megatron-core config could hold."""
    value = getattr(config, field, UNSET)
    return value is None or isinstance(value, (bool, int, float, str)) or str(value).startswith("torch.")


def _set(config: Any, write: Write) -> None:
    before, after = getattr(config, write.field), write.after
    if isinstance(after, DType):
        after = after.torch()
    if before is not after and before != after:
        setattr(config, write.field, after)
        name = f"{type(config).__name__}.{write.field}"
        logger.debug("Overwrote %s  %s -> %s", name, before, after)
        logger.info("%s: %s -> %s (%s)", name, say(before), say(write.after), write.why)


def register(func: Callable[[], MixedPrecisionConfig]) -> Callable[[], MixedPrecisionConfig]:
    """Decorator: registers a function that returns a MixedPrecisionConfig, of this module or of mpbridge, under the function's name."""
    registry.register(_Made(func))
    return func


class _Made:
    """A factory of Bridge's configs as one of ours, with the function's name, module and description."""

    def __init__(self, func: Callable[[], Any]) -> None:
        functools.update_wrapper(self, func)
        self.func = func

    def __call__(self) -> OurConfig:
        made = self.func()
        return made.ours() if isinstance(made, MixedPrecisionConfig) else made  # the registry refuses anything but ours


def get_mixed_precision_config(name: str | MixedPrecisionConfig) -> MixedPrecisionConfig:
    """The recipe of that name in Bridge's fields; a config is returned unchanged. Raises UnknownRecipe, a ValueError."""
    if isinstance(name, MixedPrecisionConfig):
        return name
    try:
        entry = registry.recipe(name)
    except UnknownName as error:
        raise UnknownRecipe("recipe", name, error.known) from None
    made = entry.make.func() if isinstance(entry.make, _Made) else None
    if isinstance(made, MixedPrecisionConfig):
        return made
    ours = registry.get_mixed_precision_config(name)
    if not ours.given().keys() <= FIELDS.keys():
        raise UnknownRecipe("recipe in Megatron Bridge's fields", entry.name, list(MIXED_PRECISION_RECIPES))
    said = ours.stored()
    values: dict[str, Any] = {field: said[field] for field in FIELDS if said[field] is not None}
    if ours.first_last_layers_bf16:
        for field in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            values.setdefault(field, 1)  # None means one layer here and zero is Bridge's default
    values = {field: value.torch() if isinstance(value, DType) else value for field, value in values.items()}
    return MixedPrecisionConfig(**values)


@functools.cache
def _factory(name: str) -> Callable[[], MixedPrecisionConfig]:
    """One object for every spelling of a name, with a function's name and docstring."""
    made = functools.partial(get_mixed_precision_config, name)
    made.__name__, made.__doc__ = name, registry.recipe(name).summary  # type: ignore[attr-defined]
    return made


class _Recipes(Mapping[str, Callable[[], MixedPrecisionConfig]]):
    """Every recipe that Bridge's fields can express, under both spellings."""

    def __getitem__(self, name: str) -> Callable[[], MixedPrecisionConfig]:
        if registry.key(name) not in {registry.key(known) for known in self}:
            raise KeyError(name)
        return _factory(registry.recipe(name).name)

    def __iter__(self) -> Iterator[str]:
        for name in registry.recipes:
            if self._says(name):
                yield name
                if "_" in name:
                    yield name.replace("_", "-")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @staticmethod
    def _says(name: str) -> bool:
        entry = registry.recipe(name)
        if isinstance(entry.make, _Made):
            return True
        try:
            return entry.make().given().keys() <= FIELDS.keys()
        except MpbridgeError:  # a third-party package that does not load
            return False


MIXED_PRECISION_RECIPES: Mapping[str, Callable[[], MixedPrecisionConfig]] = _Recipes()


def install() -> None:
    """Makes `import megatron.bridge.training.mixed_precision` import this module. Call it before Bridge is imported."""
    there = sys.modules.get(BRIDGE)
    if there is not None and there is not sys.modules[__name__]:
        raise MpbridgeError(f"{BRIDGE} is already imported: call mpbridge.compat.megatron_bridge.install() first")
    sys.modules[BRIDGE] = sys.modules[__name__]


def apply(container: Any, recipe: Any, *, on_conflict: Literal["warn", "error"] = "warn") -> Any:
    """Writes any recipe onto Bridge's ConfigContainer before `pretrain`: `mpbridge.backend.megatron.bridge_container.apply`, which needs torch."""
    room = importlib.import_module("mpbridge.backend.megatron.bridge_container")
    return room.apply(container, recipe, on_conflict=on_conflict)


def __getattr__(name: str) -> Any:
    # the recipe functions: bf16_mixed(), bf16_with_mxfp8_mixed() ...
    if not name.startswith("_") and name in registry.recipes and name == registry.recipe(name).name:
        return _factory(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
