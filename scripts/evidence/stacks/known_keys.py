"""Collects the keys that each stack's configuration accepts from that stack's own classes and parsers, and rewrites mpbridge/interop/stacks/data/known_keys.json.

    python scripts/evidence/stacks/known_keys.py --packages SITE_PACKAGES --torchtitan CHECKOUT --automodel CHECKOUT --bridge CHECKOUT --megatron-lm CHECKOUT

Names only. Sources are parsed as syntax trees and never imported: annotated fields of dataclasses and pydantic models with those of their
bases, parameters of a constructor, options of an argparse parser, and keys that code reads from a configuration.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
DATA = ROOT / "mpbridge" / "interop" / "stacks" / "data" / "known_keys.json"


class Classes:
    """Fields of the classes in some files, bases and nested classes included."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.fields: dict[str, set[str]] = {}
        self.bases: dict[str, set[str]] = {}
        self.alias: dict[str, str] = {}
        for file in files:
            self._walk(ast.parse(file.read_text(encoding="utf-8")).body, "")

    def _walk(self, body: list[ast.stmt], outer: str) -> None:
        for node in body:
            if isinstance(node, (ast.ImportFrom, ast.Import)):
                self.alias |= {one.asname: one.name for one in node.names if one.asname}
            elif isinstance(node, ast.ClassDef):
                name = f"{outer}{node.name}"
                found = self.fields.setdefault(name, set())
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        found.add(part.target.id)
                        called = part.value.keywords if isinstance(part.value, ast.Call) else []
                        found |= {
                            str(one.value.value)
                            for one in called
                            if one.arg == "alias" and isinstance(one.value, ast.Constant)
                        }
                self.bases.setdefault(name, set()).update(ast.unparse(base) for base in node.bases)
                self._walk(node.body, f"{name}.")
            elif isinstance(node, (ast.If, ast.Try)):
                self._walk(node.body, outer)

    def of(self, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Fields of a class and its bases; of all classes if several have the name."""
        name = self.alias.get(name, name)
        if name in seen or name not in self.fields:
            return set()
        inherited = (self.of(base.split("[")[0], seen | {name}) for base in self.bases[name])
        return {field for field in self.fields[name].union(*inherited) if not field.startswith("_")}


def python_files(*places: Path) -> Iterator[Path]:
    """Files, and every Python file below folders."""
    for place in places:
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]


def strings(file: Path, pattern: str) -> set[str]:
    """Matches of a pattern's group in a file's text."""
    return set(re.findall(pattern, file.read_text(encoding="utf-8")))


def parameters(file: Path, owner: str) -> set[str]:
    """Parameters of a class's constructor."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    return {one.arg for one in [*part.args.args, *part.args.kwonlyargs]} - {"self"}
    raise SystemExit(f"{file}: no class {owner} with a constructor")


def accelerate(packages: Path) -> dict[str, set[str]]:
    """Keys of `accelerate config`'s files, and the launcher's arguments for their sections."""
    here = packages / "accelerate"
    config = Classes([here / "commands" / "config" / "config_args.py"])
    options = strings(here / "commands" / "launch.py", r'"--([a-z0-9_]+)"')
    kwargs = Classes([here / "utils" / "dataclasses.py"])
    asked = strings(here / "commands" / "config" / "cluster.py", r'_config\["([a-z0-9_]+)"\]')
    eight = {name for kind in ("TERecipeKwargs", "MSAMPRecipeKwargs", "AORecipeKwargs") for name in kwargs.of(kind)}
    known = asked | options
    return {
        "": config.of("ClusterConfig") | config.of("SageMakerConfig"),
        "fsdp_config": {name for name in known if name.startswith("fsdp_")},
        "deepspeed_config": {
            name
            for name in known
            if "zero" in name or "deepspeed" in name or "offload" in name or name.startswith("gradient_")
        },
        "fp8_config": eight
        | {name.removeprefix("fp8_") for name in options if name.startswith("fp8_")}
        | {"backend", "fp8_format"},
        "megatron_lm_config": {name for name in known if name.startswith("megatron_lm_")},
    }


def deepspeed(packages: Path) -> dict[str, set[str]]:
    """Keys of its JSON: names in its constants, and the fields of its pydantic models."""
    here = packages / "deepspeed"
    models = Classes([
        *python_files(here / "runtime" / "zero"), here / "runtime" / "precision_config.py", here / "runtime" / "config.py", here / "comm" / "config.py",
        here / "monitor" / "config.py", here / "compile" / "config.py", here / "runtime" / "config_utils.py",
    ])  # fmt: skip
    named = {}
    for file in python_files(here):
        if file.name == "constants.py":
            named |= dict(
                re.findall(r"(?m)^([A-Z0-9_]+)\s*=\s*[\"']([a-z0-9_]+)[\"']", file.read_text(encoding="utf-8"))
            )
    text = (here / "runtime" / "config.py").read_text(encoding="utf-8")
    asked = re.findall(
        r"param\(\s*(?:param_dict|pd|ds_config),\s*([A-Z0-9_]+)|\b([A-Z0-9_]+) in (?:param_dict|ds_config)|(?:param_dict|pd|ds_config)(?:\[|\.get\()([A-Z0-9_]+)",
        text,
    )
    constants = {named[one] for found in asked for one in found if one in named}
    constants |= strings(here / "runtime" / "config.py", r"param_dict\.get\([\"']([a-z0-9_]+)[\"']")
    common = constants | models.of("DeepSpeedMonitorConfig") | {
        "bf16", "fp16", "zero_optimization", "data_types", "comms_logger", "compile", "hybrid_engine", "activation_checkpointing", "torch_autocast",
        "train_batch_size", "train_micro_batch_size_per_gpu", "flops_profiler", "autotuning", "elasticity", "tensor_parallel",
        # looked up by names that are passed to their readers
        "communication_data_type", "seq_parallel_communication_data_type",
    }  # fmt: skip
    return {
        "": common,
        "bf16": models.of("DeepSpeedBF16Config"),
        "fp16": models.of("DeepSpeedFP16Config"),
        "zero_optimization": models.of("DeepSpeedZeroConfig"),
        "data_types": {"grad_accum_dtype", "param_dtype", "keep_in_fp32_modules"} & {*named.values(), *re.findall(r"[\"']([a-z0-9_]+)[\"']", text)},
    }  # fmt: skip


def lightning(packages: Path) -> dict[str, set[str]]:
    """Keys of a Trainer, and of the CLI's file around it."""
    here = packages / "lightning" / "pytorch"
    return {
        "": {"seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "fit", "validate", "test", "predict", "config"}
        | strings(here / "cli.py", r'add_argument\(\s*"--([a-z_]+)"'),
        "trainer": parameters(here / "trainer" / "trainer.py", "Trainer"),
    }  # fmt: skip


def transformers(packages: Path) -> dict[str, set[str]]:
    """Keys of TrainingArguments, and the arguments by which its example scripts load a model."""
    classes = Classes(
        [packages / "transformers" / "training_args.py", packages / "transformers" / "training_args_seq2seq.py"]
    )
    return {"": classes.of("TrainingArguments") | classes.of("Seq2SeqTrainingArguments") | {"dtype", "torch_dtype"}}


def torchtitan(checkout: Path) -> dict[str, set[str]]:
    """Keys of Trainer.Config and its sections."""
    here = checkout / "torchtitan"
    classes = Classes(
        python_files(
            here / "trainer.py",
            here / "config",
            here / "components",
            here / "distributed",
            here / "tools",
            here / "protocols",
        )
    )
    sections = {
        "training": ("TrainingConfig",), "parallelism": ("ParallelismConfig",), "compile": ("CompileConfig",), "comm": ("CommConfig",),
        "debug": ("DebugConfig",), "override": ("OverrideConfig",), "metrics": ("MetricsProcessor.Config",),
        "optimizer": ("OptimizersContainer.Config",), "lr_scheduler": ("LRSchedulersContainer.Config",), "profiler": ("Profiler.Config",),
        "checkpoint": ("CheckpointManager.Config", "BaseCheckpointManager.Config"), "tokenizer": ("HuggingFaceTokenizer.Config",),
    }  # fmt: skip
    found = {name: set().union(*(classes.of(one) for one in names)) for name, names in sections.items()}
    top = classes.of("Trainer.Config") | {
        "module",
        "config",
    }  # the two words of its command line that choose a function
    return {"": top, **{name: fields for name, fields in found.items() if fields}}


def automodel(checkout: Path) -> dict[str, set[str]]:
    """Top-level keys are those that its recipes read and its examples have; a section with a `_target_` has that callable's parameters."""
    import yaml

    here = checkout / "nemo_automodel"
    asked: set[str] = set()
    for file in python_files(here / "recipes"):
        asked |= strings(file, r"cfg\.get\(\s*[\"']([a-zA-Z_0-9]+)") | strings(file, r"self\.cfg\.([a-z_0-9]+)\b")
    for file in sorted((checkout / "examples").rglob("*.yaml")):
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        asked |= {str(name) for name in data} if isinstance(data, dict) else set()
    classes = Classes(
        python_files(
            here / "components" / "distributed",
            here / "components" / "quantization",
            here / "recipes" / "_dist_utils.py",
        )
    )
    sizes = {
        name
        for file in python_files(here / "components" / "distributed", here / "recipes" / "_dist_utils.py")
        for name in strings(file, r"[\"']([a-z_]+_size)[\"']")
    }
    kinds = ("FSDP2Config", "MegatronFSDPConfig", "DDPConfig", "DistributedSetup")
    return {
        "": asked - {"get", "to_dict", "to_yaml_dict", "set_by_dotted", "instantiate_path", "raw_config", "_target_"},
        "distributed": set().union(*(classes.of(kind) for kind in kinds))
        | sizes
        | {"strategy", "pipeline", "moe", "activation_checkpointing"},
        "distributed.mp_policy": {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", "_target_"},
        "fp8": classes.of("FP8Config"),
    }


def bridge(checkout: Path, core: Path) -> dict[str, set[str]]:
    """Keys of ConfigContainer and its sections, including the fields inherited from megatron-core."""
    here = checkout / "src" / "megatron" / "bridge"
    classes = Classes(python_files(
        here / "training" / "config.py", here / "training" / "mixed_precision.py", here / "training" / "comm_overlap.py", here / "training" / "tokenizers",
        here / "models" / "gpt_provider.py", here / "models" / "transformer_config.py", here / "models" / "hybrid", here / "models" / "mamba", here / "peft",
        core / "megatron" / "core" / "transformer" / "transformer_config.py", core / "megatron" / "core" / "model_parallel_config.py",
        core / "megatron" / "core" / "optimizer" / "optimizer_config.py", core / "megatron" / "core" / "distributed" / "distributed_data_parallel_config.py",
        core / "megatron" / "core" / "datasets", core / "megatron" / "training" / "config",
    ))  # fmt: skip
    sections = {
        "train": "TrainingConfig", "optimizer": "OptimizerConfig", "ddp": "DistributedDataParallelConfig", "scheduler": "SchedulerConfig",
        "logger": "LoggerConfig", "checkpoint": "CheckpointConfig", "dist": "DistributedInitConfig", "profiling": "ProfilingConfig",
        "rng": "RNGConfig", "rerun_state_machine": "RerunStateMachineConfig", "validation": "ValidationConfig", "mixed_precision": "MixedPrecisionConfig",
    }  # fmt: skip
    found = {name: classes.of(one) for name, one in sections.items()}
    return {"": classes.of("ConfigContainer"), **{name: fields for name, fields in found.items() if fields}}


def main() -> int:
    """Writes the lists for which its arguments give sources; the others are kept."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("packages", "torchtitan", "automodel", "bridge", "megatron-lm"):
        arguments.add_argument(f"--{name}", type=Path)
    args = arguments.parse_args()
    from mpbridge.interop.stacks.exporters import stack_module

    data = json.loads(DATA.read_text()) if DATA.is_file() else {}
    found: dict[str, dict[str, set[str]]] = {}
    if args.packages:
        found |= {one.__name__: one(args.packages) for one in (accelerate, deepspeed, lightning, transformers)}
    if args.torchtitan:
        found["torchtitan"] = torchtitan(args.torchtitan)
    if args.automodel:
        found["automodel"] = automodel(args.automodel)
    if args.bridge and args.megatron_lm:
        found["megatron-bridge"] = bridge(args.bridge, args.megatron_lm)
    installed = (
        {one.metadata["Name"]: one.version for one in distributions(path=[str(args.packages)])} if args.packages else {}
    )
    for stack, sections in found.items():
        version = installed.get(stack) or [*stack_module(stack).VERSIONS][-1]
        data[stack] = {"version": version, "keys": {name: sorted(keys) for name, keys in sections.items()}}
        print(f"{stack} {version}: " + ", ".join(f"{name or 'top'} {len(keys)}" for name, keys in sections.items()))
    # one section per line, since the file is a list of names
    lines = [
        f'"{stack}": {{"version": "{one["version"]}", "keys": {{\n' + ",\n".join(f'  "{name}": {json.dumps(keys)}' for name, keys in one["keys"].items()) + "\n}}"
        for stack, one in sorted(data.items())
    ]  # fmt: skip
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
