"""A run that takes seconds: two layers of 64, sequences of 32, a text file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpbridge.settings.container import ConfigContainer, Run

MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False,
    "bias_dropout_fusion": False, "bias_activation_fusion": False,
}  # fmt: skip


def tiny(
    folder: Path, recipe: Any = "bf16_mixed", *, engine: str | None = None, **sections: dict[str, Any]
) -> ConfigContainer:
    """A container that trains `recipe` on a text under `folder`; `sections` are laid over its own."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {n} says {n * n}\n" for n in range(4000)))
    own: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "optimizer": {"lr": 5e-3, "weight_decay": 0.01},
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": 6,
            "eval_interval": 3,
            "eval_iters": 1,
            "seed": 7,
        },
        "data": {"corpus": str(text), "split": "90,10", "cache_dir": str(folder / "cache")},
        "logger": {"log_dir": str(folder / "run")},
    }
    merged = {name: {**own.get(name, {}), **sections.get(name, {})} for name in {*own, *sections}}
    return ConfigContainer(mixed_precision=recipe, engine=engine, **merged)


def tiny_run(folder: Path, recipe: Any = "bf16_mixed", *, engine: str | None = None, **sections: dict[str, Any]) -> Run:
    """The same, resolved for one process."""
    return tiny(folder, recipe, engine=engine, **sections).resolved()
