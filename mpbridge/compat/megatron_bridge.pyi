from mpbridge.interop.megatron_bridge import *  # noqa: F403 - the same names under the former path, for type checkers
