"""mpbridge: one name decides every precision fact of a megatron-core training run, and live tensors prove it.

The flow of a run, top to bottom; data flows down only, and no layer depends on those above it:

    a name, a file or a MixedPrecisionConfig        precision.registry, precision.config
      | resolve          frozen PrecisionPolicy     precision.resolve, precision.policy
      | rules            machine, sizes, memory: pure functions          rules, memory, estimate
      | plan             what would be written to which field, and why    sync.plan
      | build or apply   megatron-core configs from inputs, or the same writes onto live objects
      | engine.build     model, wrapper, optimizer  engines, on CUDA or on the CPU device layer
      | audit            live tensors against the policy
      | train            schedules, loss scale, checkpoints
      | report           tables, plots

docs/architecture.md has the diagram of all packages; the contracts in pyproject.toml enforce it (`lint-imports`).

The names below are resolved on first use, so that `import mpbridge` loads neither torch nor megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpbridge.common import upstream
from mpbridge.common.shipped import VERSION as __version__

upstream.install()

_HOME = {
    "ConfigContainer": "settings.container",
    "MixedPrecisionConfig": "precision.config",
    "MpbridgeError": "common.errors",
    "Plan": "precision.sync.plan",
    "PrecisionPolicy": "precision.policy",
    "Receipt": "precision.sync.plan",
    "Run": "settings.container",
    "apply": "backend.megatron.targets",
    "build": "backend.megatron.targets",
    "emulate": "numerics.modules",
    "get_mixed_precision_config": "precision.registry",
    "plan": "precision.sync.plan",
    "pretrain": "training.loop",
    "recipes": "precision.registry",
    "register": "precision.registry",
    "resolve": "precision.registry",
    "transformer_engine_on_cpu": "te_cpu.context",
    "tune_module": "training.tune.run",
    "witness": "observe.witnessing.witness",
    "wrap": "backend.engines.wrap",
}
__all__ = [
    "ConfigContainer",
    "MixedPrecisionConfig",
    "MpbridgeError",
    "Plan",
    "PrecisionPolicy",
    "Receipt",
    "Run",
    "__version__",
    "apply",
    "build",
    "emulate",
    "get_mixed_precision_config",
    "plan",
    "pretrain",
    "recipes",
    "register",
    "resolve",
    "transformer_engine_on_cpu",
    "tune_module",
    "witness",
    "wrap",
]

if TYPE_CHECKING:
    from mpbridge.backend.engines.wrap import wrap
    from mpbridge.backend.megatron.targets import apply, build
    from mpbridge.common.errors import MpbridgeError
    from mpbridge.numerics.modules import emulate
    from mpbridge.observe.witnessing.witness import witness
    from mpbridge.precision.config import MixedPrecisionConfig
    from mpbridge.precision.policy import PrecisionPolicy
    from mpbridge.precision.registry import get_mixed_precision_config, recipes, register, resolve
    from mpbridge.precision.sync.plan import Plan, Receipt, plan
    from mpbridge.settings.container import ConfigContainer, Run
    from mpbridge.te_cpu.context import transformer_engine_on_cpu
    from mpbridge.training.loop import pretrain
    from mpbridge.training.tune.run import tune_module

if not TYPE_CHECKING:  # visible to mypy, this would make every name of the package Any

    def __getattr__(name: str) -> Any:
        if name == "pretrain":  # a script that trains by it, as `mpbridge train` does
            upstream.without_chatter()
        if name in _HOME:
            return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
