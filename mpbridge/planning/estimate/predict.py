"""`estimate`: the time of a step with its error band, the resulting rates in tokens and FLOPs, and where the time goes.

Seconds per step come from ideal times and constants: stages, pipeline, and what waits for what. `timing` reads what a run of mpbridge measured."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import RunFacts
from mpbridge.common.files import text_of
from mpbridge.common.machines import Machine, key, machines
from mpbridge.common.versions import release
from mpbridge.planning.estimate.build import Standing, standing, work
from mpbridge.planning.estimate.constants import Constants, constants
from mpbridge.planning.estimate.gemms import model_flops_per_token
from mpbridge.planning.estimate.price import host_units, micro_seconds, step_seconds
from mpbridge.planning.memory.identical_layers import distinct_stages
from mpbridge.planning.memory.overheads import left_out_of_time
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

    known: the result of `standing_work` for a run with the same sizes."""
    parallel = run.parallel
    every = parallel.world_size // parallel.pipeline
    kind = {stage: first for first, same in distinct_stages(policy, run).items() for stage in same}
    priced = {}
    for stage in set(kind.values()):
        one = work(policy, run, stage * every, None if known is None else known[stage])
        once = step_seconds(run, one.optimizer, one.step, machine)
        priced[stage] = micro_seconds(run, one, machine), host_units(run, one), once
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
    at = {stage: Coordinates.of(stage * every, run.parallel) for stage in distinct_stages(policy, run)}
    return {stage: standing(policy, run, first) for stage, first in at.items()}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted step."""

    seconds: float
    band: float
    """Nine of ten predictions of this kind were within `span`."""
    one_sided: bool
    """Whether the prediction is a lower bound: real steps of this kind only take longer."""
    because: str
    """The measurements that the band comes from."""
    parts: Mapping[str, float]
    """Kind of work -> seconds; the sum is `seconds`."""
    tokens_per_second: float
    """Per GPU."""
    flops_per_second: float
    """Model FLOP/s per GPU: without recomputation, causal attention halved."""
    peak: float
    """Dense peak of the recipe's lowest-precision GEMMs on that machine, FLOP/s."""
    world: int
    left_out: tuple[str, ...]

    @property
    def span(self) -> tuple[float, float]:
        """The low and high end of the band, in seconds."""
        return self.seconds * (1 if self.one_sided else 1 - self.band), self.seconds * (1 + self.band)

    @property
    def share_of_peak(self) -> float:
        """Model FLOP/s as a fraction of the dense peak."""
        return self.flops_per_second / self.peak if self.peak else 0.0

    @property
    def gpu_hours_per_billion_tokens(self) -> float:
        """Summed over all GPUs."""
        return 1e9 / self.tokens_per_second / 3600


def estimate(
    policy: PrecisionPolicy, run: RunFacts, machine: Machine | None = None, using: Constants | None = None
) -> Estimate:
    """The prediction for a run. machine: None: the run's own. Raises BadValue if the run cannot be priced."""
    where = machine or run.machine
    if where is None or not where.peak:
        raise BadValue(
            f"{where.name if where is not None else 'the machine'} has no rates in the table: name a --target, or give a --machine-file that `mpbridge calibrate` wrote"
        )
    held = using or constants()
    made = ideal(policy, run, where)
    parts = seconds(made, held)
    total = sum(parts.values())
    tokens = made.tokens / total
    band, because = _band(run, where, held)
    return Estimate(
        seconds=total,
        band=band,
        one_sided=bool(unusual(run)),
        because=because,
        parts=grouped(parts),
        tokens_per_second=tokens,
        flops_per_second=tokens * model_flops_per_token(run.shape, run.model),
        peak=where.flops(policy.narrowest) or where.flops("bf16") or 0.0,
        world=run.parallel.world_size,
        left_out=left_out_of_time(run),
    )


def mean(stages: Sequence[tuple[float, Estimate]]) -> Estimate:
    """The mean step of a run in stages: (share of its steps, that stage's step) of each. Machine, layout and model are the same in all, so the band is too."""
    total, parts = math.fsum(share * one.seconds for share, one in stages), defaultdict[str, float](float)
    for share, one in stages:
        for name, value in one.parts.items():
            parts[name] += share * value

    def over_time(of: Callable[[Estimate], float]) -> float:
        return math.fsum(share * one.seconds * of(one) for share, one in stages) / total

    return replace(
        stages[0][1],
        seconds=total,
        parts=dict(sorted(parts.items(), key=lambda item: -item[1])),
        tokens_per_second=over_time(lambda one: one.tokens_per_second),
        flops_per_second=over_time(lambda one: one.flops_per_second),
        peak=over_time(lambda one: one.peak),
        left_out=tuple(dict.fromkeys(words for _, one in stages for words in one.left_out)),
    )


_LABELS = {
    "memory:quantization": "quantization", "memory:": "memory-bound", "expert_": "communication: expert parallel", "tensor": "communication: tensor parallel",
    "data": "communication: data parallel", "context": "communication: context parallel", "pipeline bubble": "pipeline bubble",
    "pipeline": "communication: pipeline",
}  # fmt: skip
"""How the name of a part of a step starts -> its label in tables, the first that matches; any other name is its own label."""


def grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by the labels shown in tables, longest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in parts.items():
        product = name.removeprefix("grouped:")
        label = next((label for start, label in _LABELS.items() if name.startswith(start)), name)
        if product.startswith("gemm_"):
            label = f"GEMMs {product.removeprefix('gemm_')}" + (" (experts)" if name != product else "")
        found[label] += value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def unusual(run: RunFacts) -> str:
    """Why a model's kernels differ from those of the fitted rows; empty if they do not."""
    found = []
    if run.model.get("softmax_type") not in (None, "vanilla"):
        found.append("attention sinks")
    if run.model.get("activation_func_clamp_value") is not None:
        found.append("a clamped activation")
    if run.shape.experts and run.shape.linear_bias:
        found.append("biases in experts")
    if "M" in run.shape.pattern:
        found.append(_MAMBA)
    return ", ".join(found)


def longer(run: RunFacts) -> str:
    """How far steps with unusual kernels are from their prediction, always on one side (`scripts/evidence/fit_step_time.py`); empty for usual kernels."""
    if not (odd := unusual(run)):
        return ""
    seen, median, worst = ("all 50", "1.5", "2.1") if _MAMBA in odd else ("26 of 27", "1.6", "2.2")
    said = f"{seen} published runs of such a model take longer than predicted"
    return f"{odd}: {said}, {median} times in the median, {worst} at worst"


_MAMBA = "Mamba layers"
"""Their kernels are counted as memory traffic (`limitations`); `scripts/evidence/check_hybrids.py` compares them with published runs."""


def _band(run: RunFacts, machine: Machine, using: Constants) -> tuple[float, str]:
    """(relative error not exceeded in nine of ten predictions, the measurements that it comes from). Independent terms: the machine, and the release of the software."""
    if unusual(run):
        return using.bands["unusual kernels"], longer(run)
    if machine.name in using.spread:
        band, because = using.spread[machine.name], f"published runs on {machine.name}"
    elif machine.name in using.machines:
        return using.bands["architecture not fitted"], "rates that calibrate measured there, with no run to compare"
    else:
        because = f"no published run on {machine.name} was fitted: constants of other machines"
        if all(machine.arch != machines[key(name)].arch for name in using.spread):
            return using.bands["architecture not fitted"], because
        band = math.hypot(max(using.spread.values()), using.bands["machine not fitted"])
    core = run.versions.megatron_core
    if core is not None and ".".join(map(str, release(core)[:2])) not in using.releases:
        band = math.hypot(band, using.bands["release not fitted"])
        because += f"; none with megatron-core {core} was fitted"
    return band, because


NAME = "timing.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A measured step."""

    recipe: str
    seconds: float
    """Median of the last steps."""
    tokens_per_second: float
    """Per process."""
    steps: int
    """Number of steps in the median."""
    world_size: int
    config: dict[str, Any]
    """The run's configuration, as returned by ConfigContainer.as_data."""


def timing(folder: Path) -> Timing:
    """The timing of that run. Raises BadValue for a folder without one, or with an invalid one."""
    path = folder / NAME
    try:
        data = json.loads(text_of(path))
        found = Timing(**{name: data[name] for name in Timing.__dataclass_fields__})
    except OSError as error:
        raise BadValue(f"{path}: {error.strerror or error} (a run with logger.log_dir={folder} writes it)") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadValue(f"{path} is not the timing of a run: {error}") from None
    if not (isinstance(found.seconds, (int, float)) and found.seconds > 0 and found.tokens_per_second > 0):
        raise BadValue(f"{path}: seconds={found.seconds!r}, expected a positive number")
    return found
