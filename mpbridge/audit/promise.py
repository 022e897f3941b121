"""What the policy promises of each role's tensors on an engine: the expected storage format, or that there is none."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from mpbridge.formats import DType
from mpbridge.precision.policy import Gemms, Owner, PrecisionPolicy, Quant

ABSENT = "none"
"""The promise that a role has no tensors of its own."""

ALWAYS_FP32 = ("*expert_bias", "*inv_freq")
"""Buffers that megatron-core keeps in FP32 whatever the model's dtype (router.py, rotary_pos_embedding.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """The policy, settled, as one engine has to keep it."""

    policy: PrecisionPolicy
    engine: str
    layers: int
    """Of the whole model."""
    emulated: bool = False
    """Emulation keeps weights in 16 or 32 bits whatever the recipe stores."""

    @property
    def owner(self) -> Owner:
        """Who holds the main weights on this engine: Megatron-FSDP always itself, FSDP2 never (FusedAdam does)."""
        owner = self.policy.main_params_owner
        if owner == "params":
            return owner
        return {"megatron_fsdp": "engine", "fsdp2": "optimizer"}.get(self.engine, owner)  # type: ignore[return-value]

    def of(self, role: str, parameter: str) -> str | None:
        """The storage format promised for a tensor of `role`; ABSENT; or None when the policy says nothing about it."""
        if role == "buffers":
            return "fp32" if any(fnmatch.fnmatchcase(parameter, pattern) for pattern in ALWAYS_FP32) else None
        if role == "params":
            return self._params(parameter)
        if role in ("grads", "main_grads") and self.kept_fp32(parameter):
            return "fp32"
        if role == "grads":
            return self._params(parameter) if self.engine == "fsdp2" else self.policy.reduce.short
        if role == "main_grads":
            return (self.policy.main_grads or DType.FP32).short
        if role == "main_params":
            return self._main_params(parameter)
        if role in ("exp_avg", "exp_avg_sq"):
            # full 16-bit on FSDP2 is torch's AdamW, whose moments have their parameter's dtype
            follows = self.engine == "fsdp2" and self.policy.main_params_owner == "params" and self.kept_fp32(parameter)
            return "fp32" if follows else (getattr(self.policy, role) or DType.FP32).short
        return None

    def gemms(self, module: str) -> Gemms:
        """The rules promised for the GEMMs of the linear at path `module`."""
        return self.policy.of_path(module, self.layers)

    def quant(self, module: str) -> Quant | None:
        """The rule promised for the linear at path `module`, the first among its GEMMs'; None: high precision."""
        return next(iter(self.gemms(module).distinct), None)

    def kept_fp32(self, parameter: str) -> bool:
        """Whether `keep_fp32` names this parameter."""
        return any(fnmatch.fnmatchcase(parameter, pattern) for pattern in self.policy.keep_fp32)

    def _params(self, parameter: str) -> str:
        if self.kept_fp32(parameter):
            return "fp32"
        quant = (
            self.quant(parameter.rpartition(".")[0]) if parameter.endswith(".weight") and not self.emulated else None
        )
        # only the weights of linears rest in a low format: norms and routers share the layer, not the rule
        if quant is not None and quant.stored and "norm" not in parameter and "router" not in parameter:
            return quant.row.stored.tensor
        return self.policy.params.short

    def _main_params(self, parameter: str) -> str:
        owner = self.owner
        main = self.policy.main_params or DType.FP32
        if owner == "params" or (self.kept_fp32(parameter) and self.engine == "fsdp2"):
            return ABSENT
        if (
            owner == "optimizer"
            and self.policy.precision_aware
            and self.policy.remainders
            and main is DType.FP32
            and self._params(parameter) == "bf16"
        ):
            return "int16"
        return main.short
