"""The one reader of a folder's quantization_config, whichever method's: its row of the table of formats, what it says that another one does not, and whether it needs static scales."""

from __future__ import annotations

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
    algorithm, strategy = said.get("quant_algo", "").removeprefix("W4A16_"), said.get("weights", {}).get("strategy")
    return said.get("quant_method"), algorithm, said.get("format"), strategy, said.get("weight_block_size")


_GROUP = ("weights", "input_activations", "output_activations")
_ELSEWHERE = (
    *_GROUP, "config_groups", "kv_cache_scheme", "kv_cache_quant_algo", "ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers",
)  # fmt: skip
_SILENT = (
    "version", "producer", "quantization_status", "global_compression_ratio", "sparsity_config", "fmt", "observer", "observer_kwargs", "zp_dtype", "actorder",
)  # fmt: skip
"""What says nothing of how an engine computes from the codes and scales that are there."""


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a quantization_config says, whichever method's: its own settings, those of its one group, and the key-value cache's format under one name each.

    A setting that is null, empty, 0 or false is left out, and so are lists of modules.
    """
    groups = config.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, dict) and len(groups) == 1 else {}
    group = first if isinstance(first, dict) else {}
    cache = config.get("kv_cache_scheme")
    bits = cache.get("num_bits") if isinstance(cache, dict) else None
    found = {name: value for name, value in config.items() if name not in _ELSEWHERE}
    found |= {"targets": group.get("targets"), "quant_algo": str(config.get("quant_algo") or "").upper()}
    named = {"8": "FP8", "4": "NVFP4"}.get(str(bits), cache)
    found["key-value cache"] = named if cache else config.get("kv_cache_quant_algo")
    found = {name: value for name, value in found.items() if value and name not in _SILENT}
    for part in (name for name in _GROUP if isinstance(group.get(name), dict)):
        found[part] = {name: value for name, value in group[part].items() if value and name not in _SILENT}
    size = found.get("group_size") or found.get("weights", {}).get("group_size")
    return found | ({"group_size": size} if size else {})


def settings_faults(config: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(setting, what is wrong) of a quantization_config that should compute as `own` of the same row does."""
    now, made = settings_of(config), settings_of(own)
    grouped = "config_groups" in own
    # an engine of ModelOpt's formats reads no groups; NVFP4's weights are the same with quantized activations and without
    apart = {"quant_algo"} if grouped else {"quant_algo", "targets", *_GROUP}
    apart |= {"input_activations"} if grouped and "input_activations" not in made else set()
    for name in sorted({*now, *made} - apart):
        pairs = [(name, now.get(name), made.get(name))]
        if all(isinstance(value, dict) for _, *values in pairs for value in values):
            inner, theirs = now[name], made[name]
            pairs = [(f"{name}.{key}", inner.get(key), theirs.get(key)) for key in sorted({*inner, *theirs})]
        for key, found, expected in pairs:
            if found != expected:
                said, wanted = ("absent" if value is None else str(value)[:120] for value in (found, expected))
                yield key, f"is {said}, expected {wanted}: an engine computes otherwise than training"


def listed(config: Mapping[str, Any], row: ServedFormat) -> tuple[list[Any], str]:
    """(the list of modules in high precision that engines take, what is wrong where there are two). 'ignored_layers' is another name for modules_to_not_convert.

    vLLM and SGLang take the first that is not empty, and TensorRT-LLM both (vLLM 0.33 quantization/fp8.py, SGLang 0.5.23 quantization/fp8.py, TensorRT-LLM at 008e0af model_config.py).
    """
    names = ("ignored_layers", row.kept) if row.kept == "modules_to_not_convert" else (row.kept,)
    lists = [found if isinstance(found, list) else [found] for name in names if (found := config.get(name))]
    apart = any(sorted(map(str, one)) != sorted(map(str, lists[0])) for one in lists)
    return lists[
        0
    ] if lists else [], f"lists other modules than {row.kept}: engines take it alone, or both" if apart else ""


def scales_are_static(config: Mapping[str, Any]) -> bool:
    """Whether engines quantize activations by scales that a folder with that quantization_config holds."""
    said = settings_of(config)
    static = said.get("quant_algo") in ("NVFP4", "FP8") or said.get("activation_scheme") == "static"
    return static or said.get("input_activations", {"dynamic": True}).get("dynamic") is not True
