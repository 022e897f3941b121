"""A named recipe and what follows from its fields."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mpbridge.common.errors import MpbridgeError
from mpbridge.precision import requirements
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.resolve import resolve

Factory = Callable[[], MixedPrecisionConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A named entry with its metadata."""

    name: str
    make: Factory
    """Returns a new config at every call."""
    summary: str
    aliases: tuple[str, ...] = ()
    status: Literal["validated", "experimental"] = "experimental"
    """"validated": trained to a published or measured loss; the evidence is in `source`."""
    source: str = ""
    """Source of the values and the evidence."""
    prefers: str | None = None
    """The preferred engine if several could run it; None: determined by its fields."""
    advice: tuple[str, ...] = ()
    """Recommended hyperparameters in addition to those that follow from its fields, each with its source."""
    foreign: bool = False
    """Whether it comes from an installed package, which is loaded only when the recipe is used."""

    def _repr_html_(self) -> str:
        """HTML for notebooks: its metadata and fields."""
        from mpbridge.common.tables import facts

        about = {"summary": self.summary, "status": self.status, "source": self.source, "engine": self.engine}
        config = {} if self.foreign else self.make().as_data()
        return facts(f"recipe {self.name}", {**about, **config}).html()

    @property
    def policy(self) -> PrecisionPolicy | None:
        """Its meaning; None if that requires loading a package, or it cannot be resolved."""
        return None if self.foreign else _meaning(self.make)

    @property
    def needs(self) -> tuple[int, int] | None:
        """Lowest CUDA compute capability that runs it natively; None: any machine, including a CPU (or unknown: `foreign`)."""
        return None if (policy := self.policy) is None else requirements.needs(policy)

    @property
    def engine(self) -> str | None:
        """Its engine; None: megatron-core's."""
        return self.prefers or (None if (policy := self.policy) is None else requirements.engine_for(policy))

    @property
    def hints(self) -> tuple[str, ...]:
        """Recommended hyperparameters, each with its source."""
        return (() if (policy := self.policy) is None else requirements.hints(policy)) + self.advice


@functools.lru_cache(256)
def _meaning(make: Factory) -> PrecisionPolicy | None:
    try:
        return resolve(make())
    except MpbridgeError:
        return None
