"""Uses DeepSpeed's own configuration to verify `export --to deepspeed` and `import --from deepspeed`.

    python scripts/evidence/stacks/deepspeed.py

DeepSpeedConfig and the engine's properties that decide dtypes are real; no engine is started. Needs deepspeed 0.19.8 (DS_BUILD_OPS=0) and torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")
sys.path[:] = [
    path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent
]  # this file has the same name
ASKED = (
    "fp16_enabled", "bfloat16_enabled", "zero_optimization", "zero_optimization_stage", "zero_cpu_offload", "torch_autocast_enabled",
    "fp16_master_weights_and_gradients", "bf16_master_weights_and_gradients", "bf16_optimizer_states", "torch_autocast_dtype",
    "dynamic_loss_scale", "initial_dynamic_scale", "loss_scale", "get_data_types", "amp_enabled",
)  # fmt: skip
CASES = (
    '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
    '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}',
    '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "communication_data_type": "fp32"}',
    '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
    '{"fp16": {"enabled": true, "initial_scale_power": 8}, "zero_optimization": {"stage": 3}}',
    "{}",
)


def theirs(text: str) -> dict[str, str]:
    """How DeepSpeed's own classes read a configuration; {'error': text} if they refuse it."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    logging.disable(logging.INFO)
    try:
        config = DeepSpeedConfig(
            {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, **json.loads(text)}
        )
    except (ValueError, AssertionError) as error:
        return {"error": str(error)}
    engine: Any = types.SimpleNamespace(_config=config)
    for name in ASKED:
        if hasattr(DeepSpeedEngine, name):
            setattr(engine, name, types.MethodType(getattr(DeepSpeedEngine, name), engine))
    storage, accumulator = engine.get_data_types()
    wire = DeepSpeedEngine.communication_data_type.fget(engine)
    facts = {"storage": str(storage), "accumulator": str(accumulator), "wire": str(wire)}
    if config.float16_config.enabled:
        facts["initial"] = str(float(config.float16_config.initial_dynamic_scale()))
    return facts


def ours(meaning: Any) -> dict[str, str]:
    """The same facts according to our reading."""
    facts = {name: f"torch.{getattr(meaning, name).value}" for name in ("storage", "accumulator", "wire")}
    if meaning.loss_scale is not None:
        facts["initial"] = str(meaning.loss_scale.initial)
    return facts


def main() -> int:
    """Compares exports and cases; returns 0 if all facts are equal."""
    from mpbridge import recipes
    from mpbridge.interop.stacks.exporters import export
    from mpbridge.interop.stacks.importers import read_text

    wrong = count = 0
    for name in recipes:
        made = export(name, "deepspeed")
        if made.fidelity == "impossible":
            continue
        text = made.pieces[0].text
        for mine in (ours(made.meaning), ours(read_text(text, stack="deepspeed", name="x.json").meaning)):
            count += 1
            if mine != theirs(text):
                wrong += 1
                print(f"{name}: {mine} against {theirs(text)}")
    for text in CASES:
        count += 1
        mine = ours(read_text(text, stack="deepspeed", name="x.json").meaning)
        if mine != theirs(text):
            wrong += 1
            print(f"{text}: {mine} against {theirs(text)}")
    print(f"compared with DeepSpeed's own classes: {count}, equal: {count - wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
