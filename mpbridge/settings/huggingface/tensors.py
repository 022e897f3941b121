"""Which tensors of a folder form which parameter of the GPT built here, in which layout, and under which names checkpoints store that parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mpbridge.common.facts import ModelShape
from mpbridge.planning.memory.layers import Split, Weight, layer_weights
from mpbridge.precision.globs import DECODER, MTP
from mpbridge.settings.huggingface.families import Family

PartLayout = Literal["whole", "qkv", "stacked"]
"""How parts form a parameter: unchanged; rows of queries, keys and values by query group; gate above up."""

ADAPTERS = ("alone", "merged", "merged-before", "merged-after")
"""What becomes of adapters in an export: a folder of their own; added to a base that nothing quantizes, or before or after its quantization."""


@dataclass(frozen=True, slots=True)
class CheckpointSlice:
    """A parameter's place in a checkpoint: `counts` leading axes (layers, experts) of the tensor `key`, and its own index on them."""

    key: str
    index: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Mapped:
    """One parameter (or the router's FP32 bias) and the tensors that form it."""

    name: str
    """Global name in megatron-core's local modules."""
    shape: tuple[int, ...]
    layout: PartLayout
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """(name in the folder, shape), in order."""
    places: tuple[CheckpointSlice, ...]
    """Every name under which an engine looks for it; it is written under the first."""
    wide: bool = False
    """FP32 in any recipe: not a weight, but a bias that load balancing updates."""
    linear: bool = False
    """Whether it is the weight of a GEMM that a recipe can quantize."""
    split: Split | None = None
    """How tensor parallelism splits it."""
    expert: bool = False
    rows: tuple[tuple[str, int], ...] = ()
    """Suffixes of the tensors in which a checkpoint stores it, with each one's rows; (): in one tensor."""

    @property
    def stored(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(suffix, shape) of the tensors that hold it in a checkpoint, in the order of its rows."""
        return tuple((f".{name}", (rows, *self.shape[1:])) for name, rows in self.rows) or (("", self.shape),)

    @property
    def elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


def mapped(family: Family, shape: ModelShape, model: Mapping[str, Any]) -> Iterator[Mapped]:
    """Every parameter of the model in the order of its layers, without adapters. model: the model section, for what the shape does not contain."""
    shape = dataclasses.replace(shape, lora_rank=0)
    embedding, norm = family.outside
    final = f"decoder.{'final_norm' if shape.pattern else 'final_layernorm'}.weight"
    whole = {
        "embedding.word_embeddings.weight": (f"{embedding}.weight", (shape.vocab_size, shape.hidden_size)),
        final: (f"{norm}.weight", (shape.hidden_size,)),
    }
    if not shape.tied:
        whole["output_layer.weight"] = ("lm_head.weight", (shape.vocab_size, shape.hidden_size))
    for name, (theirs, size) in whole.items():
        yield Mapped(name, size, "whole", ((theirs, size),), (CheckpointSlice(name),))
    for layer in range(shape.num_layers):
        yield from _layer(family, shape, model, layer, layer)
    for depth in range(shape.mtp_layers):
        yield from _ahead(family, shape, model, depth)


def adapters(one: Mapped, rank: int) -> tuple[Mapped, Mapped]:
    """The two matrices of the adapter beside a linear's weight: A [rank, columns], B [rows, rank]. No folder has parts for them."""
    rows, columns = one.shape

    def beside(name: str, *shape: int) -> Mapped:
        end = f"adapter.{name}.weight"
        places = (dataclasses.replace(place, key=place.key.removesuffix("weight") + end) for place in one.places)
        return Mapped(one.name.removesuffix("weight") + end, shape, "whole", (), tuple(places))

    return beside("linear_in", rank, columns), beside("linear_out", rows, rank)


def copies(family: Family, shape: ModelShape) -> dict[str, str]:
    """Tensors that a folder may repeat -> the tensor that they repeat."""
    embedding = f"{family.outside[0]}.weight"
    found, head = ({"lm_head.weight": embedding}, embedding) if shape.tied else ({}, "lm_head.weight")
    for depth in range(shape.mtp_layers):
        layer = f"model.layers.{shape.num_layers + depth}."
        found |= {f"{layer}embed_tokens.weight": embedding, f"{layer}shared_head.head.weight": head}
    return found


def _layer(family: Family, shape: ModelShape, model: Mapping[str, Any], layer: int, theirs: int) -> Iterator[Mapped]:
    kind = shape.parts(min(layer, shape.num_layers - 1))
    alike = len({shape.parts(i) for i in range(shape.num_layers)}) == 1
    experts, above, ahead = shape.experts or 0, family.outside[0].partition(".")[0], theirs - shape.num_layers
    weights = layer_weights(
        shape, tensor=1, expert_tensor=1, local_experts=experts, parts=kind, shared_gate=bool(model.get("moe_shared_expert_gate")), whole_down=True
    )  # fmt: skip
    stems = [stem.format(ahead) for stem in MTP] if ahead >= 0 else [DECODER.format(layer)]
    stack = (layer, shape.num_layers) if alike and not shape.pattern and ahead < 0 else None
    bias = [Weight("mlp.router.expert_bias", (experts,))] if "experts" in kind and shape.expert_bias else []
    for weight in (*weights, *bias):
        layout, names = _source(family, weight.path)
        sizes = _sizes(shape, weight, layout)
        parts = tuple((f"{above}.layers.{theirs}.{n}", size) for n, size in zip(names, sizes, strict=True))
        yield Mapped(
            stems[0] + weight.path, weight.shape, layout, parts, tuple(_places(weight.path, stems, stack, experts)),
            wide=weight in bias, linear=weight.linear, split=weight.split, expert=weight.expert, rows=stored_apart(shape, weight.path),
        )  # fmt: skip


def _ahead(family: Family, shape: ModelShape, model: Mapping[str, Any], depth: int) -> Iterator[Mapped]:
    """One depth of multi-token prediction: two norms, a projection and a whole layer of the same kind as the last layer."""
    hidden, layer = shape.hidden_size, shape.num_layers + depth
    outside = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    for ours, theirs in outside.items():
        name, linear = f"mtp.layers.{depth}.{ours}.weight", ours == "eh_proj"
        size, split = (hidden, 2 * hidden) if linear else (hidden,), "column" if linear else None
        parts, places = ((f"model.layers.{layer}.{theirs}.weight", size),), (CheckpointSlice(name),)
        yield Mapped(name, size, "whole", parts, places, linear=linear, split=split)  # type: ignore[arg-type]
    yield from _layer(family, shape, model, shape.num_layers - 1, layer)


_ATTENTION: Mapping[str, tuple[PartLayout, tuple[str, ...]]] = {
    **{f"{ours}.weight": ("whole", (f"{theirs}.weight",)) for ours, theirs in {
        "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm", "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.k_layernorm": "self_attn.k_norm", "self_attention.linear_q_proj": "self_attn.q_proj",
        "self_attention.linear_q_down_proj": "self_attn.q_a_proj", "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
        "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa", "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    }.items()},
    **{f"self_attention.linear_qkv.{part}": ("qkv", tuple(f"self_attn.{name}_proj.{part}" for name in "qkv")) for part in ("weight", "bias")},
}  # fmt: skip
"""Path below a layer -> layout and names below the folder's layer, for everything but the MLP and the norm of queries."""


def stored_apart(shape: ModelShape, path: str) -> tuple[tuple[str, int], ...]:
    """The parts in which megatron-core stores a Mamba layer's stacked projections (0.16.1 ssm/mamba_mixer.py sharded_state_dict); () for other parameters."""
    module = path.rpartition(".")[0]
    if module not in ("mixer.in_proj", "mixer.conv1d"):
        return ()
    inner, states, heads = shape.mamba_sizes
    mixed = (("x", inner), ("B", states), ("C", states))
    return (("z", inner), *mixed, ("dt", heads)) if module == "mixer.in_proj" else mixed


_HYBRID: Mapping[str, tuple[PartLayout, tuple[str, ...]]] = {
    "input_layernorm.weight": ("whole", ("norm.weight",)),
    "pre_mlp_layernorm.weight": ("whole", ("norm.weight",)),
    "self_attention.linear_proj.weight": ("whole", ("mixer.o_proj.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"mixer.{name}_proj.weight" for name in "qkv")),
    **{f"mlp.fc{n}_latent_proj.weight": ("whole", (f"mixer.fc{n}_latent_proj.weight",)) for n in (1, 2)},
}
"""The same of a hybrid's layers, each of which has one norm and one mixer; Mamba's own parameters have the same names there."""


def _source(family: Family, path: str) -> tuple[PartLayout, tuple[str, ...]]:
    if family.hybrid and (path in _HYBRID or not path.startswith("mlp.")):
        return _HYBRID.get(path, ("whole", (path,)))
    if path in _ATTENTION:
        return _ATTENTION[path]
    if path == "self_attention.q_layernorm.weight":
        return "whole", (f"self_attn.{'q_a_layernorm' if family.latent else 'q_norm'}.weight",)
    router = {"weight": "weight", "expert_bias": "e_score_correction_bias"}
    if path.startswith("mlp.router."):
        return "whole", (f"{family.mixture}.gate.{router[path.rpartition('.')[2]]}",)
    if path == "mlp.shared_experts.gate_weight":
        return "whole", (f"mlp.{family.shared}_gate.weight",)
    head, linear = path.removesuffix(".weight").rsplit(".", 1)
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if head.startswith("mlp.experts."):
        stem, (gate, up, down) = f"{family.mixture}.experts.{head.rpartition('.')[2]}", family.expert_parts
    else:
        above = "mixer" if family.hybrid else "mlp"
        stem = {"mlp": above, "mlp.shared_experts": f"{above}.{family.shared}"}[head]
    if family.hybrid and linear == "linear_fc1":
        return "whole", (f"{stem}.up_proj.weight",)
    if linear == "linear_fc1":
        return "stacked", (f"{stem}.{gate}.weight", f"{stem}.{up}.weight")
    return "whole", (f"{stem}.{down}.weight",)


def _sizes(shape: ModelShape, weight: Weight, layout: PartLayout) -> list[tuple[int, ...]]:
    rows, *rest = weight.shape
    if layout == "stacked":
        return [(rows // 2, *rest)] * 2
    if layout == "qkv":
        keys = shape.num_query_groups * shape.kv_channels
        return [(rows - 2 * keys, *rest), (keys, *rest), (keys, *rest)]
    return [weight.shape]


FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "norm.weight": "mixer.in_proj.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""A norm's name -> its name inside the linear after it, where Transformer Engine's modules fuse the two; megatron-core's checkpoints often use the latter for both."""


def _places(path: str, stems: list[str], stack: tuple[int, int] | None, experts: int) -> Iterator[CheckpointSlice]:
    """Layers stacked under one key, as megatron-core stores layers of one kind (`stack`: the number and how many); a key for each; and FSDP engines' own names."""
    if not path.startswith("mlp.experts."):
        for name in (path, *([FUSED_NORMS[path]] if path in FUSED_NORMS else [])):
            if stack is not None:
                yield CheckpointSlice(f"decoder.layers.{name}", stack[:1], stack[1:])
            yield from (CheckpointSlice(f"{stem}{name}") for stem in stems)
        return
    _, _, _, number, linear, part = path.split(".")
    expert, grouped = int(number), f"mlp.experts.experts.{linear}.{part}"
    if stack is not None:
        yield CheckpointSlice(f"decoder.layers.{grouped}", (stack[0], expert), (stack[1], experts))
    yield from (CheckpointSlice(f"{stem}{grouped}", (expert,), (experts,)) for stem in stems)
    yield from (CheckpointSlice(f"{stem}{path}") for stem in stems)
    yield from (CheckpointSlice(f"{stem}mlp.experts.{linear}.{part}{expert}") for stem in stems)
