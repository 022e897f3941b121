"""The policy's promise for each role's tensors on an engine: the expected storage format, or that there are none."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.planning.memory.keeps import FROZEN, Holding, is_frozen, keeps, kept_fp32
from mpbridge.precision.policy import Gemms, PrecisionPolicy, Quant

ROLES = ("grads", "main_grads", "main_params", "exp_avg", "exp_avg_sq", "factors")
"""Roles of a parameter besides itself."""
ABSENT = "none"
"""The promise that a role has no tensors."""

NO_LINEARS = ("norm", "router", "conv1d")
"""Modules of a layer with a `weight` that no quantized GEMM reads: only weights of linears are stored in a low format."""
ALWAYS_FP32 = ("*expert_bias", "*inv_freq")
"""Buffers that megatron-core keeps in FP32 regardless of the model's dtype (router.py, rotary_pos_embedding.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """The resolved policy as it applies to one engine."""

    policy: PrecisionPolicy
    run: RunFacts
    layers: int
    """Of the whole model."""
    emulated: bool = False
    """Emulation keeps weights in 16 or 32 bits regardless of what the recipe stores."""
    foreign: bool = False
    """The model is not megatron-core's: the dtypes of its norms, residual stream, rotary angles and loss are up to its own code."""
    matrices: frozenset[str] | None = None
    """The parameters that Muon, SOAP or Lion is to train beside Adam; None: a run without them."""
    _kept: dict[tuple[DType, str], Mapping[str, Holding]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """`kept` by dtype and optimizer: every tensor asks, each time that metrics are written."""

    @property
    def seen(self) -> bool:
        """Whether operands of quantized GEMMs pass through torch, where they can be observed: emulated ones, and torchao's."""
        return self.emulated or all(quant.row.core is None for quant in self.policy.quants)

    @property
    def owner(self) -> str:
        """The owner of the main weights on this engine: 'engine', 'optimizer', or 'params' if the parameters are their own main weights."""
        held = self.kept(self.policy.params).get("main_params")
        return "params" if held is None else held.owner

    def kept(self, at_rest: DType, trained: str = "") -> Mapping[str, Holding]:
        """`memory.keeps` of a parameter stored in that dtype. trained: by which optimizer; '': the run's."""
        run, key = self.run, (at_rest, trained)
        if key not in self._kept:
            self._kept[key] = keeps(
                self.policy, run.traits, run.optimizer, at_rest=at_rest, ddp=run.ddp, trained=trained or None
            )
        return self._kept[key]

    def trained(self, parameter: str) -> str:
        """OptimizerFacts.name of what is to train a parameter; FROZEN: nothing."""
        if is_frozen(self.policy, parameter):
            return FROZEN
        return self.run.optimizer.name if self.matrices is None or parameter in self.matrices else "adam"

    def of(self, role: str, parameter: str) -> str | None:
        """The storage format promised for a tensor of `role`; ABSENT; or None if the policy says nothing about it."""
        if role == "buffers":
            return "fp32" if any(fnmatch.fnmatchcase(parameter, pattern) for pattern in ALWAYS_FP32) else None
        if role == "params":
            return self._params(parameter)
        if role not in ROLES:
            return None
        held = self.kept(self.rests(parameter), self.trained(parameter)).get(role)
        return ABSENT if held is None else held.dtype.short

    def gemms(self, module: str) -> Gemms:
        """The rules promised for the GEMMs of the linear at path `module`."""
        return self.policy.of_path(module, self.layers)

    def quant(self, module: str) -> Quant | None:
        """The rule promised for the linear at path `module` (the first of its GEMMs' rules); None: high precision."""
        return next(iter(self.gemms(module).distinct), None)

    def kept_fp32(self, parameter: str) -> bool:
        """Whether `keep_fp32` names this parameter."""
        return kept_fp32(self.policy, parameter)

    def rests(self, parameter: str) -> DType:
        """The dtype that a parameter is stored in; UINT8 in low precision."""
        if self.kept_fp32(parameter):
            return DType.FP32
        # 'weight', or 'weight0' and on in a grouped linear
        weight = re.fullmatch(r"weight\d*", parameter.rpartition(".")[2])
        linear = weight and not any(word in parameter for word in NO_LINEARS)
        quant = self.quant(parameter.rpartition(".")[0]) if linear and not self.emulated else None
        return DType.UINT8 if quant is not None and quant.stored else self.policy.params

    def _params(self, parameter: str) -> str:
        rests = self.rests(parameter)
        quant = self.quant(parameter.rpartition(".")[0]) if rests is DType.UINT8 else None
        return rests.short if quant is None else quant.row.stored.tensor
