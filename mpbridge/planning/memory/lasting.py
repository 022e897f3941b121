"""What kernels and libraries allocate once and never free: GEMM workspaces, reused buffers, placeholders.

Each size comes from the source named with it; `scripts/evidence/check_memory_rows.py` checks their sum against live bytes measured on GPUs.
"""

from __future__ import annotations

from mpbridge.common.facts import RunFacts
from mpbridge.common.machines import Machine
from mpbridge.planning.memory.layers import parameters
from mpbridge.planning.memory.ranks import Coordinates, in_flight
from mpbridge.precision.policy import PrecisionPolicy

MIB = 2**20
TORCH_THREADS = 2
"""Threads for which torch allocates a cuBLAS workspace: the one that runs forward passes, and autograd's."""
TORCH_WORKSPACE = 2 * 4 * MIB + 8 * 16 * 2**10
"""torch's cuBLAS workspace before compute capability 9.0 (ATen/cuda/CublasHandlePool.cpp: ':4096:2:16:8')."""
TORCH_WORKSPACE_LARGE = 32 * MIB
"""From 9.0 on; also the size that CUBLAS_WORKSPACE_CONFIG=:4096:8 requests, which deterministic kernels need. Older torch uses the small one on 10.0."""
TE_WORKSPACE, TE_WORKSPACE_LARGE = 4 * MIB, 32 * MIB + 2**10
"""Transformer Engine's: before 9.0, and from 9.0 on (pytorch/cpp_extensions/gemm.py get_cublas_workspace_size_bytes)."""
TE_STREAMS, TE_OVERLAP_STREAMS = 4, 3
"""Streams with one workspace each: for grouped GEMMs, and for GEMMs that overlap tensor-parallel communication (same file)."""


def workspaces(run: RunFacts, machine: Machine) -> int:
    """Bytes of cuBLAS workspaces, torch's and Transformer Engine's."""
    recent = machine.arch is not None and machine.arch >= (9, 0)
    torch = TORCH_WORKSPACE_LARGE if recent or run.model.get("deterministic_mode") else TORCH_WORKSPACE
    size = TORCH_THREADS * torch
    if run.model.get("transformer_impl") == "local":
        return size
    streams = 1 + (TE_STREAMS if run.shape.grouped_gemm else 0)
    if run.model.get("tp_comm_overlap") and run.parallel.tensor > 1:
        streams += TE_OVERLAP_STREAMS
    return size + streams * (TE_WORKSPACE_LARGE if recent else TE_WORKSPACE)


def placeholders(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Bytes left behind by fused gradient accumulation: per shape of a linear's weight, including the output layer's, one tensor that autograd gets as the gradient.

    Transformer Engine's pytorch/module/base.py get_dummy_wgrad caches them by shape; megatron-core's tensor_parallel/layers.py calls it too.
    """
    if not run.model.get("gradient_accumulation_fusion") or run.model.get("transformer_impl") == "local":
        return 0
    chunks = parameters(run, at)
    shapes = {p.weight.shape for chunk in chunks for p in chunk if p.weight.linear and p.layer is not None}
    if any(chunk.last for chunk in at.chunks(run)):
        shapes.add((run.shape.vocab_size // run.parallel.tensor, run.shape.hidden_size))
    return sum(rows * columns for rows, columns in shapes) * policy.compute.bytes


def gather_buffer(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Bytes of megatron-core's GlobalMemoryBuffer: the largest tensor that is gathered or computed into it.

    The output layer's input under sequence parallelism (tensor_parallel/layers.py), the tokens of all ranks with the all-gather dispatcher
    (transformer/moe/token_dispatcher.py), the scores of local attention (transformer/dot_product_attention.py).
    """
    parallel, shape = run.parallel, run.shape
    whole = run.tokens * shape.hidden_size * policy.compute.bytes
    sizes = [0]
    if parallel.sequence and parallel.tensor > 1 and any(chunk.last for chunk in at.chunks(run)):
        sizes.append(whole)
    if shape.experts and run.model.get("moe_token_dispatcher_type", "allgather") == "allgather":
        ranks = parallel.expert * parallel.expert_width
        sizes.append(whole // parallel.sequence_width * ranks if ranks > 1 else 0)
    if run.model.get("transformer_impl") == "local":
        sizes.append(
            run.tokens * shape.seq_length * shape.num_attention_heads // parallel.tensor * policy.compute.bytes
        )
    return max(sizes)


def graph_inputs(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Bytes of CUDA graphs' static inputs: the hidden states and, with attention, the mask, for each layer and micro-batch in flight.

    megatron-core's transformer/transformer_layer.py get_layer_static_inputs; buffers are reused once a micro-batch's backward pass is done.
    """
    model, shape, parallel = run.model, run.shape, run.parallel
    if model.get("cuda_graph_impl") in (None, "none") and not model.get("enable_cuda_graph"):
        return 0
    rows = shape.seq_length // parallel.context
    states = rows * run.micro_batch_size * shape.hidden_size * policy.compute.bytes
    scope = str(model.get("cuda_graph_scope") or "attn")
    mask = run.micro_batch_size * rows * shape.seq_length if "attn" in scope else 0
    layers = sum(len(chunk.built(shape)) for chunk in at.chunks(run))
    flying = in_flight(run, at.stage) if parallel.pipeline > 1 else 1.0
    return int((states // parallel.sequence_width + mask) * layers * flying)
