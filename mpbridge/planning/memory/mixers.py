"""What a layer of a hybrid costs that mixes tokens otherwise than by attention: a row for each such part of `common.facts.PARTS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mpbridge.common.facts import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """One part, without its linears, which are counted as GEMMs. Sizes are those of the whole model, before tensor parallelism."""

    first: str
    """The linear whose rule stands for the layer's."""
    kept: Callable[[ModelShape, float, int], float]
    """(shape, bytes of a quantized input, bytes of the compute dtype) -> bytes a token that it keeps for its backward pass."""
    moved: Callable[[ModelShape], float]
    """Bytes a token that its kernels read and write, forward and backward, at 16 bits."""
    flops: Callable[[ModelShape], int]
    """Floating-point operations a token, forward and backward."""


def _mamba_kept(shape: ModelShape, low: float, wide: int) -> float:
    """What the scan's kernel and the gated norm keep; `scripts/evidence/measure_activations.py` measures megatron-core 0.16.1's layer beside it."""
    inner, states, heads = shape.mamba_sizes
    return wide * (2 * (inner + states) + heads + 2 * inner) + low * inner + 4 * shape.sizes["mamba_num_groups"]


def _mamba_moved(shape: ModelShape) -> float:
    """Convolution, scan and gated norm: the projection is read by the forward pass, read again and its gradient written by the backward pass, and so are
    the convolved channels and the result; what is inside the scan stays on the chip."""
    inner, states, heads = shape.mamba_sizes
    return 2 * (3 * (2 * (inner + states) + heads) + 3 * 2 * (inner + 2 * states) + 3 * 3 * inner)


MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {
        "mamba": Mixer(
            first="mixer.in_proj",
            kept=_mamba_kept,
            moved=_mamba_moved,
            # 7 for each channel's each state, forward, three times that in all, as Megatron-LM counts (training.py mamba_layer_flops) except that it takes
            # twice the hidden size for the number of channels
            flops=lambda shape: 3 * 7 * shape.mamba_sizes[0] * shape.sizes["mamba_state_dim"],
        )
    }
)
