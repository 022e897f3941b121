"""A causal LM in a local Hugging Face folder: configuration and weights are read as data, never run as code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, DataError, Refused
from mpbridge.common.files import text_of
from mpbridge.common.shipped import install
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.settings.huggingface.folder import read_config, read_json_file, tensors
from mpbridge.training.tune.costs import Budget
from mpbridge.training.tune.expressible import Where
from mpbridge.training.tune.module import aimed, tune_module
from mpbridge.training.tune.tuning import Tuned, refuse_bad

TOKENIZER = "tokenizer_config.json"


def tune_folder(
    folder: Path,
    text: Path,
    recipe: str,
    *,
    levels: Sequence[str] | None = None,
    budget: Budget | None = None,
    batches: int = 8,
    unseen: int = 4,
    seq_length: int = 128,
    batch_size: int = 4,
    where: Where | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Tuned, dict[str, Any]]:
    """As `tune_module`, for the model in `folder` on the text file. Nothing is downloaded, and no code from the folder runs.

    Raises what `aimed` and `refuse_code` raise before anything is loaded, DataError for a text that is too short, BadValue for invalid numbers.
    """
    refuse_bad(batches, unseen)
    if seq_length < 2 or batch_size < 1:
        raise BadValue(f"--seq-length {seq_length}, --batch-size {batch_size}: at least 2 and 1")
    aimed(get_mixed_precision_config(recipe), levels, where or Where())
    refuse_code(folder)
    words = _read(text)
    model, encode = _loaded(folder, say)
    every = _cut(encode(words), (batches + unseen, batch_size, seq_length), text)
    facts = {
        "checkpoint": str(folder),
        "data": str(text),
        "batch": f"{batch_size} sequences of {seq_length} tokens",
    }
    return tune_module(
        model,
        _loss,
        every,
        recipe,
        levels=levels,
        budget=budget,
        unseen=unseen,
        where=where,
        facts=facts,
        library=f"transformers {version('transformers')}",
        say=say,
    )


def _cut(tokens: torch.Tensor, shape: tuple[int, int, int], text: Path) -> list[torch.Tensor]:
    """The first tokens as batches; shape: batches, sequences per batch, tokens per sequence. Raises DataError."""
    count, size, length = shape
    wanted = count * size * length
    if tokens.numel() < wanted:
        raise DataError(
            f"{text} has {tokens.numel()} tokens, expected {wanted} for {count} batches of {size} x {length}: "
            "use a longer text, or smaller --batches, --unseen, --batch-size or --seq-length"
        )
    return list(tokens[:wanted].view(shape))


def _loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return found


def refuse_code(folder: Path) -> None:
    """Refuses a folder whose model or tokenizer is code, whose weights are pickles or damaged, or that has none. Loads nothing. Raises Contradiction,
    BadValue, Refused."""
    read_config(folder)
    if (folder / TOKENIZER).is_file() and "auto_map" in (read_json_file(folder / TOKENIZER) or {}):
        raise Refused(
            f"{folder / TOKENIZER} names Python code to run (auto_map), and mpbridge never runs it: use a tokenizer that transformers itself supports"
        )
    if not tensors(folder):
        raise Refused(f"{folder} has no weights: expected .safetensors files beside config.json")


def _loaded(folder: Path, say: Callable[[str], None]) -> tuple[torch.nn.Module, Callable[[str], torch.Tensor]]:
    try:
        import transformers
    except ImportError:
        raise Refused(f"a Hugging Face folder needs the package transformers: {install('hf')}") from None
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, attn_implementation="eager", **safe
        ).to(torch.bfloat16)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise Refused(
            f"{folder} cannot be loaded as a causal LM: {str(error).splitlines()[0]} (transformers {transformers.__version__})"
        ) from error
    vocabulary = int(model.config.vocab_size)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        if vocabulary < 256:
            raise Refused(f"{folder} has no tokenizer, and a vocabulary of {vocabulary} is too small for bytes")
        say(f"{folder} has no tokenizer: the text's bytes are its tokens")
        return model, lambda text: torch.tensor(list(text.encode("utf-8")), dtype=torch.long)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **safe)
    return model, lambda text: torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)


def _read(path: Path) -> str:
    try:
        return text_of(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text {path}: {error} (expected a UTF-8 text file)") from None
