"""GPU memory other than states and activations: workspaces, communication and pipeline buffers, dispatch, CUDA graphs; and what torch does not count.

LIMITATIONS is what the predicted bytes and times of a run leave out, with the sign of each error: `memory` and `estimate` print it; `Memory.exact` uses it.
Checked against Megatron-LM's published test cases (live bytes minus states, H100, A100 and GB200; `scripts/evidence/check_memory_rows.py` prints the figures).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from mpbridge.common.facts import MUONS, RunFacts
from mpbridge.common.machines import Machine
from mpbridge.planning.memory.buckets import bucket_size
from mpbridge.planning.memory.keeps import resident
from mpbridge.planning.memory.layers import rank_parameters
from mpbridge.planning.memory.ranks import Coordinates, in_flight
from mpbridge.precision.policy import PrecisionPolicy

Known = Literal["exact", "measured", "estimated"]

CONTEXT = 2**30
"""CUDA context, kernel code and NCCL's own buffers: what the driver allocates before torch does. An estimate, +-50 %."""
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
STAGE_TENSORS = 2
"""Tensors of a model chunk that follows a stage boundary: its input, which the block keeps until the next one, and that input's gradient."""

_CASES = "on Megatron-LM's test cases"
KINDS: Mapping[str, tuple[Known, float, str]] = {
    "workspaces": ("measured", 0.2, f"cuBLAS workspaces of torch and Transformer Engine, {_CASES}"),
    "gradient placeholders": ("measured", 0.1, f"one tensor per weight shape under gradient_accumulation_fusion, {_CASES}"),
    "communication": ("estimated", 0.2, "gathered layers and gradients in transit"),
    "overlap buffers": ("measured", 0.3, "one 15B case with tp_comm_overlap"),
    "gather buffer": ("measured", 0.1, f"megatron-core's global memory buffer, {_CASES}"),
    "pipeline buffers": ("measured", 0.1, f"the input of each model chunk and its gradient, {_CASES}"),
    "CUDA graphs": ("estimated", 0.5, "static inputs of the captured layers"),
    "context": ("estimated", 0.5, "CUDA context and NCCL"),
    "fragmentation": ("estimated", 1.0, "2 % of activations: blocks that the allocator holds but cannot use"),
    "dispatch": ("estimated", 1.0, "DeepEP's and HybridEP's own buffers: space for every rank's tokens, in both directions"),
}  # fmt: skip
"""Kind -> how its size is known, its band (`Overhead.band`), and from what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """One kind of memory that is neither a state nor an activation."""

    name: str
    bytes: int
    known: Known
    band: float
    """Relative error not exceeded in nine of ten comparisons; for an estimate, a judgement."""
    because: str

    @classmethod
    def of(cls, name: str, size: int) -> Self:
        """That many bytes of a kind in `KINDS`."""
        known, band, because = KINDS[name]
        return cls(name=name, bytes=size, known=known, band=band, because=because)


def overheads(policy: PrecisionPolicy, run: RunFacts, at: Coordinates, *, every: bool = True) -> tuple[Overhead, ...]:
    """Everything of that kind on a rank that torch counts; without a GPU only communication buffers. every: also what depends on single parameters."""
    return tuple(Overhead.of(name, size) for name, size in _sizes(policy, run, at, every) if size)


def outside(policy: PrecisionPolicy, run: RunFacts, activations: int) -> tuple[Overhead, ...]:
    """What torch does not count: the CUDA context, space that its allocator cannot use, buffers that a dispatcher allocates itself."""
    if run.machine is None or not run.machine.gpu:
        return ()
    sizes = {"context": CONTEXT, "fragmentation": int(0.02 * activations), "dispatch": _dispatch(policy, run)}
    return tuple(Overhead.of(name, size) for name, size in sizes.items() if size)


def _dispatch(policy: PrecisionPolicy, run: RunFacts) -> int:
    shape, parallel = run.shape, run.parallel
    if not shape.experts or parallel.expert == 1 or run.dispatcher != "flex":
        return 0
    return 2 * (run.tokens // parallel.tensor) * parallel.expert * shape.expert_hidden_size * policy.compute.bytes


def _sizes(policy: PrecisionPolicy, run: RunFacts, at: Coordinates, every: bool) -> Iterator[tuple[str, int]]:
    parallel, shape, machine = run.parallel, run.shape, run.machine
    whole = run.tokens * shape.hidden_size * policy.compute.bytes
    share = whole // parallel.sequence_width
    if machine is not None and machine.gpu:
        yield "workspaces", _workspaces(run, machine)
    if every:
        if machine is not None and machine.gpu:
            yield "gradient placeholders", _placeholders(policy, run, at)
        yield "communication", _communication(policy, run, at)
    if run.model.get("tp_comm_overlap") and parallel.tensor > 1:
        yield "overlap buffers", 4 * whole
    yield "gather buffer", _gather_buffer(policy, run, at)
    if parallel.pipeline > 1:
        yield "pipeline buffers", STAGE_TENSORS * share * sum(not chunk.first for chunk in at.chunks(run))
    yield "CUDA graphs", _graph_inputs(policy, run, at)


def _communication(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Gathered layers under full sharding, the receiving side of an all-to-all reduce-scatter."""
    full = run.sharded("params")
    if not full and not run.ddp.get("reduce_scatter_with_fp32_accumulation"):
        return 0
    sizes: Counter[int | None] = Counter()
    for parameter in rank_parameters(run, at):
        sizes[parameter.layer] += parameter.weight.elements
    if full:
        # the unit being computed, the one being gathered next, and the gradients of one in transit
        largest = max(sizes.values(), default=0)
        return 2 * largest * (policy.gather or policy.params).bytes + largest * policy.reduce.bytes
    if run.optimizer.distributed:
        total = sum(sizes.values())
        return min(total, bucket_size(run) or total) * policy.reduce.bytes
    return 0


# --- what kernels and libraries allocate once and never free: each size comes from the source named with it ---
def _workspaces(run: RunFacts, machine: Machine) -> int:
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


def _placeholders(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Bytes left behind by fused gradient accumulation: per shape of a linear's weight, including the output layer's, one tensor that autograd gets as the gradient.

    Transformer Engine's pytorch/module/base.py get_dummy_wgrad caches them by shape; megatron-core's tensor_parallel/layers.py calls it too."""
    if not run.model.get("gradient_accumulation_fusion") or run.model.get("transformer_impl") == "local":
        return 0
    shapes = {p.weight.shape for p in rank_parameters(run, at) if p.weight.linear and p.layer is not None}
    if any(chunk.last for chunk in at.chunks(run)):
        shapes.add((run.shape.vocab_size // run.parallel.tensor, run.shape.hidden_size))
    return sum(rows * columns for rows, columns in shapes) * policy.compute.bytes


def _gather_buffer(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Bytes of megatron-core's GlobalMemoryBuffer: the largest tensor that is gathered or computed into it.

    The output layer's input under sequence parallelism (tensor_parallel/layers.py), the tokens of all ranks with the all-gather dispatcher
    (transformer/moe/token_dispatcher.py), the scores of local attention (transformer/dot_product_attention.py)."""
    parallel, shape = run.parallel, run.shape
    whole = run.tokens * shape.hidden_size * policy.compute.bytes
    sizes = [0]
    if parallel.sequence and parallel.tensor > 1 and any(chunk.last for chunk in at.chunks(run)):
        sizes.append(whole)
    if shape.experts and run.dispatcher == "allgather":
        ranks = parallel.expert * parallel.expert_width
        sizes.append(whole // parallel.sequence_width * ranks if ranks > 1 else 0)
    if run.model.get("transformer_impl") == "local":
        scores = run.tokens * shape.seq_length * shape.num_attention_heads // parallel.tensor
        sizes.append(scores * policy.compute.bytes)
    return max(sizes)


def _graph_inputs(policy: PrecisionPolicy, run: RunFacts, at: Coordinates) -> int:
    """Bytes of CUDA graphs' static inputs: the hidden states and, with attention, the mask, for each layer and micro-batch in flight.

    megatron-core's transformer/transformer_layer.py get_layer_static_inputs; buffers are reused once a micro-batch's backward pass is done."""
    graphs, shape, parallel = run.cuda_graphs, run.shape, run.parallel
    if not graphs.on or graphs.whole_step:  # a graph of the whole iteration keeps its batch alone (full_cuda_graph.py)
        return 0
    rows = shape.seq_length // parallel.context
    states = rows * run.micro_batch_size * shape.hidden_size * policy.compute.bytes
    mask = run.micro_batch_size * rows * shape.seq_length if graphs.inside_layers("attn") else 0
    layers = [len(chunk.built(shape)) for chunk in at.chunks(run)]
    return int((states // parallel.sequence_width + mask) * in_flight(run, at.stage, layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limitation:
    """One feature of a run that is counted as something else, or not at all."""

    asked: Callable[[RunFacts], bool]
    what: str
    instead: str
    """How it is counted."""
    time: str = ""
    """The real step compared with the predicted one; empty: no error."""
    memory: str = ""
    """The real bytes compared with the predicted ones; empty: no error."""
    states: bool = False
    """Whether parameters or optimizer states are affected."""


def hybrid(model: Mapping[str, Any]) -> bool:
    """Whether a model section describes a hybrid with Mamba layers."""
    return bool(model.get("hybrid_override_pattern") or model.get("is_hybrid_model"))


def _linear_attention(run: RunFacts) -> bool:
    return bool(run.model.get("linear_attention_freq") or run.model.get("experimental_attention_variant"))


def _packed(run: RunFacts) -> bool:
    names = ("variable_seq_lengths", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank")
    return any(bool(run.model.get(name)) for name in names)


def _offloaded(run: RunFacts) -> bool:
    modules = run.model.get("fine_grained_activation_offloading") and run.model.get("offload_modules")
    return bool(modules or run.model.get("cpu_offloading"))


def _no_network(run: RunFacts) -> bool:
    machine = run.machine
    return machine is not None and run.parallel.world_size > machine.domain and not machine.network


LIMITATIONS = (
    Limitation(asked=lambda run: hybrid(run.model) and not run.shape.pattern, what="state-space layers (Mamba)",
               instead="counted as layers of attention and an MLP, which are larger", time="faster", memory="smaller", states=True),
    Limitation(asked=lambda run: bool(run.shape.pattern), what="the scans of Mamba layers",
               instead="counted as the memory traffic of their operands, without the products inside", time="slower"),
    Limitation(asked=lambda run: bool(run.model.get("heterogeneous_block_specs")), what="layers of several shapes",
               instead="counted as layers of the configured shape, which no layer needs to exceed", time="faster", memory="smaller", states=True),
    Limitation(asked=_linear_attention, what="linear attention",
               instead="counted as softmax attention, without its gates and convolutions", time="faster", memory="larger by those weights", states=True),
    Limitation(asked=_packed, what="packed sequences or sequences of several lengths",
               instead="counted as whole sequences of seq_length", time="faster", memory="at most as large"),
    Limitation(asked=_offloaded, what="the copies of offloaded activations to the host and back",
               instead="counted as taking no time", time="slower"),
    Limitation(asked=lambda run: resident(run) < 1, what="the optimizer's states and update on the host",
               instead="states counted by their share, the update as on the GPU", time="slower",
               memory="smaller by less than the states of one tensor", states=True),
    Limitation(asked=lambda run: run.optimizer.name in (*MUONS, "soap"), what="the products of Muon's and SOAP's steps",
               instead="not counted, nor the matrices in them", time="slower",
               memory="larger by a few copies of the largest matrix while the optimizer steps"),
    Limitation(asked=lambda run: run.realization == "emulated" and run.machine is not None and run.machine.gpu, what="emulation (emulate: true)",
               instead="weights and operands counted as it keeps them, in high precision (emulate=false counts the GPU's own)",
               memory="smaller natively, where they are stored in low precision"),
    Limitation(asked=_no_network, what="traffic between hosts", instead="", time="slower"),
)  # fmt: skip


def left_out_of_time(run: RunFacts) -> tuple[str, ...]:
    """What a predicted step leaves out, as text, each with the sign of its error."""
    seen = [one for one in LIMITATIONS if one.time and one.asked(run)]
    return tuple(f"{_words(one, run)}; the real step is {one.time}" for one in seen)


def left_out_of_memory(run: RunFacts) -> tuple[str, ...]:
    """What predicted bytes leave out, as text, each with the sign of its error."""
    seen = [one for one in LIMITATIONS if one.memory and one.asked(run)]
    return tuple(f"{_words(one, run)}; the real bytes are {one.memory}" for one in seen)


def states_counted(run: RunFacts) -> bool:
    """Whether all parameters and optimizer states are counted as they are."""
    return not any(one.states and one.asked(run) for one in LIMITATIONS)


def counted_at_most(run: RunFacts) -> bool:
    """Whether something is counted as more than it is, so that the real bytes may be far fewer."""
    return any(one.memory == "smaller" and one.asked(run) for one in LIMITATIONS)


def _words(one: Limitation, run: RunFacts) -> str:
    if one.asked is _no_network:
        return f"{one.what}: {run.machine.name} has no network in the table (a --machine-file can specify it)"
    return f"{one.what}: {one.instead}"
