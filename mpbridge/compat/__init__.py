"""Megatron Bridge's names under the path that its users import: `mpbridge.compat.megatron_bridge` is `mpbridge.interop.megatron_bridge`."""
