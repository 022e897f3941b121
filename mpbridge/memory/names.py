"""Names of a model's linears as a recipe's `modules` can use them, and the patterns that name none of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpbridge.errors import Refused
from mpbridge.facts import ModelShape
from mpbridge.memory.layers import layer_weights
from mpbridge.precision.globs import DECODER, MTP, MTP_PROJECTION, below, matches, names
from mpbridge.precision.regions import Region
from mpbridge.precision.words import region_text


def module_paths(shape: ModelShape) -> tuple[str, ...]:
    """Every linear below a layer. Experts by both of their names: one by one, and grouped on a GPU."""
    kinds = sorted({shape.is_expert_layer(layer) for layer in range(shape.num_layers)})
    found = [name for kind in kinds for name in _of_layer(shape, kind)]
    return tuple(dict.fromkeys([*found, *((MTP_PROJECTION,) if shape.mtp_layers else ())]))


def listed(*shapes: ModelShape) -> str:
    """The linears of a model in words, experts once: for messages. Of several shapes: every linear that one of them has, once."""
    shown = dict.fromkeys(names(path)[-1] for shape in shapes for path in module_paths(shape))
    if len(shapes) > 1:
        return f"{', '.join(shown)}; whole paths: decoder.layers.N and mtp.layers.N"
    ahead = f"; also mtp.layers.0 to {shapes[0].mtp_layers - 1}" if shapes[0].mtp_layers else ""
    return f"{', '.join(shown)}; whole paths: decoder.layers.0 to {shapes[0].num_layers - 1}{ahead}"


def any_gpt(layers: int | None = None) -> tuple[ModelShape, ...]:
    """Shapes that between them have every linear of any GPT: dense and with experts, plain and latent attention, multi-token prediction.

    layers: the depth, where it is known; None: as deep as any, so that a layer's number alone names nothing wrong.
    """
    common: dict[str, Any] = {
        "num_layers": layers or 1000, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 64, "num_query_groups": 4, "kv_channels": 16,
        "vocab_size": 64, "seq_length": 64, "mtp_layers": 8,
    }  # fmt: skip
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 16}
    experts = {
        "experts": 1, "expert_ffn_hidden_size": 64, "expert_layers": (True,) * common["num_layers"], "expert_topk": 1, "shared_expert_size": 64,
    }  # fmt: skip
    return (
        ModelShape(**common),
        ModelShape(**common, latent_attention=latent),
        ModelShape(**common, latent_attention={**latent, "q_lora_rank": 0}),
        ModelShape(**common, **experts),
    )


def refuse_dead_regions(regions: Iterable[Region], *shapes: ModelShape | tuple[ModelShape, ...]) -> None:
    """Raises Refused for regions that cover no linear of any of the shapes, with the names of those there are."""
    every = [one for shape in shapes for one in (shape if isinstance(shape, tuple) else (shape,))]
    regions = tuple(regions)
    dead = [
        text for text in dead_regions(regions, every[0]) if all(text in dead_regions(regions, one) for one in every[1:])
    ]
    if dead:
        model = "any GPT" if len(every) > 1 else "the model"
        raise Refused(f"no linear of {model} is named by {'; '.join(dead)} in `modules` (linears: {listed(*every)})")


def dead_regions(regions: Iterable[Region], shape: ModelShape) -> tuple[str, ...]:
    """The regions, in words, that cover no linear of the model."""
    return tuple(region_text(region) for region in regions if not _alive(region, shape))


def _alive(region: Region, shape: ModelShape) -> bool:
    kinds: dict[bool, tuple[str, ...]] = {}
    for layer in range(shape.num_layers):
        if not region.about(layer, shape.num_layers):
            continue
        kind = shape.is_expert_layer(layer)
        known = kinds.setdefault(kind, _of_layer(shape, kind))
        globs = (region.modules, *below(region.modules, DECODER.format(layer)))
        if any(matches(glob, name) for glob in globs for name in known):
            return True
    return any(_alive_ahead(region, shape, depth) for depth in range(shape.mtp_layers))


def _alive_ahead(region: Region, shape: ModelShape, depth: int) -> bool:
    if not region.about(None, shape.num_layers):
        return False
    known = _of_layer(shape, shape.is_expert_layer(shape.num_layers - 1))
    globs = {region.modules, *(glob for stem in MTP for glob in below(region.modules, stem.format(depth)))}
    projection = matches(region.modules, MTP_PROJECTION, f"mtp.layers.{depth}.{MTP_PROJECTION}")
    return projection or any(matches(glob, name) for glob in globs for name in known)


def _of_layer(shape: ModelShape, mixture: bool) -> tuple[str, ...]:
    found: list[str] = []
    for grouped in (False, True):
        every = layer_weights(
            shape, tensor=1, expert_tensor=1, local_experts=shape.experts or 0, mixture=mixture, shared_gate=False, whole_down=True, grouped=grouped
        )  # fmt: skip
        found += [weight.module for weight in every if weight.linear]
    return tuple(dict.fromkeys(found))
