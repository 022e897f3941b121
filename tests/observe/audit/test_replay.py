"""The replay of an optimizer's step, beside real optimizers on a few tensors: silent over healthy updates, naming each changed one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.backend.engines.optimizers import CpuFusedAdam
from mpbridge.observe.audit import replay as replayed
from mpbridge.observe.audit.holdings import Held
from mpbridge.observe.audit.replay import Replayed, replay, replay_findings, start_of

BETAS = {"usual": (0.9, 0.999), "large models": (0.9, 0.95), "no first": (0.0, 0.99)}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, one by one": lambda params, **how: torch.optim.AdamW(params, foreach=False, **how),
    "Adam": torch.optim.Adam,
    "Muon": lambda params, lr, weight_decay, eps, betas: torch.optim.Muon(
        params, lr=lr, weight_decay=weight_decay, momentum=betas[0], nesterov=betas[1] == 0.95
    ),
    "FusedAdam": lambda params, **how: CpuFusedAdam(params, adam_w_mode=True, **how),
    "FusedAdam, coupled": lambda params, **how: CpuFusedAdam(params, adam_w_mode=False, **how),
    "FusedAdam, BF16 moments": lambda params, **how: CpuFusedAdam(
        params, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16, **how
    ),
}


def held_of(optimizer: Any, weight: torch.nn.Parameter) -> Held:
    own = {"inner": optimizer, "group": optimizer.param_groups[0], "state": optimizer.state.get(weight, {})}
    return Held("weight", weight, weight.detach().reshape(-1), weight, **own)


def stepped(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Any],
    change: Callable[[Any, Any], None] = lambda optimizer, weight: None,
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 4,
    size: float = 1.0,
    **how: Any,
) -> Replayed:
    """What the replay finds of the last of some steps; `change` takes place right after what it begins with was noted."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.nn.Parameter(torch.randn(40, 30, generator=generator).to(dtype) * 0.05)
    settings = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8, "betas": (0.9, 0.999)} | how
    optimizer = make([weight], **settings)
    for step in range(steps):
        weight.grad = (torch.randn(40, 30, generator=generator) * size).to(dtype)
        if step == steps - 1:
            start = start_of(held_of(optimizer, weight))
            assert start is not None
            change(optimizer, weight)
        optimizer.step()
    monkeypatch.setattr(replayed, "holdings", lambda engine: [held_of(optimizer, weight)])
    return replay(SimpleNamespace(), {"weight": start})


@pytest.mark.parametrize(
    ("name", "betas", "steps"),  # each optimizer with all betas and all numbers of steps, each betas with all of these
    [(name, betas, (1, 2, 40)[(i + j) % 3]) for i, name in enumerate(OPTIMIZERS) for j, betas in enumerate(BETAS.values())],
)  # fmt: skip
def test_a_healthy_update_is_as_its_settings_say(
    monkeypatch: pytest.MonkeyPatch, name: str, betas: tuple[float, float], steps: int
) -> None:
    for size in (1.0, 1e-6, 1e-12, 1e4):
        seen = stepped(monkeypatch, OPTIMIZERS[name], steps=steps, betas=betas, size=size)
        assert (seen.looked.total(), seen.wrong) == (48, []), size


def test_full_bf16_is_as_its_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stepped(monkeypatch, OPTIMIZERS["FusedAdam"], dtype=torch.bfloat16).wrong == []


def of_group(**values: Any) -> Callable[[Any, Any], None]:
    return lambda optimizer, weight: optimizer.param_groups[0].update(values)


def of_state(name: str, factor: float) -> Callable[[Any, Any], None]:
    return lambda optimizer, weight: optimizer.state[weight][name].view(-1)[::2].mul_(factor)


CHANGES = {
    "rate 1 % larger": of_group(lr=1.01e-3),
    "no weight decay": of_group(weight_decay=0.0),
    "beta1": of_group(betas=(0.91, 0.999)),
    "beta2": of_group(betas=(0.9, 0.998)),
    "eps": of_group(eps=1e-2),
    "moments zeroed": of_state("exp_avg", 0.0),
    "second moments halved": of_state("exp_avg_sq", 0.5),
    "one part in ten thousand of a moment": of_state("exp_avg", 1.0001),
    "weight moved": lambda optimizer, weight: weight.data.add_(1e-5),
}


MUONS = {
    "momentum of the group": of_group(momentum=0.5),
    "momentum zeroed": of_state("momentum_buffer", 0.0),
    "one part in ten thousand of the momentum": of_state("momentum_buffer", 1.0001),
}
ANOTHER = [
    pytest.param(name, change, id=f"{name}: {what}")
    for name, changes in (("AdamW", CHANGES), ("FusedAdam", CHANGES), ("Muon", MUONS))
    for what, change in changes.items()
]


@pytest.mark.parametrize(("name", "change"), ANOTHER)
def test_another_update_is_named(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    assert stepped(monkeypatch, OPTIMIZERS[name], change).wrong


def test_a_weight_decay_that_is_tripled_inside_of_the_first_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second moment has one term then, so that its root, and with it the update, is known to a few bits."""
    for make in (OPTIMIZERS["AdamW"], OPTIMIZERS["FusedAdam"]):
        assert stepped(monkeypatch, make, of_group(weight_decay=0.003), steps=1, weight_decay=0.001).wrong
        assert not stepped(monkeypatch, make, steps=1, weight_decay=0.001).wrong


def test_settings_that_differ_over_ranks_and_norms_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [stepped(monkeypatch, OPTIMIZERS["AdamW"], lr=lr) for lr in (1e-3, 1.1e-3)]
    norm = ranks[0].squares["weight"][0] ** 0.5
    for one in ranks:  # replicas: each has all 1,200 elements
        one.squares["weight"] = (norm**2, 1200, 1200)
    found = {one.subject: one.ok for one in replay_findings(ranks, norm=norm, clip=0.0, whole=True)}
    assert found == {"optimizer step": True, "optimizer settings": False, "gradient norm as clipped": True}
    (who,) = replay_findings(ranks, norm=None, clip=None, whole=True)[1].offenders
    assert "(rank 0) against lr 0.0011" in who
    assert who.endswith("(rank 1)")
    for reported, clip in ((norm * 1.002, 0.0), (norm, norm / 2), (norm * 2, norm * 2)):
        assert not replay_findings(ranks[:1], norm=reported, clip=clip, whole=True)[-1].ok
