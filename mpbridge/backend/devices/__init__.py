"""Where megatron-core runs: on CUDA as it is, or on a CPU through one context manager."""

from contextlib import AbstractContextManager, nullcontext


def device_layer(cuda: bool, *, fused_adam: type | None = None) -> AbstractContextManager[None]:
    """A context in which megatron-core trains on the requested device.

    cuda=True: a null context, nothing is redirected. cuda=False: `cpu_device`, everything that requests CUDA gets the CPU.
    fused_adam: the CPU layer's replacement for Transformer Engine's FusedAdam; unused on CUDA.
    """
    if cuda:
        return nullcontext()
    from mpbridge.backend.devices.cpu import cpu_device

    return cpu_device(fused_adam=fused_adam)


__all__ = ["device_layer"]
