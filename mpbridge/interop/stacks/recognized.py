"""The stack that a command line belongs to: told by the program that it starts, and by the names of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

from mpbridge.common.errors import DataError, cut
from mpbridge.interop.stacks.megatron_lm_arguments import options
from mpbridge.interop.stacks.reading import known

LM = "megatron-lm"
TITLES: Mapping[str, str] = {
    LM: "Megatron-LM", "transformers": "Transformers", "torchtitan": "torchtitan", "lightning": "Lightning",
    "megatron-bridge": "Megatron Bridge",
}  # fmt: skip
"""Stacks that are read from arguments -> their names in messages; where options decide nothing, the first is assumed."""
_EXAMPLES = frozenset({"model_name_or_path", "tokenizer_name", "dataset_name", "dataset_config_name", "torch_dtype", "dtype"})  # fmt: skip
"""Options of Transformers' example scripts beside those of TrainingArguments."""
_ANYONES = ("__deepspeed", "__deepspeed_config", "__bf16", "__fp16")
_DECIDES = (
    "use_fsdp", "use_deepspeed", "use_megatron_lm", "config_file", "mixed_precision", "deepspeed_config_file", "zero_stage",
)  # fmt: skip
"""Options of `accelerate launch` that may change what its program's own arguments mean."""


@dataclass(frozen=True, slots=True)
class Recognized:
    """A command line's stack."""

    stack: str
    assumed: tuple[str, ...] = ()
    """What was assumed, where its options leave it open."""
    undecided: tuple[str, ...] = ()
    """What decides beside its options."""


def recognize_words(words: Sequence[str], program: Sequence[str] = ()) -> Recognized:
    """The stack of a program's arguments. program: the words before them, up to the program. Raises DataError where a file decides that is not read."""
    started = started_by(program)
    names = [word.partition("=")[0] for word in words if _is_setting(word)]
    if started == "deepspeed":  # these belong to its own programs as well
        names = [name for name in names if name.replace("-", "_") not in _ANYONES]
    counts = {stack: sum(_has(stack, name) for name in names) for stack in TITLES}
    best = max(counts, key=lambda stack: counts[stack])
    several = list(counts.values()).count(counts[best]) > 1
    clear = 2 * counts[best] >= len(names) and not several
    if started == "accelerate":
        if not clear:
            give = "its file (accelerate config), or the arguments of the program that it starts (--args)"
            raise DataError(f"the options of accelerate launch are not read: pass {give}")
        decides = [word for word in program if word.startswith("--") and word.strip("-").partition("=")[0] in _DECIDES]
        if decides:
            text = f"accelerate launch {' '.join(decides)}: the launcher shards the model or casts it: pass its file"
            return Recognized(best, undecided=(text,))
        text = f"read as {TITLES[best]}'s arguments: the options of accelerate launch before them are not read"
        return Recognized(best, (text,))
    if started == "deepspeed":
        if clear:
            return Recognized(best)
        file = deepspeed_file(words)  # it holds the precision, unless the arguments are clearly another stack's
        where = cut(file) if file else "the file of --deepspeed_config"
        give = "pass that file (or name the stack, --from STACK)"
        raise DataError(f"this command starts its program with DeepSpeed, whose settings stand in {where}: {give}")
    if started is not None:
        return Recognized(started)
    if clear:
        return Recognized(best)
    why = "its options do not tell the stack" if several else f"it has {counts[best]} of the {len(names)} options"
    return Recognized(best, (f"read as {TITLES[best]}'s arguments: assumed, since {why} (--from STACK names another)",))


def started_by(program: Sequence[str]) -> str | None:
    """The stack that a launch command belongs to, 'deepspeed' for its launcher; None for a program that may be any stack's."""
    names = [PurePath(word).name for word in program]
    last = program[-1] if program else ""
    if last.startswith("torchtitan.") or PurePath(last).parts[-2:] == ("torchtitan", "train.py"):
        return "torchtitan"
    if names[-1:] == ["run_recipe.py"]:
        return "megatron-bridge"
    pairs = pairwise(names)
    if any(pair == ("accelerate", "launch") for pair in pairs) or "accelerate.commands.launch" in program:
        return "accelerate"
    return "deepspeed" if "deepspeed" in names[:-1] else None


def deepspeed_file(words: Sequence[str]) -> str | None:
    """The file of DeepSpeed's settings that some arguments name."""
    return value_of(words, "--deepspeed_config") or value_of(words, "--deepspeed-config")


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value of an option, in the word behind it or attached to it; None if it is not given, or has none."""
    found = ""  # the last one counts, as for argparse
    for word, after in pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if name == option:
            found = value if equals else after
    return None if not found or found.startswith("--") else found


def _is_setting(word: str) -> bool:
    head, equals, _ = word.lstrip("+~").partition("=")
    return len(word) > 2 and (word.startswith("--") or bool(equals and head.replace(".", "_").isidentifier()))


def _has(stack: str, name: str) -> bool:
    """Whether an option or override is known to a stack, by its name."""
    dashed, plain = name.startswith("--"), name.lstrip("-+~")
    section, dot, _ = plain.partition(".")
    under = plain.replace("-", "_")
    keys = known(stack)
    if stack == LM:
        return name in options()
    if stack == "transformers":
        return dashed and (under in keys[""] or under in _EXAMPLES)
    if stack == "torchtitan":
        return dashed and (section in keys[""] if dot else plain in ("module", "config"))
    if stack == "lightning":
        return plain in keys["trainer"] or (section in keys[""] and bool(dot) and dashed)
    return not dashed and section in keys[""]
