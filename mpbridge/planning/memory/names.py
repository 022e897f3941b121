"""Names of a model's linears for use in a recipe's `modules`, which region decides for which of them, and the regions and patterns that match none or never decide."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mpbridge.common.errors import Refused
from mpbridge.common.facts import ModelShape
from mpbridge.planning.memory.layers import layer_weights
from mpbridge.precision.globs import DECODER, MTP, MTP_PROJECTION, below, matches, names, told_apart
from mpbridge.precision.modules import layers_text
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import Region, outside, spans_of
from mpbridge.precision.wording import NOT_QUANTIZED, region_rule, region_text


class Stack(NamedTuple):
    """The linears of one layer."""

    layer: int | None
    """0-based; None: multi-token prediction."""
    stem: str
    """Of their whole paths: 'decoder.layers.3.'."""
    linears: tuple[str, ...]
    """Their paths below the layer."""


@dataclass(slots=True)
class Coverage:
    """The effect of each region, by its index. Created by `coverage`."""

    named: set[int] = field(default_factory=set)
    """Regions whose glob and layers match some linear."""
    deciding: set[int] = field(default_factory=set)
    """Regions that decide for some linear as the first match."""
    ahead: dict[int, set[int]] = field(default_factory=dict)
    """Index -> earlier regions that decide for linears that it also matches."""

    def dead(self, index: int) -> bool:
        """Whether the region matches no linear."""
        return index not in self.named

    def shadowed(self, index: int) -> bool:
        """Whether earlier regions decide for every linear that it matches."""
        return index in self.named and index not in self.deciding


def coverage(regions: Sequence[Region], stacks: Iterable[Stack], layers: int) -> Coverage:
    """The effect of each of `regions` (the first match decides) on the linears of a model with that many layers, read until every region but the last
    decides somewhere."""
    found, known = Coverage(), _Masks()
    wanted = set(range(len(regions) - 1))
    seen: set[tuple[object, ...]] = set()
    for stack in stacks:
        if wanted <= found.deciding:
            break
        place = told_apart(stack.stem, (region.modules for region in regions))
        alike = (place, stack.linears, *(region.about(stack.layer, layers) for region in regions))
        if alike in seen:
            continue
        seen.add(alike)
        for index, decided in enumerate(_decided(regions, stack, layers, known, found)):
            if decided:
                found.deciding.add(index)
    return found


def deciders(regions: Sequence[Region], stack: Stack, layers: int) -> dict[str, int]:
    """Linear -> the index of the region that decides for it; linears that none matches are omitted."""
    masks = _decided(regions, stack, layers, _Masks(), Coverage())
    return {name: i for i, mask in enumerate(masks) for bit, name in enumerate(stack.linears) if mask >> bit & 1}


def _decided(regions: Sequence[Region], stack: Stack, layers: int, known: _Masks, found: Coverage) -> Iterable[int]:
    """For each region, the linears of the stack that it decides for, as bits."""
    taken: list[int] = []
    for index, region in enumerate(regions):
        mask = known.of(region.modules, stack) if region.about(stack.layer, layers) else 0
        mine = mask
        for other, theirs in enumerate(taken):
            if mask & theirs:
                found.ahead.setdefault(index, set()).add(other)
            mine &= ~theirs
        if mask:
            found.named.add(index)
        taken.append(mine)
    return taken


class _Masks:
    """Which linears of a stack a glob matches, as bits; layers of one kind are evaluated once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[str, ...]], int] = {}

    def of(self, glob: str, stack: Stack) -> int:
        mask = 0
        for rest in (glob, *below(glob, stack.stem)):
            key = (rest, stack.linears)
            if key not in self._known:
                self._known[key] = sum(1 << bit for bit, name in enumerate(stack.linears) if matches(rest, name))
            mask |= self._known[key]
        return mask


_HYBRID = ("mixer.in_proj", "mixer.out_proj", "mlp.fc1_latent_proj", "mlp.fc2_latent_proj")
"""Linears of a hybrid's layers besides those of a GPT's: Mamba's, and the projections around latent experts (megatron-core's MambaMixer and MoELayer)."""


def module_paths(shape: ModelShape) -> tuple[str, ...]:
    """Every linear of a layer. Experts appear under both of their names: individually, and grouped as on a GPU."""
    kinds = sorted({shape.parts(layer) for layer in range(shape.num_layers)}, reverse=True)
    found = [name for kind in kinds for name in _of_layer(shape, kind)]
    return tuple(dict.fromkeys([*found, *((MTP_PROJECTION,) if shape.mtp_layers else ())]))


def listed(*shapes: ModelShape) -> str:
    """The linears of a model as text for messages, experts once. For several shapes: every linear that any of them has, once."""
    shown = dict.fromkeys(names(path)[-1] for shape in shapes for path in module_paths(shape))
    if len(shapes) > 1:
        return f"{', '.join(shown)}; whole paths: decoder.layers.N and mtp.layers.N"
    ahead = f"; also mtp.layers.0 to {shapes[0].mtp_layers - 1}" if shapes[0].mtp_layers else ""
    return f"{', '.join(shown)}; whole paths: decoder.layers.0 to {shapes[0].num_layers - 1}{ahead}"


def any_gpt(layers: int | None = None) -> tuple[ModelShape, ...]:
    """Shapes that together have every linear of any GPT: dense and with experts, plain and latent attention, multi-token prediction, and of hybrids.

    layers: the depth, if known; None: deeper than any model, so that no layer number is out of range."""
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
        ModelShape(**common, hybrid=True),
    )


def refuse_idle_rules(policy: PrecisionPolicy, *shapes: ModelShape, depth: int | None) -> None:
    """Raises Refused for rules under `modules` that have no effect in any of the shapes: they match no linear, name layers that do not exist, or are always
    preceded by another rule.

    depth: the model's number of layers; None: unknown, so that no layer number is out of range."""
    far = () if depth is None else beyond_the_model(policy, depth)
    dead, shadowed = idle(policy, *shapes)
    lines = [f"layers that the model does not have: {'; '.join(far)}"] if far else []
    if dead and not far:
        model = "any GPT" if len(shapes) > 1 else "the model"
        lines.append(f"no linear of {model} matches {'; '.join(dead)} in `modules` (linears: {listed(*shapes)})")
    if shadowed:
        lines.append(f"{'; '.join(shadowed)}. {SHADOWED_CURE}")
    if lines:
        raise Refused("\n".join(lines))


SHADOWED_CURE = "The first rule that matches a linear decides: move the narrower rule above the broader one, or drop it"


def idle(policy: PrecisionPolicy, *shapes: ModelShape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The rules under `modules`, as text, that match no linear of any model (those of a hybrid: `foreign`), and those that never decide
    because earlier ones do."""
    regions = policy.regions
    own = _own(policy)
    if not own:
        return (), ()
    found, elsewhere = _covered(policy, shapes), foreign(policy, *shapes)
    dead = tuple(text for index in own if found.dead(index) and (text := region_text(regions[index])) not in elsewhere)
    early = {i: region_text(one) + (" (first_last_layers_bf16)" if one.ends else "") for i, one in enumerate(regions)}
    ahead = {i: " and ".join(early[other] for other in sorted(found.ahead[i])) for i in own if found.shadowed(i)}
    return dead, tuple(f"{region_text(regions[i])} never decides: {first} comes first" for i, first in ahead.items())


def foreign(policy: PrecisionPolicy, *shapes: ModelShape) -> tuple[str, ...]:
    """The rules under `modules`, as text, that match no linear of any shape, but linears of a hybrid (Mamba's, latent experts', multi-token prediction's): a recipe for
    hybrids is no mistake on another model."""
    dead = unnamed(policy, *shapes)
    if not dead:
        return ()
    nowhere = _nowhere(policy, shapes[0].num_layers)
    return tuple(region_text(region) for region in dead if region not in nowhere)


@functools.lru_cache(maxsize=256)
def _nowhere(policy: PrecisionPolicy, layers: int) -> tuple[Region, ...]:
    return unnamed(policy, any_gpt(layers)[-1])


def unnamed(policy: PrecisionPolicy, *shapes: ModelShape) -> tuple[Region, ...]:
    """The rules under `modules` that match no linear of any shape."""
    own = _own(policy)
    found = _covered(policy, shapes) if own else None
    return () if found is None else tuple(policy.regions[index] for index in own if found.dead(index))


def _own(policy: PrecisionPolicy) -> list[int]:
    """Positions of the rules under `modules` among the regions."""
    return [index for index, region in enumerate(policy.regions[:-1]) if not region.ends]


def _covered(policy: PrecisionPolicy, shapes: tuple[ModelShape, ...]) -> Coverage:
    return coverage(policy.regions, (stack for shape in shapes for stack in stacks(shape)), shapes[0].num_layers)


def beyond_the_model(policy: PrecisionPolicy, layers: int) -> tuple[str, ...]:
    """The rules under `modules`, as text, that name layers beyond a model of `layers` layers."""
    have = f"the model has {layers} layers, 0 to {layers - 1}, or -{layers} to -1 from the end"
    return tuple(
        f"{region_text(region)}: {layers_text(wrong)} ({have})"
        for region in policy.module_regions
        if (wrong := outside(region.layers or (), layers))
    )


def stacks(shape: ModelShape) -> Iterator[Stack]:
    """The linears of every layer under all of their names, multi-token prediction last."""
    kinds = {kind: _of_layer(shape, kind) for kind in {shape.parts(n) for n in range(shape.num_layers)}}
    for layer in range(shape.num_layers):
        yield Stack(layer, DECODER.format(layer), kinds[shape.parts(layer)])
    for depth in range(shape.mtp_layers):
        for stem in MTP:
            yield Stack(None, stem.format(depth), kinds[shape.parts(shape.num_layers - 1)])
        yield Stack(None, f"mtp.layers.{depth}.", (MTP_PROJECTION,))


def linear_rules(policy: PrecisionPolicy, *shapes: ModelShape) -> list[tuple[str, str]]:
    """(linears, rule): the rule that applies to each linear, decided by the first match. Linears with the same result share a row; those that no rule
    under `modules` matches come last. Multi-token prediction is listed for a single shape, and if a rule names it."""
    fates, own = _fates(policy, shapes)
    named = _rows({label: fate for label, fate in fates.items() if label in own})
    others = _rows({label: fate for label, fate in fates.items() if label not in own})
    ways = tuple(dict.fromkeys((where, rule) for _, where, rule in others))
    alike = all(len([way for way in others if way[0] == group]) == len(ways) for group, _, _ in others)
    rest = [("all other linears", where, rule) for where, rule in ways] if alike else others
    return [(f"{group}{where}", rule) for group, where, rule in (*named, *rest)]


def _fates(policy: PrecisionPolicy, shapes: tuple[ModelShape, ...]) -> tuple[dict[str, dict[str, set[int]]], set[str]]:
    """(linear -> rule that applies -> layers, -1 in multi-token prediction; the linears decided by a rule under `modules`)."""
    ahead = len(shapes) == 1 or any("mtp" in region.modules for region in policy.module_regions)
    fates: dict[str, dict[str, set[int]]] = {}
    own: set[str] = set()
    for shape, stack in ((one, stack) for one in shapes for stack in stacks(one)):
        beside = stack.layer is None
        if beside and not (ahead and stack.stem in (MTP[0].format(0), "mtp.layers.0.")):
            continue
        for name, index in deciders(policy.regions, stack, shape.num_layers).items():
            region = policy.regions[index]
            label = f"mtp: {names(name)[-1]}" if beside else names(name)[-1]
            plain = beside and not policy.gemms_at(name, None, shape.num_layers, f"{stack.stem}{name}").distinct
            rule = NOT_QUANTIZED if plain else region_rule(region)
            fates.setdefault(label, {}).setdefault(rule, set()).add(-1 if stack.layer is None else stack.layer)
            if index < len(policy.regions) - 1 and not region.ends:
                own.add(label)
    return fates, own


def _rows(fates: Mapping[str, Mapping[str, set[int]]]) -> list[tuple[str, str, str]]:
    """(linears, ' of layers ...' unless all of theirs, rule), with linears grouped if they have the same rules."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for label, fate in fates.items():
        order = sorted(fate, key=lambda rule: min(fate[rule]))
        where = {rule: f" of layers {layers_text(spans_of(fate[rule]))}" if len(fate) > 1 else "" for rule in order}
        groups.setdefault(tuple((where[rule], rule) for rule in order), []).append(label)
    return [
        (", ".join(group[at : at + 3]), where, rule)
        for key, group in groups.items()
        for at in range(0, len(group), 3)
        for where, rule in key
    ]


def _of_layer(shape: ModelShape, parts: tuple[str, ...]) -> tuple[str, ...]:
    every = (weight for grouped in (False, True) for weight in layer_weights(shape, parts=parts, grouped=grouped))
    own = dict.fromkeys(weight.module for weight in every if weight.linear)
    return (*own, *(_HYBRID if shape.hybrid and not shape.pattern else ()))
