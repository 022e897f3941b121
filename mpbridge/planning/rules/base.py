"""The types of the rule table: Rule (a row with its texts, its source and the versions in which it is true), Case (what it judges) and Violation (what it reports),
and how rows are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.traits import EngineTraits
from mpbridge.common.versions import Window, at_least
from mpbridge.planning.memory.keeps import Holding, keeps, offloaded
from mpbridge.precision.config import FUSED
from mpbridge.precision.policy import PrecisionPolicy, Quant

ARGUMENTS = "Megatron-LM training/arguments.py validate_args (d98e8a64)"
MODEL_CONFIG = "megatron-core 0.16.1 transformer_config.py __post_init__"
NEWER_MODEL_CONFIG = "Megatron-LM core/transformer/transformer_config.py (d98e8a64)"
"""Sources that rules on several subjects cite."""

PLAIN_WEIGHTS = "mixed_precision.fp8_param_gather=false mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false"
"""The cure of rules about weights stored in a low-precision format; it clears both fields, since a reused buffer without stored weights is a contradiction."""
NO_EXPERT_OVERLAP = "model.overlap_moe_expert_parallel_comm=false model.delay_wgrad_compute=false model.ep_overlap_early_attn_memory_release=false"

Severity = Literal["error", "warning"]
Emulated = Literal["same", "warning", "silent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One policy in one run, with the queries that many rules share."""

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

    def words(self, name: str) -> tuple[str, ...]:
        """A model setting that is one word or a list of words, as a tuple; () if it is not set."""
        value = self.model(name, ())
        return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)

    @property
    def native(self) -> bool:
        """Whether Transformer Engine performs the quantization."""
        return self.run.realization == "native"

    @property
    def gpu(self) -> bool | None:
        """Whether the machine is a GPU; None: no machine is named."""
        return None if self.run.machine is None else self.run.machine.gpu

    @property
    def arch(self) -> tuple[int, int]:
        """The compute capability; (0, 0) if there is none or it is not known."""
        return (self.run.machine.arch if self.run.machine is not None else None) or (0, 0)

    @property
    def core(self) -> bool:
        """Whether the engine uses megatron-core's own wrapper and optimizer."""
        return self.traits.main_weights == "megatron_core"

    @property
    def traits(self) -> EngineTraits:
        """Traits of the run's engine."""
        return self.run.traits

    @property
    def kept(self) -> Mapping[str, Holding]:
        """What is stored for a parameter, by role (`memory.keeps`)."""
        return keeps(self.policy, self.traits, self.run.optimizer, ddp=self.run.ddp)

    @property
    def plain_ddp(self) -> str:
        """Settings that select plain DDP, as a cure."""
        also = {  # what rules refuse without the distributed optimizer
            "ddp.overlap_param_gather=false": self.ddp("overlap_param_gather"),
            "ddp.num_distributed_optimizer_instances=1": self.run.instances > 1,
            "mixed_precision.use_precision_aware_optimizer=false": self.aware,
            "optimizer.optimizer_cpu_offload=false": self.offloaded,
            "optimizer.overlap_param_gather_with_optimizer_step=false": self.run.optimizer.overlap_param_gather_with_step,
            PLAIN_WEIGHTS: self.stored,
        }
        return " ".join(["ddp.use_distributed_optimizer=false", *(setting for setting, on in also.items() if on)])

    @property
    def plain_states(self) -> str:
        """Settings that select states which an optimizer other than FusedAdam keeps, as a cure."""
        states = {"main_grads_dtype": "main_grads", **FUSED}
        low = [field for field, fact in states.items() if getattr(self.policy, fact) not in (None, DType.FP32)]
        also = ["mixed_precision.use_precision_aware_optimizer=false"] if self.aware else []
        also += [f"mixed_precision.{field}=null" for field in low]
        # torch's optimizers update the parameters themselves: FP32 states are those of FP32 parameters
        narrow = self.traits.main_weights == "optimizer" and self.policy.params is not DType.FP32
        also += ["mixed_precision.params_dtype=fp32"] if narrow else []
        # offload-needs-precision-aware would send back
        return " ".join([*also, *(["optimizer.optimizer_cpu_offload=false"] if self.offloaded else [])])

    @property
    def offloaded(self) -> bool:
        """Whether megatron-core's HybridDeviceOptimizer keeps the states."""
        return offloaded(self.traits, self.run.optimizer)

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
        """The quantizations whose weights are stored in the low-precision format."""
        return tuple(quant for quant in self.policy.quants if quant.stored)

    @property
    def aware(self) -> bool:
        """Whether FusedAdam owns the states."""
        return bool(self.policy.precision_aware)

    def te_before(self, version: str) -> bool:
        """Whether the installed Transformer Engine is older than `version`; False without one, which another rule reports."""
        have = self.run.versions.transformer_engine
        return have is not None and not at_least(have, version)

    def variable(self, name: str) -> str:
        """An environment variable; '' if it is not set."""
        return self.run.environment.get(name, "").strip()

    def set_variable(self, name: str) -> bool:
        """Whether an environment variable is set to a true value."""
        return self.variable(name).lower() not in ("", "0", "false", "off", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row. The rule is broken if `when` holds and `found` has words."""

    id: str
    when: Callable[[Case], object] = lambda case: True
    """Whether the case is of the kind that is wrong; the default is any."""
    found: str | Callable[[Case], object]
    """What is wrong: text in which {c.run.engine} and the like are filled in, or a function that returns it (something false: the rule holds)."""
    expected: str
    cure: str
    """Command-line settings, or a sentence. Alternatives are separated by ', or '; each of them is sufficient."""
    source: str
    """Where the rule comes from: file and function of a version, or the upstream issue."""
    cure_here: Callable[[Case], str] | None = None
    """The cure for a particular case, where it differs between cases; None: `cure`."""
    about: str = ""
    """Traits of a recipe (rules.cards.traits) for which the rule is shown, all required; empty: the rule is about runs, not recipes."""
    severity: Severity = "error"
    holds: tuple[Window, ...] = ()
    """The versions in which the rule is true; outside any of these windows it is silent."""
    engine: str = ""
    """The engine that the rule applies to; '': all."""
    emulated: Emulated = "same"
    """What an error turns into when the quantization is emulated and the rule may not apply."""

    def applies(self, run: RunFacts) -> bool:
        """Whether the rule is about the run's engine and its windows contain the run's versions."""
        inside = (window.holds(run.versions.of(window.package)) for window in self.holds)
        return self.engine in ("", run.engine) and all(inside)

    def broken(self, found: str, cure: str = "") -> Violation:
        """That `found` breaks it. cure: in that case; '': the rule's."""
        holds = " and ".join(map(str, self.holds))
        return Violation(rule=self.id, severity=self.severity, found=found, expected=self.expected, cure=cure or self.cure, source=self.source, versions=holds)  # fmt: skip

    def fault(self, case: Case) -> str:
        """What is wrong with a case that the rule applies to; '' if it holds."""
        if not self.when(case):
            return ""
        return self.found.format(c=case) if isinstance(self.found, str) else str(self.found(case) or "")


def row(
    id: str, found: str | Callable[[Case], object], expected: str, cure: str, source: str = MODEL_CONFIG, **more: Any
) -> Rule:
    """A rule as the tables write it: what is found; what is expected; cure and source (none: the checks of TransformerConfig); then what else there is."""
    return Rule(id=id, found=found, expected=expected, cure=cure, source=source, **more)


warning = partial(row, severity="warning")


BETWEEN_STAGES = row("stage-loses-the-optimizer-states", "",
    "a stage that goes on with the optimizer's states of the one before it",
    "train the later stages as a run of their own, from the last checkpoint of the earlier ones with --reset-optimizer", "docs/checkpoints.md")  # fmt: skip
"""What a switch between two stages breaks (`cli._schedule.lost_states`), and no single case."""


def faults(what: str, *parts: tuple[str, object]) -> str:
    """`what` and the words of every part that is wrong ((words, whether it is)), '' if none is."""
    wrong = [words for words, is_wrong in parts if is_wrong]
    return f"{what}{', '.join(wrong)}" if wrong else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule, as text."""

    rule: str
    severity: Severity
    found: str
    expected: str
    cure: str
    source: str
    versions: str = ""
    """The versions in which the rule is true; empty: all."""

    def __str__(self) -> str:
        what = f"{self.found}; expected {self.expected}"
        return f"{self.severity} {self.rule}: {what}. Cure: {self.cure}. [{self.source}]"


def _get(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    value = settings.get(name)
    return default if value is None else value
