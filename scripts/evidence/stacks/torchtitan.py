"""Uses torchtitan's own configuration class to verify `export --to torchtitan` and `import --from torchtitan`.

    python scripts/evidence/stacks/torchtitan.py CHECKOUT

The `--training.*` arguments of every export are parsed into its TrainingConfig by tyro, as its ConfigManager does, and values that its literals refuse
must be those that the import names as contradictions. Needs torch and tyro.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import logging
import shlex
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))


def training_config(checkout: Path) -> type:
    """Its TrainingConfig, loaded from its file, because the package around it imports data loaders."""
    spec = importlib.util.spec_from_file_location(
        "torchtitan_configs", checkout / "torchtitan" / "config" / "configs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: type = module.TrainingConfig
    return found


def parsed(config: type, words: list[str]) -> Any:
    """Its TrainingConfig from the `--training.*` arguments, or its error message."""
    import tyro

    pairs = zip(words[::2], words[1::2], strict=True)
    mine = [part for name, value in pairs if name.startswith("--training.") for part in (f"--{name[11:]}", value)]
    log = io.StringIO()
    try:
        with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
            return tyro.cli(
                config, args=[*mine, "--num_tokens_per_microbatch_per_dp_rank", "64", "--max_context_length", "64"]
            )
    except SystemExit:
        return " ".join(log.getvalue().split())[-200:]


NOT_INSTALLED = (
    "grain", "datasets", "spmd_types", "torch_checkpointing", "torchdata", "torch_remat", "tokenizers", "torchvision", "av", "helion", "deep_ep", "wandb",
)  # fmt: skip
"""Packages that its models import; those that are missing here are stand-ins, for names alone."""
MODELS = (
    ("llama3", "debugmodel"),
    ("qwen3", "debugmodel_moe"),
    ("deepseek_v3", "debugmodel"),
    ("gpt_oss", "debugmodel"),
)
"""Two dense kinds of attention and three mixtures, with and without shared experts."""
CONVERTED = ("bf16_with_mxfp8_mixed", "bf16_with_fp8_rowwise", "bf16_with_fp8_rowwise_gw_hp", "bf16_with_nvfp4_mixed")
REFUSED = {("deepseek_v3", "bf16_with_nvfp4_mixed")}
"""Widths that 128 does not divide: its own converter of NVFP4 says so."""


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=_Nothing):
    """A class, a decorator and an instance with every attribute."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if given and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(self, other: Any) -> Any:
        return self


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Nothing,), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: only what no other finds comes to it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.partition(".")[0] in NOT_INSTALLED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        made = _Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None:
        pass


def converters_agree(checkout: Path) -> tuple[int, int]:
    """(exported functions run on a model, those that convert what the recipe quantizes and no more)."""
    from mpbridge.interop.stacks.exporters import export

    sys.path.insert(0, str(checkout))
    sys.meta_path.append(_StandIns())
    logging.disable(logging.WARNING)
    for name in ("float8", "mx", "nvfp4"):  # a GPU that has every format
        importlib.import_module(f"torchtitan.components.quantization.{name}").has_cuda_capability = lambda *wanted: True
    ran = right = 0
    for name, flavor in MODELS:
        registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
        for recipe in CONVERTED:
            text = next(piece.text for piece in export(recipe, "torchtitan").pieces if piece.name.endswith(".py"))
            scope: dict[str, Any] = {}
            exec(text, scope)
            ran += 1
            wrong = wrongly_converted(scope["quantized"], registry, flavor, experts="GroupedExpertsConverter" in text)
            if wrong is None or (wrong.startswith("ValueError") and (name, recipe) in REFUSED):
                right += 1
            else:
                print(f"{recipe} on {name}: {wrong}")
    return ran, right


def wrongly_converted(quantized: Callable[..., Any], registry: Any, flavor: str, *, experts: bool) -> str | None:
    """What the function leaves or converts against the recipe; None if nothing."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts

    config = types.SimpleNamespace(model_spec=registry(flavor), compile=types.SimpleNamespace(enable=True))
    try:
        model = quantized(config, registry, flavor).model_spec.model
    except ValueError as error:
        return f"ValueError: {error}"
    found = []
    for name, one, *_ in model.traverse(Linear.Config):
        wanted = name.startswith("layers.") and not name.endswith("router.gate")
        if (type(one) is not Linear.Config) is not wanted:
            found.append(name)
    for name, one, *_ in model.traverse(GroupedExperts.Config):
        plain = not type(one)._owner.__name__.startswith(("MXFP8", "Float8"))
        if plain is experts:
            found.append(name)
    return ", ".join(found) or None


def main() -> int:
    """The command line of this script."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("checkout", type=Path)
    args = arguments.parse_args()
    config = training_config(args.checkout.resolve())
    from mpbridge import recipes
    from mpbridge.interop.stacks.exporters import export
    from mpbridge.interop.stacks.importers import read_args

    wrong = said = 0
    for name in recipes:
        made = export(name, "torchtitan")
        if made.fidelity == "impossible":
            continue
        said += 1
        text = made.pieces[0].text.replace("\\\n", " ")
        got, meant = parsed(config, shlex.split(text)), made.meaning
        back = read_args(text, stack="torchtitan").meaning
        wanted = (meant.storage.value, meant.compute.value, meant.wire.value)
        found = got if isinstance(got, str) else (got.dtype, got.mixed_precision_param, got.mixed_precision_reduce)
        if found != wanted or (back.storage, back.compute, back.wire) != (meant.storage, meant.compute, meant.wire):
            print(f"{name}: parsed as {found}, intended {wanted}")
            wrong += 1
    traps = [
        "--training.mixed_precision_reduce bfloat16",
        "--training.dtype float16",
        "--training.mixed_precision_param float16",
    ]
    agreed = sum(
        isinstance(parsed(config, shlex.split(trap)), str) and bool(read_args(trap, stack="torchtitan").contradicts)
        for trap in traps
    )
    print(
        f"exports parsed there: {said}, as intended: {said - wrong}; refused there and named by import: {agreed} of {len(traps)}"
    )
    ran, right = converters_agree(args.checkout.resolve())
    print(f"exported functions run with its converters: {ran}, as the recipe says: {right}")
    return 0 if not wrong and agreed == len(traps) and ran == right else 1


if __name__ == "__main__":
    raise SystemExit(main())
