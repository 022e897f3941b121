"""What each optimizer's step makes of its states, and the settings of its groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpbridge.observe.audit.holdings import ADAMS, Held

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Rule:
    """What an optimizer's step makes of its states."""

    words: str
    states: tuple[str, ...]
    """Each is beta times itself plus 1 - beta times the gradient, or its square."""
    declared: Mapping[str, tuple[str, ...]]
    """Setting, in words -> names of the field of megatron-core's optimizer config that declares it."""


ADAM = Rule("Adam's", MOMENTS, {"beta1": ("adam_beta1",), "beta2": ("adam_beta2",), "eps": ("adam_eps",)})
MUON = Rule(
    "Muon's", ("momentum_buffer",),
    {"momentum": ("muon_momentum",), "Nesterov": ("muon_use_nesterov", "muon_nesterov"), "iterations": ("muon_num_ns_steps",), "products": ("muon_fp32_matmul_prec",)},
)  # fmt: skip
LION = Rule("Lion's", ("exp_avg",), {"beta1": ("adam_beta1",), "beta2": ("adam_beta2",)})
"""megatron-core gives the Lion of optimizer.optimizer=lion Adam's betas (0.18 to 0.20): `lion_beta1` and `lion_beta2` are those of the one beside Muon."""
RULES = dict.fromkeys(ADAMS, ADAM) | {"Lion": LION} | dict.fromkeys(("ShardMuon", "Muon", "TensorParallelMuon"), MUON)
"""Class of optimizer -> its rule. Muon's update of a weight follows from the whole matrix: audit.orthogonal replays it."""


def rule_of(inner: Any) -> Rule | None:
    """An optimizer's rule; None: it follows none of them. Other people's Muons and Lions have the name alone in common."""
    rule = RULES.get(type(inner).__name__)
    own = ("torch", "mpbridge", "megatron", "emerging_optimizers")
    known = rule not in (MUON, LION) or type(inner).__module__.partition(".")[0] in own
    return rule if known else None


@dataclass(frozen=True, slots=True)
class Settings:
    """What the optimizer's group said before the step."""

    lr: float
    betas: tuple[float, ...]
    """Of each state."""
    weight_decay: float
    own: tuple[tuple[str, Any], ...]
    """(a word of Rule.declared, value)."""

    @classmethod
    def of(cls, held: Held) -> Settings:
        """The settings of a parameter's group, and those that its optimizer has beside its groups."""
        group, inner = held.group or {}, held.inner
        rule = rule_of(inner)
        if rule is LION:
            first, second = (float(beta) for beta in group["betas"])
            betas: tuple[float, ...] = (second,)
            own: dict[str, Any] = {"beta1": first, "beta2": second}
        elif rule is ADAM:
            betas = tuple(float(beta) for beta in group["betas"])
            own = {"beta1": betas[0], "beta2": betas[1], "eps": float(group["eps"])}
        else:
            # torch's names, or Emerging-Optimizers'
            betas = (float(group.get("momentum", group.get("momentum_beta", math.nan))),)
            own = {
                "momentum": betas[0], "Nesterov": group.get("nesterov", getattr(inner, "use_nesterov", None)), "iterations": group.get("ns_steps"),
                "products": getattr(inner, "fp32_matmul_prec", None),
            }  # fmt: skip
        known = tuple((word, value) for word, value in own.items() if value is not None)
        return cls(float(group["lr"]), betas, float(group.get("weight_decay") or 0.0), known)

    def __str__(self) -> str:
        return f"lr {self.lr:g}, {', '.join(f'{word} {say_value(value)}' for word, value in self.own)}, weight decay {self.weight_decay:g}"


def say_value(value: Any) -> str:
    """A setting as text."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def betas_of(held: Held) -> dict[str, float]:
    """State -> beta, as far as the parameter's group has them."""
    rule = rule_of(held.inner)
    if held.group is not None and rule in (MUON, LION):
        return dict(zip(rule.states, Settings.of(held).betas, strict=True))
    return dict(zip(MOMENTS, (held.group or {}).get("betas", ()), strict=False))


def is_decoupled(held: Held, group: Mapping[str, Any]) -> bool:
    """Whether weight decay is decoupled from the moments."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    if rule_of(held.inner) in (MUON, LION):
        return bool(
            getattr(held.inner, "weight_decay_method", "decoupled") == "decoupled"
        )  # Emerging-Optimizers has others
    return bool(getattr(held.inner, "adam_w_mode", type(held.inner).__name__ == "AdamW"))
