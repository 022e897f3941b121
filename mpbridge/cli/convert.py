"""`mpbridge convert SOURCE TARGET`: converts weights between Hugging Face folders (hf:DIR) and checkpoints (ckpt:DIR), and config.json to a configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mpbridge.cli.options import JSON, arg
from mpbridge.cli.text import answer, print_line, record
from mpbridge.common.errors import BadValue
from mpbridge.common.formats import dtype
from mpbridge.common.report.progress import bar
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.huggingface.folder import PREFIX, folder_of, is_reference, tensors
from mpbridge.settings.huggingface.served import METHODS
from mpbridge.settings.huggingface.tensors import ADAPTERS
from mpbridge.training.checkpoint.store import locate

if TYPE_CHECKING:
    from mpbridge.training.serving.convert import Taken

SUMMARY = "convert weights and configuration from a Hugging Face folder, and back"
CHECKPOINT = "ckpt:"
ARGUMENTS = (
    arg("source SOURCE", f"{PREFIX}DIR, or {CHECKPOINT}DIR (a checkpoint, or a folder of them)"),
    arg("target TARGET", f"{CHECKPOINT}DIR, {PREFIX}DIR, or a new FILE.yaml for only the configuration"),
    arg(f"--like {PREFIX}DIR", "to a folder: copy config.json and tokenizer from that one, for the same model; with --adapters, the base"),
    arg("--dtype", "to a folder: dtype of the weights (default: as stored; fp32 uses main weights)", ("bf16", "fp16", "fp32")),
    arg("--quantization", "to a folder: quantize as training did, and store codes and scales in the format of that quant_method (vLLM's and SGLang's --quantization)", METHODS),
    arg("--adapters", "to a folder, of a run with adapters: their own folder for peft (alone), or the model with them: merged; merged-before or merged-after where the run quantizes the base: before its quantization, or after", ADAPTERS),
    arg("--recipe NAME", "with --quantization: quantize by this recipe (a name or a YAML file) instead of the run's"),
    JSON,
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Converts, and reports what happened to the weights."""
    source, target = args.source, args.target
    if is_reference(source) and target.startswith(CHECKPOINT):
        _only_to_folders(args)
        _take(args, _place(target, CHECKPOINT))
    elif source.startswith(CHECKPOINT) and is_reference(target):
        folder = _place(target, PREFIX)
        if not folder.name:  # '.' and '/': the folder is renamed into place when complete
            raise BadValue(f"{target}: expected the name of a new folder")
        _give(args, folder)
    elif is_reference(source) and target.endswith((".yaml", ".yml")):
        _only_to_folders(args)
        _configuration(args, Path(target))
    else:
        raise BadValue(
            f"convert {source} {target}: expected {PREFIX}DIR {CHECKPOINT}DIR, {CHECKPOINT}DIR {PREFIX}DIR, or {PREFIX}DIR FILE.yaml"
        )
    return 0


def _place(target: str, prefix: str) -> Path:
    folder = target.removeprefix(prefix)
    if not folder:
        raise BadValue(f"{target}: expected {prefix}DIR, the name of a folder")
    return Path(folder)


def _only_to_folders(args: argparse.Namespace) -> None:
    options = ("like", "dtype", "quantization", "recipe", "adapters")
    given = [f"--{name} {getattr(args, name)}" for name in options if getattr(args, name)]
    if given:
        raise BadValue(f"{' and '.join(given)}: only for {CHECKPOINT}DIR {PREFIX}DIR; here weights are taken as stored")


def _configuration(args: argparse.Namespace, file: Path) -> None:
    if file.exists():
        raise BadValue(f"{file} already exists: expected a new file")
    ConfigContainer.load(args.source, check=False).dump(file)
    wrote = (
        f"{args.source}: wrote model, tokenizer and sample length to {file}; set recipe, optimizer and train yourself"
    )
    answer(args, {"from": args.source, "path": str(file)}, lambda: print_line(wrote))


def _take(args: argparse.Namespace, folder: Path) -> None:
    from mpbridge.training.serving.convert import to_checkpoint

    made = ConfigContainer.load(args.source, check=False).resolved(training=False)
    with bar("converted", quiet=args.json) as told:
        taken = to_checkpoint(folder_of(args.source), folder, made, told)
    notes = _told(taken)
    facts = record(taken, "tensors", "elements", "dtypes", "widened", "rounded", notes=notes)
    lines = (
        f"{taken.path}: {taken.tensors:,} tensors, {taken.elements:,} parameters in {_words(taken.dtypes)}",
        *(f"  {note}" for note in notes),
        f"  to train on: mpbridge train --config {args.source} checkpoint.load={folder} --reset-optimizer train.train_iters=N optimizer.lr=X data.corpus=...",
    )
    answer(args, {"from": args.source, "path": str(taken.path), **facts}, lambda: print_line(*lines))


def _told(taken: Taken) -> list[str]:
    kinds = " and ".join(taken.dtypes)
    narrow = [dtype(name).short for name in taken.dtypes if name in ("bfloat16", "float16")]
    widened = f"{taken.widened:,} tensors were blockwise FP8 and are widened; {taken.rounded:,} of their values are rounded to {kinds}"
    initial = "main weights are initialized from {}: a recipe with FP32 main weights starts from exactly these values; what rounding lost is not restored"
    return [widened] * bool(taken.widened) + [initial.format(name) for name in narrow[:1]]


def _give(args: argparse.Namespace, target: Path) -> None:
    from mpbridge.training.serving.convert import opened, to_folder
    from mpbridge.training.serving.merge import Merge

    like = folder_of(args.like) if args.like else None
    if args.like and not is_reference(args.like):
        raise BadValue(f"--like {args.like}: expected {PREFIX}DIR")
    if args.recipe and not args.quantization:
        raise BadValue(
            f"--recipe {args.recipe}: only with --quantization, which says in which format its codes are stored"
        )
    if args.quantization and args.adapters == "alone":
        raise BadValue(f"--quantization {args.quantization} with --adapters alone: adapters are in high precision")
    path = locate(Path(args.source.removeprefix(CHECKPOINT)))
    compared = args.adapters == "alone" and like is not None and bool(tensors(like))
    if compared:
        with opened(path, like=like, adapters="alone") as export, Merge(path, export, how="alone", like=like) as base:
            base.verify()
    how = {"dtype": dtype(args.dtype).value if args.dtype else None, "method": args.quantization, "recipe": args.recipe}
    with bar("written", quiet=args.json) as told:
        given = to_folder(path, target, like=like, adapters=args.adapters, told=told, **how)
    notes = [f"{given.left_out} padding rows of the embedding are omitted"] if given.left_out else []
    notes += given.notes
    if args.adapters == "alone" and like is not None and not compared:
        notes.append(f"{like} has no weights: whether it is the base that was trained beside was not compared")
    facts = record(given, "family", "tensors", "elements", "dtypes", notes=notes)
    facts |= {} if given.merged is None else {"merged": given.merged}
    lines = (
        f"{path} -> {given.path}: {given.family}, {given.tensors:,} tensors, {given.elements:,} elements in {_words(given.dtypes)}",
        *(f"  {note}" for note in notes),
    )
    answer(args, {"from": str(path), "path": str(given.path), **facts}, lambda: print_line(*lines))


def _words(dtypes: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count:,})" if len(dtypes) > 1 else name for name, count in dtypes.items())
