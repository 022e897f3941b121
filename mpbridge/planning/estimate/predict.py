"""`estimate`: the time of a step with its error band, the resulting rates in tokens and FLOPs, and where the time goes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine, key, machines
from mpbridge.common.versions import release
from mpbridge.planning.estimate.constants import Constants, constants
from mpbridge.planning.estimate.flops import model_flops_per_token
from mpbridge.planning.estimate.step import ideal, seconds
from mpbridge.planning.memory.limitations import left_out_of_time
from mpbridge.precision.policy import PrecisionPolicy


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
        peak=_peak(policy, where),
        world=run.parallel.world_size,
        left_out=left_out_of_time(run),
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


def _peak(policy: PrecisionPolicy, machine: Machine) -> float:
    low = "fp4" if policy.fp4 else "fp8" if policy.fp8 else policy.compute.short
    return machine.flops(low) or machine.flops("bf16") or 0.0


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
    odd = unusual(run)
    seen = ("all 50", "1.5", "2.1") if _MAMBA in odd else ("26 of 27", "1.6", "2.2")
    return (
        "{}: {} published runs of such a model take longer than predicted, {} times in the median, {} at worst".format(
            odd, *seen
        )
        if odd
        else ""
    )


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
