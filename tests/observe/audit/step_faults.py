"""Faults of the optimizer's step: what it begins with, the settings that it uses, the norm and the limit of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.observe.audit.faults import around, changed, given, gpt, inner, largest, states


def moments_zeroed_before_every_step(engine: Any) -> None:
    def zero() -> None:
        for state in states(engine):
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    around(inner(engine), "step", zero)


@given
def moments_times(engine: Any, factor: float, name: str) -> None:
    """Once, now: half of the elements of every moment of this name."""
    for state in states(engine):
        state[name].view(-1)[::2] *= factor


def rates_doubled_inside(engine: Any) -> None:
    """The groups show the promised rates before and after the update."""

    def times(factor: float) -> None:
        for group in inner(engine).param_groups:
            group["lr"] *= factor

    def enters() -> Callable[[], None]:
        times(2.0)
        return lambda: times(0.5)

    around(inner(engine), "step", enters)


@given
def setting(engine: Any, **values: Any) -> None:
    """The optimizer's groups have other settings than its config declares."""
    for group in inner(engine).param_groups:
        group.update(values)


def decay_in_the_moments(engine: Any) -> None:
    inner(engine).adam_w_mode = False


def never_clipped(engine: Any) -> None:
    """The live config's limit is switched off; the author wrote 1."""
    for config in {id(one): one for one in (engine.configs.optimizer, engine.optimizer.config)}.values():
        config.clip_grad = 0.0


@given
def norm_times(engine: Any, factor: float) -> None:
    changed(engine.optimizer, "get_grad_norm", lambda norm: norm * factor)


def norm_in_bf16(engine: Any) -> None:
    changed(engine.optimizer, "get_grad_norm", lambda norm: float(torch.tensor(float(norm)).bfloat16()) * (1 + 2.0**-9))


@given
def one_ulp_apart(engine: Any, which: str) -> None:
    """One FP32 element of a main weight or moment, now: too little to show in the rounded parameter."""
    weight = largest(engine)
    tensor = weight.data if which == "main" else inner(engine).state[weight][which]
    tensor.view(torch.int32).view(-1)[7] += 1


@given
def frequencies_times(engine: Any, factor: float) -> None:
    gpt(engine).rotary_pos_emb.inv_freq *= factor


@given
def rate_times(engine: Any, factor: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] *= factor
