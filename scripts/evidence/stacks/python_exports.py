"""Runs the Python that `export` writes for FSDP2, accelerate, Lightning and transformers with the real packages on a CPU.

    python scripts/evidence/stacks/python_exports.py

Calls that would start processes or load a model are recorded instead (fully_shard, Accelerator, Trainer, from_pretrained, torchao's MXFP8, which needs
its kernels); policies, plugins, strategies, arguments, loss scales and torchao's conversion are the real classes; for Transformer Engine's recipe
the arguments are recorded. Exit code 0 if every fact is as the export states: dtypes, loss scales, the layers that are quantized, and the recipe that
Transformer Engine is given. Needs torch, torchao, accelerate, lightning and transformers.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
sys.path[:] = [
    path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent
]  # names of packages


class Recorder:
    """Records the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls.append((given, named))
        return types.SimpleNamespace()


DEPTH = 8


def model() -> Any:
    """A module with blocks and an output layer, as the exported code expects."""
    import torch

    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(DEPTH)])
    for block in made.layers:
        block.mlp = torch.nn.Linear(32, 32)
    made.lm_head = torch.nn.Linear(32, 32)
    made.config = types.SimpleNamespace(num_hidden_layers=DEPTH)
    return made


def run(text: str, replaced: dict[str, Any]) -> dict[str, Any]:
    """The names after the code ran; names in `replaced` are put back after each import."""
    names: dict[str, Any] = {"model": model()}
    for line in _statements(text):
        try:
            exec(compile(line, "exported", "exec"), names)
        except ImportError:
            if "transformer_engine" not in line:
                raise
        names |= {name: stand_in for name, stand_in in replaced.items() if name in line or name in names}
    return names


def _statements(text: str) -> list[str]:
    import ast

    lines = text.splitlines()
    return ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in ast.parse(text).body]


def fsdp2(text: str, meant: Any) -> dict[str, tuple[Any, Any]]:
    record, fused, quantized, scaler = Recorder(), Recorder(), Recorder(), Recorder()
    names = run(text, {"fully_shard": record, "FusedAdam": fused, "quantize_": quantized, "ShardedGradScaler": scaler})
    policy = record.calls[0][1]["mp_policy"]
    stored = next(names["model"].parameters()).dtype
    facts = _facts(meant, storage=stored, compute=policy.param_dtype, wire=policy.reduce_dtype)
    facts |= _handed_on(meant, policy.output_dtype) | _scaled(meant, scaler.calls[0][1] if scaler.calls else None)
    if meant.regions[-1].quant is not None:
        given = quantized.calls[0][0] if quantized.calls else None
        facts |= _layers(meant, _asked(names["model"], given[2]) if given else _converted(names["model"]))
    return facts


def accelerate(text: str, meant: Any) -> dict[str, tuple[Any, Any]]:
    import accelerate.utils.dataclasses as inner
    import torch

    inner.is_transformer_engine_available = lambda: True
    record = Recorder()
    names = run(text, {"Accelerator": record})
    policy = names["plugin"].mixed_precision_policy
    stored = next(names["model"].parameters()).dtype
    facts = _facts(meant, storage=stored, compute=policy.param_dtype, wire=policy.reduce_dtype)
    facts |= _handed_on(meant, policy.output_dtype)
    word, quant = record.calls[0][1]["mixed_precision"], meant.regions[-1].quant
    low = quant is None and stored is torch.float32 and policy.param_dtype is not torch.float32
    if word != ("fp8" if quant is not None else meant.compute.short if low else "no"):
        facts["mixed_precision"] = (word, meant)
    handlers = {type(one).__name__: one for one in record.calls[0][1].get("kwargs_handlers", [])}
    scale = handlers.get("GradScalerKwargs")
    facts |= _scaled(meant, None if scale is None else vars(scale))
    if "AORecipeKwargs" in handlers:
        from accelerate.utils.ao import convert_model_to_fp8_ao

        given = handlers["AORecipeKwargs"]
        convert_model_to_fp8_ao(names["model"], config=given.config, module_filter_func=given.module_filter_func)
        facts |= _layers(meant, _converted(names["model"]))
    if "TERecipeKwargs" in handlers and quant.row.history:
        facts |= _recipe(quant, handlers["TERecipeKwargs"].to_kwargs())
    return facts


def lightning(text: str, meant: Any) -> dict[str, tuple[Any, Any]]:
    record = Recorder()
    _library()
    names = run(text, {"Trainer": record})
    given = record.calls[0][1]
    if given.get("plugins"):
        plugin = given["plugins"][0]
        facts = _facts(meant, storage=plugin.weights_dtype, autocast=plugin.fallback_compute_dtype)
        plugin.replace_layers = False  # Transformer Engine's own layers need a GPU
        stored = next(plugin.convert_module(names.get("model")).parameters()).dtype
        return (
            facts | _facts(meant, storage=stored, wire=stored) | _recipe(meant.regions[-1].quant, vars(plugin.recipe))
        )
    from lightning.pytorch.plugins.precision import FSDPPrecision

    strategy = given.get("strategy")
    if strategy is None:
        return (
            {}
            if given["precision"] == "32-true" and meant.storage.short == meant.compute.short == "fp32"
            else {"word": (given, meant)}
        )
    precision = FSDPPrecision(given["precision"])
    policy = strategy.mixed_precision or precision.mixed_precision_config
    scaler = precision.scaler
    facts = _facts(meant, compute=policy.param_dtype, wire=policy.reduce_dtype)
    if (scaler is not None) is not (meant.loss_scale is not None):
        facts["loss scale"] = (scaler, meant.loss_scale)
    return facts


def _library() -> None:
    """A substitute for Transformer Engine's recipe, sufficient for Lightning: records the arguments."""
    import enum

    import lightning.fabric.plugins.precision.transformer_engine as plugin

    class DelayedScaling:
        def __init__(self, **given: Any) -> None:
            self.__dict__ |= given

    package, common, recipe = (
        types.ModuleType(f"transformer_engine{end}") for end in ("", ".common", ".common.recipe")
    )
    recipe.DelayedScaling = DelayedScaling  # type: ignore[attr-defined]
    recipe.Format = enum.Enum("Format", "HYBRID E4M3 E5M2")  # type: ignore[attr-defined]
    sys.modules |= {one.__name__: one for one in (package, common, recipe)}
    plugin._TRANSFORMER_ENGINE_AVAILABLE = True  # type: ignore[assignment]


def _recipe(quant: Any, given: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compares Transformer Engine's reading of these arguments (with its defaults for the rest) with the intended rule."""
    form = given.get("fp8_format", "HYBRID")
    found = {
        "format": getattr(form, "name", form).lower(),
        "amax_history": given.get("amax_history_len", 1024),
        "amax_algo": given.get("amax_compute_algo", "max"),
        "margin": given.get("margin", 0),
    }
    return {name: (value, getattr(quant, name)) for name, value in found.items() if value != getattr(quant, name)}


def _handed_on(meant: Any, found: Any) -> dict[str, tuple[Any, Any]]:
    wanted = (meant.output or meant.compute).torch()
    return {} if found == wanted else {"output": (found, wanted)}


def _scaled(meant: Any, given: dict[str, Any] | None) -> dict[str, tuple[Any, Any]]:
    scale = meant.loss_scale
    wanted = None if scale is None else (scale.initial, scale.window)
    found = None if given is None else (given["init_scale"], given["growth_interval"])
    return {} if found == wanted else {"loss scale": (found, wanted)}


def _converted(module: Any) -> set[str]:
    """Names of the linears that torchao replaced."""
    return {name for name, one in module.named_modules() if type(one).__name__ == "Float8Linear"}


def _asked(module: Any, ask: Any) -> set[str]:
    return {name for name, one in module.named_modules() if ask(one, name)}


def _layers(meant: Any, found: set[str]) -> dict[str, tuple[Any, Any]]:
    """The linears in the layers that the regions quantize, excluding the output layer."""
    wanted = set()
    for number in range(DEPTH):
        region = next(one for one in meant.regions if one.about(number, DEPTH))
        wanted |= {f"layers.{number}.mlp"} if region.quant is not None else set()
    return {} if found == wanted else {"layers": (sorted(found), sorted(wanted))}


def transformers(text: str, meant: Any) -> dict[str, tuple[Any, Any]]:
    loaded = Recorder()
    text = text.replace(" TrainingArguments(", " TrainingArguments(use_cpu=True, ", 1)  # there is no GPU here
    names = run(text, {"AutoModelForCausalLM": types.SimpleNamespace(from_pretrained=loaded)})
    made = names["arguments"]
    facts = _facts(meant, storage=loaded.calls[0][1]["dtype"])
    if (made.bf16 or made.fp16) != (meant.autocast is not None):
        facts["autocast"] = (made.bf16, meant.autocast)
    return facts


def _facts(meant: Any, **found: Any) -> dict[str, tuple[Any, Any]]:
    """Facts that differ: name -> (found, intended)."""
    return {
        name: (value, getattr(meant, name)) for name, value in found.items() if value != getattr(meant, name).torch()
    }


def main() -> int:
    """Runs every possible export; returns 0 if all facts are equal."""
    from mpbridge import recipes
    from mpbridge.interop.stacks.exporters import export

    wrong = count = 0
    for stack, judge in (
        ("fsdp2", fsdp2),
        ("accelerate", accelerate),
        ("lightning", lightning),
        ("transformers", transformers),
    ):
        for name in recipes:
            made = export(name, stack)
            if made.fidelity == "impossible":
                continue
            count += 1
            bad = judge(made.pieces[0].text, made.meaning)
            if bad:
                wrong += 1
                print(f"{stack} {name}: {bad}")
    print(f"exports run with the real packages: {count}, as intended: {count - wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
