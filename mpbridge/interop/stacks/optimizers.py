"""Which states an optimizer keeps for each weight, by the name that a stack's file gives it (a policy's moments are Adam's); and the settings of
megatron-core's optimizers beside Adam in both Megatrons: each one's field, Megatron-LM's option for it, and what decides where it is not said.

The fields are those of megatron-core's schema, the options those of Megatron-LM's parser (megatron_lm_arguments): a new one of either is read and
written without a row here.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mpbridge.common.errors import cut
from mpbridge.common.facts import BESIDE_ADAM, OWN_SETTINGS, reads
from mpbridge.common.formats import say
from mpbridge.planning.rules.trained import NEWTON_SCHULZ, WORDS
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.megatron_spec.versions import BEFORE_018, described


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What an optimizer keeps beside a weight."""

    name: str = "Adam"
    """Adam for all of its kin with the same two moments (AdamW, FusedAdam, NAdam)."""
    exp_avg: bool = True
    """A momentum for every element."""
    exp_avg_sq: bool = True
    """A mean or sum of squares for every element."""
    note: str = ""
    """What these two don't tell; '' where they tell all."""

    def keeps(self, row: str) -> bool:
        """Whether it has the state that a row of stacks.meaning.LABELS is about; True for every other row."""
        return bool(getattr(self, row)) if row in MOMENTS else True


MOMENTS = ("exp_avg", "exp_avg_sq")
OFFLOADED: Mapping[str, Any] = MappingProxyType(
    {"store_param_remainders": False, "main_params_dtype": "fp32", "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"}
)
"""Fields of a recipe with optimizer_cpu_offload in both Megatrons, whatever else is said (memory.keeps.offloaded)."""
NO_DTYPES = "HybridDeviceOptimizer is given no dtypes: its main weights and moments are FP32"
ADAM = Optimizer()
NOT_SAID = "no optimizer stands in it: moments and bytes are those of Adam"
_UNKNOWN = "its states are not known here: moments and bytes are those of Adam"
_KNOWN: Mapping[str, Optimizer] = MappingProxyType({
    # the name without '_', '.', digits of its states' bits and words for how it runs -> its states
    r"(mu|cpu|fused|deepspeedcpu)?(adam|adamw|nadam|radam|adamax)|adamwtorch|adamwbnb|adamwanyprecision|onebitadam|zerooneadam": ADAM,
    r"(onebit|fused)?lamb": Optimizer(name="LAMB"),
    r"(mu|fused)?sgd": Optimizer(name="SGD", exp_avg_sq=False),
    r"(fused|cpu|deepspeedcpu)?lion": Optimizer(name="Lion", exp_avg_sq=False),
    r"(cpu|deepspeedcpu)?adagrad": Optimizer(name="Adagrad", exp_avg=False),
    r"rmsprop(bnb)?": Optimizer(name="RMSprop", exp_avg=False),
    r"adafactor": Optimizer(
        name="Adafactor", exp_avg=False, exp_avg_sq=False, note="squares are kept as one row and one column of each matrix, which the bytes leave out"
    ),
    r"(dist|tensorparallel)?muon": Optimizer(
        name="Muon", exp_avg_sq=False, note="matrices keep one momentum, which is shown; embeddings, norms and biases have the moments of the optimizer beside it"
    ),
    r"adaptivemuon": Optimizer(name="adaptive Muon", note="squares are kept by element (adamuon) or by row (normuon): the former are shown"),
    r"soap": Optimizer(name="SOAP", note="Shampoo's matrices beside the two moments are left out of the bytes"),
    r"ademamix": Optimizer(name="AdEMAMix", note="a second, slow momentum is left out of the bytes"),
    r"schedulefree(adamw|radam)": Optimizer(name="schedule-free AdamW", note="in the place of the first moment stands a second copy of the weights"),
    r"schedulefreesgd": Optimizer(name="schedule-free SGD", exp_avg_sq=False, note="in the place of the momentum stands a second copy of the weights"),
    r"flashadamw": Optimizer(name="FlashAdamW", note="states and main weights are compressed, which has no setting here: whole moments and no main weights are shown"),
})  # fmt: skip
"""Sources: torch.optim, Megatron-LM's megatron/core/optimizer, DeepSpeed's ops, transformers' Trainer.get_optimizer_cls_and_kwargs, and their papers."""
_WITH_MOMENTUM = ("SGD", "RMSprop")
"""Optimizers that keep a momentum where it is not 0."""
_HOW = re.compile(r"^paged|(fused|xla|npu|layerwise)(?=$|fused$)|(4|8|32)bit$")


def optimizer_named(name: str, *, momentum: bool = False) -> Optimizer:
    """The states of an optimizer of that name or class ('torch.optim.AdamW', 'adamw_torch_fused'); Adam's, with a note, for one that is not known.

    momentum: whether SGD and RMSprop are given one.
    """
    word = re.sub(r"[^a-z0-9]", "", name.rpartition(".")[2].lower())
    while (plain := _HOW.sub("", word)) not in ("", word):
        word = plain
    found = next((states for pattern, states in _KNOWN.items() if re.fullmatch(pattern, word)), None)
    if found is None:
        return Optimizer(name=cut(name), note=_UNKNOWN)
    return dataclasses.replace(found, exp_avg=momentum) if found.name in _WITH_MOMENTUM else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A setting of one of these optimizers in one stack."""

    name: str
    """Field of that megatron-core's OptimizerConfig."""
    default: Any
    """What decides where the stack's configuration says nothing."""
    option: str = ""
    """Megatron-LM's; '' where it has none, and in Bridge, whose configuration has the field."""
    words: tuple[str, ...] = ()
    """The words that are taken; empty: any, or a number."""

    def flags(self, value: Any) -> str:
        """The option that says it, '' where a switch has to be left out. A switch's value is given by its presence."""
        if isinstance(self.default, bool):
            return self.option if value is not self.default else ""
        return f"{self.option} {value}"

    def takes(self, value: Any) -> bool:
        """Whether the stack has a word for that value."""
        return not self.words or value in self.words

    def told(self, value: Any) -> str:
        """A value as the stack writes it."""
        return self.flags(value) or f"no {self.option}" if self.option else f"optimizer.{self.name}={say(value)}"

    @property
    def ours(self) -> str:
        """Its name in the megatron-core that is installed here; '' if that has none, or if rules, memory and audit know no other value than its default
        (rule settings-not-known-here)."""
        known, old = records("optimizer"), records("optimizer", version=described()[0])
        judged = any(one in old for one in spellings(self.name))
        return next((one for one in spellings(self.name) if judged and one in known), "")

    @property
    def usual(self) -> Any:
        """What decides here where nothing is said; the stack's default for a setting that the installed megatron-core lacks."""
        return records("optimizer")[self.ours]["default"] if self.ours else self.default


def spellings(name: str) -> tuple[str, ...]:
    """An optimizer's setting as releases of megatron-core call it: 0.16's muon_use_nesterov is muon_nesterov in 0.20."""
    stem = name.replace("_use_nesterov", "_nesterov")
    return name, stem, stem.replace("_nesterov", "_use_nesterov")


@functools.cache
def settings(core: str) -> Mapping[str, Setting]:
    """Field -> its Setting in a megatron-core."""
    known = {name: one for name, one in records("optimizer", version=core).items() if name.startswith(OWN_SETTINGS)}
    words = {name: tuple(WORDS.get(name, ())) for name in known}
    made = {name: Setting(name=name, default=one["default"], words=words[name]) for name, one in known.items()}
    return MappingProxyType(made)


def at_ours(there: Mapping[str, Setting], name: str) -> Setting | None:
    """A stack's setting by the name that it has here; None if the stack has none."""
    return next((there[one] for one in spellings(name) if one in there), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What trains a run of megatron-core's own optimizers, as one of the Megatrons says it."""

    name: str
    """The optimizer, by the stack's word."""
    core: str
    """The stack's megatron-core."""
    distributed: bool
    """Whether the distributed optimizer, or the layer-wise one, is asked for."""
    there: Mapping[str, Setting]
    given: Mapping[str, Any]
    """Field -> the value that stands in the configuration."""

    @property
    def plain(self) -> str:
        """The optimizer without the word for how its states are divided."""
        return self.name.removeprefix("dist_")

    @property
    def divided(self) -> bool:
        """Whether data-parallel ranks share its states: since 0.18 the distributed optimizer of what is neither Adam nor SGD is the layer-wise one."""
        return self.name != self.plain or (self.distributed and not self.refused)

    @property
    def refused(self) -> bool:
        """Whether that megatron-core raises for the optimizer beside the distributed one (validate_args)."""
        return self.distributed and self.plain in BESIDE_ADAM and BEFORE_018.holds(self.core)

    @property
    def ours(self) -> str:
        """The value of optimizer.optimizer that trains so; '' for Adam, which is the default, and for what mpbridge does not train."""
        if self.plain not in (*BESIDE_ADAM, "sgd"):
            return ""
        return "dist_muon" if self.plain == "muon" and self.divided else self.plain

    def __getitem__(self, name: str) -> Any:
        """The value in force of a field."""
        return self.given.get(name, self.there[name].default)

    @property
    def read(self) -> tuple[Setting, ...]:
        """The settings that this optimizer reads."""
        return tuple(one for one in self.there.values() if reads(self.plain, one.name, self.given))

    @property
    def here(self) -> dict[str, Any]:
        """Setting of the optimizer section -> value, wherever a run has to say it to be trained so; the name first."""
        said = [one for one in self.read if one.ours and one.takes(self[one.name])]
        told = {one.ours: self[one.name] for one in said if self[one.name] != one.usual}
        return {"optimizer": self.ours, **told} if self.ours else {}

    def notes(self, where: str) -> Iterator[tuple[str, Any, str]]:
        """(kind of note, whether it applies, text). where: the stack's setting that names the optimizer."""
        read, here = self.read, self.here
        for one, value in ((self.there[name], value) for name, value in self.given.items()):
            reader = next((text for stem, text in _READERS.items() if one.name.startswith(stem)), "another optimizer")
            unread = f"{one.told(cut(value))}: only {reader} reads it, and the optimizer is {cut(self.name)}"
            refused = f"{one.told(cut(value))}: refused there, which takes {', '.join(one.words)}"
            yield ("contradicts", not one.takes(value), refused) if one in read else ("inert", True, unread)
        for one in read:
            value = self[one.name]
            lacks = f"{one.told(cut(value))}: rules, memory and audit here know {say(one.default)} only"
            yield "cannot_express", not one.ours and value != one.default, lacks
            if one.name == "muon_fp32_matmul_prec" and value in NEWTON_SCHULZ:
                text = f"Newton-Schulz multiplies in {NEWTON_SCHULZ[value]}: optimizer.{one.name}={value} here"
                yield "assumed", one.takes(value), text
            elif one.name == "muon_fp32_matmul_prec":
                known = f"torch knows only {', '.join(NEWTON_SCHULZ)}, warns, and Newton-Schulz multiplies in FP32"
                yield "contradicts", one.takes(value), f"{one.told(cut(value))}: {known}"
        for said, why in ((True, ""), (False, ": what is in force there where nothing is said")):
            told = [one for one in read if one.ours in here and (one.name in self.given) is said]
            words = " ".join(f"optimizer.{one.ours}={say(self[one.name])}" for one in told)
            yield "assumed", told, f"{words} here{why}"
        apart = self.divided and self.ours not in ("", "sgd", "dist_muon")
        yield "cannot_express", apart, f"{where}={self.name}: whole matrices are dealt to the ranks there; here every rank keeps all states of {self.plain}"  # fmt: skip
        yield "contradicts", self.refused, f"{where}={self.name} with the distributed optimizer: megatron-core {self.core} refuses both together"  # fmt: skip


_READERS = {"lion_": "the Lion beside Muon (muon_scalar_optimizer)", "sgd_": "SGD", "muon_": "Muon", "soap_": "SOAP"}
"""Start of a setting's name -> what reads it, in words."""


def host_settings(fraction: Any) -> str:
    """What a run sets beside the recipe where either Megatron offloads its optimizer."""
    return f"optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction={fraction}, which are not fields of a recipe"
