"""contract.json: what a served folder holds, tensor by tensor, and by which rule of which run it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.precision.wording import quant_text
from mpbridge.settings.huggingface.kept import full_names
from mpbridge.settings.huggingface.served import (
    CONTRACT,
    LEGACY,
    Cast,
    chosen,
    group_of,
    legacy_config,
    quantization_config,
    ranks,
)
from mpbridge.settings.huggingface.tensors import Mapped
from mpbridge.training.checkpoint.store import audit_of, step_of
from mpbridge.training.checkpoint.verdict import FILE as FINGERPRINT
from mpbridge.training.checkpoint.verdict import read_fingerprint
from mpbridge.training.serving.cast import ServedWeights, TrainedWith

FILE = CONTRACT
SCHEMA = 1


def is_module(name: str) -> bool:
    """Whether an unquantized tensor of that name belongs to a linear, which engines look up in the list of modules in high precision."""
    return name.endswith(".weight") and not name.endswith(("norm.weight", "embed_tokens.weight"))


class Served(ServedWeights):
    """Quantizes the parameters of an export, and writes its contract."""

    def __init__(self, path: Path, training: TrainedWith, method: str) -> None:
        super().__init__(training, chosen(method, training.found, training.run.facts))
        self.path = path
        self._tensors: Mapping[str, Mapping[str, Any]] = {}

    @classmethod
    def of(cls, path: Path, run: Any, wanted: Sequence[Mapped], method: str, recipe: str | None = None) -> Served:
        """The casting of a checkpoint's run, or of another recipe."""
        return cls(path, TrainedWith.of(path, run, wanted, recipe), method)

    @property
    def identity(self) -> object:
        """What decides the bytes, besides the checkpoint."""
        training = self.training
        return self.row.name, training.policy.fingerprint(), training.release, training.stores

    def sizes(self, one: Mapped) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name in the folder -> (dtype, shape) of a quantized parameter's tensors."""
        return {
            f"{name.removesuffix('.weight')}.{suffix}": facts
            for name, (rows, columns) in one.parts
            for suffix, facts in self.row.shapes(rows, columns).items()
        }

    @property
    def notes(self) -> list[str]:
        """What the user should know about the folder."""
        made = [
            f"{self.row.name}, quantized by the rule of {self.training.recipe}; {FILE} has each tensor's rule and SHA-256"
        ]
        if self.training.given:
            made.append(f"this is not what the run computed with: its own recipe is {self.training.run.recipe}")
        return [*made, f"activations in the engine: {self.row.activations}"]

    @property
    def kept(self) -> list[str]:
        """Full names of the modules in high precision that engines would otherwise quantize."""
        found = [
            name.removesuffix(".weight")
            for name, facts in self._tensors.items()
            if is_module(name) and len(facts["shape"]) == 2
        ]
        low = {part.removesuffix(".weight") for cast in self.training.found if cast.quant for part, _ in cast.one.parts}
        # a tied head has no tensor, and is a module nevertheless
        return full_names({*found, "lm_head"} - low)

    def finish(self, folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Writes the contract, and ModelOpt's own file; returns the quantization_config."""
        self._tensors = facts
        kept, quants = self.kept, list(dict.fromkeys(self.rules.values()))
        (folder / FILE).write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
        if self.row.method == "modelopt":
            (folder / LEGACY).write_text(json.dumps(legacy_config(self.row, kept), indent=2) + "\n", encoding="utf-8")
        return quantization_config(self.row, quants, kept, self.facts.environment)

    def document(self) -> dict[str, Any]:
        """The contract."""
        training = self.training
        modules: dict[str, Any] = {}
        for cast in training.found:
            for name, _ in cast.one.parts if cast.quant is not None else ():
                modules[name.removesuffix(".weight")] = self._module(cast, name.removesuffix(".weight"))
        return {
            "schema": SCHEMA, "format": self.row.name, "recipe": training.recipe, "fingerprint": training.policy.fingerprint(), "step": step_of(self.path), "audit": audit_of(self.path), "run": self._run(),
            "requantized": training.given, "rules": f"Transformer Engine {'.'.join(map(str, training.release))}",
            "activations": self.row.activations, "high_precision": self.kept, "modules": modules, "tensors": self._tensors,
        }  # fmt: skip

    def _run(self) -> Mapping[str, Any] | None:
        """The fingerprint of the run, as its checkpoint has it; None where there is none."""
        return read_fingerprint(self.path).as_data() if (self.path / FINGERPRINT).is_file() else None

    def _module(self, cast: Cast, module: str) -> dict[str, Any]:
        assert cast.quant is not None
        split = ranks(cast.one, self.facts)
        found = {"parameter": cast.one.name, "rule": quant_text(cast.quant), "group": group_of(module)}
        found["source"] = "float32 main weight" if self.from_main(cast.one) else "parameter"
        return found | ({"ranks": split} if split > 1 else {})
