"""Megatron Bridge's names under the path that its users import: `mpbridge.compat.megatron_bridge` is `mpbridge.interop.megatron_bridge`."""

import sys

from mpbridge.interop import megatron_bridge

sys.modules[f"{__name__}.megatron_bridge"] = megatron_bridge
