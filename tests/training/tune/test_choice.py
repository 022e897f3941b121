"""Budgets, the knapsack, decisions, and recipes that say what was chosen."""

from __future__ import annotations

import itertools
import random

import pytest

from mpbridge.common.errors import BadValue
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.training.tune.choices import LOW, DecisionUnit, TunedLinear, at_random, by_kind, configured, least, units
from mpbridge.training.tune.levels import base_of, budget_of
from mpbridge.training.tune.scores import rank_correlation

LEVELS = (LOW, "mxfp8", "bf16")


@pytest.mark.parametrize("seed", range(6))
def test_the_knapsack_finds_what_trying_everything_finds(seed: int) -> None:
    draw = random.Random(seed)
    gains = [{"a": draw.random(), "b": draw.random() / 2, "c": 0.0} for _ in range(6)]
    costs = [{"a": 1.0, "b": 1.0 + draw.randint(1, 3), "c": 2.0 + draw.randint(2, 5)} for _ in range(6)]
    budget = 6 + draw.randint(2, 12)
    best = min(
        sum(gain[name] for gain, name in zip(gains, names, strict=True))
        for names in itertools.product("abc", repeat=6)
        if sum(cost[name] for cost, name in zip(costs, names, strict=True)) <= budget
    )
    found = least(gains, costs, budget)
    assert found is not None
    assert sum(cost[name] for cost, name in zip(costs, found, strict=True)) <= budget
    assert sum(gain[name] for gain, name in zip(gains, found, strict=True)) == pytest.approx(best)


def test_a_budget_below_the_cheapest_choice_has_no_answer() -> None:
    assert least([{"a": 1.0, "b": 0.0}], [{"a": 2.0, "b": 3.0}], 1.9) is None
    assert least([{"a": 1.0, "b": 0.0}], [{"a": 2.0, "b": 3.0}], 2.0) == ["a"]


@pytest.mark.parametrize(
    ("text", "what", "value"),
    [
        (None, "tail", 0),
        ("time=1.1", "time", 1.1),
        ("memory=40GB", "memory", 40e9),
        ("memory=1.5 GiB", "memory", 1.5 * 2**30),
        ("gradient-error=3e-1", "gradient-error", 0.3),
    ],
)
def test_budgets_are_read(text: str | None, what: str, value: float) -> None:
    found = budget_of(text)
    assert (found.what, found.value) == (what, pytest.approx(value))


@pytest.mark.parametrize(
    "text", ["time", "time=", "speed=2", "time=1GB", "time=0", "memory=3 bytes", "time=nan", 1.3, 0, True]
)
def test_a_budget_that_is_none_is_refused_with_the_legal_ones(text: object) -> None:
    says = "" if isinstance(text, str) else "does not say what it limits; "
    with pytest.raises(BadValue, match=rf"{says}expected time=1\.1"):
        budget_of(text)  # type: ignore[arg-type]


def place(slot: str, layer: int, below: str, weight: int | None = None) -> TunedLinear:
    return TunedLinear(slot=slot, below=below, layer=layer, weight=slot if weight is None else weight)


def test_an_expert_layer_is_one_decision_and_so_are_linears_with_one_weight() -> None:
    experts = [
        place(f"l.{layer}.e{i}.{fc}", layer, f"mlp.experts.local_experts.{i}.{fc}")
        for layer in (1, 2)
        for i in range(2)
        for fc in ("linear_fc1", "linear_fc2")
    ]
    tied = [place("l.0.a", 0, "a", weight=7), place("l.2.a", 2, "a", weight=7)]
    found = units([*tied, place("l.0.b", 0, "b"), *experts])
    assert [unit.slots for unit in found[:2]] == [("l.0.a", "l.2.a"), ("l.0.b",)]
    assert [len(unit.slots) for unit in found[2:]] == [4, 4]
    assert found[2].places == ((1, "mlp.experts.*"),)
    assert [unit.kind for unit in by_kind(found)] == ["a", "b", "mlp.experts.*"]


def test_linears_that_read_one_tensor_are_one_decision_where_nothing_is_fused_yet() -> None:
    some = [place(f"l.0.attn.{name}", 0, f"attn.{name}") for name in ("q", "k", "o")]
    inputs = {"l.0.attn.q": 1, "l.0.attn.k": 1, "l.0.attn.o": 2}
    assert [len(unit.slots) for unit in units(some, inputs)] == [2, 1]
    assert [len(unit.slots) for unit in units(some)] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_the_recipe_says_exactly_what_was_chosen(seed: int) -> None:
    """Read back through the policy, every linear of every layer has the level of its unit."""
    draw = random.Random(seed)
    names = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    some = [DecisionUnit(slots=(f"{layer}{name}",), places=((layer, name),)) for layer in range(6) for name in names]
    choice = {unit.name: draw.choice(LEVELS) for unit in some}
    high = draw.choice([0, 1, 2])
    choice |= {unit.name: "bf16" for unit in some if unit.layer >= 6 - high}
    base = base_of(get_mixed_precision_config("nemotron_3_ultra_bf16_with_nvfp4_mixed"))
    made = configured(base, some, choice, "bf16")
    policy = resolve(made)
    scaling = {LOW: "nvfp4", "mxfp8": "mxfp8", "bf16": None}
    for unit in some:
        (layer, name) = unit.places[0]
        rule = policy.of_path(f"decoder.layers.{layer}.{name}", 6)
        assert rule.one
        assert (rule.fprop and rule.fprop.scaling) == scaling[choice[unit.name]]
    first = all(choice[unit.name] == "bf16" for unit in some if unit.layer == 0)
    assert bool(made.first_last_layers_bf16) == (high > 0 or first)


@pytest.mark.parametrize("seed", range(20))
def test_random_choices_come_within_five_percent_of_the_cost(seed: int) -> None:
    some = [DecisionUnit(slots=(str(i),), places=((i, "a"),)) for i in range(16)]
    options, costs = [dict.fromkeys(LEVELS, 0.0)] * 16, [{LOW: 1.0, "mxfp8": 2.0, "bf16": 4.0}] * 16
    limit = 16 * 2.5
    chosen = at_random(some, options, costs, limit, seed)
    spent = sum(costs[i][chosen[unit.name]] for i, unit in enumerate(some))
    assert 0.95 * limit <= spent <= limit


def test_the_authors_own_rules_stay_before_the_choice() -> None:
    base = base_of(get_mixed_precision_config("nvfp4").derive(modules={"mlp.linear_fc2": "bf16"}))
    some = [DecisionUnit(slots=(f"{layer}",), places=((layer, "mlp.linear_fc1"),)) for layer in (0, 1)]
    made = configured(base, some, {some[0].name: "bf16", some[1].name: LOW}, "bf16")
    assert made.modules == {"mlp.linear_fc2": "bf16", "mlp.linear_fc1": [{"layers": "0", "precision": "bf16"}]}


def test_the_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # by hand: ranks 1 2.5 2.5 4 5 and 1 2 3.5 5 3.5, both with squares of 9.5 around their mean and products of 7.25
    assert rank_correlation([1, 2, 2, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(7.25 / 9.5)
