"""A foreign loop presented to the audit like an engine: its model, its optimizer, the facts that promises need, and its kind."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch.distributed as dist

from mpbridge.backend.engines.contract import Live
from mpbridge.common.facts import ModelShape, RunFacts
from mpbridge.common.traits import EngineTraits
from mpbridge.interop.stacks.meaning import Sharded
from mpbridge.observe.audit.flags import inner_optimizers
from mpbridge.precision.policy import PrecisionPolicy

_EMPTY: Mapping[str, Any] = MappingProxyType({})
LAYER_LISTS = ("layers", "h", "blocks", "block", "layer")
"""Attribute names of models' lists of layers."""


@dataclass(frozen=True, kw_only=True)
class LoopFacts(RunFacts):
    """RunFacts of a loop that none of mpbridge's engines runs."""

    own_traits: EngineTraits | None = None

    @property
    def traits(self) -> EngineTraits:
        """The traits of the loop's kind."""
        return self.own_traits or super().traits


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """What the audit reads from a run."""

    policy: PrecisionPolicy
    facts: RunFacts
    recipe: str = ""
    inputs: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """The live configs' values when the witness was created: their author's decisions up to then."""
    plan: Any = None
    emulate: bool = False


@dataclass(slots=True)
class Update:
    """One call of an optimizer's `step`."""

    applied: bool = True
    norm: float | None = None
    """Gradient norm before clipping, if the optimizer reports it."""


class Loop(ABC):
    """One kind of loop. It has the engine attributes that the audit reads, and answers the questions of audit.holdings itself."""

    name: str
    words: str
    """Display name of this loop, such as 'torch FSDP2'."""
    sharded: Sharded = "nothing"
    kind: EngineTraits
    foreign = True
    """Whether the model is not megatron-core's."""
    of_the_mean: float = 1.0
    """The wrapper's result as a multiple of the gradients' mean over ranks: 1, or the number of ranks if it is set to sum them."""

    def __init__(self, model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> None:
        self.model: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
        self.outer = optimizer
        self.scaler = scaler
        self.group = group
        self.optimizer: Any = optimizer
        self.configs: Any = SimpleNamespace(model=None, optimizer=None, ddp=None)
        self.run = LoopRun(policy=neutral(), facts=self.facts())

    # --- facts ---------------------------------------------------------------------------------------------------------------------------
    @abstractmethod
    def facts(self) -> LoopFacts:
        """Shape, parallel sizes and optimizer, as far as promises need them."""

    @abstractmethod
    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Parameters of this rank by their names in the unwrapped model."""

    @abstractmethod
    def tensors(self) -> Iterable[Live]:
        """Every tensor with a role, as it exists now."""

    # --- the update ----------------------------------------------------------------------------------------------------------------------
    @abstractmethod
    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """Calls `then` after each update, while its gradients still exist; returns a function that removes the hook."""

    def on_step(self, begins: Callable[[], None]) -> Callable[[], None]:
        """Calls `begins` before each update if the loop's optimizer may compute gradients itself (a closure); returns a function that removes the hook."""
        return lambda: None

    def pending(self) -> Update | None:
        """The update of a step in which only some of several optimizers stepped, of which `on_update` has not told; None elsewhere."""
        return None

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        scale = getattr(self.scaler, "get_scale", None)
        return float(scale()) if scale is not None and getattr(self.scaler, "is_enabled", lambda: True)() else 1.0

    def largest(self, setting: str) -> float:
        """The largest value that a setting has in any group."""
        groups = (group for inner in inner_optimizers(self.outer) for group in inner.param_groups)
        return max((float(group.get(setting, 0.0)) for group in groups), default=0.0)

    @property
    def updaters(self) -> tuple[str, ...]:
        """Class names of the torch optimizers that update the weights."""
        return tuple(dict.fromkeys(type(inner).__name__ for inner in inner_optimizers(self.optimizer)))

    def unobserved(self) -> Mapping[str, str]:
        """Row -> why it cannot be seen in this loop."""
        return _EMPTY

    def cut_twice(self) -> list[str]:
        """Parameters that tensor parallelism splits before a wrapper shards them."""
        return []

    def audit_ranks(self) -> tuple[int, ...]:
        """Global ranks that average gradients with this one."""
        if not dist.is_initialized():
            return (0,)
        if self.group is not None:
            return tuple(dist.get_process_group_ranks(self.group))
        return tuple(range(dist.get_world_size()))


def neutral() -> PrecisionPolicy:
    """The policy to observe under if none was given; nothing is judged by it."""
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.precision.resolve import resolve

    return resolve(get_mixed_precision_config("fp32"))


def shape_of(modules: Iterable[tuple[str, Any]], *, tied: bool = False) -> ModelShape:
    """The shape facts that per-layer rules need: the number of layers. The other sizes of a foreign model are unknown and not needed."""
    layers = 0
    for path, _ in modules:
        parts = path.split(".")
        numbers = (number for name, number in itertools.pairwise(parts) if name in LAYER_LISTS and number.isdigit())
        layers = max(layers, 1 + int(next(numbers, -1)))
    sizes = ("hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels", "vocab_size", "seq_length")  # fmt: skip
    unknown: dict[str, Any] = dict.fromkeys(sizes, 0)
    return ModelShape(num_layers=layers, tied=tied, **unknown)


def together(*undo: Callable[[], None]) -> Callable[[], None]:
    """A function that calls all of these, the last first: removes several hooks."""

    def off() -> None:
        for one in reversed(undo):
            one()

    return off


def chunks(model: Any) -> Iterator[Any]:
    """A model, or each chunk of one."""
    yield from model if isinstance(model, (list, tuple)) else (model,)
