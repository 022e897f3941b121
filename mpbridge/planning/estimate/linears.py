"""The cost of individual linears under a quantization rule: the same products, constants and casts as in the prediction of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.machines import Machine
from mpbridge.planning.estimate.constants import Constants
from mpbridge.planning.estimate.gemms import layer_gemms, linear_gemms, operands
from mpbridge.planning.estimate.memory_traffic import quantized_bytes
from mpbridge.planning.estimate.price import MatrixProduct, gemm_seconds
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Quant, Region

Basis = Literal["predicted", "peaks"]


def layer_seconds(
    policy: PrecisionPolicy,
    run: RunFacts,
    layer: int,
    quant: Quant | None,
    machine: Machine,
    using: Constants,
    basis: Basis,
) -> Mapping[str, float]:
    """Module below the layer (all experts as 'mlp.experts.linear_fc1') -> seconds per micro-batch on one rank if all its linears were under `quant`.

    GEMMs and quantization; with basis 'peaks' only the GEMMs at the machine's peak, a bound that is never reached. Raises BadValue for a format without a rate.
    """
    uniform = dataclasses.replace(policy, regions=(Region(quant=quant),))
    again = run.model.get("recompute_granularity") == "full"
    found: dict[str, list[MatrixProduct]] = {}
    for gemm in layer_gemms(uniform, run, layer, f"decoder.layers.{layer}"):
        found.setdefault(gemm.where, []).append(gemm)
        if again and gemm.step == "forward":
            found[gemm.where].append(dataclasses.replace(gemm, step="recompute"))
    return {where: seconds_of(gemms, machine, using, basis) for where, gemms in found.items()}


def linear_seconds(
    rows: int,
    out: int,
    inner: int,
    quant: Quant | None,
    compute: DType,
    machine: Machine,
    using: Constants,
    basis: Basis,
) -> float:
    """Seconds of one linear [out, inner] on `rows` tokens, forward and backward, under `quant`; as `layer_seconds`."""
    return seconds_of(linear_gemms("linear", rows, out, inner, operands(quant, compute)), machine, using, basis)


def seconds_of(gemms: Iterable[MatrixProduct], machine: Machine, using: Constants, basis: Basis) -> float:
    """Seconds of those products and the casts of their operands."""
    gemms, total = tuple(gemms), 0.0
    for gemm in gemms:
        name, ideal = gemm_seconds(gemm, machine, saturated=basis == "predicted")
        if basis == "predicted":
            ideal *= using.of(name) * using.machine(machine.name) * (using.of("grouped") if gemm.grouped else 1.0)
        total += ideal
    if basis == "peaks" or not machine.bandwidth:
        return total
    return total + quantized_bytes(gemms, machine.arch) / machine.bandwidth * using.of("memory")
