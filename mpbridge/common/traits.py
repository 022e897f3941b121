"""Each engine's properties as data: what it shards, who holds main weights, what it cannot do. Read by every layer; loads no framework.

An engine's traits are next to its class (`engines/*_traits.py`); another package provides an engine through an entry point in the group `mpbridge.engines`
whose value is an `EngineTraits`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mpbridge.common.errors import BadValue, DuplicateName, UnknownName
from mpbridge.common.versions import entry_points

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "mpbridge.engines"
"""Entry point group through which other packages provide engines: name -> an EngineTraits with that name."""
DEFAULT = "mcore"
"""The engine of a run that does not name one."""
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "mcore": "mpbridge.backend.engines.mcore_traits:TRAITS",
        "fsdp2": "mpbridge.backend.engines.fsdp2_traits:TRAITS",
        "megatron_fsdp": "mpbridge.backend.engines.megatron_fsdp_traits:TRAITS",
    }
)
"""Name -> 'module:attribute' of its traits."""

Sharding = Literal["whole", "buffers", "rows", "even"]
"""How one role of a parameter is divided among the data-parallel ranks: not at all; in equal pieces of megatron-core's buckets; by rows, as in torch
FSDP2; in equal shares."""
MainWeights = Literal["megatron_core", "optimizer", "wrapper", "own"]
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """One engine."""

    name: str
    engine: str
    """'module:class' of the engine; imported when one is built."""
    summary: str
    """One line on who shards and reduces."""
    layout: Sharding
    """How it divides what it shards."""
    shards: frozenset[str] = frozenset()
    """Roles that it always shards over data-parallel ranks."""
    sharding_setting: str = ""
    """Field of the ddp section that sets the level of sharding; '': only `shards`."""
    sharding_levels: Mapping[str, frozenset[str]] = field(default_factory=lambda: _EMPTY)
    """Value of `sharding_setting` -> the roles that are sharded."""
    distributed_optimizer: Literal["optional", "always", "never"]
    """Whether megatron-core's distributed optimizer can be chosen (optional), is always what it does, or must stay off (never)."""
    main_weights: MainWeights
    """Who holds main weights separate from 16-bit parameters: megatron-core's optimizer classes (or FusedAdam, by their flag), only FusedAdam, the wrapper, or as
    its `keeps` says."""
    keeps: str = ""
    """'module:function' of what it keeps, where main weights are its "own": (settled policy, OptimizerFacts, dtype of the stored parameter) -> role -> (dtype,
    owner, the role whose memory it shares or None), as in memory.keeps."""
    optimizers: tuple[str, ...]
    """Values of optimizer.optimizer that it builds."""
    parallelisms: frozenset[str] = frozenset()
    """Supported in addition to data parallelism: 'tensor', 'pipeline', 'context', 'expert'."""
    wide_storage: bool = False
    """Whether it supports FP32 parameters with 16-bit compute."""
    casts_outputs: bool = False
    """Whether it casts what a layer returns to the recipe's output_dtype."""
    stored_weights: bool = False
    """Whether weights can be stored in low precision."""
    per_token_loss: bool = False
    """Whether gradients can be divided by the tokens of all ranks."""
    quantizers: frozenset[str] = frozenset({"transformer_engine"})
    """Libraries whose quantized GEMMs it supports in its linears; the rows of the table of scalings name them."""
    exact_memory: bool = True
    """Whether the memory prediction matches its live bytes to the byte."""
    checkpoints: str
    """Format of its checkpoints: engines with the same format can read each other's."""
    ddp_switch: str = ""
    """Field of the ddp section that is true exactly on this engine; '': there is none."""
    ddp_defaults: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """Settings of the ddp section that apply if the author sets nothing."""
    refuses: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """Switch of the model section that must stay off -> why."""
    rules: str = ""
    """'module:attribute' of its own rules, a tuple of rules.base.Rule that apply to this engine only."""
    label: str = ""
    """Its usual name; '': the engine's name."""

    @property
    def full_name(self) -> str:
        """The engine's name in messages."""
        return self.label or self.name

    def sharded(self, role: str, *, distributed: bool, ddp: Mapping[str, Any] = _EMPTY) -> Sharding:
        """How a role's tensors are divided. distributed: megatron-core's distributed optimizer is on; ddp: the ddp section."""
        chosen = str(ddp.get(self.sharding_setting) or self.ddp_defaults.get(self.sharding_setting) or "")
        roles = self.sharding_levels.get(chosen, self.shards)
        states = self.distributed_optimizer != "optional" or distributed
        return self.layout if role in roles and states else "whole"


def engine_names() -> tuple[str, ...]:
    """Every engine's name: built-in ones first, then those of installed packages."""
    return tuple(_places())


def traits(name: str) -> EngineTraits:
    """The traits of the engine called `name`. Raises UnknownName with the nearest name."""
    places = _places()
    if name not in places:
        raise UnknownName("engine", name, places)
    return _load(name, places[name])


def known(name: str) -> EngineTraits | None:
    """The traits of the engine called `name`, or None, since a checkpoint may come from an engine that is not installed."""
    return traits(name) if name in _places() else None


def attribute(path: str) -> Any:
    """The object that 'module:attribute' refers to."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _places() -> dict[str, str]:
    places = dict(BUILT_IN)
    for point in _installed():
        if point.name in places:
            what = f"an engine named {point.name!r}, which already exists"
            raise DuplicateName(f"entry point {point.value!r} provides {what}")
        places[point.name] = point.value
    return places


@functools.cache
def _installed() -> tuple[EntryPoint, ...]:
    return entry_points(ENTRY_POINTS)


@functools.cache
def _load(name: str, path: str) -> EngineTraits:
    found = attribute(path)
    if not isinstance(found, EngineTraits) or found.name != name:
        raise BadValue(f"{path} is {found!r}, expected an EngineTraits named {name!r}")
    if (found.main_weights == "own") is not bool(found.keeps):
        raise BadValue(
            f"{path}: main_weights={found.main_weights!r} with keeps={found.keeps!r}, expected `keeps` with main weights of its own, and only with those"
        )
    return found
