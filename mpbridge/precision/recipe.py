"""A named recipe, and the hardware, engine and hints that follow from its fields, so that one from a file has the same metadata as a built-in one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.formats import DType
from mpbridge.common.traits import DEFAULT, EngineTraits, engine_names, traits
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.resolve import resolve

Factory = Callable[[], MixedPrecisionConfig]
HINTS: Mapping[str, Callable[[PrecisionPolicy], bool]] = MappingProxyType({
    "Adam epsilon matters more under low precision: try 1e-8 against 1e-5 (Megatron Bridge issue 1178)": lambda policy: policy.quantized,
    "BF16 edge layers help convergence but cost speed (Megatron Bridge issues 651, 1347)": lambda policy: policy.ends is not None,
    "keep the last layers in BF16: Llama-3-8B needed four (Megatron Bridge issue 1347)": lambda policy: policy.fp4 is not None and policy.ends is None,
    "updates below 2**-9 of a weight are lost: raise the learning rate or choose bf16_mixed_bf16_moments instead (scripts/evidence/show_bf16_adam.py)":
        lambda policy: policy.narrow_alone,
})  # fmt: skip
"""Recommended hyperparameters, each with its source -> whether they are about a policy."""


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
        # a factory is asked anew each time, as it may read what has changed since; fields do not change
        fields = isinstance(self.make, functools.partial) and self.make.func is MixedPrecisionConfig
        try:
            return None if self.foreign else _of_fields(self.make) if fields else resolve(self.make())
        except MpbridgeError:
            return None

    @property
    def needs(self) -> tuple[int, int] | None:
        """Lowest CUDA compute capability that runs it natively; None: any machine, including a CPU (or unknown: `foreign`)."""
        policy = self.policy
        quants = () if policy is None else policy.quants
        return max((quant.row.hardware.low for quant in quants), default=None)

    @property
    def engine(self) -> str | None:
        """Its engine; None: megatron-core's."""
        return self.prefers or (None if (policy := self.policy) is None else engine_for(policy))

    @property
    def hints(self) -> tuple[str, ...]:
        """Recommended hyperparameters, each with its source."""
        policy = self.policy
        return tuple(text for text, of in HINTS.items() if policy is not None and of(policy)) + self.advice


@functools.cache
def _of_fields(make: Factory) -> PrecisionPolicy:
    return resolve(make())


def able(policy: PrecisionPolicy, engine: EngineTraits) -> bool:
    """Whether an engine can keep such parameters and compute such GEMMs; other restrictions are rules."""
    libraries = {quant.row.hardware.library for quant in policy.quants}
    stored = engine.stored_weights or not policy.stored
    wide = engine.wide_storage or not policy.mixed or policy.params is not DType.FP32
    return wide and stored and libraries <= engine.quantizers


def engine_for(policy: PrecisionPolicy) -> str | None:
    """The engine that the policy requires: the first capable one if the default is not; None: the default is capable, or none is."""
    if able(policy, traits(DEFAULT)):
        return None
    return next((name for name in engine_names() if able(policy, traits(name))), None)
