"""Reads other stacks' files: recognizes the stack and interprets the settings. Nothing in a file is executed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.common.errors import MOST_SHOWN, BadValue, DataError, cut
from mpbridge.common.files import text_of as read_bounded
from mpbridge.interop.stacks.base import Imported
from mpbridge.interop.stacks.checkpoint_args import METADATA, arguments_file, read_arguments
from mpbridge.interop.stacks.exporters import stack_module, version_for
from mpbridge.interop.stacks.launch_script import NO_PROGRAM, LaunchScript, read_script, read_words
from mpbridge.interop.stacks.reading import KINDS, PRECISION
from mpbridge.interop.stacks.recognized import LM, TITLES, Recognized, deepspeed_file, recognize_words, value_of
from mpbridge.interop.stacks.sharded_torch import has_comment, read_comment
from mpbridge.precision.yaml_loader import MOST_BITS, bounded_loader, said

LONGEST = 2000
"""Maximum length of one line about a file, regardless of its contents."""
MOST_READ = 1_000_000
"""Characters of a configuration: PyYAML reads some 350,000 a second."""
_LINES = (*KINDS, "other", "in_force")


def read_file(path: Path, *, stack: str | None = None, version: str | None = None, env: Mapping[str, str] = {}) -> Imported:  # fmt: skip
    """The meaning of a stack's file; in a Python file, of the function named after a colon ('config_registry.py:llama3_8b').

    stack: None: recognized from its contents. Raises DataError or BadValue naming the file.
    """
    file, colon, function = str(path).rpartition(".py:")
    if colon:
        path = Path(f"{file}.py")
    if str(path).startswith("hf:") or path.is_dir():
        path = _inside(path)
    if not path.is_file():
        expected = "a stack's configuration, launch script or training script (--args takes arguments)"
        raise DataError(f"{path}: no such file, expected {expected}")
    if path.suffix in (".pt", ".ckpt", ".pth") or path.name == METADATA:
        made = _importer(LM).read_values(read_arguments(path), version=_version(LM, version))
        return _finished(made, version, env)
    text = text_of(path)
    if path.suffix == ".py":
        return read_python(text, path, function if colon else "", stack=stack, version=version, env=env)
    return read_text(text, stack=stack, version=version, name=path.name, env=env, path=path)


def _inside(path: Path) -> Path:
    """The file that holds a checkpoint's settings. Raises DataError if there is none."""
    folder = Path(str(path).removeprefix("hf:"))
    try:
        return arguments_file(path)
    except (DataError, OSError):
        if folder == path and not (path / "config.json").is_file():
            raise
    expected = f"a stack's configuration, script or checkpoint (mpbridge check --config hf:{folder} reads such a model)"
    raise DataError(f"{path}: a model in Hugging Face's format, expected {expected}")


def text_of(path: Path) -> str:
    """A configuration file's text; bytes that are not UTF-8 (in a comment) are replaced. Raises DataError for a file that is not text, or too large."""
    try:
        text = read_bounded(path, errors="replace", kind="configuration")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if "\0" in text or text.count("\ufffd") > len(text) // 10:
        raise DataError(f"{path}: a binary file, expected a configuration in text (UTF-8)")
    return text


def read_python(
    text: str, path: Path | None, function: str = "", *, stack: str | None = None, version: str | None = None, env: Mapping[str, str] = {}
) -> Imported:  # fmt: skip
    """The meaning of a Python configuration, from its text alone: of one function, or of the comment that `export` wrote.

    Raises DataError if the stack has no such files, and for expressions that are nested too deeply.
    """
    name = path.name if path is not None else "the file"
    try:
        if not function and has_comment(text):
            exported = read_comment(text, name=name, stack=stack)
            found = dataclasses.replace(exported, version=_version(exported.stack, version))
        else:
            found = _of_function(text, path, name, function, stack, version)
    except RecursionError:
        raise DataError(f"{name}: its expressions are nested too deeply for a configuration") from None
    return _finished(found, version, env)


def _of_function(text: str, path: Path | None, name: str, function: str, stack: str | None, version: str | None) -> Imported:  # fmt: skip
    from mpbridge.interop.stacks.python_text import Reading
    from mpbridge.interop.stacks.python_values import Module

    stack = stack or next((found for mark, found in _PYTHON if mark in text), None)
    functions = [found for _, found in _PYTHON]
    if stack not in functions:
        whose = f"a Python script{f' of {stack}' if stack else ''}"
        cure = "pass its configuration file or its arguments (--args)"
        read = f"functions of {' and '.join(functions)} are read as text, and what `mpbridge export` wrote"
        raise DataError(f"{name}: {whose} would have to be executed: {cure}. Of Python, {read}, by its comment")
    module, source = stack_module(stack), Module(text, path, name)
    reading, public = Reading(opaque=module.OPAQUE), [one for one in source.functions if not one.startswith("_")]
    if not function and len(public) != 1:
        some = ", ".join(public[:4])
        raise DataError(f"{name} has {len(public)} functions: name one, {name}:FUNCTION ({some}, ...)")
    function = function or public[0]
    made = reading.function(source, function)
    found: Imported = module.read_made(made, reading.notes, name=function, version=_version(stack, version))
    return found


def read_args(text: str, *, stack: str | None = None, version: str | None = None, env: Mapping[str, str] = {}) -> Imported:  # fmt: skip
    """The meaning of command-line arguments, with the command before them or without. env: values of variables in them.

    stack: None: recognized by the program and by the options' names; Megatron-LM is assumed, which `assumed` reports, where they leave it open.
    Raises BadValue for text that is not a command line.
    """
    return _read_words(read_words(text, env), stack, version, "--args", Path())


def _read_words(script: LaunchScript, stack: str | None, version: str | None, name: str, beside: Path | None) -> Imported:  # fmt: skip
    """By the reader of their stack, or that of the DeepSpeed file that they name and the script writes. beside: the folder of the files that they name."""
    file = deepspeed_file(script.words)
    if file is not None and file in script.documents:
        found = read_data_of("deepspeed", load(script.documents[file], "ds.json"), version=version)
        said = f"{cut(file)} is written by the script and decides: the options of its program are not read"
        notes = tuple(note for note in script.notes if "here-document" not in note)
        own = [f"{cut(word)}: the program makes the optimizer itself, perhaps with 8-bit moments" for word in script.words if _EIGHT_BIT.match(word)]  # fmt: skip
        return dataclasses.replace(found, assumed=(said, *notes, *found.assumed), undecided=(*own, *found.undecided))
    told = recognize_words(script.words, script.program) if stack is None else Recognized(stack)
    module = _importer(told.stack)
    if not hasattr(module, "read"):
        raise BadValue(f"{told.stack} is configured by files, not by arguments: pass the file")
    words, notes = script.words, (*told.assumed, *script.notes)
    if not words and name != "--args":
        why = f": {script.notes[0]}" if script.notes else ""
        raise DataError(f"{name or 'the text'}: it has no {TITLES.get(told.stack, told.stack)} option{why}")
    silent = not any(word.startswith("-") and PRECISION.search(word) for word in words)  # no word says a precision
    alone = "no command here starts a Python program: what it is started with decides: pass its arguments (--args)"
    undecided = (
        *told.undecided, *(note for note in notes if "not decided" in note and _DECIDES.search(note)),
        *((alone,) if NO_PROGRAM in script.notes else ()),
        *(() if file is None else (f"--deepspeed_config: {cut(file)} decides: pass that file (--from deepspeed)",)),
        *(told.assumed if silent and name != "--args" else ()),  # neither the stack nor a precision is said
        # a variable without a value, where one is an option's name, or where nothing says a precision: what it holds would
        *(note for note in notes if " no value" in note and (silent or "--" in words)),
    )  # fmt: skip
    rules = {"rules": _rules_beside(script, words, beside)} if told.stack == LM else {}
    found = module.read(words, version=_version(told.stack, version), **rules)
    notes = tuple(note for note in notes if note not in undecided)
    found = dataclasses.replace(found, assumed=(*notes, *found.assumed), undecided=(*undecided, *found.undecided))
    return _finished(found, version)


def _rules_beside(script: LaunchScript, words: Sequence[str], beside: Path | None) -> Any:
    """The data of Megatron-LM's file of rules by module, if the script writes it or it stands where its name says; else None."""
    named = value_of(words, _importer(LM).MODULES_FILE)
    if named is None or named in script.documents:
        return named and load(script.documents[named], named)
    place = None if beside is None else beside / named
    return load(text_of(place), named) if place is not None and place.is_file() else None


_EIGHT_BIT = re.compile(r"--[\w-]*(bnb|bitsandbytes|8.?bit)")
"""Options of programs that make an optimizer of bitsandbytes' without naming it in DeepSpeed's file."""
_DECIDES = re.compile(rf"{PRECISION.pattern}|optimizer|fsdp|transformer-impl|hysteresis|deepspeed.config|zero.stage")
"""Pattern of notes on options that decide a fact."""


def read_text(
    text: str, *, stack: str | None = None, version: str | None = None, name: str = "", env: Mapping[str, str] = {}, path: Path | None = None
) -> Imported:  # fmt: skip
    """The meaning of a file's text. name: the file's, which helps to recognize the stack. path: the file's, to find files that a script sources."""
    if name.endswith(".py"):
        return read_python(text, None, stack=stack, version=version, env=env)
    if not name.endswith(_DATA) and (stack == "megatron-lm" or _is_script(text, name)):
        return _read_words(read_script(text, env, path), stack, version, name, path and path.parent)
    stack = stack or recognize(text, name)
    return read_data_of(stack, load(text, name), version=version, env=env)


def read_data_of(stack: str, data: Any, *, version: str | None = None, env: Mapping[str, str] = {}) -> Imported:
    """The meaning of plain data as a stack's configuration. Raises DataError if there is none."""
    if data is None:
        raise DataError(f"the configuration is empty: it has no {stack} settings")
    found = _importer(stack).read_data(data, version=_version(stack, version))
    nothing = (f"it is empty: every setting of {stack} is at its default",) if data == {} else ()
    return _finished(dataclasses.replace(found, assumed=(*nothing, *found.assumed)), version, env)


_LONG = re.compile(rf"\b0[xob]\w{{{MOST_BITS // 4}}}")
"""A whole number in TOML that no message can show; tomllib reads decimal ones up to 4,300 digits."""


def load(text: str, name: str) -> Any:
    """Plain data of a YAML, JSON or TOML text. Raises DataError."""
    import tomllib

    import yaml

    where = name or "the file"
    if len(text) > MOST_READ:
        raise DataError(f"{where}: {len(text):,} characters, expected at most {MOST_READ:,} in a configuration")
    if name.endswith(".toml") and _LONG.search(text):
        raise DataError(f"{where}: cannot be read: a whole number of more than {MOST_BITS:,} bits")
    try:
        if name.endswith(".json") and "\t" in text:  # which JSON allows, and YAML does not
            text = text.replace("\t", " ")
        # a TOML file without keys counts as an empty file, not as an empty mapping
        return (tomllib.loads(text) or None) if name.endswith(".toml") else yaml.load(text, Loader=_plain_loader())
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise DataError(f"{where}: cannot be read: {said(error)[:MOST_SHOWN]}") from None


def recognize(text: str, name: str) -> str:
    """The stack that a text belongs to. Raises DataError if none is recognized."""
    if _is_script(text, name):  # in a data file: options under MODEL_ARGS
        return "megatron-lm"
    if name.endswith(".toml"):
        return "torchtitan"
    data, where = load(text, name), name or "the text"
    if not isinstance(data, Mapping):
        raise DataError(f"{where}: not a stack's configuration: expected a mapping, found {type(data).__name__}")
    if ours(data) or "extends" in data:
        kind = "run configuration" if ours(data) else "recipe or configuration"
        raise DataError(f"{where}: already a {kind} of mpbridge (mpbridge compare and export --config read it)")
    if any(isinstance(part, Mapping) and "_component_" in part for part in data.values()):
        raise DataError(f"{where}: torchtune's configuration (_component_), which is not among the stacks")
    found = next((stack for stack, keys in _MARKS if any(key in data for key in keys)), None)
    if found is None:
        cure = "name the stack, mpbridge import FILE --from STACK"
        raise DataError(f"{where}: not recognized as any stack's configuration: {cure}")
    return found


def _is_script(text: str, name: str) -> bool:
    """Whether a text is a launch script, or arguments alone."""
    return name.endswith(".sh") or text.startswith("#!") or "--micro-batch-size" in text


def ours(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is a run configuration of mpbridge: by how it names its recipe, or by sections that Megatron Bridge lacks."""
    sections = {"mixed_precision", "model", "optimizer", "scheduler", "ddp", "train", "checkpoint", "logger"}
    own = data.get("mixed_precision")
    named = isinstance(own, list) or (isinstance(own, Mapping) and "recipe" in own)
    return named or ("mixed_precision" in data and bool(_OURS & data.keys()) and data.keys() <= sections | _OURS)


_DATA = (".yaml", ".yml", ".json", ".toml")
_OURS = frozenset({"data", "parallel", "audit", "engine", "emulate", "target", "te"})
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # keys that only this stack uses, the most specific stacks first: several share 'optimizer' or 'model'
    ("accelerate", ("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config")),
    ("megatron-lm", ("MODEL_ARGS",)),
    ("megatron-bridge", ("mixed_precision", "ddp")),
    ("deepspeed", ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "torch_autocast")),
    ("automodel", ("step_scheduler", "distributed", "fp8")),
    ("lightning", ("trainer",)),
    ("transformers", ("per_device_train_batch_size", "output_dir", "bf16_full_eval")),
    ("torchtitan", ("training", "job", "parallelism")),
    ("deepspeed", ("bf16", "fp16")),
)
_PYTHON = (("megatron.bridge", "megatron-bridge"), ("torchtitan", "torchtitan"))
"""Text that identifies a stack's Python configurations -> the stack."""


def _importer(stack: str) -> Any:
    """The module that reads a stack's files: STACK_import, or STACK itself."""
    module = stack_module(stack)
    try:
        return importlib.import_module(f"{module.__name__}_import")
    except ModuleNotFoundError:
        if not hasattr(module, "read_data"):
            raise BadValue(f"{stack} has no configuration file to read: its settings are Python arguments") from None
    return module


def _version(stack: str, asked: str | None) -> str:
    """The version to read for: the requested one if it is supported, otherwise the nearest; `_finished` reports the difference."""
    return version_for(stack_module(stack), asked, doing="read")[0]


def _finished(found: Imported, asked: str | None, env: Mapping[str, str] = {}) -> Imported:
    """`found` with overlong lines cut, and with a note if the requested version is not a supported one, or for each variable that its source has no use for."""
    lines: dict[str, Any] = {name: tuple(cut(line, LONGEST) for line in getattr(found, name)) for name in _LINES}
    _, assumed = version_for(stack_module(found.stack), asked, doing="read")
    idle = (f"--env {name}: has no effect: only launch scripts and --args have variables" for name in env)
    return dataclasses.replace(found, **(lines | {"assumed": (*idle, *assumed, *lines["assumed"])}))


@functools.cache
def _plain_loader() -> Any:
    """A safe loader of yaml's that keeps foreign tags as plain values, made on first use: yaml is not needed for shell scripts."""
    import yaml

    class Plain(bounded_loader()):  # type: ignore[misc]
        pass

    def plain(loader: Any, _suffix: str, node: Any) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return loader.construct_scalar(node)
        whole = loader.construct_mapping if isinstance(node, yaml.MappingNode) else loader.construct_sequence
        return whole(node, deep=True)

    Plain.add_multi_constructor("!", plain)
    Plain.add_multi_constructor("tag:", plain)
    return Plain
