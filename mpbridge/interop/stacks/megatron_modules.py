"""Shared by both Megatrons: quantization by module and layer in Megatron-LM's flags and file, and what megatron-core can express."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.errors import BadValue, cut
from mpbridge.interop.stacks.base import Line, Request
from mpbridge.planning.memory.names import any_gpt, listed
from mpbridge.planning.memory.overheads import hybrid
from mpbridge.precision.globs import DECODER, within
from mpbridge.precision.megatron_spec.module_rules import as_dict, params
from mpbridge.precision.megatron_spec.precision_field import ModuleRules
from mpbridge.precision.megatron_spec.schema import records
from mpbridge.precision.megatron_spec.versions import BEFORE_017, SINCE_017
from mpbridge.precision.regions import Quant, Region
from mpbridge.precision.scalings import SCALINGS


def softmax_of(request: Request, *, core: str) -> bool:
    """Whether attention's softmax is in FP32: as the policy states, otherwise the default of megatron-core's class.

    The defaults of that class and of Megatron-LM's parser differ, so it is always written.
    """
    stated = request.policy.softmax_fp32
    return bool(records("model", version=core)["attention_softmax_in_fp32"]["default"] if stated is None else stated)


_OF_THE_FILE = ("format", "scaling", "factory", "options")
"""What a rule of the file says of a quantization."""


def regions_said(request: Request, *, core: str) -> Iterator[Region]:
    """The policy's regions as flags and file express them: attention in 16 bits, and a rule of the file is a scaling and a format."""
    new, depth = SINCE_017.holds(core), _depth(request)
    for region in request.policy.regions[:-1]:
        if region.ends:
            # the switch needs a format; if the depth is known, the file itself excludes those layers
            if request.policy.quant is not None or depth is not None:
                yield region
        elif _sayable(request, region, core):
            own = region.quant
            stored = own is not None and own.stored and new
            said = own and Quant(**{name: getattr(own, name) for name in _OF_THE_FILE}, stored=stored)
            yield dataclasses.replace(region, quant=said)
    quant = in_core(request.policy.quant, request, core)
    yield Region(quant=quant and dataclasses.replace(quant, attention="none"))


def in_core(quant: Quant | None, request: Request, core: str) -> Quant | None:
    """The rule if megatron-core can express it and would follow it, else None."""
    follows = quant is not None and quant.row.core and not (quant.bits == 4 and never_fp4(request, core))
    return quant if follows else None


def never_fp4(request: Request, core: str) -> bool:
    """Whether the run is a hybrid of a megatron-core whose stack never enters the FP4 context."""
    return request.run is not None and hybrid(request.run.facts.model) and BEFORE_017.holds(core)


def _depth(request: Request) -> int | None:
    return None if request.run is None else int(request.run.facts.shape.num_layers)


def _sayable(request: Request, region: Region, core: str) -> bool:
    """Whether the file can express a rule: one for all three GEMMs, with existing linears and known layer numbers."""
    known = region.quant is None or in_core(region.quant, request, core) is not None
    numbered = _depth(request) is not None or all(min(span) >= 0 for span in region.layers or ())
    return region not in request.unnamed and known and region.gemms is None and numbered


def reasons(request: Request, core: str) -> Mapping[str, str]:
    """Row -> the reason on a Megatron where rules name the linears of another model, or where a hybrid does not follow them."""
    if never_fp4(request, core) and any(quant.bits == 4 for quant in request.policy.quants):
        text = f"--stack-version 0.20; a hybrid of megatron-core {core} never enters the FP4 context"
        return {"quantization": text, "modules": text}
    if not request.unnamed:
        return {}
    named = ", ".join(dict.fromkeys(region.modules for region in request.unnamed))
    text = f"{cut(named)}: names of another model, not of megatron-core's linears ({listed(*any_gpt())})"
    return {"modules": text}


def rules_file(request: Request, *, core: str) -> str:
    """The file's text. With a run's depth it is what the plan writes to model.quant_recipe; without one its patterns work for any depth."""
    import yaml

    depth, regions = _depth(request), request.policy.regions
    if depth is not None and request.run is not None:
        kept = tuple(region for region in regions if region.ends or _sayable(request, region, core))
        made = as_dict(
            ModuleRules(regions=kept), range(depth), depth, ahead=request.run.facts.shape.mtp_layers, core=core
        )
        return yaml.safe_dump(made, sort_keys=False)
    numbered = {f"rule_{index}": region for index, region in enumerate(request.policy.module_regions)}
    said = {name: region for name, region in numbered.items() if _sayable(request, region, core)}
    outside = request.policy.quant is None
    configs = {name: params(region.quant, outside=outside, core=core) for name, region in said.items()}
    matchers = {
        f"{name}_{number}": {"type": "glob", "enabled": True, "pattern": pattern, "config": name}
        for name, region in said.items()
        for number, pattern in enumerate(_patterns(region))
    }
    return yaml.safe_dump({"configs": configs, "matchers": matchers}, sort_keys=False)


def _patterns(region: Region) -> Iterator[str]:
    if region.layers is None:
        yield region.modules if region.modules.startswith("*") else f"*{region.modules}"
        return
    for first, last in region.layers:
        for stem in map(DECODER.format, range(first, last + 1)):
            yield from (f"{stem}{glob}" for glob in within(region.modules, stem))


_LAYER = re.compile(r"\*?(?:decoder\.)?layers\.(\d+)\.(.+)")
_READ = frozenset({
    "fp8_quantization_recipe", "fp4_quantization_recipe", "fp8_format", "custom_recipe_factory", "fp8_param", "fp4_param",
    "override_nonquantized_autocast", "override_quantized_autocast",
})  # fmt: skip


def rules_of(data: Any, *, base: str, outside: bool) -> dict[str, Any]:
    """`modules` of the file's data: the reverse of `rules_file`. base: the compute dtype's word; outside: no flag quantizes what the rules leave.

    Raises BadValue for what `modules` cannot express.
    """
    configs, matchers = (data.get(name) if isinstance(data, Mapping) else None for name in ("configs", "matchers"))
    if not isinstance(configs, Mapping) or not isinstance(matchers, Mapping):
        raise BadValue("expected a mapping with configs and matchers")
    rules: dict[tuple[str, str], list[int]] = {}
    for name, matcher in matchers.items():
        if not isinstance(matcher, Mapping) or matcher.get("type") != "glob" or matcher.get("config") not in configs:
            raise BadValue(f"matcher {cut(name)}: expected type: glob, a pattern, and one of its configs")
        if matcher.get("enabled", False):
            pattern, key = str(matcher.get("pattern")), str(matcher["config"])
            layer = _LAYER.fullmatch(pattern)
            # below the stages nothing but multi-token prediction is called mtp
            glob = layer[2] if layer else pattern.removeprefix("*") if pattern.startswith("*mtp.") else pattern
            rules.setdefault((glob, key), []).extend([int(layer[1])] if layer else [])
    made: dict[str, Any] = {}
    for (glob, key), layers in rules.items():
        said = _said(configs[key], key, base=base, outside=outside)
        if layers:
            said = {"precision": said} if isinstance(said, str) else said
            said = {**said, "layers": ", ".join(map(str, layers))}
        if glob in made and next(reversed(made)) != glob:
            raise BadValue(f"{cut(glob)}: rules of other linears stand between its rules, and the first match decides")
        before = made.get(glob, [])
        made[glob] = said if not before else [*(before if isinstance(before, list) else [before]), said]
    return made


def _said(config: Any, key: str, *, base: str, outside: bool) -> Any:
    """What one of the file's configs means in `modules`."""
    recipe = config.get("training_recipe") if isinstance(config, Mapping) else None
    unknown = sorted(recipe.keys() - _READ) if isinstance(recipe, Mapping) else ["training_recipe"]
    if not isinstance(recipe, Mapping) or unknown:
        raise BadValue(f"config {cut(key)}: {cut(', '.join(unknown))} cannot be read")
    if recipe.get("override_quantized_autocast", True) is not True:
        raise BadValue(f"config {cut(key)}: override_quantized_autocast=false leaves the flags' scaling in force")
    bits = next((bits for bits in (8, 4) if recipe.get(f"fp{bits}_quantization_recipe") is not None), None)
    if bits is None or (outside and not recipe.get("override_nonquantized_autocast", False)):
        return base  # without that word a rule has no effect where the block opens no autocast
    asked = recipe[f"fp{bits}_quantization_recipe"]
    row = next((row for row in SCALINGS.values() if row.core == asked and row.formats), None)
    if row is None or recipe.get("custom_recipe_factory"):
        raise BadValue(f"config {cut(key)}: fp{bits}_quantization_recipe {cut(asked)} is not one that `modules` has")
    form = recipe.get("fp8_format", "e4m3") if bits == 8 else row.formats[0]
    stored = {f"fp{bits}_param_gather": True} if recipe.get(f"fp{bits}_param") else {}
    return {f"fp{bits}": form, f"fp{bits}_recipe": row.name, **stored}


def notes(request: Request) -> Iterator[Line]:
    """Notes for readers of the file."""
    numbered = any(region.layers is not None or "layers." in region.modules for region in request.policy.module_regions)
    split = request.run is not None and request.run.facts.parallel.pipeline > 1
    if numbered or (_depth(request) is not None and split):
        text = "layers are numbered from 0 in each pipeline stage there, but over the whole model in mpbridge"
        yield Line(fidelity="different" if split else "exact", fact="modules", text=text)
