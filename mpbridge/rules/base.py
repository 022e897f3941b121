"""What a rule is: a row with its words, its source and the versions in which it holds; the case that it judges; the violation that it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mpbridge.facts import RunFacts
from mpbridge.formats import DType
from mpbridge.hardware.versions import Window, at_least
from mpbridge.memory.keeps import Holding, keeps
from mpbridge.precision.policy import PrecisionPolicy, Quant
from mpbridge.traits import EngineTraits

ARGUMENTS = "Megatron-LM training/arguments.py validate_args (d98e8a64)"
"""A source that rules of several subjects cite."""

PLAIN_WEIGHTS = "mixed_precision.fp8_param_gather=false mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false"
"""The cure of rules about weights at rest in a low format: a reused buffer without them is a contradiction."""

Severity = Literal["error", "warning"]
Emulated = Literal["same", "warning", "silent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One policy in one run, with the questions that many rules ask."""

    policy: PrecisionPolicy
    run: RunFacts

    def model(self, name: str, default: Any = None) -> Any:
        """A setting of the model section; None counts as not given."""
        return _get(self.run.model, name, default)

    def ddp(self, name: str, default: Any = None) -> Any:
        """A setting of the ddp section."""
        return _get(self.run.ddp, name, default)

    def opt(self, name: str, default: Any = None) -> Any:
        """A setting of the optimizer section."""
        return _get(self.run.optimizer.settings, name, default)

    @property
    def native(self) -> bool:
        """Whether Transformer Engine does the quantization."""
        return self.run.realization == "native"

    @property
    def core(self) -> bool:
        """Whether megatron-core's own wrapper and optimizer run it."""
        return self.traits.main_weights == "megatron_core"

    @property
    def traits(self) -> EngineTraits:
        """The engine's."""
        return self.run.traits

    @property
    def kept(self) -> Mapping[str, Holding]:
        """What is kept of a parameter, by role (`memory.keeps`)."""
        return keeps(self.policy, self.traits, self.run.optimizer, ddp=self.run.ddp)

    @property
    def own_copy(self) -> bool:
        """As `PrecisionPolicy.narrow_alone`."""
        return self.policy.narrow_alone

    @property
    def plain_ddp(self) -> str:
        """The settings that come to plain DDP: a cure."""
        also = " ddp.overlap_param_gather=false" if self.ddp("overlap_param_gather") else ""
        return f"ddp.use_distributed_optimizer=false{also}"

    @property
    def plain_states(self) -> str:
        """The settings that come to an optimizer whose states are megatron-core's own: a cure."""
        low = [
            f" mixed_precision.{name}_dtype=null"
            for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq")
            if getattr(self.policy, name) not in (None, DType.FP32)
        ]
        return "".join(["mixed_precision.use_precision_aware_optimizer=false", *low])

    @property
    def scalings(self) -> tuple[str, ...]:
        """The scalings of all regions."""
        return tuple(quant.scaling for quant in self.policy.quants)

    @property
    def history(self) -> bool:
        """Whether any region's scales come from earlier steps (delayed scaling)."""
        return any(quant.row.history for quant in self.policy.quants)

    @property
    def stored(self) -> tuple[Quant, ...]:
        """The quantizations whose weights rest in the low format."""
        return tuple(quant for quant in self.policy.quants if quant.stored)

    @property
    def aware(self) -> bool:
        """Whether FusedAdam owns the states."""
        return bool(self.policy.precision_aware)

    def te_before(self, version: str) -> bool:
        """Whether a Transformer Engine older than `version` is there (an absent one is another rule's subject)."""
        have = self.run.versions.transformer_engine
        return have is not None and not at_least(have, version)

    def set_variable(self, name: str) -> bool:
        """Whether an environment variable is set to something that means yes."""
        return self.run.environment.get(name, "").strip().lower() not in ("", "0", "false", "off", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row. `found` gives the words for what is wrong, or a false value when the rule holds."""

    id: str
    found: Callable[[Case], object]
    expected: str
    cure: str
    """Settings as a command line takes them, or words; several cures stand with ', or ' between them, and each of them cures."""
    source: str
    """Where the rule comes from: file and function of a version, or the upstream issue."""
    cure_here: Callable[[Case], str] | None = None
    """The cure of one case, where not every case has the same; None: `cure`."""
    about: str = ""
    """Traits of a recipe (rules.cards.traits) that bring it up, all of them needed; empty: the rule is about runs, not recipes."""
    severity: Severity = "error"
    holds: tuple[Window, ...] = ()
    """The versions in which it is true; outside of any of them the row is silent."""
    engine: str = ""
    """The engine whose runs it is asked of; '': all."""
    emulated: Emulated = "same"
    """What becomes of an error when the quantization is emulated, where it may not apply."""

    def applies(self, run: RunFacts) -> bool:
        """Whether it speaks of the run's engine, and the run's versions lie in its windows."""
        return self.engine in ("", run.engine) and all(
            window.holds(getattr(run.versions, window.package)) for window in self.holds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule in words."""

    rule: str
    severity: Severity
    found: str
    expected: str
    cure: str
    source: str
    versions: str = ""
    """In which versions the rule is true; empty: in all."""

    def __str__(self) -> str:
        return (
            f"{self.severity} {self.rule}: {self.found}; expected {self.expected}. Cure: {self.cure}. [{self.source}]"
        )


def _get(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    value = settings.get(name)
    return default if value is None else value
