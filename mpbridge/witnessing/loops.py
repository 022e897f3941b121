"""Somebody else's loop as the audit sees an engine: its model, its optimizer, the facts that promises need, and which kind of loop it is."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch.distributed as dist

from mpbridge.audit.flags import inner_optimizers
from mpbridge.engines.contract import Live
from mpbridge.facts import ModelShape, RunFacts
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.stacks.meaning import Sharded
from mpbridge.traits import EngineTraits

_EMPTY: Mapping[str, Any] = MappingProxyType({})
LAYER_LISTS = ("layers", "h", "blocks", "block", "layer")
"""Names under which models keep their list of layers."""


@dataclass(frozen=True, kw_only=True)
class LoopFacts(RunFacts):
    """RunFacts of a loop that no engine of ours runs."""

    own_traits: EngineTraits | None = None

    @property
    def traits(self) -> EngineTraits:
        """Those of the loop's kind."""
        return self.own_traits or super().traits


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """What the audit asks of a run."""

    policy: PrecisionPolicy
    facts: RunFacts
    recipe: str = ""
    inputs: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    """The live configs' values when the witness was made: what their author had decided by then."""
    plan: Any = None
    emulate: bool = False


@dataclass(slots=True)
class Update:
    """One call of an optimizer's step."""

    applied: bool = True
    norm: float | None = None
    """Gradient norm before clipping, where the optimizer says it."""


class Loop(ABC):
    """One kind of loop. It has the attributes of an engine that the audit reads, and answers its own questions (audit.subject)."""

    name: str
    words: str
    """What this loop is, for people: 'torch FSDP2'."""
    sharded: Sharded = "nothing"
    kind: EngineTraits
    foreign = True
    """Whether the model is another's than megatron-core's."""

    @property
    def of_the_mean(self) -> float:
        """What the wrapper makes of gradients, as a multiple of their mean over ranks: 1, or the number of ranks where it is told to sum them."""
        return 1.0

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
        """Every tensor that plays a role, as it exists now."""

    # --- the update ----------------------------------------------------------------------------------------------------------------------
    @abstractmethod
    def on_update(self, then: Callable[[Update], None]) -> Callable[[], None]:
        """Calls `then` after each update, while its gradients still exist; gives back what takes the hook off."""

    def on_step(self, begins: Callable[[], None]) -> Callable[[], None]:
        """Calls `begins` before each update where the loop's optimizer may ask for gradients itself (a closure); gives back what takes the hook off."""
        return lambda: None

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by now."""
        scale = getattr(self.scaler, "get_scale", None)
        return float(scale()) if scale is not None and getattr(self.scaler, "is_enabled", lambda: True)() else 1.0

    @property
    def rate(self) -> float:
        """The largest learning rate of any group."""
        rates = [float(group.get("lr", 0.0)) for inner in inner_optimizers(self.outer) for group in inner.param_groups]
        return max(rates, default=0.0)

    def unobserved(self) -> Mapping[str, str]:
        """Row -> why it cannot be seen in this loop."""
        return _EMPTY

    def cut_twice(self) -> list[str]:
        """Parameters that tensor parallelism cuts before a wrapper shards them."""
        return []

    def audit_ranks(self) -> tuple[int, ...]:
        """Global ranks that average gradients with this one."""
        if not dist.is_initialized():
            return (0,)
        if self.group is not None:
            return tuple(dist.get_process_group_ranks(self.group))
        return tuple(range(dist.get_world_size()))


def neutral() -> PrecisionPolicy:
    """A policy to observe under when nobody gave one; nothing is judged by it."""
    from mpbridge.precision.registry import get_mixed_precision_config
    from mpbridge.precision.resolve import resolve

    return resolve(get_mixed_precision_config("fp32"))


def shape_of(modules: Iterable[tuple[str, Any]], *, tied: bool = False) -> ModelShape:
    """What rules of single layers ask of a shape: how many there are. The sizes of a foreign model are not known and not asked for."""
    layers = 0
    for path, _ in modules:
        parts = path.split(".")
        for name, number in itertools.pairwise(parts):
            if name in LAYER_LISTS and number.isdigit():
                layers = max(layers, int(number) + 1)
                break
    return ModelShape(
        num_layers=layers,
        hidden_size=0,
        num_attention_heads=0,
        ffn_hidden_size=0,
        num_query_groups=0,
        kv_channels=0,
        vocab_size=0,
        seq_length=0,
        tied=tied,
    )


def chunks(model: Any) -> Iterator[Any]:
    """A model, or each chunk of one."""
    yield from model if isinstance(model, (list, tuple)) else (model,)
