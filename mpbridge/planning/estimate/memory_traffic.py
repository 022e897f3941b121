"""Memory traffic per micro-batch, in bytes: norms and residuals, activation functions, routing, casts, weights, the loss.

Counted per token and layer, with every operand read once and written once by each kernel of the forward and backward passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from mpbridge.common.facts import RunFacts
from mpbridge.planning.estimate.gemms import attended
from mpbridge.planning.estimate.price import AttentionWork, MatrixProduct
from mpbridge.planning.memory.activations import attention_kernel, layers_again, recomputed_modules
from mpbridge.planning.memory.identical_layers import counted
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.planning.memory.mixers import MIXERS
from mpbridge.planning.memory.ranks import Chunk, Coordinates
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.scalings import scaling


def attention(run: RunFacts, chunks: tuple[Chunk, ...]) -> Iterator[AttentionWork]:
    """Core attention of those chunks."""
    shape, rows = run.shape, run.tokens
    heads = shape.num_attention_heads / run.parallel.tensor
    kernel = attention_kernel(run)
    again = "core_attn" in recomputed_modules(run)
    flops = scores = 0.0
    layers = 0
    for chunk in chunks:
        for repeated, layer in zip(layers_again(run, chunk), chunk.built(shape), strict=True):
            if "attention" not in shape.parts(layer):
                continue
            passes = 3.5 + (again or repeated)
            keys = attended(shape, run.model, layer)
            flops += passes * 2 * rows * shape.attention_width / run.parallel.tensor * keys
            scores += 2 * rows * heads * keys
            layers += 1
    # unfused: the full square is computed, written, normalized and read; twice as many positions as a causal kernel visits
    moved = 0.0 if kernel == "fused" else layers * rows * heads * shape.seq_length * 2 * 8
    if layers:
        yield AttentionWork(
            flops=flops * (1 if kernel == "fused" else 2),
            scores=scores,
            format="fp8" if run.model.get("fp8_dot_product_attention") else "",
            bytes=moved,
        )


def traffic(
    policy: PrecisionPolicy, run: RunFacts, chunks: tuple[Chunk, ...], gemms: tuple[MatrixProduct, ...], weights: float
) -> Mapping[str, float]:
    """`Work.traffic`, without kinds of which there is none. weights: from `weight_bytes`."""
    shape, tensor, rows = run.shape, run.parallel.tensor, run.tokens
    wide = policy.compute.bytes / 2
    found: defaultdict[str, float] = defaultdict(float)
    fused = bool(run.model.get("use_transformer_engine_op_fuser"))
    for chunk in chunks:
        for repeated, layer in zip(layers_again(run, chunk), chunk.built(shape), strict=True):
            share = (4 / 3 if repeated else 1) * rows / tensor * wide
            parts = shape.parts(layer)
            mixture = "experts" in parts
            if parts[0] in MIXERS:
                found["norms"] += share * 18 * shape.hidden_size
                found["scan"] += share * MIXERS[parts[0]].moved(shape)
                continue
            found["norms"] += share * (_attention_bytes(run) if "attention" in parts else 18 * shape.hidden_size)
            width: float = shape.ffn_hidden_size if "mlp" in parts else 0
            if mixture:
                width = run.routed * shape.expert_ffn_hidden_size + shape.shared_expert_size
            found["activation"] += share * (16 if shape.gated else 10) * width * (0.75 if fused and mixture else 1)
            if mixture:
                # an FP32 router casts its input and its input's gradient
                casts = 16 * shape.hidden_size if run.model.get("moe_router_dtype") else 0
                sent = 12 * run.routed * shape.expert_hidden_size
                found["routing"] += share * (sent + 8 * (shape.experts or 0) + casts)
        found["loss"] += chunk.heads(shape) * 12 * shape.vocab_size * rows / tensor
    cast = quantized_bytes(gemms, run.machine.arch if run.machine is not None else None)
    found["quantization"] += cast * (0.6 if fused and shape.experts else 1)
    found["weights"] += weights
    return {kind: size for kind, size in found.items() if size}


def _attention_bytes(run: RunFacts) -> float:
    """Norms, residuals, rotary embedding and layout changes around attention, in bytes per token and layer at 16 bits."""
    shape = run.shape
    latent = shape.latent_attention
    if latent is None:
        inner = shape.num_attention_heads * shape.kv_channels
        # rotary embedding; norms of queries and keys: read and written in forward, two reads and a write in backward
        each = 8 + (10 if shape.qk_layernorm else 0)
        return 36 * shape.hidden_size + each * (inner + shape.num_query_groups * shape.kv_channels) + 6 * inner
    keys = latent["qk_head_dim"] + 2 * latent["qk_pos_emb_head_dim"] + latent["v_head_dim"]
    heads = shape.num_attention_heads
    return 36 * shape.hidden_size + 8 * heads * keys + 6 * heads * latent["v_head_dim"]


def quantized_bytes(gemms: Iterable[MatrixProduct], arch: tuple[int, int] | None) -> float:
    """Bytes read and written by casts of inputs and output gradients; each is cast once for all products that use it."""
    total = 0.0
    for gemm in gemms:
        if not gemm.scaling or gemm.step == "wgrad":
            continue
        # forward casts the input [m, k], dgrad the output's gradient [m, k]; the weight gradient reuses both
        total += gemm.m * gemm.k * gemm.times * cast_bytes(gemm.scaling, int(gemm.format.removeprefix("fp")), arch)
    return total


def cast_bytes(name: str, bits: int, arch: tuple[int, int] | None) -> float:
    """Bytes that the cast of one 16-bit element reads and writes under that scaling: the value, twice if the tensor's amax must be known first,
    its code, a second copy if the GEMMs need one, and the block's scale."""
    row = scaling(name)
    block = row.blocks[0] if row.blocks is not None else None
    # a per-tensor scale computed from the tensor itself: alone, or above block scales as in NVFP4
    looked_up = 2 if not row.history and (row.per_tensor or bits < 8 or block is None) else 0
    scales = row.stored.scale_bytes / block.along if block is not None and block.along else 0.0
    copies = 2 if row.keeps_transposed(arch) else 1
    return 2 + looked_up + copies * (bits / 8 + scales)


def weight_bytes(
    policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunks: Iterable[Chunk] | None = None
) -> float:
    """Bytes per micro-batch: weights read by forward and dgrad, their gradients read and written. chunks: None: those of the rank."""
    total = 0.0
    for parameter, times in counted(policy, run, at, chunks):
        weight = parameter.weight
        if not weight.linear or parameter.layer is None:
            continue
        quant = policy.at(weight.module, parameter.layer, run.shape.num_layers)
        stored = policy.compute.bytes if quant is None else quant.bits / 8
        own = 0 if is_frozen(policy, parameter.name) else 2 * policy.reduce.bytes
        total += times * weight.elements * (2 * stored + own)
    return total
