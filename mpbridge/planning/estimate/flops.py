"""Model FLOPs per token, forward and backward, without recomputation and padding: as counted in published tables, and as in PaLM's appendix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbridge.common.facts import ModelShape
from mpbridge.planning.memory.identical_layers import windowed
from mpbridge.planning.memory.layers import layer_weights
from mpbridge.planning.memory.mixers import MIXERS


def model_flops_per_token(shape: ModelShape, model: Mapping[str, Any]) -> float:
    """Floating-point operations per token as published tables count them: causal attention halved, no router.

    model: the model section, for sliding windows. Agrees with "Model TFLOP/s/GPU" of Megatron Bridge's performance summaries within 0.2 % in the median.
    """
    scores = sum(shape.attention_width * attended(shape, model, layer) for layer in _attending(shape))
    return 6 * (_weights(shape) + scores) + _scans(shape)


def whole_square_flops_per_token(shape: ModelShape) -> int:
    """Floating-point operations per token, counting the full square of a causal mask and the routers: the basis of the rate in a run's log.

    6 for every weight that a token is multiplied by (2 forward, 4 backward), plus 12 * layers * sequence * (heads * head size) for attention:
    the "6N + 12LHQT" of PaLM (arXiv 2204.02311, appendix B). N is counted from the shape instead of the parameters: embeddings, norms and biases
    are not multiplied, the output layer is, and only the experts that a token visits are counted.
    """
    layers = _layers(shape)
    routers = sum(shape.hidden_size * (shape.experts or 0) for layer in layers if shape.is_expert_layer(layer))
    return 6 * (_weights(shape) + routers + len(_attending(shape)) * shape.attention_width * shape.seq_length) + _scans(
        shape
    )


def attended(shape: ModelShape, model: Mapping[str, Any], layer: int) -> float:
    """Average number of keys that a query of that 0-based layer attends to: half the sequence, or the mean over a window."""
    seq, window = shape.seq_length, model.get("window_size")
    if not window or not windowed(model, layer):
        return seq / 2
    reach = min(seq, int(window[0]) + 1)
    return reach - reach * (reach - 1) / (2 * seq)


def _layers(shape: ModelShape) -> list[int]:
    """The 0-based layers that a token passes through; a prediction layer after the last is built like the last."""
    return [*range(shape.num_layers), *[shape.num_layers - 1] * shape.mtp_layers]


def _attending(shape: ModelShape) -> list[int]:
    """Those of `_layers` with attention."""
    return [layer for layer in _layers(shape) if "attention" in shape.parts(layer)]


def _scans(shape: ModelShape) -> int:
    """Floating-point operations of the scans of a hybrid's layers."""
    return sum(MIXERS[part].flops(shape) for layer in _layers(shape) for part in shape.parts(layer) if part in MIXERS)


def _weights(shape: ModelShape) -> int:
    """Number of weights that a token is multiplied by, without routers."""
    heads = shape.hidden_size * shape.vocab_size * (1 + shape.mtp_layers) + shape.mtp_layers * 2 * shape.hidden_size**2
    return heads + sum(
        weight.elements
        for layer in _layers(shape)
        for weight in layer_weights(shape, parts=shape.parts(layer), local_experts=shape.expert_topk)
        if weight.linear
    )
