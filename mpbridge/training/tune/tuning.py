"""The complete tuning: scores, a choice within a budget, its proof next to simple rules on unseen batches, and a verdict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpbridge.backend.devices.collectives import from_all
from mpbridge.common.errors import BadValue, Refused
from mpbridge.common.facts import RunFacts
from mpbridge.common.tables import size
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant
from mpbridge.precision.resolve import resolve
from mpbridge.training.tune.choices import (
    ALL_LOW,
    KINDS,
    LOW,
    TAIL,
    TUNED,
    Costs,
    DecisionUnit,
    TunedLinear,
    at_random,
    by_kind,
    configured,
    kinds,
    least,
    tail,
    uniform,
    units,
)
from mpbridge.training.tune.levels import Budget, Levels, Pricing, bytes_of, prepared, seconds
from mpbridge.training.tune.proof import GradientError, Subject, TuningVerdict, high_precision, judged, prove
from mpbridge.training.tune.scores import Scorer, Scores, damages, joint, merged, rank_correlation

FEWEST, ENOUGH = 4, 8
"""Scoring batches: fewer than the first are refused, fewer than the second get a note."""
AGREE = 0.7
"""Rank correlation of two halves' scores below which layers are pooled to whole kinds."""
RANDOM = 3
"""Random choices to compare with the proposal."""
JOINT = 2
"""Scoring batches on which the joint damage of each kind of GEMM is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRequest:
    """What to tune and how."""

    config: MixedPrecisionConfig
    levels: Levels
    budget: Budget = field(default_factory=Budget)
    batches: int = ENOUGH
    unseen: int = 4
    pricing: Pricing
    run: RunFacts | None = None
    """The run whose operations are priced; None: the linears' shapes are."""
    fused: bool = True
    """Whether linears that one GEMM computes are already one module (megatron-core's are)."""
    seed: int = 1234
    notes: tuple[str, ...] = ()
    """What was excluded before anything was measured, and why."""

    @property
    def high(self) -> str:
        """The word for high precision."""
        return tuple(self.levels)[-1]


@dataclass(slots=True, kw_only=True)
class Tuned:
    """The result."""

    config: MixedPrecisionConfig
    """The proposal."""
    choice: dict[str, str]
    """Unit's name -> level."""
    units: list[DecisionUnit]
    options: list[dict[str, float]]
    """For each unit: levels that it can take -> damage."""
    spent: dict[str, float]
    """Arm -> its cost relative to that of all low; under a memory budget, bytes of the fullest rank."""
    proof: dict[str, GradientError]
    """Arm -> its figures on unseen batches."""
    recipes: dict[str, MixedPrecisionConfig]
    """Arm -> its config."""
    agreement: float
    pooled: bool
    predicted: float
    """The expected gradient error of the choice."""
    verdict: TuningVerdict
    notes: list[str] = field(default_factory=list)
    asked: TuningRequest


def refuse_bad(batches: int, unseen: int) -> None:
    """Raises BadValue for too few batches."""
    if batches < FEWEST:
        raise BadValue(f"--batches {batches}: scores of fewer than {FEWEST} batches rank nothing (use {ENOUGH})")
    if unseen < 2:
        raise BadValue(f"--unseen {unseen}: a standard error needs 2 batches or more")


def tuned(subject: Subject, asked: TuningRequest, say: Callable[[str], None] = lambda text: None) -> Tuned:
    """Measures, chooses and proves. Every rank calls it. Raises BadValue for a budget that nothing or everything meets, DataError for bad batches."""
    refuse_bad(asked.batches, asked.unseen)
    base, policy = prepared(asked.config)
    assert policy.quant is not None
    low = {LOW: policy.quant} | {name: quant for name, quant in asked.levels.items() if quant is not None}
    heard = _score(subject, asked, low, say)
    found = units(heard.places, None if asked.fused else heard.inputs)
    if not found:
        raise Refused("the recipe quantizes no linear of this model, so there is nothing to choose")
    if all((place.slot, name) in heard.refused for place in heard.places for name in low):
        slot, why = next((slot, why) for (slot, _), why in heard.refused.items())
        raise Refused(
            f"no linear of this model can be quantized this way, so there is nothing to choose: {slot}: {why} (use sizes that fit, or another recipe)"
        )
    say(f"{len(found)} decisions about {len(heard.places)} linears; measuring the joint damage of each kind of GEMM")
    whole = joint(subject, policy, low, heard.refused, min(JOINT, asked.batches))
    halves = [damages(found, low, half, whole) for half in heard.halves]
    agreement = rank_correlation(*([next(iter(mine.values()), 0.0) for mine in half] for half in halves))
    pooled = not agreement >= AGREE and len(by_kind(found)) < len(found)
    if pooled:
        found = by_kind(found)
    options = damages(found, low, merged(heard.halves), whole)
    for unit, mine in zip(found, options, strict=True):
        for name in [name for name in mine if any((slot, name) in heard.refused for slot in unit.slots)]:
            del mine[name]
        mine[asked.high] = 0.0
    work = _Choice(asked, base, policy, found, options, heard)
    return work.proved(subject, agreement, pooled, say)


@dataclass(slots=True, kw_only=True)
class _Heard:
    """The results of scoring, from all ranks."""

    places: list[TunedLinear]
    halves: tuple[Scores, Scores]
    refused: dict[tuple[str, str], str]
    inputs: dict[str, Any]
    shapes: dict[str, tuple[int, int, int]]


def _score(subject: Subject, asked: TuningRequest, low: Mapping[str, Quant], say: Callable[[str], None]) -> _Heard:
    emulation = subject.emulation
    scorer = Scorer(low, emulation)
    # layers of multi-token prediction have no number that a rule could name: they keep the recipe's format
    own = [
        TunedLinear(slot=name, below=below, layer=layer, weight=id(linear.weight))
        for linear, name, below, layer, _ in emulation.linears()
        if layer is not None
    ]
    for number in range(asked.batches):
        scorer.batch(number)
        with emulation.listening(scorer):
            high_precision(subject, "train", number)
    say(f"scored {len(own)} linears on {asked.batches} batches")
    parts = from_all((own, scorer.halves, scorer.refused, scorer.inputs, scorer.shapes))
    places: dict[str, TunedLinear] = {}
    for number, part in enumerate(parts):
        for place in part[0]:
            # a weight's identity is meaningless on another rank
            places.setdefault(place.slot, dataclasses.replace(place, weight=(number, place.weight)))
    known = {place.slot for place in places.values()}
    halves = tuple(
        {key: sums for key, sums in merged([part[1][half] for part in parts]).items() if key[0] in known}
        for half in (0, 1)
    )
    return _Heard(
        places=sorted(places.values(), key=lambda place: place.layer),
        halves=(halves[0], halves[1]),
        refused={key: why for part in parts for key, why in part[2].items()},
        inputs={key: value for part in parts for key, value in part[3].items()},
        shapes={key: value for part in parts for key, value in part[4].items()},
    )


class _Choice:
    """Costs, the knapsack, and the proof of its choice."""

    def __init__(
        self, asked: TuningRequest, base: MixedPrecisionConfig, policy: PrecisionPolicy, found: list[DecisionUnit], options: list[dict[str, float]], heard: _Heard
    ) -> None:  # fmt: skip
        self.asked, self.base, self.policy, self.heard = asked, base, policy, heard
        self.units, self.options = found, options
        self.notes: list[str] = list(asked.notes)
        self.low, self.high = (uniform(found, options, level, asked.high) for level in (LOW, asked.high))
        self.memory = asked.budget.what == "memory"
        self.floor = 0.0
        """Under a memory budget, the bytes that no choice changes."""
        self.pricing = asked.pricing
        self.costs = self._costs()

    def _costs(self) -> Costs:
        asked, levels = self.asked, {LOW: self.policy.quant, **self.asked.levels}
        if self.memory:
            assert asked.run is not None, "refused before anything is measured"
            costs, self.floor = bytes_of(self.units, levels, self.policy, asked.run)
            return costs
        costs = seconds(self.units, levels, self.policy, self.pricing, asked.run, self.heard.shapes)
        low, high = self._sum(costs, self.low), self._sum(costs, self.high)
        if self.pricing.basis == "predicted" and low >= high:
            self.notes.append(
                f"predicted for {self.pricing.machine.name}, GEMMs and casts of these sizes take {low * 1e3:.3g} ms all low and "
                f"{high * 1e3:.3g} ms in {asked.high}: the low format saves no time here, so peak rates price the choice, as for a larger model"
            )
            self.pricing = dataclasses.replace(self.pricing, basis="peaks")
            costs = seconds(self.units, levels, self.policy, self.pricing, asked.run, self.heard.shapes)
        return costs

    def _sum(self, rows: Sequence[Mapping[str, float]], choice: Mapping[str, str]) -> float:
        return math.fsum(row[choice[unit.name]] for unit, row in zip(self.units, rows, strict=True))

    def spent(self, choice: Mapping[str, str]) -> float:
        """Seconds, or bytes beyond the floor."""
        return self._sum(self.costs, choice)

    def damage(self, choice: Mapping[str, str]) -> float:
        """Expected squared relative gradient error."""
        return self._sum(self.options, choice)

    def shown(self, cost: float) -> float:
        """A cost in the budget's terms: relative to all low, or bytes of the fullest rank."""
        return self.floor + cost if self.memory else cost / self.spent(self.low)

    def limit(self) -> float:
        """The budget in the knapsack's units. Raises BadValue for one that nothing or everything meets."""
        budget, high = self.asked.budget, self.asked.high
        if budget.what == "tail":
            return self.spent(tail(self.units, self.options, high))
        if budget.what == "gradient-error":
            damage = math.sqrt(self.damage(self.low))
            if budget.value >= damage:
                raise BadValue(
                    f"--budget {budget}: all low already has an expected error of {damage:.3g}, so everything meets it: use the recipe as it is, or a smaller error"
                )
            return budget.value**2
        pairs = zip(self.costs, self.options, strict=True)
        cheapest = math.fsum(min(cost[name] for name in mine) for cost, mine in pairs)
        most = self.spent(self.high)
        limit = budget.value - self.floor if self.memory else budget.value * self.spent(self.low)
        shown = [size(self.shown(cost)) if self.memory else f"{self.shown(cost):.3g}" for cost in (cheapest, most)]
        if limit < cheapest * (1 - 1e-9):
            raise BadValue(
                f"--budget {budget}: nothing meets it; the cheapest choice costs {shown[0]}: use a larger budget"
            )
        if limit >= most:
            raise BadValue(
                f"--budget {budget}: everything meets it; {high} for all linears costs {shown[1]}: use {high}, or a smaller budget"
            )
        return max(limit, cheapest)

    def choices(self) -> dict[str, dict[str, str]]:
        """Arm -> its choice; the proposal first. Raises BadValue for a budget that only high precision everywhere meets, or nothing."""
        asked, limit, swapped = self.asked, self.limit(), self.asked.budget.what == "gradient-error"
        prices = [{name: cost[name] for name in mine} for cost, mine in zip(self.costs, self.options, strict=True)]
        picked = least(prices, self.options, limit) if swapped else least(self.options, prices, limit)
        assert picked is not None, "refused by `limit`"
        if swapped and set(picked) == {asked.high}:
            smallest = min(damage for mine in self.options for level, damage in mine.items() if level != asked.high)
            raise BadValue(
                f"--budget {asked.budget}: only {asked.high} for all linears meets it, so nothing is left in low precision (the smallest expected error of any single linear in a lower "
                f"format is {math.sqrt(smallest):.2g}): use {asked.high}, or a larger error"
            )
        mine = {unit.name: level for unit, level in zip(self.units, picked, strict=True)}
        found = {TUNED: mine, ALL_LOW: self.low, f"{TAIL} {asked.high}": tail(self.units, self.options, asked.high)}
        whole = kinds(self.units, self.options, self.costs, limit, swapped)
        if whole is not None:
            found[KINDS] = whole
        for name, quant in asked.levels.items():
            if quant is not None:
                found[f"all {name}"] = uniform(self.units, self.options, name, asked.high)
        spent = self.spent(mine)
        for number in range(RANDOM):
            found[f"random {number + 1}"] = at_random(self.units, self.options, self.costs, spent, asked.seed + number)
        return found

    def proved(self, subject: Subject, agreement: float, pooled: bool, say: Callable[[str], None]) -> Tuned:
        """The proposal and the choices that it is compared with, on unseen batches."""
        asked, choices = self.asked, self.choices()
        recipes = {name: configured(self.base, self.units, choice, asked.high) for name, choice in choices.items()}
        say(f"proving {len(choices)} choices on {asked.unseen} unseen batches")
        proof = prove(subject, {name: resolve(config) for name, config in recipes.items()}, asked.unseen)
        spent = {name: self.shown(self.spent(choice)) for name, choice in choices.items()}
        refused = sorted({slot for slot, level in self.heard.refused if level == LOW})
        if refused:
            self.notes.append(
                f"{len(refused)} linears cannot be quantized this way and stay in {asked.high}, such as {refused[0]}: {self.heard.refused[refused[0], LOW]}"
            )
        if asked.batches < ENOUGH:
            self.notes.append(f"{asked.batches} batches: {ENOUGH} rank better")
        return Tuned(
            config=recipes[TUNED],
            choice=choices[TUNED],
            units=self.units,
            options=self.options,
            spent=spent,
            proof=proof,
            recipes=recipes,
            agreement=agreement,
            pooled=pooled,
            predicted=math.sqrt(self.damage(choices[TUNED])),
            verdict=judged(proof, spent, {name: choices[name] == choices[TUNED] for name in choices}),
            notes=self.notes,
            asked=dataclasses.replace(asked, pricing=self.pricing),
        )
