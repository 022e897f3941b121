"""Number of elements of every role on a rank: what `memory.keeps` lists, counted in the engine's own layout; and the bytes of Transformer Engine's low-precision weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mpbridge.common.facts import BESIDE_ADAM, RunFacts
from mpbridge.common.formats import DType
from mpbridge.common.traits import Sharding
from mpbridge.planning.memory.buckets import Buffer, buffers, up
from mpbridge.planning.memory.keeps import STATES, Holding, elements_of, is_frozen, keeps, kept_fp32, trained_by
from mpbridge.planning.memory.layers import Parameter, parameters
from mpbridge.planning.memory.ranks import Coordinates
from mpbridge.precision.policy import PrecisionPolicy, Quant
from mpbridge.precision.scalings import Scaling

WeightCopy = tuple[str, str, DType, int]


def weight_copies(parameter: Parameter, quant: Quant, run: RunFacts) -> Iterator[WeightCopy]:
    """(role, parameter, dtype, elements) of a weight in low precision, in addition to its entry in the parameter buffer.

    Weights that are not stored in low precision are quantized once per step and kept over its micro-batches, unless disable_parameter_transpose_cache is
    set. Sources: Transformer Engine 2.11 tensor/storage/*.py and tensor/{mxfp8,nvfp4,float8_blockwise}_tensor.py."""
    if not quant.stored and run.model.get("disable_parameter_transpose_cache"):
        return
    size, name = parameter.weight.elements, parameter.name
    rows, columns = parameter.weight.shape
    data = size if quant.bits == 8 else -(-size // 2)
    reused = bool(run.ddp.get("reuse_grad_buf_for_mxfp8_param_ag"))
    # stored weights are in the parameter buffer itself, unless that is the gradient buffer
    if not quant.stored or (quant.row.stored.through_grads and reused):
        yield "weight_copies", name, DType.UINT8, data
    if quant.row.keeps_transposed(run.machine.arch if run.machine is not None else None):
        yield "weight_transposes", name, DType.UINT8, data
    width = DType.FP32 if quant.row.stored.scale_bytes == 4 else DType.UINT8
    yield "weight_scales", name, width, weight_scales(quant.row, rows, columns)


def weight_scales(row: Scaling, rows: int, columns: int) -> int:
    """Number of scales of a weight, for both copies together, including the kernels' padding of scale tensors."""
    if row.blocks is None or row.per_tensor:
        return 1
    # one scale per line and block, unless lines share a stored scale: NVFP4 writes the scale of a 16x16 block once per line
    along, across = row.blocks[1].along, row.blocks[1].across if row.stored.lines == 1 else 1

    def one(lines: int, length: int) -> int:
        return up(-(-lines // across), row.stored.lines) * up(-(-length // (along or length)), row.stored.count)

    return one(rows, columns) + one(columns, rows)


class Role(NamedTuple):
    """One kind of tensor of one parameter (or of all that share a buffer) on one rank."""

    name: str
    """'params', 'grads', one of keeps.STATES, 'buffers', 'padding', 'weight_copies', 'weight_transposes', 'weight_scales'."""
    parameter: str
    """Global name; '' if several parameters share it."""
    dtype: DType
    """Storage dtype: FP8 and FP4 are UINT8."""
    elements: int
    """On this rank, in units of `dtype`, without padding."""
    padding: int
    """Unused elements."""
    owner: str
    """'model', 'wrapper', 'engine', 'optimizer' or 'transformer_engine': who allocates it."""

    @property
    def bytes(self) -> int:
        """Bytes that it occupies, with padding."""
        return (self.elements + self.padding) * self.dtype.bytes


def roles(policy: PrecisionPolicy, run: RunFacts, *, rank: int = 0, together: bool = False) -> tuple[Role, ...]:
    """Every role on `rank` between optimizer steps, once states exist. Views of other roles' memory are not listed. together: those that are alike in a buffer as one.

    `memory.keeps` determines what is stored; this function counts it in the engine's layout (`EngineTraits.exact_memory`: to the byte or not)."""
    settled = policy.settled(dict(run.optimizer.settings))
    at = Coordinates.of(rank, run.parallel)
    chunks = parameters(run, at)
    lay = _LAYOUTS[run.traits.layout]
    if lay is _in_buffers and run.optimizer.name not in BESIDE_ADAM and not settled.frozen:
        lay = functools.partial(_in_buffers, together=together)
    if run.optimizer.name == "dist_muon":
        lay = functools.partial(_in_buffers, mine=_dealt(settled, run, at, chunks))
    found = [role for index, chunk in enumerate(chunks) for role in lay(settled, run, at, chunk, index)]
    found += [role for chunk in chunks for role in _module_buffers(settled, run, chunk)]
    return tuple(found)


def dtype_at_rest(policy: PrecisionPolicy, run: RunFacts, parameter: Parameter) -> tuple[DType, Quant | None]:
    """(dtype of the stored parameter, the quantization of its GEMM); UINT8 if its weight is stored in FP8."""
    if kept_fp32(policy, parameter.name):
        return DType.FP32, None
    weight = parameter.weight
    if parameter.layer is None or not weight.linear or not policy.quantized or run.realization != "native":
        return policy.params, None
    quant = policy.of_path(_module(parameter), run.shape.num_layers).first
    return (DType.UINT8 if quant is not None and quant.stored else policy.params), quant


def _module(parameter: Parameter) -> str:
    """The full path of the module that owns the parameter."""
    return parameter.name.removesuffix(parameter.weight.path) + parameter.weight.module


def resting(policy: PrecisionPolicy, run: RunFacts) -> Callable[[Parameter], tuple[DType, Quant | None]]:
    """`dtype_at_rest` for a run: evaluated once per linear, not once per expert weight."""
    known = _known(policy, run.shape.num_layers, run.realization)

    def of(parameter: Parameter) -> tuple[DType, Quant | None]:
        if policy.keep_fp32:  # may name individual parameters
            return dtype_at_rest(policy, run, parameter)
        if parameter.layer is None or not parameter.weight.linear:
            return policy.params, None
        if (found := known.get(parameter.name)) is None:
            path = _module(parameter)
            if path not in known:
                known[path] = dtype_at_rest(policy, run, parameter)
            found = known[parameter.name] = known[path]
        return found

    return of


@functools.lru_cache(maxsize=32)  # asked again for each stage, chunk and layout
def _known(policy: PrecisionPolicy, layers: int, realization: str) -> dict[str, tuple[DType, Quant | None]]:
    """What is known of linears under a policy, by path and by the names of their parameters: `dtype_at_rest` depends on nothing else."""
    return {}


def holdings(policy: PrecisionPolicy, run: RunFacts) -> Callable[..., Mapping[str, Holding]]:
    """`keeps` of a settled policy in a run, by the dtype in which a parameter is stored, and by the parameter where its states are asked for; results are
    cached."""
    engine, name = run.traits, run.optimizer.name

    @functools.cache
    def kept(at_rest: DType, trained: str) -> Mapping[str, Holding]:
        return keeps(policy, engine, run.optimizer, at_rest=at_rest, ddp=run.ddp, trained=trained)

    def of(at_rest: DType, parameter: Parameter | None = None) -> Mapping[str, Holding]:
        if parameter is None or (name not in BESIDE_ADAM and not policy.frozen):
            return kept(at_rest, name)
        dimensions, core = len(parameter.weight.shape), run.versions.megatron_core
        return kept(at_rest, trained_by(name, parameter.name, dimensions, policy, core))

    return of


def _in_buffers(
    policy: PrecisionPolicy,
    run: RunFacts,
    at: Coordinates,
    chunk: tuple[Parameter, ...],
    index: int,
    mine: Collection[str] | None = None,
    *,
    together: bool = False,
) -> Iterator[Role]:
    """megatron-core's DDP and distributed optimizer. mine: the parameters that this rank updates; None: what the buffers' shards say. together: all parameters
    are trained alike, and a buffer's are one."""
    of, rests = holdings(policy, run), resting(policy, run)
    reused = policy.reuse_grad_buffer and run.realization == "native"
    for buffer in chunk_buffers(policy, run, at, index):
        kept = of(buffer.params)
        yield from _buffer(buffer, kept, shared=reused and buffer.params is DType.UINT8, together=together)
        owned: Iterable[tuple[Parameter, int]] = ((slot.parameter, slot.end - slot.start) for slot in buffer.slots)
        if buffer.distributed:
            shard = at.expert_data if buffer.apart else at.data
            owned = buffer.shard(shard % buffer.group)
        for parameter, size in _sum(owned) if together else owned:
            if mine is not None and parameter.name not in mine:
                continue
            own = of(buffer.params, parameter)
            for name in STATES:
                if name in own and own[name].view_of is None:
                    count = elements_of(name, parameter.weight.shape, size)
                    yield Role(name, parameter.name, own[name].dtype, count, 0, own[name].owner)
    if not policy.quantized and not policy.frozen:
        return
    alike: dict[tuple[object, ...], list[Any]] = {}
    for parameter in chunk:
        stored, quant = rests(parameter)
        if is_frozen(policy, parameter.name) and not (reused and stored is DType.UINT8):
            size = parameter.weight.elements
            packed = stored is DType.UINT8 and quant is not None and quant.bits == 4
            yield Role("params", parameter.name, stored, -(-size // 2) if packed else size, 0, "model")
        if quant is not None:
            kind = (parameter.weight.shape, quant) if together else (parameter.name,)
            alike.setdefault(kind, [parameter, quant, 0])[2] += 1
    for first, quant, times in alike.values():
        for name, whose, dtype, size in weight_copies(first, quant, run):
            yield Role(name, whose, dtype, times * size, 0, "transformer_engine")


def _dealt(
    policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunks: Iterable[tuple[Parameter, ...]]
) -> frozenset[str]:
    """The parameters that dist_muon updates on this rank: whole ones, dealt by size to the ranks in order and back (megatron-core 0.16.1
    optimizer/layer_wise_optimizer.py shard_params)."""
    trained = [parameter for chunk in chunks for parameter in chunk if not is_frozen(policy, parameter.name)]
    core = run.versions.megatron_core
    # as its groups have them: Muon's matrices first
    trained.sort(key=lambda one: trained_by("muon", one.name, len(one.weight.shape), core=core) != "muon")
    if run.parallel.replicas(expert=False) == 1:  # then it deals nothing, nor an expert's, whose replicas may be more
        return frozenset(one.name for one in trained)
    trained.sort(key=lambda one: one.weight.elements)
    found, dealt = set(), {False: 0, True: 0}
    for parameter in trained:
        apart = parameter.weight.expert and run.parallel.expert > 1
        ranks, index = run.parallel.replicas(expert=apart), dealt[apart]
        turn = index % (2 * ranks)
        if min(turn, 2 * ranks - 1 - turn) == (at.expert_data if apart else at.data) % ranks:
            found.add(parameter.name)
        dealt[apart] += 1
    return frozenset(found)


@functools.lru_cache(maxsize=128)  # states and the step's collectives ask for the same ones
def chunk_buffers(policy: PrecisionPolicy, run: RunFacts, at: Coordinates, index: int) -> list[Buffer]:
    """The contiguous buffers of the rank's index-th model chunk, under megatron-core's DDP."""
    of, rests = holdings(policy, run), resting(policy, run)
    trained = [one for one in parameters(run, at)[index] if not is_frozen(policy, one.name)]
    at_rest = [(parameter, rests(parameter)[0]) for parameter in trained]
    rows = [(parameter, dtype, of(dtype)["grads"].dtype) for parameter, dtype in at_rest]
    return buffers(run, rows, stage=at.stage, index=index)


def _sum(sizes: Iterable[tuple[Parameter, int]]) -> list[tuple[Parameter, int]]:
    """The first parameter with the sum of all sizes."""
    every = list(sizes)
    return [(every[0][0], sum(size for _, size in every))] if every else []


def _buffer(buffer: Buffer, kept: Mapping[str, Holding], *, shared: bool, together: bool) -> Iterator[Role]:
    """Parameters and gradients. shared: MXFP8 weights, whose gather borrows the gradient buffer; their own bytes are Transformer Engine's copies."""
    sizes = [(slot.parameter, slot.end - slot.start) for slot in buffer.slots]
    for parameter, size in _sum(sizes) if together else sizes:
        if not shared:
            yield Role("params", parameter.name, buffer.params, size, 0, kept["params"].owner)
        yield Role("grads", parameter.name, buffer.grads, size, 0, kept["grads"].owner)
    if buffer.padding:
        padded = (buffer.grads,) if shared else (buffer.params, buffer.grads)
        yield from (Role("padding", "", dtype, 0, buffer.padding, "wrapper") for dtype in padded)


def _by_rows(
    policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunk: tuple[Parameter, ...], index: int
) -> Iterator[Role]:
    """Every parameter split along its first dimension; ranks that get fewer rows hold padding. Gradients and moments follow the parameters' shards.

    torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py: chunks as torch.chunk splits them, gradients cast to the parameter's dtype after the reduction.
    """
    ranks, of = run.parallel.data * run.parallel.context, holdings(policy, run)
    for parameter in chunk:
        rows = parameter.weight.shape[0]
        width = parameter.weight.elements // max(1, rows)
        each = -(-rows // ranks)
        here = max(0, min(each, rows - at.data * each))
        for name, held in of(dtype_at_rest(policy, run, parameter)[0], parameter).items():
            if held.view_of is None:
                padding = (each - here) * width if name == "params" else 0
                yield Role(name, parameter.name, held.dtype, here * width, padding, held.owner)


def _evenly(
    policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunk: tuple[Parameter, ...], index: int
) -> Iterator[Role]:
    """Equal shares of what the sharding strategy shards; the alignment of the wrapper's buffers is ignored."""
    of = holdings(policy, run)
    for parameter in chunk:
        group = run.parallel.replicas(expert=parameter.weight.expert)
        size = parameter.weight.elements
        for name, held in of(dtype_at_rest(policy, run, parameter)[0], parameter).items():
            if held.view_of is None:
                share = size if held.sharding == "whole" else -(-size // group)
                yield Role(name, parameter.name, held.dtype, share, 0, held.owner)


_LAYOUTS: Mapping[Sharding, Callable[..., Iterator[Role]]] = MappingProxyType(
    {"buffers": _in_buffers, "rows": _by_rows, "even": _evenly}
)


def _module_buffers(policy: PrecisionPolicy, run: RunFacts, chunk: tuple[Parameter, ...]) -> Iterator[Role]:
    """Buffers of the router (tokens per expert and the bias that balances them, which is FP32 again from the first forward pass on), and of YaRN:
    cosines and sines over the original context length, in each layer with latent attention, otherwise once for all layers of a chunk
    (yarn_rotary_pos_embedding.py)."""
    latent = run.shape.latent_attention
    yarn = latent is not None and run.model.get("rope_type", "yarn") == "yarn"
    positions = int(run.model.get("original_max_position_embeddings") or 4096)
    if chunk and run.model.get("position_embedding_type") == "yarn":
        size = int(run.model["yarn_original_max_position_embeddings"]) * run.shape.kv_channels
        for table in ("cos_cached", "sin_cached"):
            yield Role("buffers", f"rotary_pos_emb.{table}", policy.params, size, 0, "model")
    for parameter in chunk:
        if yarn and latent is not None and parameter.weight.path.endswith("self_attention.linear_proj.weight"):
            prefix = parameter.name.removesuffix("linear_proj.weight")
            for table in ("cos_cached", "sin_cached"):
                size = positions * latent["qk_pos_emb_head_dim"]
                yield Role("buffers", f"{prefix}rotary_pos_emb.{table}", policy.params, size, 0, "model")
        if run.shape.expert_bias and parameter.weight.path.endswith("mlp.router.weight"):
            prefix = parameter.name.removesuffix("weight")
            yield Role("buffers", f"{prefix}expert_bias", DType.FP32, run.shape.experts or 0, 0, "model")
            yield Role("buffers", f"{prefix}local_tokens_per_expert", policy.params, run.shape.experts or 0, 0, "model")
