"""The Python that `export` writes for FSDP2, accelerate, Lightning and transformers, run against the real packages on a CPU.

    python scripts/stacks/python_exports.py

What would start processes or load a model is recorded instead (fully_shard, Accelerator, Trainer, from_pretrained, plugins that need Transformer
Engine); policies, plugins, strategies and arguments are the real classes. Exit code 0 when every dtype is as the export says. Needs torch,
torchao, accelerate, lightning and transformers.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path[:] = [
    path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent
]  # names of packages


class Recorder:
    """Keeps the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls.append((given, named))
        return types.SimpleNamespace()


def model() -> Any:
    """A module with blocks, as the exported code expects one."""
    import torch

    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
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
    record, fused, quantized = Recorder(), Recorder(), Recorder()
    replaced = {
        "fully_shard": record,
        "FusedAdam": fused,
        "convert_to_float8_training": quantized,
        "quantize_": quantized,
    }
    names = run(text, replaced)
    policy = record.calls[0][1]["mp_policy"]
    stored = next(names["model"].parameters()).dtype
    return _facts(meant, storage=stored, compute=policy.param_dtype, wire=policy.reduce_dtype)


def accelerate(text: str, meant: Any) -> dict[str, tuple[Any, Any]]:
    import accelerate.utils.dataclasses as inner

    inner.is_transformer_engine_available = lambda: True
    record = Recorder()
    names = run(text, {"Accelerator": record})
    policy = names["plugin"].mixed_precision_policy
    stored = next(names["model"].parameters()).dtype
    facts = _facts(meant, storage=stored, compute=policy.param_dtype, wire=policy.reduce_dtype)
    word = record.calls[0][1]["mixed_precision"]
    if (word != "no") != (meant.autocast is not None):
        facts["autocast"] = (word, meant.autocast)
    return facts


def lightning(text: str, meant: Any) -> dict[str, tuple[Any, Any]]:
    record = Recorder()
    run(text, {"Trainer": record, "TransformerEnginePrecision": Recorder()})
    given = record.calls[0][1]
    strategy = given.get("strategy")
    if strategy is None:
        return {}
    from lightning.pytorch.plugins.precision import FSDPPrecision

    policy = strategy.mixed_precision or FSDPPrecision(given["precision"]).mixed_precision_config
    return _facts(meant, compute=policy.param_dtype, wire=policy.reduce_dtype)


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
    """Facts that differ: name -> (found, meant)."""
    return {
        name: (value, getattr(meant, name)) for name, value in found.items() if value != getattr(meant, name).torch()
    }


def main() -> int:
    """Runs every export that is possible; 0 when all facts are equal."""
    from mpbridge import recipes
    from mpbridge.stacks.exporters import export

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
    print(f"exports run against the real packages: {count}, as meant: {count - wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
