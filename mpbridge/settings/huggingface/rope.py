"""Rotary embeddings: converts rope_parameters, or rope_theta with rope_scaling, to megatron-core's settings and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpbridge.settings.huggingface.fields import ConfigFields

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of megatron-core's RotaryEmbedding._apply_scaling (0.16.1 to 0.20); Llama 3.1, 3.2 and 3.3 use the same."""
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""transformers' values if YaRN's bounds are omitted, null or 0 (modeling_rope_utils.py)."""
_SCALES = ("mscale", "mscale_all_dim")


def rope_section(fields: ConfigFields, *, latent: bool) -> dict[str, Any]:
    """The model section's settings of rotary embeddings."""
    own = fields.raw("rope_parameters")
    scaling = fields.raw("rope_scaling")
    theta = fields.number("rope_theta", 10000.0, least=1.0)
    if own is not None and scaling is not None and _spelled(own) != _spelled(scaling):
        fields.fault(
            f"rope_scaling={scaling!r} and rope_parameters={own!r} differ, and transformers uses the first: remove one of them"
        )
    given = own if own is not None else scaling if scaling is not None else {}
    name = "rope_parameters" if own is not None else "rope_scaling"
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        fields.fault(f"{name}: expected one mapping for all layers, of rope_type and its factors")
        return {}
    inner = ConfigFields(given, fields.faults, {}, within=f"{name}.")
    if inner.has("rope_theta"):
        theta = inner.number("rope_theta", theta, least=1.0)
    kind = inner.raw("rope_type") or inner.raw("type") or "default"
    inner.raw("type")  # older files have both
    out: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": theta}
    out |= _scaled(str(kind), inner, latent=latent)
    for place in (fields, inner):
        place.must("partial_rotary_factor", (1.0, 1), "transformers rotates all channels of a head in these models")
    for left in inner.left():
        inner.fault(f"{left}={given[left]!r} is not mapped")
    return out


def _spelled(given: Any) -> Any:
    """A form that is equal for mappings with rope_type and with type, as in older files."""
    if not isinstance(given, dict):
        return given
    plain = {name: value for name, value in given.items() if name not in ("type", "rope_theta")}
    return plain | {"rope_type": given.get("rope_type", given.get("type", "default"))}


def _scaled(kind: str, inner: ConfigFields, *, latent: bool) -> dict[str, Any]:
    """The settings that scale the frequencies, by rope_type."""
    if kind == "yarn":
        return _latent_yarn(inner) if latent else _yarn(inner)
    # megatron-core multiplies attention scores by a function of this factor, also in plain latent attention
    plain: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0} if latent else {}
    if kind == "default":
        return plain
    if kind == "linear" and not latent:
        return {"seq_len_interpolation_factor": _factor(inner)}
    if kind == "llama3" and not latent:
        for name, value in _LLAMA3.items():
            found = inner.number(name, value)
            if found != value:
                inner.fault(f"{name}={found:g}: expected {value:g}, which megatron-core's rope_scaling has built in")
        return {"rope_scaling": True, "rope_scaling_factor": _factor(inner)}
    known = "default or yarn" if latent else "default, linear, llama3 or yarn"
    inner.fault(
        f"rope_type={kind!r}: expected {known}: for these layers mpbridge maps no other scaling to megatron-core's settings"
    )
    for name in inner.left():  # its factors are not reported as separate faults
        inner.raw(name)
    return plain


def _factor(inner: ConfigFields) -> float:
    """The factor by which positions are stretched; transformers has no default for it."""
    if not inner.has("factor"):
        inner.fault("factor is missing")
        return 1.0
    return inner.number("factor", 1.0, least=1.0)


def _bounds(inner: ConfigFields) -> dict[str, float]:
    betas = {name: inner.number(name, value) or value for name, value in _BETAS.items()}
    if betas["beta_fast"] <= betas["beta_slow"]:
        inner.fault(f"beta_fast={betas['beta_fast']:g}: expected more than beta_slow={betas['beta_slow']:g}")
    return betas


def _scales(inner: ConfigFields, factor: float) -> tuple[float, float] | None:
    """mscale and mscale_all_dim if both are set; None: sines and cosines are multiplied by 0.1 ln factor + 1, as in transformers unless both are set."""
    pair = inner.number("mscale"), inner.number("mscale_all_dim")
    usual = 0.1 * math.log(factor) + 1.0
    given = inner.number("attention_factor", usual)
    if given not in (usual, 1.0):
        inner.fault(
            f"attention_factor={given}: expected 1, or {usual} (0.1 ln factor + 1): mpbridge maps no other to megatron-core's mscale"
        )
    if inner.has("attention_factor"):  # transformers reads the other two only if it is omitted
        return None if given == usual else (1.0, 1.0)
    return pair if all(pair) else None


def _yarn(inner: ConfigFields) -> dict[str, Any]:
    factor = _factor(inner)
    scales = _scales(inner, factor)
    out: dict[str, Any] = {f"yarn_{name}": value for name, value in _bounds(inner).items()}
    out |= {f"yarn_{name}": value for name, value in zip(_SCALES, scales or (None, None), strict=True)}
    return out | {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": inner.size("original_max_position_embeddings"),
        "yarn_correction_range_round_to_int": inner.flag("truncate", True),
    }


def _latent_yarn(inner: ConfigFields) -> dict[str, Any]:
    inner.must("attention_factor", (), "it follows from mscale and mscale_all_dim")
    inner.must("truncate", (True,), "megatron-core rounds the range of corrected frequencies")
    mscale, whole = inner.number("mscale"), inner.number("mscale_all_dim")
    if whole and not mscale:
        inner.fault(
            f"mscale_all_dim={whole:g} without mscale: megatron-core has no setting that matches transformers here"
        )
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": _factor(inner),
        "original_max_position_embeddings": inner.size("original_max_position_embeddings"),
        **_bounds(inner),
        # transformers reads mscale only if mscale_all_dim is set
        "mscale": mscale if whole else 1.0,
        "mscale_all_dim": whole,
    }


def rope_fields(model: Mapping[str, Any], *, latent: bool) -> dict[str, Any]:
    """rope_theta and rope_scaling of config.json from a model section with its defaults filled in."""
    out: dict[str, Any] = {"rope_theta": float(model["rotary_base"]), "rope_scaling": None}
    if latent and model["rope_type"] == "yarn":
        scaling = {name: model[name] for name in ("original_max_position_embeddings", *_BETAS, *_SCALES)}
        out["rope_scaling"] = {"type": "yarn", "factor": float(model["rotary_scaling_factor"]), **scaling}
    elif model["position_embedding_type"] == "yarn":
        out["rope_scaling"] = {"rope_type": "yarn", **_dense_yarn_fields(model)}
    elif model["rope_scaling"]:
        out["rope_scaling"] = {"rope_type": "llama3", "factor": float(model["rope_scaling_factor"]), **_LLAMA3}
    elif model["seq_len_interpolation_factor"] is not None:
        out["rope_scaling"] = {"rope_type": "linear", "factor": float(model["seq_len_interpolation_factor"])}
    return out


def _dense_yarn_fields(model: Mapping[str, Any]) -> dict[str, Any]:
    names = ("original_max_position_embeddings", *_BETAS)
    out: dict[str, Any] = {"factor": float(model["yarn_rotary_scaling_factor"])}
    out |= {name: model[f"yarn_{name}"] for name in names}
    scales = {name: model[f"yarn_{name}"] for name in _SCALES}
    out |= scales if None not in scales.values() else {}
    return out if model["yarn_correction_range_round_to_int"] else out | {"truncate": False}
