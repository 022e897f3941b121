"""Lists of modules in high precision as each engine's own matcher resolves them, compared with what the folder stores."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from mpbridge.settings.huggingface.served import UNREAD, group_of

ENGINES = ("vllm", "sglang", "trtllm")
MOST = 2_000_000
"""Maximum number of comparisons of patterns with modules."""
Matcher = Callable[[str, str], bool]
"""(entry, module): whether the entry keeps the module in high precision."""
_NAMES = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "q_a_proj": "fused_qkv_a_proj"}
"""The first linear of a fused group -> an engine's name of the whole."""


def _part(entry: str, module: str) -> bool:
    return module == entry or entry in module or fnmatchcase(module, entry)


def _below(entry: str, module: str) -> bool:
    return module == entry or module.startswith(f"{entry}.")


def _pattern(entry: str, module: str) -> bool:
    if not entry.startswith("re:"):
        return entry == module
    return _tame(entry[3:]) and re.match(entry[3:], module) is not None


@functools.lru_cache(maxsize=1024)
def _tame(pattern: str) -> bool:
    """Whether a regular expression of a foreign file is valid and short of work: at most three repetitions, none of a group."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return len(pattern) <= 500 and len(re.findall(r"[*+{]", pattern)) <= 3 and not re.search(r"\)[*+{?]", pattern)


def _wildcard_below(entry: str, module: str) -> bool:
    return fnmatchcase(module, entry) or _below(entry, module)


def _sglang_modelopt(entry: str, module: str) -> bool:
    """A wildcard of the name or of one of its words; below a module, except for experts; and a latent projection named in any layer means all layers'."""
    if any(fnmatchcase(part, entry) for part in (module, *module.split("."))):
        return True
    last, own = entry.rpartition(".")[2], module.rpartition(".")[2]
    if last in _LATENT and last in own.replace("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"):
        return True
    return not module.endswith(".experts") and _below(entry, module)


_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_MATCHERS: Mapping[tuple[str, str], Matcher] = {
    ("vllm", "modelopt"): _part,
    ("vllm", "fp8"): operator.eq,
    ("sglang", "modelopt"): _sglang_modelopt,
    ("sglang", "fp8"): _below,
    ("sglang", "mxfp8"): _below,
    ("vllm", "compressed-tensors"): _pattern,
    ("sglang", "compressed-tensors"): _pattern,
}
"""(engine, quant_method) -> how an entry matches; TensorRT-LLM: fnmatch. Sources: vLLM 0.33 quantization/modelopt.py is_layer_excluded and
utils/quant_utils.py is_layer_skipped; SGLang 0.5.23 quantization/utils.py; TensorRT-LLM at 008e0af, models/modeling_utils.py is_module_excluded_from_quantization."""


def fused(module: str) -> str:
    """The engine's module that computes `module`: 'model.layers.0.mlp.gate_up_proj'."""
    if ".experts." in module:
        return module.partition(".experts.")[0] + ".experts"
    first = group_of(module)
    stem, _, last = first.rpartition(".")
    return f"{stem}.{_NAMES[last]}" if last in _NAMES else first


def full_names(high: Iterable[str]) -> list[str]:
    """The list that every engine resolves to exactly `high`, full names of modules: those names, and a set of experts by its own, for which some look."""
    return sorted({name for module in high for name in (module, *([fused(module)] if ".experts." in module else ()))})


def list_faults(
    entries: Sequence[object], modules: Mapping[str, bool], method: str, engines: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """(module or entry, what is wrong) of a list. modules: full name of every linear in the folder -> whether it is stored quantized.

    Without engines: what no engine can resolve as meant. With engines: what their matchers make of it.
    """
    names = [entry for entry in entries if isinstance(entry, str)]
    if len(names) < len(entries):
        yield "the list", "has entries that are not names"
    listed = set(names)
    loose = [name for name in names if name not in modules]
    if len(loose) * len(modules) > MOST:
        yield "the list", f"has {len(loose)} entries that name no module of the folder: not resolved any further"
        return
    tame = "valid, at most three repetitions, none of a group"
    for name in loose:
        if name.startswith("re:") and not _tame(name[3:]):
            why = f"is not a regular expression that mpbridge evaluates ({tame}): its modules are not decided"
            yield name, why
        elif not any(_by_any(name, module) for module in modules):
            yield name, "matches no module of the folder, so an engine keeps nothing in high precision by it"
    unread = "is stored quantized, and no engine reads it so"
    yield from ((module, unread) for module, low in modules.items() if low and module.endswith(UNREAD))
    modules = {module: low for module, low in modules.items() if not module.endswith(UNREAD)}
    for module, low in modules.items():
        if low and module in listed:
            yield module, "is stored quantized, and listed as in high precision"
        if not low and module not in listed and not any(_by_any(name, module) for name in loose):
            yield module, "is stored in high precision, and not listed: an engine builds it quantized"
    for engine in engines:
        yield from _by_engine(engine, names, loose, modules, method)


def _by_any(entry: str, module: str) -> bool:
    return _pattern(entry, module) or _wildcard_below(entry, module)


def _by_engine(
    engine: str, names: Sequence[str], loose: Sequence[str], modules: Mapping[str, bool], method: str
) -> Iterator[tuple[str, str]]:
    matcher: Matcher = _MATCHERS.get((engine, method), lambda entry, module: fnmatchcase(module, entry))
    listed = set(names)
    whole: dict[str, list[str]] = {}
    for module in modules:
        whole.setdefault(fused(module), []).append(module)
    for name, parts in whole.items():
        # an engine looks up the names of all parts of a fused module, and then its own name; substrings count in the latter only
        by_part = operator.eq if matcher is _part and name not in parts else matcher
        # SGLang looks for the name of the whole set of experts alone
        looked = [name] if matcher is _sglang_modelopt and name.endswith(".experts") else parts
        hits = [part in listed or any(by_part(entry, part) for entry in loose) for part in looked]
        if len(set(hits)) > 1:
            some = ", ".join(part.rpartition(".")[2] for part, hit in zip(parts, hits, strict=True) if hit)
            yield name, f"{engine} refuses it: {some} of it is listed, the rest is not"
            continue
        entry = next((entry for entry in names if matcher(entry, name)), None)
        kept = hits[0] or entry is not None
        if kept and modules[parts[0]]:
            by = f" (by the entry {entry!r})" if entry is not None else ""
            yield name, f"is stored quantized, and {engine} keeps it in high precision{by}"
        elif not kept and not modules[parts[0]]:
            yield name, f"is stored in high precision, and {engine} finds no entry for it"
