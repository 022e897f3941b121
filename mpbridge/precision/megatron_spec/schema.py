"""The generated schema: each field of megatron-core's four config classes with its types, choices and default, one file per version."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.common.files import shipped
from mpbridge.precision.megatron_spec.versions import current, nearest

CLASSES: Mapping[str, str] = MappingProxyType(
    {"model": "TransformerConfig", "optimizer": "OptimizerConfig", "ddp": "DistributedDataParallelConfig"}
)
"""Section -> megatron-core's config class."""
LATENT = "MLATransformerConfig"
"""The model section's class under multi_latent_attention; its record holds only what differs from TransformerConfig's."""
REPLACED: Mapping[str, str] = MappingProxyType(
    {
        "moe_router_topk_limited_devices": "moe_router_group_topk",
        "enable_cuda_graph": "cuda_graph_impl",
        "external_cuda_graph": "cuda_graph_impl",
        "moe_router_padding_for_fp8": "moe_router_padding_for_quantization",
        "cuda_graph_scope": "cuda_graph_modules",
    }
)
"""Old name -> new name: megatron-core translates the first to the second when a config is constructed, and rejects both together."""


@functools.cache
def upstream(version: str) -> Mapping[str, Any]:
    """The schema of a described version: class name -> field -> record, and "megatron_core": the version it was generated from."""
    data: dict[str, Any] = shipped(f"precision/megatron_spec/schema/{version}.json")
    return MappingProxyType(data)


def records(section: str, *, latent: bool = False, version: str | None = None) -> Mapping[str, Mapping[str, Any]]:
    """field -> record ("types", "default", perhaps "choices") of a section's class; version: megatron-core's, None: the installed one."""
    data = upstream(nearest(version or current()))
    found: Mapping[str, Mapping[str, Any]] = data[CLASSES[section]]
    return {**found, **data[LATENT]} if latent and section == "model" else found
