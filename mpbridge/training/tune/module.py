"""Tuning for any module and loss, and for a causal LM in a local Hugging Face folder, whose configuration and weights are read as data, never run as code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, DataError, Refused
from mpbridge.common.files import text_of
from mpbridge.common.shipped import install
from mpbridge.numerics import Emulation, emulate_linears
from mpbridge.numerics.modules import refuse_without_linears
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.registry import FOREIGN, get_mixed_precision_config
from mpbridge.settings.huggingface.folder import read_config, read_json_file, tensors
from mpbridge.training.tune.levels import Budget, Levels, Pricing, Where, aimed, budget_of, prepared
from mpbridge.training.tune.proof import ModuleSubject
from mpbridge.training.tune.report import evidence
from mpbridge.training.tune.tuning import ENOUGH, FEWEST, Tuned, TuningRequest, refuse_bad, tuned

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def tune_module(
    module: torch.nn.Module,
    step: Loss,
    batches: Sequence[Any],
    recipe: str | Path | MixedPrecisionConfig,
    *,
    levels: Sequence[str] | None = None,
    budget: Budget | str | None = None,
    unseen: int = 4,
    where: Where | None = None,
    facts: dict[str, Any] | None = None,
    library: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[Tuned, dict[str, Any]]:
    """Which of `module`'s linears can run in low precision under `recipe`: the result, and the content of a recipe file whose `modules:` use the module's names.

    step: (module, batch) -> the batch's loss, a scalar tensor on which backward has not been called. batches: the last `unseen` are for the proof, the
    others (4 or more, 8 rank better) are scored. levels, budget, where: as for `mpbridge tune`. facts: what the evidence states about model and data; library: the module's library,
    with its version. options: those of Emulation. The module is restored, without gradients. Raises what `mpbridge tune` raises, BadValue for a step that calls backward
    itself and for batches that are not a sequence, Refused for a module that is frozen or already emulated.
    """
    every = _listed(batches, unseen)
    limit = budget if isinstance(budget, Budget) else budget_of(budget)
    if limit.what == "memory":
        raise BadValue(
            "a memory budget needs a run whose bytes can be counted (--config): for a bare module only time and gradient error are known"
        )
    config, where = get_mixed_precision_config(recipe), where or Where()
    found, notes = _aimed(config, levels, where)
    policy = prepared(config)[1]
    refuse_without_linears(module)
    _refuse_frozen(module)
    asked = TuningRequest(
        config=config,
        levels=found,
        budget=limit,
        batches=len(every) - unseen,
        unseen=unseen,
        pricing=Pricing(machine=where.priced(policy), constants=where.constants),
        fused=False,
        notes=(*notes, *_unreached(module)),
    )
    with _emulated(module, policy, options) as emulation:
        result = tuned(ModuleSubject(module, step, every, emulation, unseen=unseen), asked, say)
    kind = type(module).__name__
    said = {"model": kind, FOREIGN: kind, **(facts or {})}
    return result, evidence(
        result, recipe=str(recipe) if not isinstance(recipe, MixedPrecisionConfig) else "", facts=said, library=library
    )


@contextmanager
def _emulated(module: torch.nn.Module, policy: PrecisionPolicy, options: Mapping[str, Any]) -> Iterator[Emulation]:
    """`module` in training mode with its linears emulated; restored afterwards, without gradients."""
    emulation, training = emulate_linears(module, policy, **options), module.training
    try:
        module.train()
        yield emulation
    finally:
        emulation.detach()
        module.train(training)
        module.zero_grad(set_to_none=True)


def _aimed(config: MixedPrecisionConfig, levels: Sequence[str] | None, where: Where) -> tuple[Levels, list[str]]:
    """As `aimed`, for a module. Raises BadValue for a stack."""
    if where.stack is not None:
        raise BadValue(
            f"stack {where.stack}: a stack's settings name megatron-core's linears, not those of another module: leave it out"
        )
    return aimed(config, levels, where)


def _listed(batches: Sequence[Any], unseen: int) -> list[Any]:
    if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")) or isinstance(batches, (str, Mapping)):
        raise BadValue(
            f"batches is a {type(batches).__name__}, expected a sequence, since each batch is used more than once: "
            f"list(itertools.islice(batches, {ENOUGH + unseen}))"
        )
    if unseen < 2:
        raise BadValue(f"unseen={unseen}: a standard error needs 2 batches or more")
    count = len(batches)
    if count - unseen < FEWEST:
        raise BadValue(
            f"{count} batches, {unseen} of them unseen, leave {max(count - unseen, 0)} to score, and scores of fewer than {FEWEST} rank nothing: "
            f"give {FEWEST + unseen} batches or more ({ENOUGH + unseen} rank better)"
        )
    return [batches[number] for number in range(count)]


def _refuse_frozen(module: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise Refused(
            f"every parameter of {type(module).__name__} is frozen (requires_grad=False), so there is no gradient to measure: "
            "unfreeze those that will be trained"
        )


def _unreached(module: torch.nn.Module) -> list[str]:
    """Notes on weights that are multiplied outside of `torch.nn.Linear`, such as experts in one tensor: no rule reaches them."""
    held = [
        (f"{name}.{own}" if name else own, type(child).__name__, weight.numel())
        for name, child in module.named_modules()
        if not isinstance(child, (torch.nn.Linear, torch.nn.Embedding))
        for own, weight in child.named_parameters(recurse=False)
        if weight.dim() > 1
    ]
    if not held:
        return []
    share = sum(size for *_, size in held) / sum(weight.numel() for weight in module.parameters())
    name, kind, _ = max(held, key=lambda item: item[2])
    some = "1 weight" if len(held) == 1 else f"{len(held)} weights"
    return [
        f"{share:.0%} of the parameters are in {some} outside of torch.nn.Linear and stay in high precision whatever is chosen, such as {name} of {kind}"
    ]


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

    Raises what `_aimed` and `refuse_code` raise before anything is loaded, DataError for a text that is too short, BadValue for invalid numbers.
    """
    refuse_bad(batches, unseen)
    if seq_length < 2 or batch_size < 1:
        raise BadValue(f"--seq-length {seq_length}, --batch-size {batch_size}: at least 2 and 1")
    _aimed(get_mixed_precision_config(recipe), levels, where or Where())
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
