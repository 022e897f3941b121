"""Transformer Engine's own Python on a machine without a GPU: our kernels in place of `transformer_engine_torch`."""

from mpbridge.te_cpu.context import transformer_engine_on_cpu

__all__ = ["transformer_engine_on_cpu"]
