"""Rotary embeddings: rope_parameters, or rope_theta with rope_scaling, as megatron-core's settings and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbridge.huggingface.fields import ConfigFields

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What megatron-core's RotaryEmbedding._apply_scaling has as constants (0.16.1 to 0.20); Llama 3.1, 3.2 and 3.3 have the same."""
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
"""What transformers takes for factors of YaRN that are left out (modeling_rope_utils.py)."""


def rope_section(fields: ConfigFields, *, latent: bool) -> dict[str, Any]:
    """The model section's settings of rotary embeddings."""
    own = fields.raw("rope_parameters")
    scaling = fields.raw("rope_scaling")
    theta = fields.number("rope_theta", 10000.0, least=1.0)
    if own is not None and scaling is not None and _spelled(own) != _spelled(scaling):
        fields.fault(
            f"rope_scaling={scaling!r} beside rope_parameters={own!r}: transformers takes the first, and the two differ: remove one of them"
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
    inner.raw("type")  # older files say it twice
    out: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": theta}
    out |= _scaled(str(kind), inner, latent=latent)
    for place in (fields, inner):
        place.must("partial_rotary_factor", (1.0, 1), "transformers turns all channels of a head in these models")
    for left in inner.left():
        inner.fault(f"{left}={given[left]!r} is not mapped")
    return out


def _spelled(given: Any) -> Any:
    """The same for a mapping with rope_type and one with type, as older files have it."""
    if not isinstance(given, dict):
        return given
    plain = {name: value for name, value in given.items() if name not in ("type", "rope_theta")}
    return plain | {"rope_type": given.get("rope_type", given.get("type", "default"))}


def _scaled(kind: str, inner: ConfigFields, *, latent: bool) -> dict[str, Any]:
    """What scales the frequencies, by rope_type."""
    if kind == "yarn" and latent:
        return _yarn(inner)
    # megatron-core multiplies attention scores by a function of this factor, in plain latent attention too
    plain: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0} if latent else {}
    if kind == "default":
        return plain
    if kind == "linear" and not latent:
        return {"seq_len_interpolation_factor": inner.number("factor", 1.0, least=1.0)}
    if kind == "llama3" and not latent:
        for name, value in _LLAMA3.items():
            found = inner.number(name, value)
            if found != value:
                inner.fault(f"{name}={found:g}: expected {value:g}, which megatron-core's rope_scaling has built in")
        return {"rope_scaling": True, "rope_scaling_factor": inner.number("factor", 8.0, least=1.0)}
    known = "default or yarn" if latent else "default, linear or llama3"
    inner.fault(
        f"rope_type={kind!r}: expected {known}: mpbridge maps no other scaling to megatron-core's settings for these layers"
    )
    for name in inner.left():  # its factors are no faults of their own
        inner.raw(name)
    return plain


def _yarn(inner: ConfigFields) -> dict[str, Any]:
    inner.must("attention_factor", (), "it follows from mscale and mscale_all_dim")
    inner.must("truncate", (True,), "megatron-core rounds the range of corrected frequencies")
    original = inner.size("original_max_position_embeddings")
    factors = {name: inner.number(name, value) for name, value in _YARN.items()}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": inner.number("factor", 1.0, least=1.0),
        "original_max_position_embeddings": original,
        **factors,
    }


def rope_fields(model: Mapping[str, Any], *, latent: bool) -> dict[str, Any]:
    """rope_theta and rope_scaling of config.json from a model section with its defaults filled in."""
    out: dict[str, Any] = {"rope_theta": float(model["rotary_base"]), "rope_scaling": None}
    if latent and model["rope_type"] == "yarn":
        scaling = {name: model[name] for name in ("original_max_position_embeddings", *_YARN)}
        out["rope_scaling"] = {"type": "yarn", "factor": float(model["rotary_scaling_factor"]), **scaling}
    elif model["rope_scaling"]:
        out["rope_scaling"] = {"rope_type": "llama3", "factor": float(model["rope_scaling_factor"]), **_LLAMA3}
    elif model["seq_len_interpolation_factor"] is not None:
        out["rope_scaling"] = {"rope_type": "linear", "factor": float(model["seq_len_interpolation_factor"])}
    return out
