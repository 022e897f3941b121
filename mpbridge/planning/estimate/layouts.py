"""Finds parallel layouts of a model that are legal, fit and are fast on a number of GPUs: `search`, and `nearest` for a run that does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.facts import Parallel, RunFacts
from mpbridge.common.machines import Machine
from mpbridge.planning.estimate.build import Standing
from mpbridge.planning.estimate.candidates import FULL, NONE, families, members, outlines, virtuals
from mpbridge.planning.estimate.constants import Constants, constants
from mpbridge.planning.estimate.step import ideal, seconds, standing_work
from mpbridge.planning.memory.activations import activations, uncertainty
from mpbridge.planning.memory.by_role import Memory, States, stage_states, verdict, with_states
from mpbridge.planning.memory.ranks import Coordinates
from mpbridge.planning.rules.table import broken
from mpbridge.precision.policy import PrecisionPolicy

PLACES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)


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
        return line(self.run, batch=True)


def line(run: RunFacts, than: RunFacts | None = None, *, batch: bool = False) -> str:
    """The run's layout as settings to paste after a command; than: only those in which it differs from this run. batch: the global batch too, which its author left to
    a default that follows from the layout."""
    known = set(_settings(than)) if than is not None else set()
    made = [setting for setting in _settings(run) if setting not in known]
    if (batch and made) or (than is not None and run.global_batch_size != than.global_batch_size):
        made.append(f"train.global_batch_size={run.global_batch_size}")
    return " ".join(made)


def _settings(run: RunFacts) -> list[str]:
    sizes, parts = run.parallel, []
    for name, value in (
        ("tensor_model", sizes.tensor), ("pipeline_model", sizes.pipeline), ("virtual_pipeline_model", sizes.virtual_pipeline or "null"),
        ("context", sizes.context), ("expert_model", sizes.expert),
    ):  # fmt: skip
        parts.append(f"parallel.{name}_parallel_size={value}")
    if run.shape.experts:
        parts.append(f"parallel.expert_tensor_parallel_size={sizes.expert_tensor or 'null'}")
    parts.append(f"parallel.sequence_parallel={str(sizes.sequence).lower()}")
    parts.append(f"train.micro_batch_size={run.micro_batch_size}")
    parts += [_setting(name, run.model.get(name) or None) for name in PLACES]
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        parts.append(f"model.{name}={str(bool(run.model.get(name))).lower()}")
    parts += [_setting(name, run.model.get(name)) for name in NONE]
    parts.append(f"ddp.use_distributed_optimizer={str(run.optimizer.distributed).lower()}")
    return parts


def _setting(name: str, value: object) -> str:
    """A model setting quoted for a shell: a layout contains brackets and bars, a list of modules contains quotes."""
    text = json.dumps(list(value)) if isinstance(value, (list, tuple)) else "null" if value is None else value
    return shlex.quote(f"model.{name}={text}")


def search(
    policy: PrecisionPolicy,
    run: RunFacts,
    machine: Machine,
    *,
    most: int = 10,
    using: Constants | None = None,
    stated: bool = False,
    among: int | None = None,
    below: float | None = None,
    refused: Counter[str] | None = None,
) -> tuple[Layout, ...]:
    """The fastest layouts of that world size that are legal and may fit in memory: those that fit before those that are tight, each
    fastest first; empty if there are none. Of layouts that differ only in virtual stages, recomputation, the optimizer's distribution, or in context
    parallelism for a larger micro-batch, the fastest that fits; of those that differ in pipeline stages and by less than 3 %, far less than the error band, one.

    Every candidate that a quick memory bound does not rule out is priced; bytes and rules are then checked from the fastest on, until there are enough.
    stated: the author set whether the optimizer is distributed, so it is not changed. among: consider only that many, those with the fewest changes from
    the run. below: only steps of fewer seconds. refused: gets the number of candidates by what refuses them. Raises BadValue if fewer than one layout is requested.
    """
    if most < 1:
        raise BadValue(f"{most} layouts: expected at least 1")
    tally = Counter[str]() if refused is None else refused
    priced: list[_Priced] = []
    using = using or constants()
    every = (
        families(policy, run, machine, stated=stated)
        if among is None
        else _closest(policy, run, machine, among, stated=stated)
    )
    for family in every:
        priced += _price(policy, _Family(policy, family), family, machine, using, tally)
    priced = sorted((one for one in priced if below is None or one.seconds < below), key=lambda one: one.order)
    found: dict[tuple[object, ...], Layout] = {}
    near: dict[tuple[object, ...], list[float]] = {}
    # other numbers of virtual stages may change the order
    enough = most + (3 if among is None else 0)
    for one in priced:
        # a layout that may run out of memory does not take the place of one that fits
        fitting = sorted(layout.seconds for layout in found.values() if layout.answer == "fits")
        if len(fitting) >= enough and one.seconds > fitting[enough - 1]:
            break
        sizes = _sizes(one.run)
        if sizes in found and found[sizes].answer == "fits":
            continue
        alike = near.setdefault(_but_for_stages(one.run), [])
        if among is None and any(one.seconds < ALIKE * other for other in alike):
            continue
        layout = _judged(policy, one, machine, tally)
        if layout is not None and (layout.answer == "fits" or sizes not in found):
            found[sizes] = layout
            alike += [layout.seconds] if layout.answer == "fits" else []
    listed = sorted(found.values(), key=_rank)[:enough]
    if among is None:
        listed = _distinct(sorted((_staged(policy, one, machine, using) for one in listed), key=_rank))
    return tuple(listed[:most])


def _rank(layout: Layout) -> tuple[bool, float, int]:
    return layout.answer == "tight", layout.seconds, layout.needed


def _staged(policy: PrecisionPolicy, best: Layout, machine: Machine, using: Constants) -> Layout:
    """The layout in the number of virtual stages that is fastest and fits: of those within 1 % the fewest, which hold fewer micro-batches and send less often."""
    made = [best]
    for other in virtuals(best.run):
        for one in _price(policy, _Family(policy, (other,)), (other,), machine, using, Counter()):
            layout = _judged(policy, one, machine, Counter()) if one.seconds < 1.01 * best.seconds else None
            made += [layout] if layout is not None else []
    first = min(made, key=_rank)
    near = [one for one in made if one.answer == first.answer and one.seconds < 1.01 * first.seconds]
    return min(near, key=lambda one: one.run.parallel.virtual_pipeline or 1)


def _sizes(run: RunFacts) -> tuple[object, ...]:
    """What distinguishes layouts for a reader."""
    at = run.parallel
    return at.tensor, at.pipeline, at.expert, run.micro_batch_size / at.context


def _but_for_stages(run: RunFacts) -> tuple[object, ...]:
    """What distinguishes layouts whose steps take as long."""
    tensor, _, *others = _sizes(run)
    return tensor, *others


def _distinct(listed: list[Layout]) -> list[Layout]:
    """Without those that a faster one of the list stands for: numbers of virtual stages bring them closer."""
    kept = list[Layout]()
    for one in listed:
        alike = (other for other in kept if _but_for_stages(other.run) == _but_for_stages(one.run))
        if not any(other.answer == one.answer and one.seconds < ALIKE * other.seconds for other in alike):
            kept.append(one)
    return kept


def why_none(
    policy: PrecisionPolicy, run: RunFacts, machine: Machine, refused: Counter[str], *, stated: bool = False
) -> str:
    """What refuses every layout: a rule, the memory or the sizes; given what `search` counted."""
    if refused:
        reason, count = refused.most_common(1)[0]
        others = (
            f" ({count} of {refused.total()} layouts; next: {refused.most_common(2)[1][0]})" if len(refused) > 1 else ""
        )
        return f"{reason}{others}"
    if any(families(policy, run, dataclasses.replace(machine, memory_bytes=0), stated=stated)):
        return f"weights and gradients alone exceed the memory of {run.parallel.world_size} x {machine.label}: more GPUs, or a recipe with fewer bytes (mpbridge memory --compare)"
    return f"sizes must divide {run.parallel.world_size} GPUs, layers, heads and the global batch of {run.global_batch_size}"


def _closest(
    policy: PrecisionPolicy, run: RunFacts, machine: Machine, most: int, *, stated: bool
) -> list[tuple[RunFacts, ...]]:
    """The `most` members with the fewest changes from the run, by family. Families are looked into in the order of the fewest changes that a member may have."""
    ranked: list[tuple[tuple[tuple[int, int, int], int], RunFacts]] = []
    every = (
        (_changed(run, one.sizes, one.distributed), place, one)
        for place, one in enumerate(outlines(run, machine, stated=stated))
    )
    for least, place, outline in sorted(every, key=lambda row: row[:2]):
        if len(ranked) >= most and ranked[most - 1][0] < (least, place):
            break
        ranked += [((_distance(run, one), place), one) for one in members(policy, run, machine, outline)]
        ranked.sort(key=lambda row: row[0])
    found: dict[int, tuple[RunFacts, ...]] = {}
    for (_, place), one in ranked[:most]:
        found[place] = (*found.get(place, ()), one)
    return list(found.values())


class _Family:
    """Candidates of the same sizes: what they share is computed once, on first use."""

    def __init__(self, policy: PrecisionPolicy, members: tuple[RunFacts, ...]) -> None:
        self._policy, self._first = policy, members[0]

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

    @property
    def order(self) -> tuple[float, int]:
        """Of equally fast ones the one with less context parallelism comes first."""
        return self.seconds, self.run.parallel.context


def _price(
    policy: PrecisionPolicy,
    family: _Family,
    members: tuple[RunFacts, ...],
    machine: Machine,
    using: Constants,
    refused: Counter[str],
) -> Iterator[_Priced]:
    """The members of a family that may fit in memory, with their predicted steps."""
    for run in members:
        # activations of the first stage, which has the most micro-batches in flight, at the low end of their band
        kept = activations(policy, run, Coordinates.of(0, run.parallel))
        if machine.memory_bytes and kept * (1 - uncertainty(run)) > machine.memory_bytes:
            refused[MEMORY] += 1
            continue
        try:
            made = ideal(policy, run, machine, family.standing)
        except MpbridgeError as error:
            refused[error.line] += 1
            continue
        yield _Priced(run, family, sum(seconds(made, using).values()), made.tokens)


def _judged(policy: PrecisionPolicy, one: _Priced, machine: Machine, refused: Counter[str]) -> Layout | None:
    """The layout; None if it does not fit or a rule forbids it, counted in `refused`."""
    try:
        held = one.family.fullest(one.run)
    except MpbridgeError as error:
        refused[error.line] += 1
        return None
    answer = verdict(held, machine.memory_bytes)
    why = MEMORY if answer == "does not fit" else _forbids(policy, one.run)
    if why:
        refused[why] += 1
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


def _forbids(policy: PrecisionPolicy, run: RunFacts) -> str:
    """The first rule that forbids the run, with its cure; '' if none does."""
    for violation in broken(policy, run):
        if violation.severity == "error":
            return f"{violation.rule}: {violation.found}; expected {violation.expected} (cure: {violation.cure})"
    return ""


def nearest(policy: PrecisionPolicy, run: RunFacts, machine: Machine, *, stated: bool = False) -> RunFacts | None:
    """The layout that fits on the fewest GPUs, starting from this run's number; among these the one with the fewest changes. None: there is none up to 64
    times as many GPUs."""
    here = run.parallel
    # the author's own placement of layers on stages, which the search does not consider
    again = dataclasses.replace(run, model={**run.model, **FULL})
    if verdict(_Family(policy, (again,)).fullest(again), machine.memory_bytes) == "fits" and not _forbids(
        policy, again
    ):
        return again
    for factor in (1, 2, 4, 8, 16, 32, 64):
        wider = dataclasses.replace(run, parallel=dataclasses.replace(here, world_size=here.world_size * factor))
        if run.global_batch_size % max(1, run.micro_batch_size * wider.parallel.data):
            wider = dataclasses.replace(wider, global_batch_size=run.global_batch_size * factor)
        every = [
            (candidate, shared)
            for family in families(policy, wider, machine, stated=stated)
            for shared in (_Family(policy, family),)
            for candidate in family
        ]
        for candidate, shared in sorted(every, key=lambda one: _distance(run, one[0])):
            with contextlib.suppress(MpbridgeError):
                held = shared.fullest(candidate)
                if verdict(held, machine.memory_bytes) == "fits" and not _forbids(policy, candidate):
                    return candidate
    return None


def _distance(run: RunFacts, other: RunFacts) -> tuple[int, int, int]:
    changed, sizes, virtual = _changed(run, other.parallel, other.optimizer.distributed)
    again = run.model.get("recompute_granularity") != other.model.get("recompute_granularity")
    return changed + 2 * again, sizes, abs(run.micro_batch_size - other.micro_batch_size) + virtual


def _changed(run: RunFacts, b: Parallel, distributed: bool) -> tuple[int, int, int]:
    """The part of `_distance` that the members of a family share: no member has less."""
    a = run.parallel
    pairs = ((a.tensor, b.tensor), (a.pipeline, b.pipeline), (a.context, b.context), (a.expert, b.expert))
    changed = sum(x != y for x, y in pairs)
    return (
        changed + (run.optimizer.distributed != distributed),
        sum(max(x, y) // min(x, y) for x, y in pairs),
        int(a.virtual_pipeline != b.virtual_pipeline),
    )
