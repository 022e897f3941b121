"""The JSON schemas of `--json`, one file per verb (mpbridge/cli/schemas): types are those of the answers to EXAMPLES, descriptions those of MEANS.

`python scripts/generate/make_schemas.py` writes them; a key that MEANS does not describe is an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from mpbridge.cli.main import main
from mpbridge.cli.text import SCHEMAS

ON = ("--target", "h100")
EXAMPLES: dict[str, list[tuple[str, ...]]] = {
    "check": [(), ("--config", "llama3_70b", "--recipe", "fp8_cs", *ON), ("--config", "llama3_8b", "--recipe", "mxfp8", *ON), ("--config", "llama3_8b", "--recipe", "bf16", *ON, "--world-size", "64"), ("--recipe", "fp16_mixed", "--emulate")],
    "memory": [(), ("--config", "llama3_70b", "--recipe", "fp8_cs", *ON), ("--config", "deepseek_v3_671b", "--recipe", "mxfp8", "--target", "b200", "--stages")],
    "estimate": [("--config", "llama3_8b", *ON), ("--config", "gpt_oss_120b", "--recipe", "fp8_sc", *ON, "--price", "2"), ("--config", "llama3_70b", "--recipe", "fp8_cs", *ON)],
    "layouts": [("--config", "llama3_8b", *ON, "--world-size", "8"), ("--config", "llama3_8b", *ON, "--world-size", "8", "--recipes", "bf16,mxfp8")],
    "recommend": [("--config", "llama3_8b", *ON, "--world-size", "8"), ()],
    "report": [("RUN",), ("DIVERGED",), ("BARE",)],
}  # fmt: skip
MEANS = {
    "schema_version": "version of this form; it changes when a key goes or means something else",
    "ok": "whether nothing refuses it: exit code 0", "verdict": "the answer in a sentence", "objections": "valid, fits -> why not", "undecided": "fits, time -> why there is no answer",
    "recipe": "canonical name", "engine": "engine", "world_size": "processes", "target": "the machine and versions in question", "assumed": "what was not said: what, value, set_by",
    "capability": "whether the machine runs the recipe: how (native, emulated, no), reason, nearest, proven", "played": "whether Transformer Engine is simulated on this CPU",
    "violations": "broken rules, errors first", "sizes": "sizes that do not suit the recipe", "fit": "memory of the fullest rank, in bytes; null: not decided", "time": "the predicted step; null: not decided",
    "others": "up to three other ways to run it: settings to paste, gains, fit, time", "bf16_layers": "layers that stay in high precision",
    "steps_that_the_first_loss_scale_may_cost": "steps that may be skipped at first", "token_multiple": "what the tokens of a micro-batch must be a multiple of", "notes": "remarks", "served_as": "the form in which serving engines take the weights",
    "parameters": "of the whole model", "rank": "the rank that is shown", "stage": "its pipeline stage", "exact": "whether roles has every state to the byte", "roles": "role -> bytes", "states": "bytes between updates",
    "bytes_per_parameter": "states per parameter of the rank", "parameters_on_rank": "before sharding", "estimates": "bytes", "beside": "workspaces, buffers and what torch does not count", "activations_uncertainty": "relative",
    "total": "peak as torch counts it, bytes", "needed": "bytes of device memory", "band": "error of the figure before it: bytes, or relative for a time", "reference": "the same of bf16_mixed; null: not valid there", "difference": "bytes more than the reference",
    "reasons": "why it differs", "fullest_rank": "rank", "duplicate_main_weights": "bytes of one more FP32 copy", "left_out": "what the prediction omits, in sentences", "stages": "the first rank of each pipeline stage",
    "predicted": "always true", "seconds": "of a step", "span": "low and high end of the band, seconds", "because": "what the band comes from", "tokens_per_second_per_gpu": "tokens per second", "model_tflops_per_gpu": "without recomputation",
    "share_of_peak": "of the dense peak of its narrowest products", "gpu_hours_per_billion_tokens": "summed over all GPUs", "price_per_billion_tokens": "with --price", "parts": "kind -> amount, in seconds or bytes",
    "layouts": "those that fit before those that are tight, each fastest first", "refused": "recipes without a layout, and what refuses them", "recipes": "in order; tied: the predicted step is within the error band of the fastest", "run": "folder", "steps": "done", "of": "steps of the whole run", "curves": "number -> first, last, lowest, highest",
    "audits": "ok (null: not proved), how many, in words", "precision": "steps measured, and the operand with the largest row error", "diagnosis": "as diagnose --json", "resume": "the checkpoint from which it resumes, or why it does not",
}  # fmt: skip
MAPS = ("roles", "parts", "objections", "undecided", "curves", "worst", "versions", "diagnosis", "errors")
"""Objects whose keys are names, or that another verb describes."""


def shape(values: list[Any], name: str = "") -> dict[str, Any]:
    """A schema that all of `values` satisfy."""
    kinds = {"null": [v for v in values if v is None], "boolean": [v for v in values if isinstance(v, bool)], "string": [v for v in values if isinstance(v, str)],
             "number": [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)], "array": [v for v in values if isinstance(v, list)], "object": [v for v in values if isinstance(v, dict)]}  # fmt: skip
    found: dict[str, Any] = {"type": [kind for kind, held in kinds.items() if held]}
    if kinds["array"] and (items := [item for held in kinds["array"] for item in held]):
        found["items"] = shape(items)
    if name in MAPS:
        return found
    if kinds["object"]:
        names = list(dict.fromkeys(key for held in kinds["object"] for key in held))
        found["properties"] = {key: shape([held[key] for held in kinds["object"] if key in held], key) for key in names}
        found["required"] = [key for key in names if all(key in held for held in kinds["object"])]
        found["additionalProperties"] = False
    return found


def runs(folder: Path) -> dict[str, str]:
    """A healthy run, one that diverged, and one with metrics alone."""
    for name, bad in (("RUN", False), ("DIVERGED", True)):
        (folder / name).mkdir()
        rows = [{"iteration": n, "loss": "nan" if bad and n > 9 else 6.0 - n / 10, "grad_norm": 1.0, "loss_scale": 1.0, "lr": 1e-3} for n in range(1, 13)]  # fmt: skip
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        audit = {"recipe": "bf16_mixed", "step": 1, "stage": "live", "ok": True, "reason": "", "facts": {"weights moved": ["yes", "yes", "ok"]}}  # fmt: skip
        data = {"recipe": "bf16_mixed", "config": {"train": {"train_iters": 20}}, "audit": {"history": [audit]} if bad else {}}  # fmt: skip
        (folder / name / "precision.json").write_text(json.dumps(data))
    (folder / "BARE").mkdir()
    (folder / "BARE" / "metrics.jsonl").write_text('{"iteration": 1}\n')
    return {name: str(folder / name) for name in ("RUN", "DIVERGED", "BARE")}


def answer(*words: str) -> Any:
    """What a command prints with --json."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([*words, "--json"])
    return json.loads(out.getvalue())


def made(verb: str) -> dict[str, Any]:
    """The verb's schema."""
    with tempfile.TemporaryDirectory() as folder:
        places = runs(Path(folder))
        answers = [answer(verb, *(places.get(word, word) for word in words)) for words in EXAMPLES[verb]]
    found = shape(answers)
    for key, part in found["properties"].items():
        part["description"] = MEANS[key]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"mpbridge {verb} --json"} | found


if __name__ == "__main__":
    os.chdir(ROOT)
    SCHEMAS.mkdir(exist_ok=True)
    for verb in EXAMPLES:
        (SCHEMAS / f"{verb}.json").write_text(json.dumps(made(verb), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {len(EXAMPLES)} schemas")
