"""megatron-core's optimizers that share a model with Adam, where it has them: by Emerging-Optimizers on Python 3.12, with megatron-core 0.18 and later."""

import math
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from mpbridge.backend.engines.registry import build_engine
from mpbridge.common.errors import Refused
from mpbridge.common.probe import installed
from mpbridge.common.versions import at_least
from mpbridge.observe.audit.examine import audit
from mpbridge.observe.audit.snapshot import Before
from mpbridge.planning.memory.roles import roles
from tests.backend.engines import tiny

HAVE = find_spec("emerging_optimizers") is not None
NEW = at_least(installed().megatron_core, "0.18")
NEEDS = pytest.mark.skipif(not (HAVE and NEW), reason="needs megatron-core 0.18 and emerging-optimizers (Python 3.12)")
KINDS = ("soap", "lion", "muon")
POSITIONS = {"position_embedding_type": "learned_absolute"}


def build(optimizer: str, **sections: Any) -> Any:
    return build_engine(tiny.run("bf16", optimizer={"optimizer": optimizer}, **sections))


def stepped(engine: Any, plant: Callable[[Any], None] | None = None) -> Any:
    """The audit of the third step. plant: called before it."""
    batches = tiny.batches()
    for _ in range(2):
        engine.train_step(batches, microbatches=1)
    if plant is not None:
        plant(engine)
    before = Before(engine)
    result = engine.train_step(batches, microbatches=1)
    return audit(engine.run.policy, engine, stage="live", before=before, result=result)


def found(report: Any) -> dict[str, bool]:
    return {one.subject: one.ok or bool(one.unseen) for one in report.findings}


@NEEDS
@pytest.mark.parametrize("name", KINDS)
def test_states_are_the_planned_ones_to_the_byte_and_the_audit_agrees(layer: None, name: str) -> None:
    engine = build(name, model=POSITIONS)
    report = stepped(engine)
    assert all(found(report).values()), report
    held: Counter[str] = Counter()
    for one in engine.tensors():
        held[one.role] += one.tensor.numel() * one.tensor.element_size()
    planned: Counter[str] = Counter()
    for one in roles(engine.run.policy, engine.run.facts):
        planned[one.name] += one.bytes
    states = ("params", "main_params", "exp_avg", "exp_avg_sq", "factors")
    assert {role: held[role] for role in states} == {role: planned[role] for role in states}
    engine.close()


def _inner(engine: Any, name: str) -> Any:
    from mpbridge.observe.audit.flags import inner_optimizers

    return next(one for one in inner_optimizers(engine.optimizer) if name in type(one).__name__)


def _around(name: str, before: Callable[[Any], None], after: Callable[[Any], None] = lambda inner: None) -> Any:
    """Plants what happens to that optimizer before and after its own step."""

    def plant(engine: Any) -> None:
        inner = _inner(engine, name)
        own = inner.step

        def step(*given: Any) -> Any:
            before(inner)
            out = own(*given)
            after(inner)
            return out

        inner.step = step

    return plant


def _zeroed(lion: Any) -> None:
    for state in lion.state.values():
        state["exp_avg"].zero_()


def _scaled(factor: float) -> Callable[[Any], None]:
    def scale(lion: Any) -> None:
        for group in lion.param_groups:
            group["lr"] *= factor

    return scale


def _narrow_factors(soap: Any) -> None:
    for state in soap.state.values():
        state["Q_L"] = state["Q_L"].bfloat16()


PLANTS = {
    "a mean of zeros": ("lion", _around("Lion", _zeroed), "optimizer step"),
    "a doubled rate": ("lion", _around("Lion", _scaled(2.0), _scaled(0.5)), "optimizer step"),
    "narrow factors": ("soap", _around("SOAP", lambda soap: None, _narrow_factors), "factors"),
}


@NEEDS
@pytest.mark.parametrize(("name", "plant", "row"), PLANTS.values(), ids=PLANTS)
def test_the_audit_names_another_step(layer: None, name: str, plant: Callable[[Any], None], row: str) -> None:
    engine = build(name)
    rows = found(stepped(engine, plant))
    assert rows[row] is False, rows
    engine.close()


@NEEDS
def test_lion_steps_by_the_sign_of_adams_betas(layer: None) -> None:
    """By hand, from Chen et al. 2023: theta <- theta - lr (sign(beta1 m + (1 - beta1) g) + wd theta); megatron-core gives it adam_beta1."""
    engine = build("lion")
    batches = tiny.batches()
    engine.train_step(batches, microbatches=1)
    lion = _inner(engine, "Lion")
    weight = next(iter(lion.state))
    old, mean = weight.detach().clone(), lion.state[weight]["exp_avg"].clone()
    rate, decay = lion.param_groups[0]["lr"], lion.param_groups[0]["weight_decay"]
    seen: list[torch.Tensor] = []
    _around("Lion", lambda lion: seen.append(weight.grad.clone()))(engine)
    engine.train_step(batches, microbatches=1)
    wanted = old * (1 - rate * decay) - rate * torch.sign(0.9 * mean + 0.1 * seen[0])
    assert math.isclose(float((weight - wanted).abs().max()), 0.0, abs_tol=1e-6)
    engine.close()


def test_its_absence_says_what_to_install(layer: None) -> None:
    """megatron-core 0.16 only asserts, and names no release."""
    if HAVE:
        pytest.skip("Emerging-Optimizers is installed")
    wanted = r"'emerging-optimizers>=0\.2' \(Python 3\.12" if NEW else r"Emerging-Optimizers@v0\.1\.0"
    with pytest.raises(Refused, match=wanted):
        build("muon")


@pytest.mark.skipif(NEW, reason="megatron-core has both since 0.18")
@pytest.mark.parametrize("name", ["soap", "lion"])
def test_a_release_without_it_is_refused_by_the_release_that_has_it(layer: None, name: str) -> None:
    with pytest.raises(Refused, match=r"optimizer-newer-than-megatron-core: .*megatron-core 0\.18 or later"):
        build(name)
