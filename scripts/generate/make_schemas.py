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
from mpbridge.interop.stacks.exporters import STACKS
from mpbridge.precision.registry import recipes

ON = ("--target", "h100")
SMALL = ("model.num_layers=3", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.max_sequence_length=32", "data.seq_length=32", "train.global_batch_size=2", "train.micro_batch_size=1")  # fmt: skip
STAGES = ("mixed_precision=[{recipe: bf16_mixed, until: 2}, {recipe: fp16_mixed}]", "train.train_iters=4")
HALVES = STAGES[0].replace("until: 2", "until: 50%")
MADE: tuple[tuple[str, ...], ...] = (
    # what the examples need, in order: runs, their checkpoints and folders, keys
    ("train", "--recipe", "mxfp8", "--emulate", "train.train_iters=2", "checkpoint.save=RUN", "logger.log_dir=RUN", "logger.precision_every=1", "train.eval_iters=0", "scheduler.lr_warmup_iters=0"),
    ("train", "--config", "lora_tiny", "train.train_iters=1", "checkpoint.save=ADAPTED", "train.eval_iters=0", "scheduler.lr_warmup_iters=0"),
    ("convert", "ckpt:RUN", "hf:SERVED", "--quantization", "compressed-tensors"), ("convert", "ckpt:RUN", "hf:PLAIN"),
)  # fmt: skip
EXAMPLES: dict[str, list[tuple[str, ...]]] = {
    "tune": [("--recipe", "nvfp4", "--batches", "4", "--unseen", "2", *SMALL, "--out", "TUNED.yaml")],
    "check": [(), ("--config", "llama3_70b", "--recipe", "fp8_cs", *ON, "--cublaslt", "12.9"), ("--config", "llama3_8b", "--recipe", "mxfp8", *ON), ("--config", "llama3_8b", "--recipe", "bf16", *ON, "--world-size", "64"), ("--recipe", "fp16_mixed", "--emulate"), ("--rules",), STAGES, (*STAGES, "--config", "llama3_8b", *ON), (*STAGES, "--config", "llama3_8b", *ON, "parallel.pipeline_model_parallel_size=3")],
    "memory": [(), ("--config", "llama3_70b", "--recipe", "fp8_cs", *ON), ("--config", "deepseek_v3_671b", "--recipe", "mxfp8", "--target", "b200", "--stages"), (*STAGES, "--config", "llama3_8b", *ON)],
    "estimate": [("--config", "llama3_8b", *ON), (*STAGES, "--config", "llama3_8b", *ON), ("--config", "gpt_oss_120b", "--recipe", "fp8_sc", *ON, "--price", "2"), ("--config", "llama3_70b", "--recipe", "fp8_cs", *ON)],
    "layouts": [("--config", "llama3_8b", *ON, "--world-size", "8", "--cublaslt", "12.9"), ("--config", "llama3_8b", *ON, "--world-size", "8", "--recipes", "bf16,mxfp8")],
    "recommend": [("--config", "llama3_8b", *ON, "--world-size", "8", "--cublaslt", "12.9"), ("--config", "gpt_tiny", *ON, "--by", "error"), ()],
    "report": [("RUN",), ("HEALTHY",), ("DIVERGED",), ("BARE",), ("DIVERGED", "--against", "HEALTHY")],
    "list": [()], "words": [(), ("bf16-mixed",)],
    "show": [*((name,) for name in recipes), ("fp8_mlp_only",), ("nvfp4", "--layers", "24"), ("TUNED.yaml",)],
    "plan": [*(("--recipe", name) for name in recipes if not name.startswith("nemotron_3")), ("--config", "gpt_oss_120b", "--recipe", "nemotron_3_super_bf16_with_nvfp4_mixed"), ("--config", "gpt_oss_120b", "--recipe", "nemotron_3_super_bf16_with_nvfp4_mixed", "mixed_precision.modules={mtp.*: bf16}"), (), ("--recipe", "fp8_cs", "ddp.grad_reduce_in_fp32=false"), ("--recipe", "fp32"), ("--recipe", "fp8_cs", "--emulate", "--world-size", "2"), STAGES, (HALVES,)],
    "compare": [("bf16_mixed", "fp8_cs"), ("bf16_mixed", "bf16"), ("bf16_mixed", "ds.json"), ("fp16_mixed", "nvfp4"), ("fp32", "bf16_megatron_fsdp"), ("bf16_mixed", "auto.json")],
    "export": [*((name, "--to", stack) for name in ("fp8_cs", "bf16_mixed", "fp8_mlp_only") for stack in STACKS), ("--config", "llama3_8b", "--to", "fsdp2")],
    "import": [("ds.json",), ("--args", "--bf16 --fp8-format hybrid --nonsense"), ("--args", "--fp8-format hybrid --bf16 --fp8-recipe custom --optimizer muon"), ("auto.json",)],
    "doctor": [(), ("--machines",), *(("--target", name) for name in ("h100", "b200", "rtx-5090", "a100", "sm_90")), (*ON, "--te", "none"), (*ON, "--recipe", "nvfp4")],
    "certify": [("bf16_mixed",), ("nvfp4", "--against", "no-sr"), ("fp8_cs", "--tensors", "RUN")],
    "audit": [("RUN",), ("DIVERGED",)], "diagnose": [("RUN",), ("DIVERGED", "--against", "HEALTHY"), ("BARE",)],
    "resume-check": [("RUN",), ("RUN", "--recipe", "fp16_mixed"), ("RUN", "--recipe", "bf16", "--reset-optimizer"), ("RUN", "train.train_iters=9")],
    "simulate": [("--world-size", "4", "--ranks", "0,3", "--step", *SMALL[:-2])],
    "data": [("inspect", "stdlib", "--tokenizer", "byte"), ("inspect", "text.txt"), ("prepare", "text.txt", "--out", "packed", "--cache", "cache"), ("inspect", "packed_text_document")],
    "convert": [("hf:PLAIN", "new.yaml"), ("hf:PLAIN", "ckpt:BACK"), ("ckpt:RUN", "hf:AGAIN"), ("ckpt:ADAPTED", "hf:MERGED", "--adapters", "merged")],
    "contract": [("SERVED", "--run", "RUN", "--engine", "vllm"), ("PLAIN", "--run", "RUN"), ("PLAIN",)],
    "mismatch": [("RUN", "SERVED", "--tokens", "text.txt", "--sequences", "1")],
    "disclose": [("RUN",), ("RUN", "--mllog", "mllog.txt"), ("RUN/step_00000002", "--sign", "key.pem"), ("PLAIN", "--sign", "key.pem", "--publish")],
    "verify": [("RUN/step_00000002", "--key", "key.pub"), ("PLAIN", "--key", "key.pub")],
}  # fmt: skip
MEANS = {
    "schema_version": "version of this form; it changes when a key goes or means something else",
    "ok": "whether nothing refuses it: exit code 0", "verdict": "the answer in a sentence", "objections": "valid, fits -> why not", "undecided": "fits, time -> why there is no answer",
    "recipe": "canonical name", **dict.fromkeys(("check.recipe", "estimate.recipe", "memory.recipe"), "canonical name; of a schedule every stage's: a, then b"),
    "plan.recipe": "canonical name; of a schedule its first stage's, as all that does not stand in stages", "mismatch.recipe": "training's: in a schedule that of the stage that saved the checkpoint", "engine": "engine", "world_size": "processes", "target": "the machine and versions in question", "assumed": "what was not said: what, value, set_by",
    "capability": "whether the machine runs the recipe: how (native, emulated, no), reason, nearest, proven", "played": "whether Transformer Engine is simulated on this CPU",
    "violations": "broken rules, errors first", "sizes": "sizes that do not suit the recipe", "fit": "memory of the fullest rank, in bytes; null: not decided", "time": "the predicted step; null: not decided",
    "others": "up to three other ways to run it: settings to paste, gains, fit, time", "bf16_layers": "layers that stay in high precision", "check.bf16_layers": "layers that stay in high precision; of a schedule in every stage that quantizes",
    "steps_that_the_first_loss_scale_may_cost": "steps that may be skipped at first", "token_multiple": "what the tokens of a micro-batch must be a multiple of", "notes": "remarks", "served_as": "the form in which serving engines take the weights",
    "parameters": "of the whole model", "rank": "the rank that is shown", "stage": "its pipeline stage", "exact": "whether roles has every state to the byte", "roles": "role -> bytes", "states": "bytes between updates",
    "bytes_per_parameter": "states per parameter of the rank", "parameters_on_rank": "before sharding", "estimates": "bytes", "beside": "workspaces, buffers and what torch does not count", "activations_uncertainty": "relative",
    "total": "peak as torch counts it, bytes", "needed": "bytes of device memory", "band": "error of the figure before it: bytes, or relative for a time", "reference": "the same of bf16_mixed; null: not valid there", "difference": "bytes more than the reference",
    "reasons": "why it differs", "fullest_rank": "rank", "duplicate_main_weights": "bytes of one more FP32 copy", "left_out": "what the prediction omits, in sentences", "ties": "what decides between the recipes of each tie, in sentences", "stages": "the first rank of each pipeline stage",
    "predicted": "always true", "seconds": "of a step", "span": "low and high end of the band, seconds", "because": "what the band comes from", "tokens_per_second_per_gpu": "tokens per second", "model_tflops_per_gpu": "without recomputation",
    "share_of_peak": "of the dense peak of its narrowest products", "gpu_hours_per_billion_tokens": "summed over all GPUs", "price_per_billion_tokens": "with --price", "parts": "kind -> amount, in seconds or bytes",
    "layouts": "those that fit before those that are tight, each fastest first", "refused": "recipes without a layout, and what refuses them", "recipes": "in order; tied: the predicted step is within the error band of the fastest; tie: those of one number tie, 0: with none", "run": "folder", "steps": "done", "measured_steps": "those whose tensors were measured", "scale": "what the first loss scale may cost, in words", "of": "steps of the whole run", "curves": "number -> first, last, lowest, highest",
    "audits": "ok (null: not proved), how many, in words", "precision": "steps measured, and the operand with the largest row error", "diagnosis": "as diagnose --json", "resume": "the checkpoint from which it resumes, or why it does not",
    "parallel": "parallel sizes", "played_on": "the GPU and release that are simulated; null: none", "rules": "every rule: severity, id, expected, holds (versions), source",
    "words": "in a sentence; words: the words asked for, or all that are known", "meanings": "stack, where, source, and the rows of meaning", "name": "canonical name", "summary": "what it does", "aliases": "its other names",
    "needs": "compute capability, or null for any", "resume-check.needs": "what the run's author has to say for it to resume", "status": "how far it was validated", "source": "where its meaning comes from", "hints": "remarks for its user", "config": "fields of the recipe",
    "policy": "what the fields mean, in full", "meaning": "fact -> what it means, as the text shows it", "card": "where it runs and what it costs", "disclose.card": "the model card's text", "fingerprint": "of the policy", "evidence": "of a tuned recipe",
    "brought": "settings that the recipe makes", "replaced": "what was written for another recipe, or by this one's author, and does not hold here, in sentences", "schema": "version of this part", "realization": "native, emulated or played", "writes": "fields that are written: target, field, before, after, why, set_by, keep", "kept": "fields left as their author set them",
    "plan.stages": "each stage of the recipes: recipe, until which step, and as above meaning, brought, fingerprint, writes, kept", "schedule": "each stage of the recipes, judged alone: recipe, until which step, share of the steps, errors, how it runs, needed (bytes), answer, whether it is the fullest, seconds, how it goes on; empty: one recipe", "origin": "setting -> where it came from", "values": "setting -> its value", "a": "the first, as given", "b": "the second, as given", "differences": "fact -> both meanings", "contract.differences": "name, kind, what, error (relative)",
    "costs": "fact -> what the second costs", "same": "fact -> the meaning of both", "fields": "field -> both values, of two recipes", "compare.notes": "a, b -> kind -> remarks on its file", "compare.verdict": "whether one continues the other's checkpoint",
    "stack": "the stack", "version": "its version that is read or written", "fidelity": "exact, layout, different or impossible", "pieces": "name and text, to paste", "lines": "fidelity, fact and text of what is not preserved", "tune.lines": "the sentences below the tables",
    "export.assumed": "what was assumed", "import.assumed": "what was assumed", "answer": "the recipe and its differences in a sentence", "overrides": "field -> value on top of the recipe", "optimizer": "what updates", "differs_here": "fact -> meaning there and here",
    "refused_here": "why mpbridge does not train it", "hazards": "what costs accuracy", "contradicts": "what contradicts itself", "inert": "what has no effect there", "cannot_express": "what no recipe expresses", "unknown": "settings that the stack does not have", "import.undecided": "what decides and stands elsewhere",
    "in_force": "defaults of the stack that decide", "other": "settings that are not about precision", "import.recipe": "the nearest recipe; null: none", "machine": "what is here, or the target", "machines": "name of --target -> the machine", "versions": "package -> release", "doctor.recipes": "recipe -> how it runs there, as check's capability",
    "gpus": "names", "environment": "variable -> value that changes what runs", "missing": "packages that the installed megatron-core imports and that are missing", "te": "the Transformer Engine release whose rules count", "certify.seconds": "that it took", "sentences": "part -> a sentence", "rows": "part, tensor, where, quantity, value, ci95, bound, derivation, condition",
    "against": "the other certificate", "diagnose.against": "differences from the other run", "variant": "the variant of NVFP4", "audit.audits": "each audit: step, stage, ok, facts (promised, found, state), faults, changes since the one before", "disclose.audits": "each audit",
    "onsets": "step and what is anomalous there", "tensors": "the first anomalous tensors", "convert.tensors": "how many", "suspects": "causes with step, score, sentence, evidence, advice", "changes": "what changed before", "cannot_tell": "what the files do not say", "can_still_tell": "what they say", "checkpoint": "folder", "from": "the recipe of the checkpoint",
    "convert.from": "source", "to": "the recipe of the run", "kind": "same, safe, lossy, weights only or refused", "step": "of the checkpoint", "lost": "what is not restored", "why": "reasons, each with its cure", "second_moment": "mean of the loaded states; null: not known", "ranks": "each rank: bytes live and predicted, differences, audit, step, ok",
    "changed": "settings that differ from the run's, since it is built without memory", "path": "what was written", "take": "the choice that is best", "tables": "title, columns, rows", "content": "the recipe file", "documents": "how many", "tokens": "how many", "skipped": "reason -> records", "cached": "whether it was prepared before", "prefixes": "of .bin and .idx", "tokenizer": "its facts",
    "files": "kind, files, bytes", "verify.files": "how many", "pairs": "facts of packed files", "dtypes": "dtype -> tensors", "elements": "how many", "family": "the model's", "widened": "tensors that were blockwise FP8", "rounded": "values that are rounded", "merged": "adapters in the base's weights: choice, linears, relative errors against what was trained with", "folder": "the folder", "format": "the served format", "quantized": "linears", "high_precision": "linears in high precision",
    "contract.recipe": "of the run; null: not said", "distances": "name, mean, k3, greedy, loss of each way of serving", "linears": "linear -> error of its output", "loss": "of training, nats", "emulated": "whether low precision was computed in software", "written": "file", "keys": "MLPerf's nine", "key": "id of the signer", "record": "file", "signature": "file",
    "result": "the verdict of the record", "configuration": "what was signed", "passedTests": "audits that passed", "warnedTests": "with a warning", "failedTests": "that failed", "provenance": "SLSA's statement", "disclose.precision": "the run's precision.json", "verify.record": "always null: the folder is signed without a record",
}  # fmt: skip
MAPS = ("recipes", "roles", "parts", "objections", "undecided", "curves", "versions", "meaning", "overrides", "origin", "differences", "differs_here", "costs", "same", "facts", "not_observed", "dtypes", "linears", "peak", "machines", "values", "fields", "notes", "skipped", "sentences", "environment", "parallel", "target", "changed")  # fmt: skip
"""Objects whose keys are names: one schema holds for all their values."""
OPEN = ("worst", "diagnosis", "errors", "policy", "config", "evidence", "provenance", "result", "content", "precision", "keys", "condition", "after", "before")  # fmt: skip
"""Objects that another verb or format describes."""


def shape(values: list[Any], name: str = "") -> dict[str, Any]:
    """A schema that all of `values` satisfy."""
    kinds = {"null": [v for v in values if v is None], "boolean": [v for v in values if isinstance(v, bool)], "string": [v for v in values if isinstance(v, str)],
             "number": [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)], "array": [v for v in values if isinstance(v, list)], "object": [v for v in values if isinstance(v, dict)]}  # fmt: skip
    found: dict[str, Any] = {"type": [kind for kind, held in kinds.items() if held]}
    if kinds["array"] and (items := [item for held in kinds["array"] for item in held]):
        found["items"] = shape(items)
    # a string only where Transformer Engine's package is installed; null for adapters that add nothing, and for stages of a run whose length is not set
    found["type"] = {"played_on": ["null", "string"], "of_change": ["null", "number"], "share": ["null", "number"]}.get(
        name, found["type"]
    )
    if name in OPEN:
        return {"type": found["type"]}
    if name in MAPS and kinds["object"]:
        found["additionalProperties"] = shape([value for held in kinds["object"] for value in held.values()])
    elif kinds["object"]:
        names = list(dict.fromkeys(key for held in kinds["object"] for key in held))
        found["properties"] = {key: shape([held[key] for held in kinds["object"] if key in held], key) for key in names}
        found["required"] = [key for key in names if all(key in held for held in kinds["object"])]
        found["additionalProperties"] = False
    return found


def write_inputs() -> None:
    """Writes what the examples read: files of other stacks, a text, keys, runs that were trained, one that diverged, one with metrics alone."""
    from cryptography.hazmat.primitives import serialization as words
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    Path("key.pem").write_bytes(key.private_bytes(words.Encoding.PEM, words.PrivateFormat.PKCS8, words.NoEncryption()))
    Path("key.pub").write_bytes(key.public_key().public_bytes(words.Encoding.PEM, words.PublicFormat.SubjectPublicKeyInfo))  # fmt: skip
    Path("ds.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "train_batch_size": 8}')
    Path("auto.json").write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}')
    Path("text.txt").write_text("\n\n".join(f"Line {n}: the quick brown fox jumps over {n} lazy dogs." for n in range(600)))  # fmt: skip
    for name, bad in (("HEALTHY", False), ("DIVERGED", True)):
        Path(name).mkdir()
        rows = [{"iteration": n, "loss": "nan" if bad and n > 9 else 6.0 - n / 10, "grad_norm": 1.0, "loss_scale": 1.0, "lr": 1e-3} for n in range(1, 13)]  # fmt: skip
        Path(name, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        audit = {"recipe": "bf16_mixed", "step": 1, "stage": "live", "ok": True, "reason": "", "facts": {"weights moved": ["yes", "yes", "ok"]}}  # fmt: skip
        data = {"recipe": "bf16_mixed", "config": {"train": {"train_iters": 20}}, "audit": {"history": [audit]} if bad else {}}  # fmt: skip
        Path(name, "precision.json").write_text(json.dumps(data))
    Path("BARE").mkdir()
    Path("BARE/metrics.jsonl").write_text('{"iteration": 1}\n')
    for command in MADE:
        if main(list(command)):
            raise SystemExit(f"mpbridge {' '.join(command)} failed")


def answer(*words: str) -> Any:
    """What a command prints with --json."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*words, "--json"])
    if not out.getvalue():
        raise SystemExit(f"mpbridge {' '.join(words)} --json printed nothing and returned {code}")
    return json.loads(out.getvalue())


def made(verb: str) -> dict[str, Any]:
    """The verb's schema."""
    found = shape([answer(verb, *words) for words in EXAMPLES[verb]])
    if missing := [key for key in found["properties"] if not MEANS.keys() & {key, f"{verb}.{key}"}]:
        raise SystemExit(f"{verb}: MEANS does not describe {', '.join(missing)}")
    for key, part in found["properties"].items():
        part["description"] = MEANS.get(f"{verb}.{key}") or MEANS[key]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"mpbridge {verb} --json"} | found


if __name__ == "__main__":
    asked = sys.argv[1:] or list(EXAMPLES)
    SCHEMAS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_inputs()
        for verb in EXAMPLES:  # in their order: some read what others wrote
            if verb in asked or (verb == "tune" and "show" in asked):
                schema = made(verb)
                (SCHEMAS / f"{verb}.json").write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
        os.chdir(ROOT)
    print(f"wrote {len(asked)} schemas")
