"""Uses Megatron Bridge's own code to verify `mpbridge.compat.megatron_bridge`.

    python scripts/evidence/stacks/megatron_bridge.py CHECKOUT CORE [--tests FILE]

CHECKOUT: a clone of Megatron Bridge. CORE: a clone of the Megatron-LM that it belongs to. Its configuration code (omegaconf_utils,
config_utils) writes, overrides and reads our objects under its module's name; with --tests, its unit tests of that module run against ours. Needs torch, triton,
omegaconf, hydra-core, transformers and pytest. Exit code 0 if all of this passes; tests that are not expected to pass are listed with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

DECIDED = {
    "test_fp8_param_synchronization": "twins that contradict each other in one constructor are refused",
    "test_setup_with_gpt_config": "loss_scale is the optimizer's field, not the model's",
    "test_setup_with_t5_config": "autocast_enabled is not a field of megatron-core: enable_autocast is written",
    "test_setup_with_optimizer_config": "a static loss scale below FP32 compute and grad_reduce_in_fp32 on the optimizer are not written by the plan",
    "test_setup_with_ddp_config": "fp16 is not a field of the DDP config",
    "test_setup_with_all_configs": "grad_reduce_in_fp32 is not a field of the optimizer config",
    "test_update_with_matching_fields": "changes are logged by the logger mpbridge.compat: logging.debug would configure the root logger",
    "test_update_preserves_none_values": "None is not copied over a value",
    "test_bf16_configuration_flow": "edge layers without quantization have no effect, and autocast is written as enable_autocast",
    "test_recipe_with_setup": "fp8_param_gather is the DDP config's field, not the model's",
    "test_fp8_configuration_flow": "FP8 with FP32 compute is refused",
}


def package(name: str, path: Path | None = None, **names: Any) -> None:
    """A package of that name without running its __init__, which would import every model."""
    module = types.ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = [str(path)] if path else []
    sys.modules[name] = module


def prepare(checkout: Path, core: Path, *, ours: bool = True) -> tuple[type, type, type]:
    """Bridge's package, with our module instead of its own unless ours=False; its three deferred config classes."""
    sys.path.insert(0, str(core))
    if not hasattr(typing, "override"):
        from typing_extensions import override

        typing.override = override
    sys.path.insert(0, str(ROOT / "scripts" / "evidence" / "stacks"))
    importlib.import_module("megatron_lm").prepare(core)
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, optimizer, ddp = map(_late, (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig))
    source = checkout / "src" / "megatron" / "bridge"
    package("megatron.bridge", source)
    package("megatron.bridge.models", None, GPTModelProvider=model, T5ModelProvider=model)
    package("megatron.bridge.models.gpt", None)
    package("megatron.bridge.models.gpt.gpt_builder", None, GPTModelConfig=_gpt_model_config(model))
    for name, found in (
        ("gpt_provider", "GPTModelProvider"),
        ("t5_provider", "T5ModelProvider"),
        ("transformer_config", "TransformerConfig"),
    ):
        package(f"megatron.bridge.models.{name}", None, **{found: model})
    package("megatron.bridge.training", source / "training")
    package("megatron.bridge.training.config", None, DistributedDataParallelConfig=ddp, OptimizerConfig=optimizer)
    if ours:
        from mpbridge.interop import megatron_bridge

        megatron_bridge.install()
    return model, optimizer, ddp


def _late(base: type) -> type:
    """megatron-core's class with __post_init__ deferred to finalize(), as in Bridge."""

    @dataclasses.dataclass
    class Late(base):  # type: ignore[misc,valid-type]
        def __post_init__(self) -> None: ...

        def finalize(self) -> None:
            base.__post_init__(self)

    Late.__name__ = Late.__qualname__ = base.__name__
    return Late


def _gpt_model_config(model: type) -> type:
    """Bridge's GPTModelConfig as far as precision is concerned: it has the attributes of its transformer config."""

    class GPTModelConfig:
        def __init__(self, transformer: Any, **_: Any) -> None:
            object.__setattr__(self, "transformer", transformer)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.transformer, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.transformer, name, value)

    return GPTModelConfig


def overrides_work(classes: tuple[type, type, type]) -> bool:
    """Runs Bridge's own OmegaConf path on our object: written as YAML data, overridden, read back, applied to megatron-core's configs."""
    from mpbridge.interop import megatron_bridge as ours

    utils = importlib.import_module("megatron.bridge.training.utils.omegaconf_utils")
    model, optimizer, ddp = classes

    @dataclasses.dataclass
    class Container:
        model: Any
        optimizer: Any
        ddp: Any
        mixed_precision: Any

    parts = (
        model(num_layers=4, hidden_size=64, num_attention_heads=4),
        optimizer(optimizer="adam", lr=1e-4),
        ddp(use_distributed_optimizer=True),
    )
    made = Container(*parts, ours.get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed"))
    changed = utils.process_config_with_overrides(
        made, cli_overrides=["mixed_precision.fp8_recipe=blockwise", "mixed_precision.grad_reduce_in_fp32=false"]
    )
    mixed = changed.mixed_precision
    mixed.finalize()
    mixed.setup(changed.model, changed.optimizer, changed.ddp)
    for config in (changed.model, changed.optimizer, changed.ddp):
        config.finalize()
    found = (
        type(mixed) is ours.MixedPrecisionConfig,
        changed.model.fp8_recipe,
        changed.ddp.grad_reduce_in_fp32,
        str(changed.model.params_dtype),
    )
    print("overrides through Bridge's OmegaConf:", found)
    return found == (True, "blockwise", False, "torch.bfloat16") and comes_back(mixed)


def comes_back(mixed: Any) -> bool:
    """Whether Bridge's loader makes an equal object of its fields and its `_target_`."""
    target = f"{type(mixed).__module__}.{type(mixed).__qualname__}"
    instantiate = importlib.import_module("megatron.bridge.utils.instantiate_utils")
    data = {"_target_": target, **{field.name: getattr(mixed, field.name) for field in dataclasses.fields(mixed)}}
    back = instantiate.instantiate(data)
    print("run_config.yaml's _target_:", target, "read back equal:", back == mixed)
    return bool(back == mixed)


def files_work() -> bool:
    """run_config.yaml of every recipe, written and read by the base class of Bridge's ConfigContainer; False if one is changed by that."""
    import tempfile

    from mpbridge.interop import megatron_bridge as ours

    base = importlib.import_module("megatron.bridge.training.utils.config_utils")._ConfigContainerBase

    @dataclasses.dataclass(kw_only=True)
    class Container(base):  # type: ignore[misc, valid-type]
        mixed_precision: Any

    # under the name of Bridge's own, whose other sections do not matter here: its loader only accepts targets below megatron
    Container.__module__, Container.__qualname__ = "megatron.bridge.training.config", "ConfigContainer"
    sys.modules[Container.__module__].ConfigContainer = Container  # type: ignore[attr-defined]

    names = sorted(name for name in ours.MIXED_PRECISION_RECIPES if "-" not in name)
    back = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = str(Path(folder) / f"{name}.yaml")
            Container(mixed_precision=ours.get_mixed_precision_config(name)).to_yaml(path)
            back[name] = Container.from_yaml(path).mixed_precision
    alike = [name for name in names if back[name] == ours.get_mixed_precision_config(name)]
    print(f"run_config.yaml written and read by Bridge's container: {len(names)}, equal: {len(alike)}")
    for name in names:
        if name not in alike:
            print(f"  {name}: {back[name]!r}")
    return bool(names) and alike == names


def own_tests(path: Path) -> bool:
    """Bridge's unit tests of the module, run on ours."""
    import pytest

    class Collected:
        def __init__(self) -> None:
            self.passed: list[str] = []
            self.failed: list[str] = []

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed:
                (self.passed if report.passed else self.failed).append(report.nodeid.rpartition("::")[2])

    seen = Collected()
    pytest.main(
        ["-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "--noconftest", "-c", "/dev/null", str(path)],
        plugins=[seen],
    )
    print(f"Bridge's own tests of the module: {len(seen.passed)} passed of {len(seen.passed) + len(seen.failed)}")
    for name in seen.failed:
        print(f"  not passed: {name}: {DECIDED.get(name, 'NOT EXPECTED')}")
    return len(seen.passed) >= 30 and all(name in DECIDED for name in seen.failed)


def main() -> int:
    """The command line of this script."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("checkout", type=Path)
    arguments.add_argument("core", type=Path)
    arguments.add_argument("--tests", type=Path, help="its tests/unit_tests/training/test_mixed_precision.py")
    args = arguments.parse_args()
    classes = prepare(args.checkout, args.core)
    good = overrides_work(classes) and files_work()
    if args.tests:
        good = own_tests(args.tests) and good
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
