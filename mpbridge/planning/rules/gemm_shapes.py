"""Checks the local sizes of every GEMM that a recipe quantizes against what the recipe needs. Findings have four levels: required, gatherable, experts (their tokens), fast."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mpbridge.common.facts import ModelShape, RunFacts
from mpbridge.planning.memory.layers import Weight, layer_weights
from mpbridge.precision.globs import MTP
from mpbridge.precision.modules import layers_text
from mpbridge.precision.policy import PrecisionPolicy, Quant
from mpbridge.precision.regions import spans_of
from mpbridge.precision.scalings import Sizes, needs_transpose

Level = Literal["required", "gatherable", "experts", "fast"]
Dimension = Literal["tokens", "tokens of a sequence shard", "in", "out", "size", "vocabulary", "tokens of an expert"]

_EXPERT_SOURCE = (
    "megatron-core 0.16.1 fp8_utils.py get_fp8_align_size, fp4_utils.py get_fp4_align_size; transformer/moe/experts.py"
)
FAST = 128
"""Rows and columns of the tensor cores' tiles: a remainder costs a whole tile."""
_FAST_SOURCE = "NVIDIA Deep Learning Performance guide, matrix multiplication: tile quantization"
_SMALL_SOURCE = "torchao 0.18 float8/float8_linear_utils.py, measured on H100; torchtitan#1319"


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """One dimension of one module that is not a multiple of what it should be."""

    level: Level
    module: str
    layers: tuple[int, ...]
    """0-based, over the whole model."""
    dimension: Dimension
    value: int
    multiple: int
    """What it should be a multiple of."""
    cure: str
    source: str

    @property
    def pad(self) -> int:
        """The padding needed to reach the next multiple."""
        return -self.value % self.multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """One quantized linear that several layers share, with its sizes on one rank."""

    module: str
    layers: tuple[int, ...]
    quant: Quant
    tokens: int | None
    """None for an expert, whose tokens are known only at run time."""
    shard: int
    """Tokens of a sequence-parallel shard; equal to `tokens` without sequence parallelism."""
    inner: int
    outer: int
    split: str | None
    """'column' or 'row'."""

    def misfit(self, level: Level, dimension: Dimension, value: int, multiple: int, cure: str, source: str) -> Misfit:
        """A finding about this linear."""
        return Misfit(
            level=level, module=self.module, layers=self.layers, dimension=dimension, value=value, multiple=multiple, cure=cure, source=source
        )  # fmt: skip


def lint(policy: PrecisionPolicy, run: RunFacts) -> tuple[Misfit, ...]:
    """Every finding, required ones first. Empty: all sizes fit the recipe."""
    found = [finding for gemm in gemms(policy, run) for finding in _judge(gemm, run)]
    found += _vocabulary(policy, run)
    order = ("required", "gatherable", "experts", "fast")
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.level)))


def gemms(policy: PrecisionPolicy, run: RunFacts) -> tuple[LinearShape, ...]:
    """The quantized linears, with layers of equal sizes and rules grouped; one expert represents all."""
    shard = run.tokens // run.parallel.sequence_width
    return tuple(
        LinearShape(
            module=module, layers=layers, quant=quant, inner=size[1], outer=size[0], split=split, shard=shard,
            tokens=None if expert else shard if _whole(module) else run.tokens,
        )
        for (module, quant, size, split, expert), layers in _grouped(policy, run.shape, run.parallel.tensor, run.parallel.expert_width)
    )  # fmt: skip


_Kind = tuple[str, Quant, tuple[int, ...], str | None, bool]
"""(module, rule, sizes on one rank, how it is split, whether it is an expert)."""


@functools.lru_cache(maxsize=64)  # a search for a layout asks again for each candidate
def _grouped(
    policy: PrecisionPolicy, shape: ModelShape, tensor: int, expert_tensor: int
) -> tuple[tuple[_Kind, tuple[int, ...]], ...]:
    """Kind of linear -> the layers that have it."""
    found: dict[_Kind, list[int]] = {}
    for layer in range(shape.num_layers):
        for weight in _linears(shape, layer, tensor, expert_tensor):
            for quant in policy.gemms_at(weight.module, layer, shape.num_layers).distinct:
                found.setdefault((weight.module, quant, weight.shape, weight.split, weight.expert), []).append(layer)
    for weight in _linears(shape, shape.num_layers - 1, tensor, expert_tensor) if shape.mtp_layers else ():
        # every multi-token prediction depth is a layer like the last one, but has no layer number
        path = f"{MTP[0].format(0)}{weight.module}"
        for quant in policy.gemms_at(weight.module, None, shape.num_layers, path).distinct:
            found.setdefault((f"mtp.{weight.module}", quant, weight.shape, weight.split, weight.expert), [])
    return tuple((key, tuple(layers)) for key, layers in found.items())


def token_multiple(policy: PrecisionPolicy, run: RunFacts) -> int:
    """The multiple to which the tokens of a micro-batch on one context-parallel rank (also of a packed batch) should be padded."""
    steps = [1]
    for gemm in gemms(policy, run):
        need = gemm.quant.row.sizes
        steps += [need.tokens, _shard_step(gemm, run) * run.parallel.tensor if run.parallel.sequence else 1]
    return math.lcm(*steps)


def vocabulary_multiple(run: RunFacts) -> int:
    """The multiple to which the embedding's rows are best padded: 128 per tensor-parallel rank (Megatron-LM's make-vocab-size-divisible-by)."""
    return FAST * run.parallel.tensor


def spans(layers: Iterable[int]) -> str:
    """Layers in the syntax of `layers:`: '0-3, 7' for (0, 1, 2, 3, 7)."""
    return layers_text(spans_of(layers))


def _linears(shape: ModelShape, layer: int, tensor: int, expert_tensor: int) -> tuple[Weight, ...]:
    weights = layer_weights(
        shape, tensor=tensor, expert_tensor=expert_tensor, local_experts=1, parts=shape.parts(layer), grouped=shape.grouped_gemm
    )  # fmt: skip
    return tuple(weight for weight in weights if weight.linear)


def _whole(module: str) -> bool:
    """Whether the linear is replicated: latent attention's down projections are whole on every rank, and their input is the sequence shard."""
    return module.endswith("_down_proj")


def _judge(gemm: LinearShape, run: RunFacts) -> Iterator[Misfit]:
    need = gemm.quant.row.sizes
    arch = run.machine.arch if run.machine is not None else None
    tokens = need.tokens
    if need.tokens_untransposed and not needs_transpose(arch):
        tokens = need.tokens_untransposed

    finding = functools.partial(_unless_multiple, gemm)
    if gemm.tokens is None and gemm.module.endswith("linear_fc1"):  # one finding for both of an expert's linears
        cure = (
            f"megatron-core pads each expert's tokens to {need.expert}: about {need.expert // 2} rows of each expert are wasted"
            " (model.moe_router_padding_for_quantization pads in the router instead, without copies)"
        )
        yield gemm.misfit("experts", "tokens of an expert", 0, need.expert, cure, _EXPERT_SOURCE)
    elif gemm.tokens is not None:
        yield from finding("required", "tokens", gemm.tokens, tokens, _tokens_cure(gemm.tokens, tokens), need.source)
    yield from finding("required", "in", gemm.inner, need.inner, _size_cure(gemm, "in", need.inner, run), need.source)
    yield from finding("required", "out", gemm.outer, need.outer, _size_cure(gemm, "out", need.outer, run), need.source)
    if gemm.tokens is not None and run.parallel.sequence and run.parallel.tensor > 1 and not _whole(gemm.module):
        yield from _shards(gemm, need, run)
    for dimension, value in (("in", gemm.inner), ("out", gemm.outer)):
        if value % need.inner == 0:  # otherwise it is an error already
            yield from finding("fast", dimension, value, FAST, f"a multiple of {FAST} fills the tiles", _FAST_SOURCE)  # type: ignore[arg-type]
    small = need.gains_above
    if small is not None and gemm.inner <= small[0] and gemm.outer <= small[1]:
        cure = f"at most {small[0]} x {small[1]} is too small to gain from FP8: keep it in 16 bits (mixed_precision.modules)"
        yield gemm.misfit("fast", "size", gemm.outer, 1, cure, _SMALL_SOURCE)


def _unless_multiple(
    gemm: LinearShape, level: Level, dimension: Dimension, value: int, multiple: int, cure: str, source: str
) -> Iterator[Misfit]:
    if value % multiple:
        yield gemm.misfit(level, dimension, value, multiple, cure, source)


def _shards(gemm: LinearShape, need: Sizes, run: RunFacts) -> Iterator[Misfit]:
    """Column-parallel inputs must be quantizable in shards (asserted); row-parallel gradients fall back to a gather in 16 bits."""
    step = _shard_step(gemm, run)
    level: Level = "required" if gemm.split == "column" else "gatherable"
    otherwise = "" if level == "required" else "; otherwise the gradient is gathered in 16 bits"
    cure = f"pad sequences to a multiple of {step * run.parallel.tensor}{otherwise}"
    yield from _unless_multiple(gemm, level, "tokens of a sequence shard", gemm.shard, step, cure, need.shard_source)
    if gemm.split == "column" and gemm.inner % need.inner == 0:
        cure = _size_cure(gemm, "in", need.shard, run)
        yield from _unless_multiple(gemm, "required", "in", gemm.inner, need.shard, cure, need.shard_source)


def _shard_step(gemm: LinearShape, run: RunFacts) -> int:
    """The multiple required of a sequence shard's tokens; Userbuffers accept MXFP8 in whole tiles only (Transformer Engine 2.11 pytorch/module/base.py)."""
    sizes = gemm.quant.row.sizes
    return max(sizes.shard, sizes.tile) if run.model.get("tp_comm_overlap") else sizes.shard


def _vocabulary(policy: PrecisionPolicy, run: RunFacts) -> list[Misfit]:
    step, rows = vocabulary_multiple(run), run.shape.vocab_size
    if rows % step == 0 or not policy.mixed:
        return []
    return [
        Misfit(
            level="fast", module="output_layer", layers=(), dimension="vocabulary", value=rows, multiple=step,
            cure=f"model.vocab_size={rows + -rows % step}", source="Megatron-LM make-vocab-size-divisible-by",
        )
    ]  # fmt: skip


def _tokens_cure(tokens: int, multiple: int) -> str:
    return f"pad sequence x micro batch to {tokens + -tokens % multiple}, or change data.seq_length or train.micro_batch_size"


def _size_cure(gemm: LinearShape, side: str, multiple: int, run: RunFacts) -> str:
    value = gemm.inner if side == "in" else gemm.outer
    split = (gemm.split == "row") == (side == "in")
    tensor = run.parallel.expert_width if "experts" in gemm.module else run.parallel.tensor
    whole = f" on each of {tensor} tensor-parallel ranks, or fewer of them" if split and tensor > 1 else ""
    return f"{_field(gemm.module, side)}: {value} to {value + -value % multiple}{whole}"


def _field(module: str, side: str) -> str:
    """The setting that determines one dimension of a linear."""
    last = module.rpartition(".")[2]
    if (last, side) in (("linear_fc1", "out"), ("linear_fc2", "in")):
        if "shared" in module:
            return "model.moe_shared_expert_intermediate_size"
        return "model.moe_ffn_hidden_size" if "experts" in module else "model.ffn_hidden_size"
    fields = {
        ("in_proj", "out"): "model.mamba_num_heads, mamba_num_groups or mamba_state_dim (its rows)",
        ("out_proj", "in"): "model.mamba_num_heads x mamba_head_dim",
        ("linear_qkv", "out"): "model.kv_channels or num_query_groups",
        ("linear_q_down_proj", "out"): "model.q_lora_rank",
        ("linear_q_up_proj", "in"): "model.q_lora_rank",
        ("linear_kv_down_proj", "out"): "model.kv_lora_rank + qk_pos_emb_head_dim",
        ("linear_kv_up_proj", "in"): "model.kv_lora_rank",
        ("linear_q_up_proj", "out"): "model.qk_head_dim + qk_pos_emb_head_dim",
        ("linear_q_proj", "out"): "model.qk_head_dim + qk_pos_emb_head_dim",
        ("linear_kv_up_proj", "out"): "model.qk_head_dim + v_head_dim",
    }
    if last == "linear_proj" and side == "in":
        return "model.num_attention_heads x (kv_channels or v_head_dim)"
    return fields.get((last, side), "model.hidden_size")
