"""Finds parallel layouts of a model that are legal, fit and are fast on a number of GPUs: `search`, and `nearest` for a run that does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.planning.estimate.bounds import Bounds, FamilyBounds
from mpbridge.planning.estimate.build import Standing
from mpbridge.planning.estimate.candidates import (
    FULL,
    Outline,
    families,
    groups,
    largest,
    line,
    members,
    recomputation,
    virtuals,
)
from mpbridge.planning.estimate.constants import Constants, constants
from mpbridge.planning.estimate.predict import ideal, seconds, standing_work
from mpbridge.planning.memory.by_role import Memory, States, stage_states, verdict, with_states
from mpbridge.planning.rules.table import broken
from mpbridge.precision.policy import PrecisionPolicy

ALIKE = 1.03
"""Steps closer than this are told apart by no prediction: of two layouts that differ in pipeline stages alone one is listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to run a model."""

    run: RunFacts
    needed: int
    """Bytes of the fullest GPU."""
    band: int
    answer: str
    """"fits" or "tight"."""
    seconds: float
    """Predicted time per step."""
    tokens_per_second: float
    """Per GPU, predicted."""

    @property
    def line(self) -> str:
        """Settings to paste after a command."""
        return line(self.run, left=("global_batch_size",))


def search(
    policy: PrecisionPolicy,
    run: RunFacts,
    machine: Machine,
    *,
    most: int = 10,
    using: Constants | None = None,
    stated: bool = False,
    below: float | None = None,
    refused: Counter[str] | None = None,
) -> tuple[Layout, ...]:
    """The fastest layouts of that world size that are legal and may fit in memory: those that fit before those that are tight, each
    fastest first; empty if there are none. Of layouts that differ only in virtual stages, recomputation, the optimizer's distribution, or in context
    parallelism for a larger micro-batch, the fastest that fits; of those that differ in pipeline stages and by less than 3 %, far less than the error band, one.
    The first of them do not depend on `most`.

    Candidates are taken from the shortest step that they may have (`Bounds`): few are priced, and of these few are held against bytes and rules.
    stated: the author set whether the optimizer is distributed, so it is not changed. below: only steps of fewer seconds.
    refused: gets the number of candidates by what refuses them, of those that were looked at before the last layout was found. Raises BadValue if fewer than one layout is requested."""
    if most < 1:
        raise BadValue(f"{most} layouts: expected at least 1")
    tally = Counter[str]() if refused is None else refused
    pool = _Pool(policy, machine, using or constants(), tally, counted=refused is not None)
    for group in groups(run, machine, stated=stated):
        pool.begin(run, group)
    found: dict[tuple[object, ...], Layout] = {}
    tight: dict[tuple[object, ...], Layout] = {}
    for one in pool.fastest(lambda: len(_beside(found, tight)) >= most, math.inf if below is None else below):
        sizes = _sizes(one.run)
        if sizes in found or _stands(found.values(), one):
            continue
        if isinstance(one, Layout):
            found[sizes] = one
            if len(found) == most:
                break
        elif (layout := _judged(one, machine, tally)) is None:
            continue
        elif layout.answer == "tight":
            tight.setdefault(sizes, layout)
        else:
            # of those within 1 % the fewest virtual stages, which hold fewer micro-batches and send less often: in its turn
            plain = _plainest(policy, layout, pool)
            pool.put(plain, plain.seconds)
    return tuple([*found.values(), *_beside(found, tight)][:most])


def _beside(found: Container[object], tight: Mapping[tuple[object, ...], Layout]) -> list[Layout]:
    """Of those that are tight the ones to be listed after those found."""
    rest = list[Layout]()
    for sizes, layout in tight.items():
        if sizes not in found and not _stands(rest, layout):
            rest.append(layout)
    return rest


def _stands(listed: Iterable[Layout], one: _Priced | Layout) -> bool:
    """Whether a faster one of the list stands for it: they differ in pipeline stages alone, and by less than a prediction tells apart."""
    mine = _but_for_stages(one.run)
    return any(one.seconds < ALIKE * other.seconds and _but_for_stages(other.run) == mine for other in listed)


def _plainest(policy: PrecisionPolicy, best: Layout, pool: _Pool) -> Layout:
    """The layout, in the fewest virtual stages with which it fits and takes at most 1 % longer."""
    for other in virtuals(best.run):
        if (other.parallel.virtual_pipeline or 1) > (best.run.parallel.virtual_pipeline or 1):
            break
        family, longest = _Family(policy, (other,), pool.bounds), 1.01 * best.seconds
        if family.bounds.verdict(other, pool.machine.memory_bytes) != "fits" or family.bounds.seconds(other) >= longest:
            continue
        one = pool.price(other, family, Counter())
        layout = _judged(one, pool.machine, Counter()) if one and one.seconds < longest else None
        if layout is not None and layout.answer == "fits":
            return layout
    return best


def _sizes(run: RunFacts) -> tuple[object, ...]:
    """What distinguishes layouts for a reader."""
    at = run.parallel
    return at.tensor, at.pipeline, at.expert, run.micro_batch_size / at.context


def _but_for_stages(run: RunFacts) -> tuple[object, ...]:
    """What distinguishes layouts whose steps take as long."""
    tensor, _, *others = _sizes(run)
    return tensor, *others


def why_none(
    policy: PrecisionPolicy, run: RunFacts, machine: Machine, refused: Counter[str], *, stated: bool = False
) -> str:
    """What refuses every layout: a rule, the memory or the sizes; given what `search` counted."""
    if refused:
        (reason, count), *others = refused.most_common(2)
        return reason + (f" ({count} of {refused.total()} layouts; next: {others[0][0]})" if others else "")
    if any(families(policy, run, dataclasses.replace(machine, memory_bytes=0), stated=stated)):
        return f"weights and gradients alone exceed the memory of {run.parallel.world_size} x {machine.label}: more GPUs, or a recipe with fewer bytes (mpbridge memory --compare)"
    return f"sizes must divide {run.parallel.world_size} GPUs, layers, heads and the global batch of {run.global_batch_size}"


class _Family:
    """Candidates of the same sizes: what they share is computed once, on first use."""

    def __init__(self, policy: PrecisionPolicy, members: tuple[RunFacts, ...], bounds: Bounds) -> None:
        self._policy, self._first = policy, members[0]
        self.bounds = FamilyBounds(bounds, members)

    @functools.cached_property
    def states(self) -> list[States]:
        """States of each kind of pipeline stage."""
        return stage_states(self._policy, self._first)

    @functools.cached_property
    def standing(self) -> Mapping[int, Standing] | None:
        """Fixed work of each kind of stage; None if it depends on the micro-batch size, since full sharding gathers weights for each micro-batch."""
        if "params" in self._first.traits.shards:
            return None
        return standing_work(self._policy, self._first)

    def fullest(self, run: RunFacts) -> Memory:
        """The fullest rank of a member."""
        return max((with_states(self._policy, run, held) for held in self.states), key=lambda one: one.needed)


@dataclass(frozen=True, slots=True)
class _Priced:
    run: RunFacts
    family: _Family
    seconds: float
    tokens: float
    best: str
    """The best verdict on its memory that is possible."""


class _Open(NamedTuple):
    """A candidate that is not priced yet."""

    run: RunFacts
    family: _Family
    best: str = ""
    """The best verdict on its memory that is possible; '': not looked at yet."""


class _Group(NamedTuple):
    """Families that differ in virtual stages and the optimizer alone, before they are looked at."""

    run: RunFacts
    """With their parallel sizes."""
    asked: RunFacts
    """As it was asked."""
    outlines: tuple[Outline, ...]


class _Pool:
    """Candidates in the order of their steps; each is priced when the shortest step that it may have is the next."""

    def __init__(
        self, policy: PrecisionPolicy, machine: Machine, using: Constants, refused: Counter[str], *, counted: bool
    ) -> None:
        self.machine = machine
        self._policy, self._using, self._refused, self._counted = policy, using, refused, counted
        self.bounds = Bounds(policy, machine, using)
        self.forbid, self._asked = set[str](), False
        self._count = itertools.count()
        self._queue: list[tuple[float, int, int, _Priced | Layout | _Open | _Group]] = []

    def put(self, one: _Priced | Layout | _Open | _Group, seconds: float) -> None:
        """One more; of equally fast ones the one with less context parallelism comes first."""
        heapq.heappush(self._queue, (seconds, one.run.parallel.context, next(self._count), one))

    def begin(self, run: RunFacts, outlines: tuple[Outline, ...]) -> None:
        """A group's families, if a batch can be divided so."""
        if not outlines or (one := largest(run, outlines[0])) is None:
            return
        most = max(outline.sizes.virtual_pipeline or 1 for outline in outlines)
        try:
            self.put(_Group(one, run, outlines), self.bounds.group(one, most))
        except MpbridgeError as error:
            self._refused[error.line] += 1

    def add(self, members: tuple[RunFacts, ...]) -> None:
        """The members of a family that may fit in memory."""
        if not self._counted:
            members = self._permitted(members)
        if not members:
            return
        family, full = _Family(self._policy, members, self.bounds), set[str]()
        for run in members:  # micro-batches grow
            again = recomputation(run)
            try:
                if again in full or family.bounds.exceeds(run, self.machine.memory_bytes):
                    full.add(again)
                    self._refused[MEMORY] += 1
                else:
                    self.put(_Open(run, family), family.bounds.least_seconds(run))
            except MpbridgeError as error:
                self._refused[error.line] += 1

    def _permitted(self, members: tuple[RunFacts, ...]) -> tuple[RunFacts, ...]:
        """The members that no known rule forbids, which costs less than their bytes. Not asked where refusals are counted: there memory is named first."""
        if members and not self._asked:
            self._asked = True
            # every rule; what forbids the first family's last, with recomputation, forbids many
            _forbids(self._policy, members[-1], self.forbid)
        return tuple(run for run in members if not _forbids(self._policy, run, self.forbid, every=False))

    def fastest(self, sure: Callable[[], bool], below: float) -> Iterator[_Priced | Layout]:
        """The shortest step of those that are left and take fewer seconds than `below`, until none is. sure: whether only those are wanted that fit for certain."""
        while self._queue and self._queue[0][0] < below:
            *_, one = heapq.heappop(self._queue)
            if isinstance(one, Layout):
                yield one
            elif isinstance(one, _Group):
                for outline in one.outlines:
                    self.add(members(self._policy, one.asked, self.machine, outline))
            elif one.best == "does not fit" or (one.best == "tight" and sure()):
                self._refused[MEMORY] += 1
            elif isinstance(one, _Priced):
                yield one
            elif not one.best:
                if why := _forbids(self._policy, one.run, self.forbid, every=False):
                    self._refused[why] += 1
                    continue
                best = one.family.bounds.verdict(one.run, self.machine.memory_bytes)
                least = 0.0 if best == "does not fit" else one.family.bounds.seconds(one.run)
                self.put(one._replace(best=best), least)
            elif (priced := self.price(one.run, one.family, self._refused, one.best)) is not None:
                self.put(priced, priced.seconds)

    def price(self, run: RunFacts, family: _Family, refused: Counter[str], best: str = "") -> _Priced | None:
        """The candidate with its predicted step; None if a rule forbids it or it has no step, counted in `refused`. best: verdict on its memory."""
        if why := _forbids(self._policy, run, self.forbid):
            refused[why] += 1
            return None
        try:
            made = ideal(self._policy, run, self.machine, family.standing)
        except MpbridgeError as error:
            refused[error.line] += 1
            return None
        return _Priced(run, family, sum(seconds(made, self._using).values()), made.tokens, best)


def _judged(one: _Priced, machine: Machine, refused: Counter[str]) -> Layout | None:
    """The layout; None if it does not fit, counted in `refused`."""
    try:
        held = one.family.fullest(one.run)
    except MpbridgeError as error:
        refused[error.line] += 1
        return None
    answer = verdict(held, machine.memory_bytes)
    if answer == "does not fit":
        refused[MEMORY] += 1
        return None
    return Layout(
        run=one.run,
        needed=held.needed,
        band=held.band,
        answer=answer,
        seconds=one.seconds,
        tokens_per_second=one.tokens / one.seconds,
    )


MEMORY = "does not fit in memory"


def _forbids(policy: PrecisionPolicy, run: RunFacts, known: set[str], *, every: bool = True) -> str:
    """The first rule that forbids the run, with its cure; '' if none does. known: rules that forbade others before, asked first. every: not these alone."""
    for among in (known, None) if every else (known,):
        for violation in broken(policy, run, among) if among is None or among else ():
            if violation.severity == "error":
                known.add(violation.rule)
                return f"{violation.rule}: {violation.found}; expected {violation.expected} (cure: {violation.cure})"
    return ""


def nearest(policy: PrecisionPolicy, run: RunFacts, machine: Machine, *, stated: bool = False) -> RunFacts | None:
    """The layout that fits on the fewest GPUs, starting from this run's number; among these the one with the fewest changes. None: there is none up to 64
    times as many GPUs."""
    here = run.parallel
    # the author's own placement of layers on stages, which the search does not consider
    again, bounds = dataclasses.replace(run, model={**run.model, **FULL}), Bounds(policy, machine, constants())
    known = set[str]()
    if _fits(policy, again, _Family(policy, (again,), bounds), machine, known):
        return again
    for factor in (1, 2, 4, 8, 16, 32, 64):
        wider = dataclasses.replace(run, parallel=dataclasses.replace(here, world_size=here.world_size * factor))
        if run.global_batch_size % max(1, run.micro_batch_size * wider.parallel.data):
            wider = dataclasses.replace(wider, global_batch_size=run.global_batch_size * factor)
        alike = [(one, _Family(policy, one, bounds)) for one in families(policy, wider, machine, stated=stated)]
        every = [(candidate, shared) for family, shared in alike for candidate in family]
        for candidate, shared in sorted(every, key=lambda one: _distance(run, one[0])):
            with contextlib.suppress(MpbridgeError):
                if _fits(policy, candidate, shared, machine, known):
                    return candidate
    return None


def _fits(policy: PrecisionPolicy, run: RunFacts, family: _Family, machine: Machine, known: set[str]) -> bool:
    """Whether a layout fits for certain and no rule forbids it. known: see `_forbids`."""
    return (
        not _forbids(policy, run, known, every=False)  # cheaper than the memory
        and family.bounds.verdict(run, machine.memory_bytes) == "fits"
        and not _forbids(policy, run, known)
        and verdict(family.fullest(run), machine.memory_bytes) == "fits"
    )


def _distance(run: RunFacts, other: RunFacts) -> tuple[int, int, int]:
    a, b = run.parallel, other.parallel
    pairs = ((a.tensor, b.tensor), (a.pipeline, b.pipeline), (a.context, b.context), (a.expert, b.expert))
    changed = sum(x != y for x, y in pairs) + (run.optimizer.distributed != other.optimizer.distributed)
    again = run.model.get("recompute_granularity") != other.model.get("recompute_granularity")
    last = abs(run.micro_batch_size - other.micro_batch_size) + (a.virtual_pipeline != b.virtual_pipeline)
    return changed + 2 * again, sum(max(x, y) // min(x, y) for x, y in pairs), last
