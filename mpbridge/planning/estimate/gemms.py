"""The matrix products of a rank's layers and output layer, per micro-batch; and model FLOPs per token, forward and backward, without recomputation
and padding: as counted in published tables, and as in PaLM's appendix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mpbridge.common.facts import ModelShape, RunFacts
from mpbridge.common.formats import DType
from mpbridge.planning.estimate.price import MatrixProduct, Pass
from mpbridge.planning.memory.activations import layers_again, recomputed_modules
from mpbridge.planning.memory.identical_layers import layer_kinds, windowed
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.planning.memory.layers import Weight, layer_weights, rank_weights, te_layers
from mpbridge.planning.memory.mixers import MIXERS
from mpbridge.planning.memory.ranks import Chunk
from mpbridge.precision.policy import PrecisionPolicy, Quant


def model_flops_per_token(shape: ModelShape, model: Mapping[str, Any]) -> float:
    """Floating-point operations per token as published tables count them: causal attention halved, no router.

    model: the model section, for sliding windows. Agrees with "Model TFLOP/s/GPU" of Megatron Bridge's performance summaries within 0.2 % in the median."""
    scores = sum(shape.attention_width * attended(shape, model, layer) for layer in _attending(shape))
    return 6 * (_weights(shape) + scores) + _scans(shape)


def whole_square_flops_per_token(shape: ModelShape) -> int:
    """Floating-point operations per token, counting the full square of a causal mask and the routers: the basis of the rate in a run's log.

    6 for every weight that a token is multiplied by (2 forward, 4 backward), plus 12 * layers * sequence * (heads * head size) for attention:
    the "6N + 12LHQT" of PaLM (arXiv 2204.02311, appendix B). N is counted from the shape instead of the parameters: embeddings, norms and biases
    are not multiplied, the output layer is, and only the experts that a token visits are counted."""
    layers = _layers(shape)
    routers = sum(shape.hidden_size * (shape.experts or 0) for layer in layers if shape.is_expert_layer(layer))
    scores = len(_attending(shape)) * shape.attention_width * shape.seq_length
    return 6 * (_weights(shape) + routers + scores) + _scans(shape)


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


PASSES: tuple[Pass, ...] = ("forward", "dgrad", "wgrad")


def routed(run: RunFacts) -> int:
    """Rows that arrive at a rank's experts in one layer with a balanced router."""
    return int(run.tokens * run.routed * run.parallel.expert_width // run.parallel.tensor)


def rank_gemms(policy: PrecisionPolicy, run: RunFacts, chunks: Iterable[Chunk]) -> Iterator[MatrixProduct]:
    """Every product of those model chunks per micro-batch, including recomputed ones; identical layers are counted, not listed."""
    kinds, alike = layer_kinds(policy, run), Counter[tuple[bool, int]]()
    hidden, wide = run.shape.hidden_size, (policy.compute.short, "")
    for chunk in chunks:
        again = layers_again(run, chunk)
        alike.update((repeated, kinds[layer]) for repeated, layer in zip(again, chunk.layers, strict=False))
        for index, repeated in enumerate(again[len(chunk.layers) :]):
            path, out = f"mtp.layers.{index}.transformer_layer", hidden // run.parallel.tensor
            yield from _repeated(linear_gemms("mtp.eh_proj", run.tokens, out, 2 * hidden, wide), repeated)
            yield from _repeated(layer_gemms(policy, run, run.shape.num_layers - 1, path), repeated)
        for _ in range(chunk.heads(run.shape)):
            rows = run.shape.vocab_size // run.parallel.tensor
            yield from linear_gemms("output_layer", run.tokens, rows, hidden, wide)
    made = {layer: tuple(layer_gemms(policy, run, layer, f"decoder.layers.{layer}")) for _, layer in alike}
    for (repeated, layer), count in alike.items():
        yield from _repeated((replace(gemm, times=gemm.times * count) for gemm in made[layer]), repeated)


def _repeated(gemms: Iterable[MatrixProduct], again: bool) -> Iterator[MatrixProduct]:
    """Those of a layer, under full recomputation with the forward ones again."""
    for gemm in gemms:
        yield gemm
        if again and gemm.step == "forward":
            yield replace(gemm, step="recompute")


def recomputed(run: RunFacts, module: str, *, mixture: bool) -> bool:
    """Whether a layer's linear is recomputed for the backward pass (transformer_config.py recompute_modules)."""
    asked = recomputed_modules(run)
    if module.endswith(("linear_q_up_proj", "linear_kv_up_proj")):
        return "mla_up_proj" in asked
    if not module.startswith("mlp."):
        return False
    if "shared_experts" in module:
        return bool(asked & {"shared_experts", "moe"})
    return "moe" in asked if mixture else "mlp" in asked


def layer_gemms(policy: PrecisionPolicy, run: RunFacts, layer: int, prefix: str) -> Iterator[MatrixProduct]:
    """Every product of one layer per micro-batch; prefix: of its linears' paths ('decoder.layers.3')."""
    shape, parallel = run.shape, run.parallel
    mixture = shape.is_expert_layer(layer)
    here = (shape.experts or 0) // parallel.expert
    seen: set[str] = set()
    for weight in rank_weights(run, layer):
        if weight.path == "mlp.router.weight":
            exact = policy.router is not None or run.model.get("moe_router_dtype")
            rows = run.tokens // parallel.sequence_width
            for gemm in linear_gemms(weight.module, rows, shape.experts or 0, shape.hidden_size, ("fp32", "")):
                # Transformer Engine multiplies 16-bit operands in forward, and FP32 ones as TF32 (moe_utils.py RouterGatingLinearFunction)
                wide = "fp32" if not te_layers(run) else policy.compute.short if gemm.step == "forward" else "tf32"
                yield replace(gemm, format=wide if exact else policy.compute.short)
        if not weight.linear:
            continue
        # the first expert's products represent all of the rank's experts
        name = weight.module
        if weight.expert:
            name = f"mlp.experts.{name.rpartition('.')[2]}"
            if name in seen:
                continue
            seen.add(name)
        yield from _linear(policy, run, weight, name, prefix, mixture, here)


def _linear(
    policy: PrecisionPolicy, run: RunFacts, weight: Weight, name: str, prefix: str, mixture: bool, experts: int
) -> Iterator[MatrixProduct]:
    rules = dict(zip(PASSES, policy.of_path(f"{prefix}.{weight.module}", run.shape.num_layers), strict=True))
    out, inner = weight.shape
    whole = weight.module.endswith(("linear_q_down_proj", "linear_kv_down_proj")) and te_layers(run)
    rows = run.tokens
    if weight.expert:
        rows = routed(run) // max(1, experts)
    elif (whole or weight.module.endswith("_latent_proj")) and run.parallel.sequence:
        rows //= run.parallel.tensor
    times = experts if weight.expert else 1
    kinds = {step: operands(rules[step], policy.compute) for step in PASSES}
    made = [*linear_gemms(name, rows, out, inner, kinds, times=times, grouped=weight.expert)]
    yield from made[: 2 if is_frozen(policy, f"{prefix}.{weight.path}") else 3]  # what is frozen has no gradient
    if recomputed(run, weight.module, mixture=mixture):
        yield replace(made[0], step="recompute")


def linear_gemms(
    where: str,
    rows: int,
    out: int,
    inner: int,
    kind: tuple[str, str] | Mapping[Pass, tuple[str, str]],
    *,
    times: int = 1,
    grouped: bool = False,
) -> Iterator[MatrixProduct]:
    """The forward, dgrad and wgrad products of one linear [out, inner]. kind: (format, scaling) of all of them, or of each."""
    shapes = {"forward": (rows, out, inner), "dgrad": (rows, inner, out), "wgrad": (out, inner, rows)}
    for step in PASSES:
        (m, n, k), (form, scaling) = shapes[step], kind if isinstance(kind, tuple) else kind[step]
        yield MatrixProduct(
            where=where, m=m, n=n, k=k, format=form, scaling=scaling, step=step, times=times, grouped=grouped
        )


def operands(quant: Quant | None, compute: DType) -> tuple[str, str]:
    """(format, scaling) of a product's operands under that rule; compute: without one."""
    return (compute.short, "") if quant is None else (f"fp{quant.bits}", quant.scaling)
