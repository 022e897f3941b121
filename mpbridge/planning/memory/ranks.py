"""A rank's coordinates in megatron-core's groups, and the layers of its pipeline stage."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpbridge.common.errors import BadValue
from mpbridge.common.facts import ModelShape, Parallel, RunFacts

_KINDS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one model chunk of a stage contains."""

    layers: tuple[int, ...]
    """0-based, over the whole model."""
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the output layer and the loss."""
    mtp: bool = False
    """Whether it has the multi-token prediction layers."""

    def ahead(self, shape: ModelShape) -> int:
        """Number of its multi-token prediction layers."""
        return shape.mtp_layers if self.mtp else 0

    def built(self, shape: ModelShape) -> tuple[int, ...]:
        """Its layers, including those of multi-token prediction, each of which is built like the last decoder layer."""
        return (*self.layers, *[shape.num_layers - 1] * self.ahead(shape))

    def heads(self, shape: ModelShape) -> int:
        """Number of times that its output layer is applied per micro-batch: also to what prediction layers of other stages send (GPTModel._postprocess)."""
        return 1 + shape.mtp_layers if self.last else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's index in each group; ranks are ordered as in megatron-core's parallel_state ("tp-cp-ep-dp-pp")."""

    tensor: int
    stage: int
    expert: int
    data: int
    """Index in the group that shards dense parameters' optimizer state (data x context)."""
    expert_data: int
    """Index in the group that shards experts' optimizer state."""

    @classmethod
    def of(cls, rank: int, parallel: Parallel) -> Coordinates:
        """The coordinates of a global rank. Raises BadValue for a rank outside the world."""
        if not 0 <= rank < parallel.world_size:
            raise BadValue(
                f"rank {rank} is not in a world of {parallel.world_size}: expected 0 to {parallel.world_size - 1} (--world-size sets the world)"
            )
        within = rank % (parallel.world_size // parallel.pipeline)
        return cls(
            tensor=rank % parallel.tensor,
            stage=rank // (parallel.world_size // parallel.pipeline),
            expert=within // parallel.expert_width % parallel.expert,
            data=within // parallel.tensor,
            expert_data=within // (parallel.expert_width * parallel.expert),
        )

    def chunks(self, run: RunFacts) -> tuple[Chunk, ...]:
        """The model chunks of this rank's stage."""
        return stage_chunks(run)[self.stage]


class _Split(NamedTuple):
    """Everything that determines the placement of layers on stages."""

    layers: int
    stages: int
    virtual: int
    mtp: int
    first: int | None
    last: int | None
    embedding: int
    """1: the embedding counts as a layer."""
    loss: int
    layout: tuple[tuple[str, ...], ...] | None
    """As `parse_layout` returns it."""


def stage_chunks(run: RunFacts) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each pipeline stage. Raises BadValue if the layers cannot be divided as requested."""
    model, parallel = run.model, run.parallel
    layout = model.get("pipeline_model_parallel_layout")
    return _placed(
        _Split(
            layers=run.shape.num_layers,
            stages=parallel.pipeline,
            virtual=(parallel.virtual_pipeline or 1) if parallel.pipeline > 1 else 1,
            mtp=run.shape.mtp_layers,
            first=model.get("num_layers_in_first_pipeline_stage"),
            last=model.get("num_layers_in_last_pipeline_stage"),
            embedding=int(bool(model.get("account_for_embedding_in_pipeline_split"))),
            loss=int(bool(model.get("account_for_loss_in_pipeline_split"))),
            layout=tuple(map(tuple, parse_layout(layout))) if layout else None,
        )
    )


@functools.lru_cache(maxsize=256)
def _placed(split: _Split) -> tuple[tuple[Chunk, ...], ...]:
    rows: Sequence[Sequence[str]] = split.layout or _evenly(split)
    if split.layout and (faults := list(_misplaced(split, split.layout))):
        raise BadValue(f"pipeline_model_parallel_layout {'; '.join(faults)}")
    stages, start = split.stages, 0
    found: list[list[Chunk]] = [[] for _ in range(stages)]
    for index, row in enumerate(rows):
        end = start + row.count("decoder")
        parts = {"first": "embedding" in row, "last": "loss" in row, "mtp": "mtp" in row}
        found[index % stages].append(Chunk(layers=tuple(range(start, end)), **parts))
        start = end
    return tuple(map(tuple, found))


def _misplaced(split: _Split, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """What megatron-core refuses about a layout, and a number of parts for which its groups were not made (pipeline_parallel_layer_layout.py)."""
    flat, parts = [kind for row in rows for kind in row], split.stages * split.virtual
    ahead = [index for index, row in enumerate(rows) if "mtp" in row]
    if len(rows) != parts:
        yield f"has {len(rows)} parts, expected {parts}: {split.stages} stages x {split.virtual} virtual (add or drop a |, or other virtual stages)"
    for letter, kind, count in (
        ("E", "embedding", 1),
        ("t", "decoder", split.layers),
        ("m", "mtp", split.mtp),
        ("L", "loss", 1),
    ):
        if flat.count(kind) != count:
            yield f"places {flat.count(kind)} {kind} ({letter}), expected {count}"
    if flat[:1] != ["embedding"] or flat[-1:] != ["loss"]:
        yield "must begin with E and end with L"
    if "mtp" in flat and "decoder" in flat[flat.index("mtp") :]:
        yield "has a t behind an m: prediction layers follow all others"
    if len(ahead) > 1 or any(index < len(rows) - split.stages for index in ahead):
        yield "must have every m in one part, the last one of its stage"


def _evenly(split: _Split) -> list[list[str]]:
    """Kinds of layers per (virtual) stage, as `parse_layout` returns them, of layers that are divided by their number."""
    whole = _counts(split)
    for stage, count in enumerate(whole):
        if count % split.virtual:
            raise BadValue(f"{count} layers of stage {stage} cannot be divided into {split.virtual} virtual stages")
    counts = [count // split.virtual for count in whole] * split.virtual
    # an embedding or a loss that counts as a layer replaces one
    counts[0] -= split.embedding
    counts[-1] -= split.loss
    rows = [["decoder"] * count for count in counts]
    rows[0].insert(0, "embedding")
    rows[-1] += ["mtp", "loss"] if split.mtp else ["loss"]
    return rows


def _counts(split: _Split) -> list[int]:
    """Number of layers per stage, including an embedding or loss that counts as one (transformer_block.py get_num_layers_to_build)."""
    first, last, stages = split.first, split.last, split.stages
    if first is None and last is None:
        total = split.layers + split.embedding + split.loss
        if total % stages:
            raise BadValue(
                f"{total} layers cannot be divided among {stages} pipeline stages: set num_layers_in_first_pipeline_stage or another pipeline size"
            )
        return [total // stages] * stages
    if (first or 0) < 0 or (last or 0) < 0:
        raise BadValue(
            f"num_layers_in_first_pipeline_stage={first}, num_layers_in_last_pipeline_stage={last}: must not be negative"
        )
    rest = split.layers - (first or 0) - (last or 0)
    left = stages - (first is not None) - (last is not None)
    if rest < 0 or (left > 0 and rest % left) or (left <= 0 and rest):
        raise BadValue(
            f"{rest} layers that remain besides the first and last stage cannot be divided among {max(left, 0)} stages"
        )
    middle = rest // left if left > 0 else 0
    counts = [middle] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def parse_layout(layout: str | Iterable[Iterable[Any]]) -> list[list[str]]:
    """Kinds of layers per (virtual) stage, from lists of them or megatron-core's pipeline_model_parallel_layout notation, as in "Et*2|(tt|)*3tmL". Raises BadValue."""
    if not isinstance(layout, str):
        return [[str(kind).rpartition(".")[2].strip().lower() for kind in row] for row in layout]
    text, flat = layout, layout.replace(",", "")
    flat = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m.group(1) * int(m.group(2)), flat)
    flat = re.sub(r"(.)\*(\d+)", lambda m: m.group(1) * int(m.group(2)), flat)
    unknown = sorted(set(flat) - set(_KINDS) - {"|"})
    if unknown:
        raise BadValue(
            f"pipeline_model_parallel_layout={text!r} has {', '.join(map(repr, unknown))} (expected E, t, m, L, '|', 'x*3' and '(..)*3')"
        )
    return [[_KINDS[letter] for letter in stage] for stage in flat.split("|")]


def virtual_stages(layout: Any, stages: int) -> int | None:
    """Virtual stages that a pipeline_model_parallel_layout (None: there is none) implies, as TransformerConfig sets them; None: no interleaving, or text that is none."""
    try:
        parts = len(parse_layout(layout)) if layout else 1
    except BadValue:  # layers-do-not-divide says it
        return None
    return parts // stages if parts > stages else None


def batches(run: RunFacts) -> int:
    """Micro-batches per step on one data-parallel rank."""
    return max(1, run.global_batch_size // max(1, run.micro_batch_size * run.parallel.data))


def has_final_norm(run: RunFacts, chunk: Chunk) -> bool:
    """Whether the decoder's final norm is in that chunk: with multi-token prediction next to the last layer (transformer_block.py), otherwise next to the loss."""
    return run.shape.num_layers - 1 in chunk.layers if run.shape.mtp_layers else chunk.last


def in_flight(run: RunFacts, stage: int, each: Sequence[float]) -> float:
    """The most that a stage holds for micro-batches in flight, from what each of its chunks keeps for one.

    1F1B has as many in flight as there are stages from this one on, the interleaved schedule many of the first chunks and few of the last, whose
    backward pass follows first (Megatron-LM, arXiv 2104.04473; megatron-core's get_pp_rank_microbatches)."""
    stages, total = run.parallel.pipeline, batches(run)
    if len(each) == 1 or stages == 1:
        return sum(each) * min(stages - stage, total)
    group = int(run.model.get("microbatch_group_size_per_vp_stage") or stages)
    flights = _flights(max(1, group), len(each), stages - stage, total)
    most: float = max(sum(map(operator.mul, each, held)) for held in flights)
    return most


@functools.lru_cache(maxsize=1024)
def _flights(group: int, virtual: int, depth: int, total: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches in flight in each chunk, at the moments between which their number rises or falls at a constant rate. Chunks take turns of `group`
    micro-batches, the last turns of what is left, forward from the first chunk, backward from the last. (Under overlap_moe_expert_parallel_comm one more forward pass precedes the first backward pass, and
    each further one takes the room that its backward pass frees, layer by layer: as many bytes.)"""
    turns, last = group * virtual, total * virtual
    first = min((depth - 1) * 2 + (virtual - 1) * group + 1, last)
    # what is in flight repeats itself, except where the last turns are shorter
    until = last if total % group else min(first + turns, last)
    groups = range(0, min(total, until // virtual + 1), group)
    starts = {at * virtual + chunk * min(group, total - at) for at in groups for chunk in range(virtual)} | {last}

    def passed(count: int) -> list[int]:
        """By chunk."""
        before = count // turns * group
        size = min(group, total - before)
        whole, part = divmod(count % turns, size or 1)
        return [before + size] * whole + [before + part] + [before] * (virtual - whole - 1)

    moments = [n for n in range(first, until + 1) if n in starts or n - first in starts]
    return tuple({tuple(map(operator.sub, passed(n), passed(n - first)[::-1])) for n in moments})


def undivided(run: RunFacts) -> str:
    """Sizes that are no multiple of the number of ranks that they are split over, as text; empty if there are none."""
    shape, sizes = run.shape, run.parallel
    groups, own = shape.num_query_groups, shape.sizes
    dense = any("mlp" in shape.parts(layer) for layer in range(shape.num_layers))
    apart = groups % sizes.tensor and sizes.tensor % groups  # groups may also be shared by whole ranks
    wrong = [
        f"{name} {size} by {by} {ranks}"
        for name, size, by, ranks in (
            ("num_attention_heads", shape.num_attention_heads, "tensor", sizes.tensor),
            ("num_query_groups", groups if apart else 0, "tensor", sizes.tensor),
            ("ffn_hidden_size", shape.ffn_hidden_size if dense else 0, "tensor", sizes.tensor),
            *((name, size, "tensor", sizes.tensor) for name, size in own.items() if "_num_" in name),
            ("vocab_size", shape.vocab_size, "tensor", sizes.tensor),
            ("num_moe_experts", shape.experts or 0, "expert", sizes.expert),
            ("moe_ffn_hidden_size", shape.expert_ffn_hidden_size, "expert tensor", sizes.expert_width),
            ("moe_shared_expert_intermediate_size", shape.shared_expert_size, "tensor", sizes.tensor),
            ("seq_length", shape.seq_length, "2 x context", 2 * sizes.context if sizes.context > 1 else 1),
            ("seq_length", shape.seq_length, "context x tensor", sizes.context * sizes.sequence_width),
        )
        if size % ranks
    ]
    return "; ".join(wrong)
