"""Groups of identical layers and of identical pipeline stages: what is computed for one member holds for all."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mpbridge.common.facts import ModelShape, RunFacts
from mpbridge.planning.memory.keeps import is_frozen, kept_fp32
from mpbridge.planning.memory.layers import Parameter, chunk_parameters, layer_weights
from mpbridge.planning.memory.ranks import Chunk, Coordinates, has_final_norm, stage_chunks
from mpbridge.precision.globs import DECODER
from mpbridge.precision.policy import PrecisionPolicy


def layer_kinds(policy: PrecisionPolicy, run: RunFacts) -> tuple[int, ...]:
    """For each decoder layer the first layer identical to it: the same parameters and attention, under the same rules."""
    skip = run.model.get("window_attn_skip_freq")
    skip = tuple(skip) if isinstance(skip, (list, tuple)) else skip
    return _kinds(policy, run.shape, bool(run.model.get("window_size")), skip)


@functools.lru_cache(maxsize=64)
def _kinds(policy: PrecisionPolicy, shape: ModelShape, windows: bool, skip: Any) -> tuple[int, ...]:
    rules, seen = _rules(policy, shape), dict[object, int]()
    model = {"window_size": windows, "window_attn_skip_freq": skip}
    return tuple(seen.setdefault((rules[layer], windowed(model, layer)), layer) for layer in range(len(rules)))


def distinct_stages(policy: PrecisionPolicy, run: RunFacts) -> dict[int, tuple[int, ...]]:
    """First stage of each kind -> all stages of that kind: the same layers in structure and precision. Raises BadValue if layers do not divide."""
    kinds = layer_kinds(policy, run)
    found: dict[int, tuple[int, ...]] = {}
    seen: dict[object, int] = {}
    for stage, chunks in enumerate(stage_chunks(run)):
        key = tuple(
            (chunk.first, chunk.last, chunk.mtp, has_final_norm(run, chunk), tuple(kinds[i] for i in chunk.layers))
            for chunk in chunks
        )
        first = seen.setdefault(key, stage)
        found[first] = (*found.get(first, ()), stage)
    return found


def counted(
    policy: PrecisionPolicy, run: RunFacts, at: Coordinates, chunks: Iterable[Chunk] | None = None
) -> Iterator[tuple[Parameter, int]]:
    """The parameters of that rank (chunks: of these), those of identical layers of a chunk and of a layer's identical experts once; (parameter, how many there are)."""
    kinds, shape = layer_kinds(policy, run), run.shape
    alone = bool(shape.experts) and not _names_experts(policy)
    experts = (shape.experts or 0) // run.parallel.expert if alone else 1
    for chunk in at.chunks(run) if chunks is None else chunks:
        alike = Counter(kinds[layer] for layer in chunk.layers)
        # the last of each kind, since the last layer of the model may have more beside it
        few = sorted({kinds[layer]: layer for layer in chunk.layers}.values())
        for parameter in chunk_parameters(run, at, replace(chunk, layers=tuple(few)), first_expert_only=alone):
            inside = parameter.layer is not None and parameter.name.startswith(DECODER.format(parameter.layer))
            times = alike[kinds[parameter.layer]] if inside and parameter.layer is not None else 1
            yield parameter, times * experts if parameter.weight.expert else times


def windowed(model: Mapping[str, Any], layer: int) -> bool:
    """Whether that 0-based layer uses sliding-window attention (megatron-core's is_layer_window_attention)."""
    if not model.get("window_size"):
        return False
    skip = model.get("window_attn_skip_freq")
    if skip is None:
        return True
    return bool((layer + 1) % skip) if isinstance(skip, int) else bool(skip[layer])


@functools.lru_cache(maxsize=64)
def _rules(policy: PrecisionPolicy, shape: ModelShape) -> tuple[object, ...]:
    """A policy's rules per layer: equal for layers that it treats the same."""
    kinds = {shape.parts(layer) for layer in range(shape.num_layers)}
    modules = {parts: _modules(shape, parts, _names_experts(policy)) for parts in kinds}
    known: dict[object, object] = {}
    found = []
    for layer in range(shape.num_layers):
        parts, prefix = shape.parts(layer), DECODER.format(layer)
        linears, names = modules[parts]
        quantized = linears if policy.quantized else ()
        rules = tuple(tuple(policy.of_path(prefix + name, shape.num_layers)) for name in quantized)
        named = policy.keep_fp32 or policy.frozen
        wide = tuple((kept_fp32(policy, prefix + name), is_frozen(policy, prefix + name)) for name in names if named)
        # one object per kind, so that callers can compare by identity
        found.append(known.setdefault((parts, rules, wide), len(known)))
    return tuple(found)


def _names_experts(policy: PrecisionPolicy) -> bool:
    """Whether a rule may distinguish between experts of a layer."""
    named = any("local_experts" in region.modules for region in policy.regions)
    return named or bool(policy.keep_fp32 or policy.frozen)


def _modules(shape: ModelShape, parts: tuple[str, ...], experts: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(linears of a layer, its parameters), with experts under both of their names; experts: all of them, otherwise only the first."""
    count = None if experts else min(1, shape.experts or 0)
    found = [
        weight
        for grouped in (False, True)
        for weight in layer_weights(shape, parts=parts, local_experts=count, shared_gate=True, grouped=grouped)
    ]
    linears = dict.fromkeys(weight.module for weight in found if weight.linear)
    return tuple(linears), tuple(dict.fromkeys(weight.path for weight in found))
