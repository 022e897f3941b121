"""Who updates what, by which rule and settings: every model parameter with the tensor, states and group of the optimizer that updates this rank's part of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mpbridge.backend.megatron import inside_fsdp
from mpbridge.backend.megatron.inside_optimizer import main_weights, parts, shard_of
from mpbridge.numerics.observation.tensors import local

Question = Literal["audit_holdings", "audit_copies", "audit_traffic", "audit_flags", "audit_ranks"]
"""Who updates what (holdings.Held of every parameter); replicas and shards (replicas.Copies); what was sent, given the watch and the number of micro-batches
(traffic.Traffic); (flags looked at, those that contradict the promises); the global ranks that average gradients with this one."""


def answer(engine: Any, question: Question) -> Callable[..., Any] | None:
    """The engine's own answer; None: the audit reads it from the structures of mpbridge's engines."""
    found: Callable[..., Any] | None = getattr(engine, question, None)
    return found


ADAMS = frozenset({"Adam", "AdamW", "FusedAdam", "CpuFusedAdam"})
"""Optimizers whose update follows from their moments: lr x m / (sqrt(v) + eps), bias-corrected."""


@dataclass(slots=True)
class Held:
    """One parameter of this rank."""

    name: str
    parameter: Any
    """As the model has it (a DTensor if sharded)."""
    part: torch.Tensor | None = None
    """The elements updated here as the forward pass's parameter has them, flat; None if they cannot be read."""
    updated: Any = None
    """The tensor that the inner optimizer updates for it; None: it is not updated."""
    begin: int = 0
    """First element of `updated` in the whole parameter, flat."""
    inner: Any = None
    """The torch optimizer."""
    group: dict[str, Any] | None = None
    """The group that `updated` is in; None: it is in no group."""
    owners: int = 1
    """Optimizers that update it."""
    rests: bool = False
    """Its optimizer, one of several, takes no step in this step of the loop."""
    state: dict[str, Any] = field(default_factory=dict)
    elements: int | None = None
    """Elements of the whole parameter; None: as many as `parameter` has."""
    samples: dict[int, float] | None = None
    """Samples of its gradient (values.sample), taken when the optimizer read it; None: the gradient still exists."""
    grad: torch.Tensor | None = None
    """The gradient that the optimizer read for it, flat, if that is not an attribute of `updated`."""

    @property
    def whole(self) -> int:
        """Elements of the whole parameter over all ranks."""
        return int(self.parameter.numel()) if self.elements is None else self.elements

    @property
    def main(self) -> torch.Tensor | None:
        """The main weights in FP32, flat; None if the parameter is its own main weight."""
        stored = self.state.get("master_param")
        if stored is not None and local(self.updated).dtype is not torch.float32:
            if stored.dtype is torch.int16:
                from mpbridge.numerics.optimizers import join

                return join(local(self.updated).detach(), local(stored)).reshape(-1)
            if hasattr(self.inner, "get_unscaled_state"):
                wide: torch.Tensor = self.inner.get_unscaled_state(self.updated, "master_param")
                return local(wide).reshape(-1)  # type: ignore[no-any-return]
        if self.updated is None:
            return None
        updated: torch.Tensor = local(self.updated)
        # a quantized weight is updated through main weights of its own
        alone = updated.dtype is not torch.float32 if self.part is None else updated.data_ptr() == self.part.data_ptr()
        return None if alone else updated.detach().reshape(-1)

    @property
    def trained(self) -> torch.Tensor | None:
        """What an update changes, flat: the main weights, or the parameter itself if it has none."""
        if self.updated is None:
            return None
        main = self.main
        return local(self.updated).detach().reshape(-1) if main is None else main

    @property
    def kept(self) -> torch.dtype:
        """The dtype that updates are rounded to: that of the main weights, or of the parameter itself; BF16 if that is no floating-point dtype."""
        stored = self.state.get("master_param")
        if stored is not None and stored.dtype is torch.int16:
            return torch.float32  # the lower half of FP32 numbers
        own = stored is None or stored.dtype is torch.uint8
        dtype: torch.dtype = local(self.updated).dtype if own else stored.dtype  # type: ignore[union-attr]
        return dtype if dtype.is_floating_point else torch.bfloat16

    @property
    def gradient(self) -> torch.Tensor | None:
        """What the optimizer reads for it, flat; None if there is none."""
        if self.grad is not None:
            return self.grad.detach().reshape(-1)
        for attribute in ("decoupled_grad", "grad"):
            grad = getattr(self.updated, attribute, None)
            if grad is not None:
                own = local(grad).detach()
                return (own.to_dense() if own.is_sparse else own).reshape(-1)  # type: ignore[no-any-return]
        whole = getattr(self.parameter, "main_grad", None)
        if whole is None or self.part is None:
            return None
        flat = local(whole).detach().reshape(-1)
        mine: torch.Tensor = flat[self.begin : self.begin + self.part.numel()]
        return mine if mine.numel() == self.part.numel() else None

    def moment(self, name: str) -> torch.Tensor | None:
        """A moment in FP32, flat; None before it exists."""
        stored = self.state.get(name)
        if not isinstance(stored, torch.Tensor):
            return None
        # FusedAdam's own accessor asserts the configured dtype; the audit reports a moment in another one instead
        scaled = hasattr(stored, "_data") or stored.dtype in (torch.float16, torch.uint8)
        if scaled and hasattr(self.inner, "get_unscaled_state"):
            # a state in a dtype that its optimizer did not choose has no scale: its stored value is final
            with suppress(KeyError):
                stored = self.inner.get_unscaled_state(self.updated, name)
        return local(stored).detach().float().reshape(-1)  # type: ignore[no-any-return]


def holdings(engine: Any) -> list[Held]:
    """Every parameter of this rank, updated or not, by global name."""
    own = answer(engine, "audit_holdings")
    if own is not None:
        return list(own())
    if hasattr(engine.optimizer, "shards"):
        return list(_sharded(engine))
    return list(_megatron(engine))


def groups_of(inner: Any) -> dict[int, dict[str, Any]]:
    """Tensor, by identity -> its group in a torch optimizer."""
    return {id(parameter): group for group in inner.param_groups for parameter in group["params"]}


def _megatron(engine: Any) -> Iterator[Held]:
    found: dict[int, Held] = {}
    for part in parts(engine.optimizer):
        groups = groups_of(part.optimizer)
        for parameter, updated in main_weights(part):
            # weights in a quantized format have no elements that could be read
            flat = parameter.detach().view(-1) if type(parameter) in (torch.Tensor, torch.nn.Parameter) else None
            begin, end = shard_of(part, parameter) or (0, None)
            own, inner = None if flat is None else flat[begin:end], part.optimizer
            group, state = groups.get(id(updated)), inner.state.get(updated, {})
            found[id(parameter)] = Held("", parameter, own, updated, begin, inner, group, state=state)
    for name, parameter in engine.named_parameters():
        held = found.get(id(parameter), Held(name=name, parameter=parameter))
        held.name = name
        yield held


def _sharded(engine: Any) -> Iterator[Held]:
    optimizer = engine.optimizer
    held_by = {key: (inner, group) for inner in optimizer.parts for key, group in groups_of(inner).items()}
    wrapped = engine.run.facts.traits.main_weights == "wrapper"
    resting = inside_fsdp.resting(engine.model[0]) if wrapped and engine.model else {}
    for name, parameter in optimizer.names.items():
        shard = optimizer.shards.get(name)
        if shard is None:
            yield Held(name=name, parameter=parameter)
            continue
        inner, group = held_by.get(id(shard), (optimizer.parts[0], None))
        begin = optimizer.offset(name, parameter)[0] * row_of(parameter)
        own = (resting[name] if name in resting else shard.detach()).reshape(-1)
        state = optimizer.state_of(name) if group is not None else inner.state.get(shard, {})
        yield Held(name, parameter, own, shard, begin, inner, group, state=dict(state))


def row_of(parameter: Any) -> int:
    """Number of elements in one row."""
    return math.prod(parameter.shape[1:])


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
        # Emerging-Optimizers has others
        return bool(getattr(held.inner, "weight_decay_method", "decoupled") == "decoupled")
    return bool(getattr(held.inner, "adam_w_mode", type(held.inner).__name__ == "AdamW"))
