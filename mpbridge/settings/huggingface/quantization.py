"""The one reader of a folder's quantization_config, whichever method's: its row of the table of formats, what it says that another one does not, and whether it needs static scales."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.settings.huggingface.served import FOREIGN, FORMATS, ServedFormat


def row_of(config: Mapping[str, Any]) -> ServedFormat:
    """The row of a folder's quantization_config. Raises BadValue for one that no row describes."""
    rows, here = (*FORMATS, *FOREIGN), _identity(config)
    found = next((row for row in rows if _identity(row.config) == here), None)
    if found is None:
        said = " ".join(str(part)[:80] for part in here if part) or "nothing known"
        raise BadValue(f"quantization_config says {said}: expected one of {', '.join(row.name for row in rows)}")
    return found


def _identity(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the rows of a method apart. NVFP4 with and without quantized activations has the same weights."""
    said = settings_of(config)
    algorithm = said.get("quant_algo", "").removeprefix("W4A16_")
    named = ("quant_method", "format", "weights.strategy", "weight_block_size")
    return algorithm, *(said.get(name) for name in named)


_PARTS = ("weights", "input_activations", "output_activations")
_TOP = ("quant_method", "format", "activation_scheme", "scale_fmt", "weight_block_size", "group_size", "transform_config")  # fmt: skip
_INNER = ("num_bits", "type", "strategy", "group_size", "dynamic", "symmetric", "block_structure")
"""The settings, of the whole and of each operand, that decide how an engine computes from the codes and scales that are there."""


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a quantization_config says by which engines compute, whichever method's; of an operand as 'weights.strategy', and with 'weights' that there is such a part.

    The key-value cache's format and the weights' group size have one name each. A setting that is null, empty, 0 or false is left out.
    """
    groups = config.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, dict) and len(groups) == 1 else {}
    group = first if isinstance(first, dict) else {}
    found = {name: config.get(name) for name in _TOP}
    found |= {"targets": group.get("targets"), "quant_algo": str(config.get("quant_algo") or "").upper()}
    for part in (name for name in _PARTS if isinstance(group.get(name), dict)):
        found |= {part: "given", **{f"{part}.{name}": group[part].get(name) for name in _INNER}}
    blocks = found.get("weights.block_structure")
    # compressed-tensors once wrote, and still reads, '128x128'
    if isinstance(blocks, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", blocks):
        found["weights.block_structure"] = list(map(int, blocks.split("x")))
    found["group_size"] = found.pop("weights.group_size", None) or found["group_size"]
    cache: Any = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    kind = f"{cache.get('type')} {cache.get('num_bits')}" if isinstance(cache, dict) else ""
    found["key-value cache"] = {"float 8": "FP8", "float 4": "NVFP4"}.get(kind, cache)
    return {name: value for name, value in found.items() if value}


def settings_faults(config: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) of a quantization_config that should compute as `own` of the same row does."""
    now, made = settings_of(config), settings_of(own)
    apart = {"quant_algo"} if own["quant_method"] == "fp8" else {"quant_algo", "scale_fmt"}
    if "config_groups" not in own:  # engines read no groups, and know the size that ModelOpt leaves out
        apart |= {"targets", *_PARTS, *({"group_size"} - now.keys())}
    elif "input_activations" not in made:  # NVFP4's weights are the same with quantized activations and without
        apart.add("input_activations")
    for name in sorted({*now, *made}):
        part = name.partition(".")[0]
        both = part == name or (part in now and part in made)
        if part not in apart and both and now.get(name) != made.get(name):
            said, wanted = (str(value.get(name, "absent"))[:120] for value in (now, made))
            yield name, f"is {said}, expected {wanted}: an engine computes otherwise than training"


def listed(config: Mapping[str, Any], row: ServedFormat) -> tuple[list[Any], str]:
    """(the list of modules in high precision that engines take, what is wrong where there are two). 'ignored_layers' is another name for modules_to_not_convert.

    vLLM and SGLang take the first that is not empty, and TensorRT-LLM both (vLLM 0.33 quantization/fp8.py, SGLang 0.5.23 quantization/fp8.py, TensorRT-LLM at 008e0af model_config.py).
    """
    names = ("ignored_layers", row.kept) if row.kept == "modules_to_not_convert" else (row.kept,)
    lists = [found if isinstance(found, list) else [found] for name in names if (found := config.get(name))]
    first, *rest = lists or [[]]
    apart = any(sorted(map(str, one)) != sorted(map(str, first)) for one in rest)
    return first, f"lists other modules than {row.kept}: engines take it alone, or both: keep one list" if apart else ""


def scales_are_static(config: Mapping[str, Any]) -> bool:
    """Whether engines quantize activations by scales that a folder with that quantization_config holds."""
    said = settings_of(config)
    static = said.get("quant_algo") in ("NVFP4", "FP8") or said.get("activation_scheme") == "static"
    return static or ("input_activations" in said and said.get("input_activations.dynamic") is not True)
