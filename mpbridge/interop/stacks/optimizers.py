"""Which states an optimizer keeps for each weight, by the name that a stack's file gives it: a policy's moments are Adam's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpbridge.common.errors import cut


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
    if found.name in _WITH_MOMENTUM:
        return dataclasses.replace(found, exp_avg=momentum)
    return found
