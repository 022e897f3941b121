"""Seconds per step from ideal times and constants: stages, pipeline, and what waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.planning.estimate.build import Standing, standing, work
from mpbridge.planning.estimate.constants import Constants
from mpbridge.planning.estimate.price import host_units, micro_seconds, step_seconds
from mpbridge.planning.memory.identical_layers import distinct_stages
from mpbridge.planning.memory.ranks import Coordinates, batches
from mpbridge.precision.policy import PrecisionPolicy

POWER = 3
"""Device and host run in parallel: (device**3 + host**3)**(1/3) is a soft maximum of the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """The components of a run's step before constants are applied: one entry per pipeline stage."""

    machine: str
    micro: tuple[Mapping[str, float], ...]
    """Constant -> ideal seconds per micro-batch."""
    host: tuple[float, ...]
    """Units of the constant 'host' per micro-batch."""
    step: tuple[Mapping[str, float], ...]
    batches: int
    """Micro-batches per data-parallel rank."""
    virtual: int
    tokens: float
    """Per step and GPU."""


def ideal(
    policy: PrecisionPolicy, run: RunFacts, machine: Machine, known: Mapping[int, Standing] | None = None
) -> Ideal:
    """Every stage's operations at ideal speed. Raises BadValue for sizes that do not divide or formats without a rate.

    known: the result of `standing_work` for a run with the same sizes.
    """
    parallel = run.parallel
    every = parallel.world_size // parallel.pipeline
    kind = {stage: first for first, same in distinct_stages(policy, run).items() for stage in same}
    priced = {}
    for stage in set(kind.values()):
        one = work(policy, run, stage * every, None if known is None else known[stage])
        priced[stage] = (
            micro_seconds(run, one, machine),
            host_units(run, one),
            step_seconds(run, one.optimizer, one.step, machine),
        )
    micro, host, step = zip(*(priced[kind[stage]] for stage in range(parallel.pipeline)), strict=True)
    return Ideal(
        machine=machine.name,
        micro=micro,
        host=host,
        step=step,
        batches=batches(run),
        virtual=(parallel.virtual_pipeline or 1) if parallel.pipeline > 1 else 1,
        tokens=run.global_batch_size * run.shape.seq_length / parallel.world_size,
    )


def standing_work(policy: PrecisionPolicy, run: RunFacts) -> Mapping[int, Standing]:
    """The `Standing` of each kind of stage, by its first stage. Raises BadValue if layers do not divide."""
    every = run.parallel.world_size // run.parallel.pipeline
    return {
        stage: standing(policy, run, Coordinates.of(stage * every, run.parallel))
        for stage in distinct_stages(policy, run)
    }


def seconds(made: Ideal, using: Constants) -> Mapping[str, float]:
    """Where a step's time goes, in seconds: kinds of work on the slowest stage, 'launch gaps', 'pipeline bubble', 'optimizer'. The sum is the step."""
    devices = [scaled(made.machine, stage, using) for stage in made.micro]
    times = [both(sum(device.values()), units, using) for device, units in zip(devices, made.host, strict=True)]
    slowest = max(range(len(times)), key=times.__getitem__)
    found = defaultdict(float, {name: value * made.batches for name, value in devices[slowest].items()})
    found["launch gaps"] = made.batches * (times[slowest] - sum(devices[slowest].values()))
    found["pipeline bubble"] = (sum(times) - times[slowest]) / made.virtual
    once = [scaled(made.machine, stage, using) for stage in made.step]
    for name, value in max(once, key=lambda stage: sum(stage.values())).items():
        found[name] += value
    return {name: value for name, value in found.items() if value > 0}


def both(device: float, units: float, using: Constants) -> float:
    """Seconds of a device's work and its host's, which run in parallel. units: of the constant 'host'."""
    return float((device**POWER + (units * using.of("host") / 1000) ** POWER) ** (1 / POWER))


def scaled(machine: str, parts: Mapping[str, float], using: Constants) -> dict[str, float]:
    """Ideal seconds times their constants."""
    found = {}
    for name, value in parts.items():
        if name.startswith("grouped:"):
            factor = using.of(name.removeprefix("grouped:")) * using.of("grouped") * using.machine(machine)
        elif name.startswith("gemm_") or name == "attention":
            factor = using.of(name) * using.machine(machine)
        else:
            factor = using.of(name.partition(":")[0])
        found[name] = value * factor
    return found
