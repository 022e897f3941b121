"""Quantizer factories for linears whose three GEMMs have rules of their own, or options that a recipe class alone has, found by name: megatron-core imports a factory by its path.

Transformer Engine (since 2.19) keeps two representations of an operand. fprop reads the rows' of inputs and weights, dgrad the columns' of weights and the
rows' of output gradients, wgrad the columns' of inputs and output gradients (pytorch/custom_recipes/quantizer_factory_zoo.py).
"""

from __future__ import annotations

import copy
import os
from typing import Any

from mpbridge.common.errors import Refused
from mpbridge.common.formats import say
from mpbridge.precision.megatron_spec.module_rules import QUANTIZERS, gemms_named
from mpbridge.precision.regions import Gemms, Quant

READ_BY = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
"""QuantizerRole.tensor_type -> the GEMMs that read its rows and its columns."""


class GemmFactory:
    """Makes the quantizer of one role: Transformer Engine's own of each rule, one for the rows and one for the columns."""

    def __init__(self, gemms: Gemms) -> None:
        self.gemms = gemms

    def __call__(self, role: Any) -> Any:
        """A quantizer; high precision for roles that no GEMM reads, such as outputs."""
        from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

        gemms = READ_BY.get(getattr(role, "tensor_type", ""))
        if gemms is None:
            return _quantizer(None, role)
        if self.gemms.one:
            return _quantizer(self.gemms.fprop, role)
        rows, columns = (_quantizer(getattr(self.gemms, gemm), role) for gemm in gemms)
        return HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)

    def __deepcopy__(self, memo: Any) -> GemmFactory:
        return copy.copy(self)  # it is immutable, and recipes are copied


def _quantizer(quant: Quant | None, role: Any) -> Any:
    """Transformer Engine's quantizer, with its recipe's defaults, in the rule's element format."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.custom_recipes import quantizer_factories
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    if quant is None:
        return IdentityQuantizer()
    made = getattr(quantizer_factories, QUANTIZERS[quant.scaling])(role)
    element = quant.element(gradient=role.tensor_type == "grad_output")
    for option in quant.row.options:
        value = quant.option(option.name, os.environ)
        if option.name in _ATTRIBUTES:
            for name in _ATTRIBUTES[option.name]:
                # what a recipe switches on by default is on for some roles only, and so is what only weights have
                on = (
                    getattr(made, name)
                    if option.default
                    else option.name not in _OF_WEIGHTS or role.tensor_type == "weight"
                )
                setattr(made, name, value and on)
        elif value != option.default:
            raise Refused(
                f"{option.variable} asks for {quant.scaling} scaling with {option.name}={say(value)}, which the quantizers of a rule per GEMM do not follow: "
                "unset it, or give the linear one rule"
            )
    made.dtype = getattr(DType, {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2", "e2m1": "kFloat4E2M1"}[element])
    return made


_ATTRIBUTES = {
    "power_of_two": ("force_pow_2_scales",), "hadamard": ("with_rht", "with_post_rht_amax"), "stochastic_rounding": ("stochastic_rounding",),
    "square_weights": ("with_2d_quantization",),
}  # fmt: skip
"""Option of a scaling -> attributes of Transformer Engine's quantizers."""
_OF_WEIGHTS = ("square_weights",)
_MADE: dict[str, GemmFactory] = {}


def __getattr__(name: str) -> GemmFactory:
    gemms = gemms_named(name)
    if gemms is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _MADE.setdefault(name, GemmFactory(gemms))
