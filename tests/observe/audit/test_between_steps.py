"""What happens between two steps, where no audit looks: the next one compares with what the last one left. Delayed scales are part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpbridge.observe.audit import AuditHook
from mpbridge.observe.audit.holdings import holdings
from tests.observe.audit.conftest import driven, faults_in, nothing
from tests.observe.audit.faults import after, around, inner, states


def faults(engine: Any, between: Callable[[int], None] = nothing, *, steps: int = 3) -> list[str]:
    """What the audits of every step find; `between` runs after each of them."""
    hook = AuditHook(mode="warn", every=1, invariants=1)
    driven(engine, hook, steps=steps, after=between)
    return faults_in(hook)


def putting_back(engine: Any) -> Callable[[int], None]:
    kept = {
        held.name: (held.updated.detach().clone(), None if held.part is None else held.part.clone())
        for held in holdings(engine)
        if held.updated is not None
    }

    @torch.no_grad()
    def put_back(step: int) -> None:
        for held in holdings(engine):
            if held.name in kept:
                main, part = kept[held.name]
                held.updated.data.copy_(main)
                if held.part is not None:
                    held.part.copy_(part)

    return put_back


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_weights_that_are_put_back_between_steps_are_named(build: Any, kind: str) -> None:
    engine = build(kind)
    found = faults(engine, putting_back(engine))
    assert any("restored after the update" in text for text in found), found
    assert not any("embedding" in text and "bits of states" in text for text in found)


BOTH = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    ("change", "moments", "words"),
    [
        pytest.param(torch.Tensor.zero_, BOTH, ("emptied after the update",), id="zeroed"),
        pytest.param(lambda moment: moment.copy_(moment.bfloat16()), BOTH, ("bits of states", "before the update"), id="rounded"),
        pytest.param(lambda moment: moment.mul_(0.5), BOTH[:1], ("exp_avg changed between two steps",), id="halved"),
    ],
)  # fmt: skip
def test_moments_that_change_between_steps_are_named(build: Any, change: Any, moments: Any, words: Any) -> None:
    engine = build("bf16")

    def between(step: int) -> None:
        for state in states(engine):
            for name in moments:
                change(state[name])

    found = faults(engine, between, steps=1 + len(moments))  # one moment is enough to be named in the very next step
    assert any(all(word in text for word in words) for text in found), found


def test_another_rate_than_the_groups_is_named(build: Any) -> None:
    engine = build("bf16")

    def times(factor: float) -> None:
        for group in inner(engine).param_groups:
            group["lr"] *= factor

    around(inner(engine), "step", lambda: times(30.0) or (lambda: times(1 / 30.0)))
    assert any("moments" in text for text in faults(engine))


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_a_schedule_that_reaches_a_rate_of_0_after_the_step_is_healthy(build: Any, kind: str) -> None:
    engine = build(kind)

    def rates(value: float) -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = value

    rates(1e-9)  # some weights stand still in the last step, whose update is below their rounding
    after(engine, "train_step", lambda: rates(0.0))
    assert faults(engine, steps=1) == []


def test_a_rate_that_the_next_step_will_have_is_not_this_ones(build: Any) -> None:
    """Under a warm-up; an update of this step's rate is below half a unit in the last place of 1e-5, one of the next step's above it."""
    engine = build("fp32")
    with torch.no_grad():
        for held in holdings(engine):
            if held.name.endswith("linear_fc1.weight"):
                held.updated.data.copy_(torch.sign(held.updated.data) * 1e-5)
    for group in engine.optimizer.param_groups:
        group["lr"] = 3e-13

    def warmer() -> None:
        for group in engine.optimizer.param_groups:
            group["lr"] = 6e-13

    after(engine, "train_step", warmer)
    assert faults(engine, steps=1) == []


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_a_block_that_begins_at_zero_is_healthy(build: Any, kind: str) -> None:
    """LLaMA-Pro's block expansion, or projections of zeros from a converted folder: nothing before them gets a gradient in the first step."""
    engine = build(kind)
    with torch.no_grad():
        for held in holdings(engine):
            if held.name.endswith(("layers.1.self_attention.linear_proj.weight", "layers.1.mlp.linear_fc2.weight")):
                held.updated.data.zero_()
                held.part.zero_()
    assert faults(engine, steps=2) == []


def test_a_block_whose_gradient_stays_zero_is_named(build: Any) -> None:
    """What begins at zero has a gradient in the next step; what is multiplied by zero never has one."""
    engine = build("bf16")
    (block,) = [module for name, module in engine.model[0].named_modules() if name.endswith("layers.1.mlp")]
    block.register_forward_hook(lambda module, args, out: tuple(None if one is None else one * 0 for one in out))
    found = faults(engine, steps=2)
    # weight decay moves the rest
    assert any("layers.1.pre_mlp_layernorm.bias" in text and "no gradient" in text for text in found), found


# --- delayed scaling: the oldest entry of a short history leaves in the very update that still counts it -------------------------------------
DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHORT = {"recipe": DELAYED, "fp8_amax_history_len": 4}
ONE_LAYER = {"num_layers": 1}
STEPS = 5


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        pytest.param({"recipe": DELAYED, "fp8_amax_history_len": 2}, {}, id="shorter than a step's micro-batches"),
        pytest.param(SHORT, RECOMPUTE, id="four, activations recomputed"),
        pytest.param(SHORT | {"fp8_amax_compute_algo": "most_recent"}, {}, id="most recent"),
    ],
)
def test_scales_made_of_an_entry_that_left_are_healthy(build: Any, drive: Any, recipe: Any, model: Any) -> None:
    hook = AuditHook(mode="warn", every=1)
    drive(build(recipe, emulate=True, model=ONE_LAYER | model), hook, steps=STEPS)
    audited = [one["facts"]["delayed scales"] for one in hook.history if "delayed scales" in one["facts"]]
    assert len(audited) == STEPS
    assert faults_in(hook) == []


@pytest.mark.parametrize("factor", [0.97, 2.0])
def test_a_wrong_scale_is_named_beside_a_short_history(build: Any, drive: Any, factor: float) -> None:
    engine, hook = build(SHORT, emulate=True, model=ONE_LAYER), AuditHook(mode="warn", every=1)
    (quantizer,) = engine.emulation.quantizers.values()
    table = quantizer.backward_table

    def plant(step: int) -> None:
        if step == STEPS - 1:
            after(table, "update", lambda: setattr(table, "scale", table.scale * factor))

    drive(engine, hook, steps=STEPS, before=plant)
    named = faults_in(hook)
    assert named
    assert all("delayed scales" in text and " dy: scale" in text for text in named), named
