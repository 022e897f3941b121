"""What layouts take and hold at least, summed from what their kinds of layers take alone: close to what `ideal` and `memory` say of each, for a small part of the work."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpbridge.common.facts import BESIDE_ADAM, RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.machines import Machine
from mpbridge.planning.estimate.build import (
    Share,
    Standing,
    least_standing,
    pipeline_collectives,
    whole_gradient,
    work_of,
)
from mpbridge.planning.estimate.candidates import NONE, recomputation
from mpbridge.planning.estimate.constants import Constants
from mpbridge.planning.estimate.memory_traffic import weight_bytes
from mpbridge.planning.estimate.predict import both, scaled
from mpbridge.planning.estimate.price import host_units, micro_seconds, step_seconds, with_wires
from mpbridge.planning.memory.activations import Known, kept, uncertainty
from mpbridge.planning.memory.by_role import States, verdict, with_states
from mpbridge.planning.memory.identical_layers import counted, distinct_stages, layer_kinds
from mpbridge.planning.memory.keeps import STATES, elements_of, is_frozen, resident, trained_by
from mpbridge.planning.memory.layers import unsplit
from mpbridge.planning.memory.ranks import Chunk, Coordinates, batches, in_flight
from mpbridge.planning.memory.roles import holdings, resting, weight_copies
from mpbridge.precision.policy import PrecisionPolicy

ROUNDING = 1e-6
"""Relative: sums of parts differ from the sum of a whole stage in floating-point rounding and in bytes that are divided over ranks."""
PADDING = 0.01
"""Relative: what the bytes of two stages differ by at most because of padding, tables and buffers."""
Part = int | tuple[bool, bool, bool]
"""A kind of layer, or what a chunk has beside its layers: (first, last, mtp)."""

Parts = tuple[tuple[Part, int], ...]
"""What a stage consists of, and how many of each."""


class _Stage(NamedTuple):
    """Pipeline stages that are alike."""

    at: Coordinates
    """Of the first of them."""
    many: int
    parts: Parts


class _Held(NamedTuple):
    """Parameters of a part."""

    shares: Mapping[object, Share]
    """Those that every sum treats alike, together."""
    copies: int
    """Bytes of their copies in low precision."""
    traffic: float
    """Bytes per micro-batch of weights and their gradients."""


class Bounds:
    """Bounds of layouts of one model on one machine."""

    def __init__(self, policy: PrecisionPolicy, machine: Machine, using: Constants) -> None:
        self.policy, self.machine, self.using = policy, machine, using
        self._micro: dict[tuple[object, ...], tuple[float, float]] = {}
        self._parameters: dict[tuple[object, ...], _Held] = {}
        self._layers: dict[tuple[object, ...], Known] = {}
        self._steps: dict[tuple[object, ...], float] = {}
        self._states: dict[tuple[object, ...], int] = {}

    def micro(self, run: RunFacts, part: Part, widths: tuple[object, ...]) -> tuple[float, float]:
        """(seconds of the device, units of the host) that a part takes per micro-batch. widths: the run's `_widths`."""
        key = widths, part
        if key not in self._micro:
            alone = _alone(run)
            at, chunk = Coordinates.of(0, alone.parallel), (_chunk(part),)
            fixed = Standing(weights=self._held(run, part).traffic, step=(), optimizer=0.0)
            made = work_of(self.policy, alone, at, chunk, fixed)
            parts = scaled(self.machine.name, micro_seconds(alone, made, self.machine), self.using)
            self._micro[key] = sum(parts.values()), host_units(alone, made)
        return self._micro[key]

    def _held(self, run: RunFacts, part: Part) -> _Held:
        """The parameters of a part."""
        sizes = run.parallel
        key = (sizes.tensor, sizes.expert, part)
        if key not in self._parameters:
            self._parameters[key] = self._count(_alone(run), part)
        return self._parameters[key]

    def _count(self, alone: RunFacts, part: Part) -> _Held:
        policy, rests, name = self.policy, resting(self.policy, alone), alone.optimizer.name
        found: dict[object, Share] = {}
        copies, at, chunk = 0, Coordinates.of(0, alone.parallel), (_chunk(part),)
        for one, times in counted(policy, alone, at, chunk):
            weight, (stored, quant) = one.weight, rests(one)
            trained = trained_by(name, one.name, len(weight.shape), policy, alone.versions.megatron_core)
            matrix = weight.shape if name in BESIDE_ADAM else None
            kind = (weight.expert, stored, trained, is_frozen(policy, one.name), whole_gradient(one), matrix)
            first, elements = found.get(kind, (one, 0))
            found[kind] = first, elements + times * weight.elements
            if quant is not None:
                copies += times * sum(count * dtype.bytes for _, _, dtype, count in weight_copies(one, quant, alone))
        return _Held(found, copies, weight_bytes(policy, alone, at, chunk))

    def _stage(self, run: RunFacts, parts: Parts) -> tuple[list[Share], int]:
        """(parameters, bytes of copies) of a stage."""
        found: dict[object, Share] = {}
        copies = 0
        for part, times in parts:
            held = self._held(run, part)
            copies += times * held.copies
            for kind, (one, elements) in held.shares.items():
                found[kind] = one, found.get(kind, (one, 0))[1] + times * elements
        return list(found.values()), copies

    def once(self, run: RunFacts, parts: Parts) -> float:
        """Seconds of what happens once per step on a stage; under full sharding weights are gathered for each micro-batch."""
        key = (*_groups(run), run.micro_batch_size if "params" in run.traits.shards else 0, parts)
        if key not in self._steps:
            fixed = least_standing(self.policy, run, self._stage(run, parts)[0])
            spent = step_seconds(run, fixed.optimizer, fixed.step, self.machine)
            self._steps[key] = sum(scaled(self.machine.name, spent, self.using).values())
        return self._steps[key]

    def states(self, run: RunFacts, parts: Parts) -> int:
        """Bytes of a stage's states, without padding, tables and buffers."""
        key = (*_groups(run), parts)
        if key not in self._states:
            policy = self.policy.settled(dict(run.optimizer.settings))
            of, rests = holdings(policy, run), resting(policy, run)
            held, copies = self._stage(run, parts)
            total = float(copies)
            for one, elements in held:
                ranks, stored = run.sharers(expert=one.weight.expert), rests(one)[0]
                borrowed = policy.reuse_grad_buffer and stored is DType.UINT8  # MXFP8 weights: only copies
                for name, role in of(stored, one).items():
                    if role.view_of is None and not (borrowed and name == "params"):
                        whole = role.sharding == "whole" and run.optimizer.name not in BESIDE_ADAM
                        share = resident(run) if name in STATES else 1.0
                        each = share * elements_of(name, one.weight.shape, one.weight.elements) * role.dtype.bytes
                        total += elements / one.weight.elements * each / (1 if whole else ranks)
            self._states[key] = int(total)
        return self._states[key]

    def group(self, run: RunFacts, virtual: int) -> float:
        """No step of a run with these parallel sizes, up to that many virtual stages and this micro-batch, or a smaller one, is shorter: all stages together take as
        long for a micro-batch as one of all layers, and none but the slowest waits for none."""
        sizes, widths, device, host = run.parallel, _widths(run), 0.0, 0.0
        ahead = run.shape.mtp_layers > 0
        apart: list[Part] = [(True, False, False), (False, True, ahead)]
        ends: list[Part] = [(True, True, ahead)] if sizes.pipeline == 1 else apart
        for part, many in Counter[Part](layer_kinds(self.policy, run) + tuple(ends)).items():
            seconds, units = self.micro(run, part, widths)
            device, host = device + many * seconds, host + many * units
        stages, each = sizes.pipeline, both(device, host, self.using) / run.micro_batch_size
        tokens = run.global_batch_size / sizes.data
        return each * (tokens / stages + (1 - 1 / stages) / virtual) * (1 - ROUNDING)

    def layers(self, run: RunFacts) -> Known:
        """What layers keep in runs of these widths, for `activations` to read and fill."""
        return self._layers.setdefault(_widths(run), {})


class FamilyBounds:
    """Bounds of layouts that differ only in micro-batch size and recomputation."""

    def __init__(self, bounds: Bounds, members: Sequence[RunFacts]) -> None:
        self._bounds, self._run = bounds, members[0]
        longest = max(members, key=lambda run: run.micro_batch_size)
        self._longest = replace(longest, model={**longest.model, **NONE})

    @functools.cached_property
    def stages(self) -> tuple[_Stage, ...]:
        """Each kind of pipeline stage. Raises BadValue if layers do not divide."""
        run, found = self._run, []
        kinds = layer_kinds(self._bounds.policy, run)
        every = run.parallel.world_size // run.parallel.pipeline
        for first, alike in distinct_stages(self._bounds.policy, run).items():
            at = Coordinates.of(first * every, run.parallel)
            parts: Counter[Part] = Counter()
            for chunk in at.chunks(run):
                parts.update(kinds[layer] for layer in chunk.layers)
                if chunk.first or chunk.last or chunk.mtp:
                    parts[chunk.first, chunk.last, chunk.mtp] += 1
            found.append(_Stage(at, len(alike), tuple(parts.items())))
        return tuple(found)

    @functools.cached_property
    def _first_chunks(self) -> list[list[tuple[int, int]]]:
        """(kind of layer, how many) of each chunk of the first stage."""
        kinds = layer_kinds(self._bounds.policy, self._run)
        chunks = self.stages[0].at.chunks(self._run)
        return [list(Counter(kinds[layer] for layer in chunk.layers).items()) for chunk in chunks]

    @functools.cached_property
    def states(self) -> tuple[States, ...]:
        """The states of the first rank of each kind of stage, without padding, tables and buffers, under one role."""
        run, bounds = self._run, self._bounds
        every = run.parallel.world_size // run.parallel.pipeline
        sizes = [(stage.at.stage * every, bounds.states(run, stage.parts)) for stage in self.stages]
        return tuple(States(rank=rank, roles={"params": size}, elements=0) for rank, size in sizes)

    def exceeds(self, run: RunFacts, available: int) -> bool:
        """Whether states and layers of the first stage, which has the most micro-batches in flight, hold too many bytes (0: as many as there are)."""
        known, policy = self._bounds.layers(run), self._bounds.policy
        each = [sum(many * kept(policy, run, kind, known).each for kind, many in chunk) for chunk in self._first_chunks]
        layers = in_flight(run, self.stages[0].at.stage, each) * (1 - uncertainty(run))
        return sum(self.states[0].roles.values()) + layers > (available or math.inf)

    def verdict(self, run: RunFacts, available: int) -> str:
        """The best verdict on a member's memory that is possible."""
        known, policy = self._bounds.layers(run), self._bounds.policy
        found = [with_states(policy, run, held, known, every=False) for held in self.states]
        most = max(one.needed for one in found)
        # the fullest stage decides, and which one that is may depend on padding
        best = {verdict(one, available) for one in found if one.needed >= most * (1 - PADDING)}
        return next(word for word in ("fits", "tight", "does not fit") if word in best)

    def seconds(self, run: RunFacts) -> float:
        """No step of a member is shorter."""
        return self._step(run, self._times(run), 1.0)

    def least_seconds(self, run: RunFacts) -> float:
        """The same from the member with the largest micro-batch, without recomputation: no token takes longer in it."""
        return self._step(run, self._least_times, run.micro_batch_size / self._longest.micro_batch_size)

    @functools.cached_property
    def _least_times(self) -> list[float]:
        return self._times(self._longest)

    def _times(self, run: RunFacts) -> list[float]:
        """Seconds per micro-batch of each kind of stage."""
        bounds, times, widths = self._bounds, [], _widths(run)
        for stage in self.stages:
            device, host = self._wires(run, stage), 0.0
            for part, many in stage.parts:
                seconds, units = bounds.micro(run, part, widths)
                device, host = device + many * seconds, host + many * units
            times.append(both(device, host, bounds.using))
        return times

    def _step(self, run: RunFacts, times: list[float], share: float) -> float:
        slowest, virtual = max(times), (run.parallel.virtual_pipeline or 1) if run.parallel.pipeline > 1 else 1
        waits = sum(time * stage.many for time, stage in zip(times, self.stages, strict=True)) - slowest
        once = max(self._bounds.once(run, stage.parts) for stage in self.stages)
        return (share * (batches(run) * slowest + waits / virtual) + once) * (1 - ROUNDING)

    def _wires(self, run: RunFacts, stage: _Stage) -> float:
        """Seconds per micro-batch of what a stage sends to its neighbours and gets from them."""
        if run.parallel.pipeline == 1:
            return 0.0
        bounds, sent = self._bounds, pipeline_collectives(self._bounds.policy, run, stage.at)
        parts = with_wires(defaultdict(float), run, sent, bounds.machine)
        return sum(scaled(bounds.machine.name, parts, bounds.using).values())


def _widths(run: RunFacts) -> tuple[object, ...]:
    """What a part's work per micro-batch depends on."""
    sizes = run.parallel
    return sizes.tensor, sizes.context, sizes.expert, run.micro_batch_size, recomputation(run)


def _groups(run: RunFacts) -> tuple[object, ...]:
    """What else a stage's states and its work per step depend on than on its parts."""
    sizes = run.parallel
    return sizes.tensor, sizes.context, sizes.expert, sizes.world_size // sizes.pipeline, run.optimizer.distributed


def _alone(run: RunFacts) -> RunFacts:
    """The run without pipeline stages."""
    sizes = run.parallel
    world = sizes.world_size // sizes.pipeline
    return unsplit(run, replace(sizes, world_size=world, pipeline=1, virtual_pipeline=None))


def _chunk(part: Part) -> Chunk:
    if isinstance(part, tuple):
        first, last, mtp = part
        return Chunk(layers=(), first=first, last=last, mtp=mtp)
    return Chunk(layers=(part,), first=False, last=False)
