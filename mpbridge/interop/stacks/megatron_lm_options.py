"""Megatron-LM's versions, and the options of its own parser by version (scripts/evidence/stacks/megatron_lm.py writes the file from the parser)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpbridge.precision.megatron_spec.versions import RELEASES

NAME = "megatron-lm"
VERSIONS = dict(one.megatron_lm for one in RELEASES if one.megatron_lm)
"""Supported versions; the first belongs to the released megatron-core."""
DEFAULT_VERSION = [*VERSIONS][-1]

CORE = {one.megatron_lm[0]: one.version for one in RELEASES if one.megatron_lm}
"""Version -> its megatron-core."""


@functools.cache
def options(version: str = DEFAULT_VERSION) -> Mapping[str, Any]:
    """option -> how many values it takes (an int, '+' or '*')."""
    text = (Path(__file__).parent / "data" / "megatron_lm.json").read_text(encoding="utf-8")
    data = json.loads(text)
    found: dict[str, Any] = data["options"]
    older = data["older"].get(version)
    if older is not None:
        lacks = frozenset(older["lacks"])
        found = {name: arity for name, arity in found.items() if name not in lacks} | older["has"]
    # --use-megatron-fsdp had this name before the supported versions
    return MappingProxyType({**found, "--use-custom-fsdp": 0})
