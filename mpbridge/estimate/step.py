"""Seconds of a step from ideal times and constants: stages, pipeline, what waits for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mpbridge.estimate.build import work
from mpbridge.estimate.constants import Constants
from mpbridge.estimate.price import host_units, micro_seconds, step_seconds
from mpbridge.facts import RunFacts
from mpbridge.hardware.machines import Machine
from mpbridge.memory.ranks import stage_chunks
from mpbridge.precision.policy import PrecisionPolicy

POWER = 3
"""Device and host run beside each other: (device**3 + host**3)**(1/3) is the slower one, softly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """What a run's step is made of before constants: one entry for each pipeline stage."""

    machine: str
    micro: tuple[Mapping[str, float], ...]
    """Constant -> ideal seconds of one micro-batch."""
    host: tuple[float, ...]
    """Units of the constant 'host' in one micro-batch."""
    step: tuple[Mapping[str, float], ...]
    batches: int
    """Micro-batches of a data-parallel rank."""
    virtual: int
    tokens: float
    """Of the whole step, on one GPU."""


def ideal(policy: PrecisionPolicy, run: RunFacts, machine: Machine) -> Ideal:
    """Every stage's operations at ideal speed. Raises BadValue for sizes that do not divide or formats without a rate."""
    parallel = run.parallel
    every = parallel.world_size // parallel.pipeline
    alike = distinct_stages(policy, run)
    priced = {stage: work(policy, run, stage * every) for stage in alike}
    works = [
        priced[next(first for first, same in alike.items() if stage in same)] for stage in range(parallel.pipeline)
    ]
    return Ideal(
        machine=machine.name,
        micro=tuple(micro_seconds(run, one, machine) for one in works),
        host=tuple(host_units(run, one) for one in works),
        step=tuple(step_seconds(run, one, machine) for one in works),
        batches=max(1, run.global_batch_size // max(1, run.micro_batch_size * parallel.data)),
        virtual=(parallel.virtual_pipeline or 1) if parallel.pipeline > 1 else 1,
        tokens=run.global_batch_size * run.shape.seq_length / parallel.world_size,
    )


def distinct_stages(policy: PrecisionPolicy, run: RunFacts) -> dict[int, tuple[int, ...]]:
    """First stage of each kind -> all stages of that kind: the same layers, in kind and precision. Raises BadValue when layers do not divide."""
    depth = run.shape.num_layers
    found: dict[int, tuple[int, ...]] = {}
    seen: dict[object, int] = {}
    for stage, chunks in enumerate(stage_chunks(run)):
        key = tuple(
            (
                chunk.first,
                chunk.last,
                chunk.mtp,
                tuple(
                    (
                        run.shape.is_expert_layer(i),
                        policy.at("mlp.linear_fc1", i, depth),
                        i % 2 if run.model.get("window_size") else 0,
                    )
                    for i in chunk.layers
                ),
            )
            for chunk in chunks
        )
        first = seen.setdefault(key, stage)
        found[first] = (*found.get(first, ()), stage)
    return found


def seconds(made: Ideal, using: Constants) -> Mapping[str, float]:
    """Where a step's time goes, in seconds: kinds of work on the slowest stage, 'launch gaps', 'pipeline bubble', 'optimizer'. The sum is the step."""
    devices = [_scaled(made.machine, stage, using) for stage in made.micro]
    host = using.of("host") / 1000
    times = [
        (sum(device.values()) ** POWER + (units * host) ** POWER) ** (1 / POWER)
        for device, units in zip(devices, made.host, strict=True)
    ]
    slowest = max(range(len(times)), key=times.__getitem__)
    found = defaultdict(float, {name: value * made.batches for name, value in devices[slowest].items()})
    found["launch gaps"] = made.batches * (times[slowest] - sum(devices[slowest].values()))
    found["pipeline bubble"] = (sum(times) - times[slowest]) / made.virtual
    once = [_scaled(made.machine, stage, using) for stage in made.step]
    for name, value in max(once, key=lambda stage: sum(stage.values())).items():
        found[name] += value
    return {name: value for name, value in found.items() if value > 0}


def _scaled(machine: str, parts: Mapping[str, float], using: Constants) -> dict[str, float]:
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
