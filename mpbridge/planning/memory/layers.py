"""The parameters of a GPT or a hybrid in megatron-core's own shapes and order, for any rank of any parallel layout. Source: 0.16.1's local layer spec."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from mpbridge.common.facts import ModelShape, Parallel, RunFacts
from mpbridge.common.versions import at_least
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.planning.memory.ranks import Chunk, Coordinates, has_final_norm
from mpbridge.precision.globs import MTP, matches, place
from mpbridge.precision.policy import PrecisionPolicy

Split = Literal["column", "row"]


@dataclass(frozen=True)
class Weight:
    """One parameter of one layer as a rank holds it: a template that `parameters` instantiates."""

    path: str
    """Path below its layer: 'mlp.linear_fc1.weight'; outside layers the full name."""
    shape: tuple[int, ...]
    linear: bool = False
    """Whether it is the weight of a GEMM that a recipe can quantize."""
    expert: bool = False
    """Whether it is replicated over the expert-data-parallel group instead of the data-parallel one."""
    split: Split | None = None
    twin: bool = False
    """Whether it is one of the two copies of a tied embedding on different pipeline stages, which get separate buckets under the distributed optimizer."""

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @functools.cached_property
    def module(self) -> str:
        """The module's path below its layer, as regions name it: 'mlp.linear_fc1'."""
        return self.path.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A Weight of a particular layer and rank."""

    name: str
    """Global name: layers are counted over all stages, experts over all ranks."""
    weight: Weight
    layer: int | None
    """0-based over the whole model; None: outside the layers."""


@functools.lru_cache(maxsize=32)  # a search asks for a layout's states, buffers and sums in turn
def parameters(run: RunFacts, at: Coordinates) -> tuple[tuple[Parameter, ...], ...]:
    """The parameters of each model chunk of the rank at these coordinates, in the order of named_parameters()."""
    return tuple(tuple(chunk_parameters(run, at, chunk)) for chunk in at.chunks(run))


def rank_parameters(run: RunFacts, at: Coordinates) -> Iterator[Parameter]:
    """The parameters of all model chunks of that rank."""
    return itertools.chain.from_iterable(parameters(run, at))


def model_names(run: RunFacts) -> tuple[str, ...]:
    """Global names of every parameter of the whole model, in order."""
    alone = unsplit(run)
    return tuple(parameter.name for parameter in rank_parameters(alone, Coordinates.of(0, alone.parallel)))


def frozen_apart(policy: PrecisionPolicy, run: RunFacts) -> bool:
    """Whether a parameter is frozen in some layers and trained in others."""
    kinds: dict[str, set[bool]] = {}
    for name in model_names(run) if policy.frozen else ():
        where = place(name)
        kinds.setdefault(name if where is None else where[0], set()).add(is_frozen(policy, name))
    return any(len(both) > 1 for both in kinds.values())


_SPLITS = {
    "pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
}  # fmt: skip


def unsplit(run: RunFacts, parallel: Parallel | None = None) -> RunFacts:
    """The run in another layout (default: one process), without the settings that place layers on stages."""
    model = run.model
    if model.keys() & _SPLITS:
        model = {name: value for name, value in model.items() if name not in _SPLITS}
    return replace(run, parallel=parallel or Parallel(), model=model)


def te_layers(run: RunFacts) -> bool:
    """Whether the engine builds Transformer Engine's modules (native runs on a GPU) rather than megatron-core's local ones."""
    native = run.realization == "native" and (run.machine is None or run.machine.gpu)
    return native and run.model.get("transformer_impl") != "local"


def chunk_parameters(
    run: RunFacts, at: Coordinates, chunk: Chunk, *, first_expert_only: bool = False
) -> list[Parameter]:
    """The parameters of a model chunk of the rank at these coordinates. first_expert_only: of a layer's experts only the first."""
    shape, tensor = run.shape, run.parallel.tensor
    rows = shape.vocab_size // tensor
    apart = run.parallel.pipeline > 1
    found: list[Parameter] = []

    def outside(name: str, *size: int, split: Split | None = None, twin: bool = False) -> None:
        found.append(Parameter(name, Weight(name, size, split=split, twin=twin), None))

    # multi-token prediction embeds the next tokens on its own stage, with a second copy of the embedding
    if chunk.first or chunk.mtp:
        twin = apart and (shape.tied or shape.mtp_layers > 0)
        outside("embedding.word_embeddings.weight", rows, shape.hidden_size, twin=twin)
        if shape.learned_positions:
            positions = run.model.get("max_sequence_length") or shape.seq_length
            outside("embedding.position_embeddings.weight", positions, shape.hidden_size)
    for layer in chunk.layers:
        found += _layer(run, at, layer, f"decoder.layers.{layer}.", first_expert_only)
    if has_final_norm(run, chunk):
        norm = _norm(shape, f"decoder.{'final_norm' if shape.pattern else 'final_layernorm'}")
        found += [Parameter(weight.path, weight, None) for weight in norm]
    if chunk.mtp:
        found += _mtp(run, at, first_expert_only)
    if chunk.last and not (shape.tied and chunk.first):
        outside("output_layer.weight", rows, shape.hidden_size, split="column", twin=apart and shape.tied)
    return found


def _layer(run: RunFacts, at: Coordinates, layer: int, prefix: str, first_expert_only: bool) -> list[Parameter]:
    grouped = run.shape.grouped_gemm and te_layers(run)
    made = rank_weights(run, layer, at.expert, grouped=grouped, first_expert_only=first_expert_only)
    if not at_least(run.versions.megatron_core, "0.19"):
        return [Parameter(prefix + w.path, w, layer) for w in made]
    # the convolution is no module of the mixer there, but its first parameters; checkpoints keep the older names
    made = tuple(sorted(made, key=lambda w: not w.path.startswith("mixer.conv1d.")))
    return [Parameter(prefix + w.path.replace("mixer.conv1d.", "mixer.conv1d_"), w, layer) for w in made]


def rank_weights(
    run: RunFacts, layer: int, expert: int = 0, *, grouped: bool = False, first_expert_only: bool = False
) -> tuple[Weight, ...]:
    """The parameters of one layer on the ranks with that index in the expert-parallel group. grouped: see `layer_weights`. first_expert_only: without its other experts."""
    parallel, shape = run.parallel, run.shape
    here = (shape.experts or 0) // parallel.expert
    return layer_weights(
        shape,
        tensor=parallel.tensor,
        expert_tensor=parallel.expert_width,
        local_experts=min(1, here) if first_expert_only else here,
        parts=shape.parts(layer),
        shared_gate=bool(run.model.get("moe_shared_expert_gate")),
        whole_down=te_layers(run),
        first_expert=expert * here,
        grouped=grouped,
    )


def _mtp(run: RunFacts, at: Coordinates, first_expert_only: bool) -> list[Parameter]:
    """Multi-token prediction depths, each with two norms, a projection and a full layer like the last one."""
    shape = run.shape
    last, hidden = shape.num_layers - 1, shape.hidden_size
    projection = Weight("eh_proj.weight", (hidden // run.parallel.tensor, 2 * hidden), linear=True, split="column")
    found: list[Parameter] = []
    for depth in range(shape.mtp_layers):
        prefix = f"mtp.layers.{depth}."
        before = (*_norm(shape, "enorm"), *_norm(shape, "hnorm"), projection)
        found += [Parameter(prefix + weight.path, weight, last) for weight in before]
        inside = MTP[at_least(run.versions.megatron_core, "0.17")].format(depth)
        found += _layer(run, at, last, inside, first_expert_only)
        found += [Parameter(prefix + weight.path, weight, last) for weight in _norm(shape, "final_layernorm")]
    return found


@functools.lru_cache(maxsize=512)
def layer_weights(
    shape: ModelShape,
    *,
    parts: tuple[str, ...],
    tensor: int = 1,
    expert_tensor: int = 1,
    local_experts: int | None = None,
    shared_gate: bool = False,
    whole_down: bool = True,
    first_expert: int = 0,
    grouped: bool = False,
) -> tuple[Weight, ...]:
    """A rank's share of the parameters of one layer.

    parts: what it consists of (`ModelShape.parts`). local_experts: None: all. whole_down: latent attention's down projections are replicated on every rank
    (Transformer Engine's modules), not split. grouped: experts are one module with one weight per expert (Transformer Engine's GroupedLinear)."""
    here, found = (shape.experts or 0) if local_experts is None else local_experts, list[Weight]()
    for part in parts:
        if part in OWN:
            found += OWN[part](shape, tensor)
            continue
        found += _norm(shape, "input_layernorm" if part == "attention" else "pre_mlp_layernorm")
        if part == "attention":
            found += _latent(shape, tensor, whole_down) if shape.latent_attention else _attention(shape, tensor)
        elif part == "experts":
            found += _experts(shape, tensor, expert_tensor, here, shared_gate, first_expert, grouped)
        else:
            found += _mlp(shape, "mlp.", shape.ffn_hidden_size, tensor)
    return tuple(_with_adapters(shape, found) if shape.lora_rank else found)


def _with_adapters(shape: ModelShape, weights: list[Weight]) -> Iterator[Weight]:
    """The weights, with those of an adapter after the linear that it hangs below."""
    for weight, following in zip(weights, [*weights[1:], None], strict=True):
        yield weight
        own = [one for one in weights if one.linear and one.module == weight.module]
        last = following is None or following.module != weight.module
        if own and last and any(matches(glob, weight.module) for glob in shape.lora_targets):
            out, inner = own[0].shape
            for name, size in (("linear_in", (shape.lora_rank, inner)), ("linear_out", (out, shape.lora_rank))):
                yield Weight(f"{weight.module}.adapter.{name}.weight", size, expert=weight.expert)


def _norm(shape: ModelShape, name: str, width: int | None = None) -> list[Weight]:
    parts = ("weight", "bias") if shape.norm_bias else ("weight",)
    return [Weight(f"{name}.{part}", (shape.hidden_size if width is None else width,)) for part in parts]


def _mamba(shape: ModelShape, tensor: int) -> list[Weight]:
    """A Mamba layer (ssm/mamba_mixer.py): heads and groups are split over tensor-parallel ranks, and with them everything between the projections."""
    inner, states, heads = shape.mamba_sizes
    mixed = (inner + 2 * states) // tensor
    return [
        *(Weight(f"mixer.{name}", (heads // tensor,)) for name in ("dt_bias", "A_log", "D")),
        *_column("mixer.in_proj", 2 * (inner + states) + heads, shape.hidden_size, tensor, bias=False),
        Weight("mixer.conv1d.weight", (mixed, 1, CONVOLVED)),
        Weight("mixer.conv1d.bias", (mixed,)),
        Weight("mixer.norm.weight", (inner // tensor,)),
        *_row("mixer.out_proj", shape.hidden_size, inner, tensor, bias=False),
        *_norm(shape, "norm"),
    ]


OWN: Mapping[str, Callable[[ModelShape, int], list[Weight]]] = MappingProxyType({"mamba": _mamba})
"""Part of `mixers.MIXERS` -> its weights on each of so many tensor-parallel ranks, with its norm."""

CONVOLVED = 4
"""Tokens that a Mamba layer's convolution reads: MambaMixer's d_conv, which no setting changes."""


def _column(path: str, out: int, inner: int, tensor: int, *, bias: bool, expert: bool = False) -> list[Weight]:
    found = [Weight(f"{path}.weight", (out // tensor, inner), linear=True, expert=expert, split="column")]
    return [*found, Weight(f"{path}.bias", (out // tensor,), expert=expert)] if bias else found


def _row(path: str, out: int, inner: int, tensor: int, *, bias: bool, expert: bool = False) -> list[Weight]:
    found = [Weight(f"{path}.weight", (out, inner // tensor), linear=True, expert=expert, split="row")]
    return [*found, Weight(f"{path}.bias", (out,), expert=expert)] if bias else found


def _attention(shape: ModelShape, tensor: int) -> list[Weight]:
    width = shape.kv_channels
    inner = shape.num_attention_heads * width
    rows = (2 if shape.gated_attention else 1) * inner + 2 * shape.num_query_groups * width
    sinks = [Weight("self_attention.core_attention.softmax_offset", (shape.num_attention_heads // tensor,))]
    found = sinks if shape.sinks else []
    found += _row("self_attention.linear_proj", shape.hidden_size, inner, tensor, bias=shape.linear_bias)
    found += _column("self_attention.linear_qkv", rows, shape.hidden_size, tensor, bias=shape.qkv_bias)
    for name in ("q_layernorm", "k_layernorm") if shape.qk_layernorm else ():
        found += _norm(shape, f"self_attention.{name}", width)
    return found


def _latent(shape: ModelShape, tensor: int, whole_down: bool) -> list[Weight]:
    """Multi-latent attention: queries, and keys with values, through low-rank projections (transformer/multi_latent_attention.py)."""
    latent = shape.latent_attention or {}
    heads, hidden = shape.num_attention_heads, shape.hidden_size
    q_rank, kv_rank, rope = latent["q_lora_rank"], latent["kv_lora_rank"], latent["qk_pos_emb_head_dim"]
    q_rows, down = heads * (latent["qk_head_dim"] + rope), 1 if whole_down else tensor
    found = _row("self_attention.linear_proj", hidden, heads * latent["v_head_dim"], tensor, bias=shape.linear_bias)
    if q_rank:
        found += _column("self_attention.linear_q_down_proj", q_rank, hidden, down, bias=False)
        found += _column("self_attention.linear_q_up_proj", q_rows, q_rank, tensor, bias=False)
    else:
        found += _column("self_attention.linear_q_proj", q_rows, hidden, tensor, bias=False)
    found += _column("self_attention.linear_kv_down_proj", kv_rank + rope, hidden, down, bias=False)
    kv_rows = heads * (latent["qk_head_dim"] + latent["v_head_dim"])
    found += _column("self_attention.linear_kv_up_proj", kv_rows, kv_rank, tensor, bias=False)
    for name, size in {"q_layernorm": q_rank, "kv_layernorm": kv_rank}.items() if shape.qk_layernorm else ():
        found += _norm(shape, f"self_attention.{name}", size) if size else []
    return found


def _mlp(
    shape: ModelShape, prefix: str, width: int, tensor: int, *, bias: bool | None = None, expert: bool = False
) -> list[Weight]:
    bias, rows = shape.linear_bias if bias is None else bias, width * (2 if shape.gated else 1)
    found = _column(f"{prefix}linear_fc1", rows, shape.hidden_size, tensor, bias=bias, expert=expert)
    return found + _row(f"{prefix}linear_fc2", shape.hidden_size, width, tensor, bias=bias, expert=expert)


def _experts(
    shape: ModelShape, tensor: int, expert_tensor: int, local: int, shared_gate: bool, first: int, grouped: bool
) -> list[Weight]:
    hidden, latent = shape.hidden_size, shape.sizes.get("moe_latent_size")
    found = [Weight("mlp.router.weight", (shape.experts or 0, hidden))]
    found += [Weight("mlp.router.bias", (shape.experts or 0,))] if shape.linear_bias else []
    for number, size in enumerate(((latent, hidden), (hidden, latent)) if latent else (), 1):  # whole on every rank
        found += _column(f"mlp.fc{number}_latent_proj", *size, 1, bias=shape.linear_bias)
    inside = replace(shape, hidden_size=shape.expert_hidden_size)
    indices, width = range(first, first + local), shape.expert_ffn_hidden_size
    if grouped:
        one = _mlp(inside, "mlp.experts.", width, expert_tensor, expert=True)
        found += [replace(weight, path=f"{weight.path}{index}") for weight in one for index in indices]
    else:
        for index in indices:
            found += _mlp(inside, f"mlp.experts.local_experts.{index}.", width, expert_tensor, expert=True)
    if shape.shared_expert_size:
        if shared_gate:
            found.append(Weight("mlp.shared_experts.gate_weight", (1, hidden)))
        found += _mlp(shape, "mlp.shared_experts.", shape.shared_expert_size, tensor, bias=False)
    return found
