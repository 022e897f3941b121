"""Globs over module paths: which paths they match, and their remainder below a layer."""

from __future__ import annotations

import fnmatch
import functools
import operator
import re
from collections.abc import Iterable, Sequence

_TOKEN = re.compile(r"\*|\?|\[!?\]?[^]]*\]|.", re.DOTALL)
_NUMBER = re.compile(r"[0-9]+")
_EXPERT = re.compile(r"\blocal_experts\.\d+\.")
DECODER = "decoder.layers.{}."
MTP = ("mtp.layers.{}.transformer_layer.", "mtp.layers.{}.mtp_model_layer.")
"""Stem of the linears of a multi-token prediction depth: megatron-core 0.16's name of its layer, and that since 0.17."""
MTP_PROJECTION = "eh_proj"
"""The only quantized linear of such a depth outside its layer."""

ADAPTERS = ("*.adapter.*",)
"""Globs over the parameters of low-rank adapters, which hang below the linear that they belong to."""
_LORA = re.compile(r"\.(?:adapter|lora_[ABab])\b")

_WHOLE = tuple(dict.fromkeys(f"{stem.partition('.')[0]}." for stem in (DECODER, *MTP)))
"""Prefixes of full paths, which no linear's name below its layer has."""
_DECODER_PATH = re.compile(r"(?:^|\.)(?:decoder\.)?layers\.(\d+)\.(.+)$")
_MTP_PATH = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)$")


def is_adapter(path: str) -> bool:
    """Whether a module or parameter belongs to a low-rank adapter: mpbridge's and Megatron Bridge's word for it, or peft's."""
    return _LORA.search(path) is not None


@functools.lru_cache(maxsize=16384)  # asked again for each recipe and layout
def place(path: str) -> tuple[str, int | None] | None:
    """(path below the layer, 0-based layer) of a global module or parameter name; the layer is None in multi-token prediction, whose layers the
    model does not number; None outside the layers."""
    ahead = _MTP_PATH.search(path)
    if ahead is not None:
        return ahead.group(2), None
    match = _DECODER_PATH.search(path)
    return None if match is None else (match.group(2), int(match.group(1)))


def names(module: str) -> tuple[str, ...]:
    """The names that a glob may use for a linear: an expert also has the name of the grouped module with all experts on a GPU."""
    grouped = _EXPERT.sub("", module)
    return (module,) if grouped == module else (module, grouped)


@functools.lru_cache(maxsize=16384)  # asked again for each layout and recipe that is priced
def matches(glob: str, module: str, path: str = "") -> bool:
    """Whether `glob` matches the linear `module` (below its layer) or `path` (the full path: 'decoder.layers.3.mlp.linear_fc1')."""
    found = any(fnmatch.fnmatchcase(name, glob) for name in names(module))
    return found or (bool(path) and any(fnmatch.fnmatchcase(name, glob) for name in names(path)))


def dead_patterns(patterns: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """The globs among `patterns` that match none of `names`: an exclusion that excludes nothing is an error, not a no-op."""
    return tuple(pattern for pattern in patterns if not fnmatch.filter(names, pattern))


def below(glob: str, stem: str) -> tuple[str, ...]:
    """The globs that, below `stem`, match what `glob` matches as a full path: '*.mlp.*' below 'decoder.layers.3.' leaves '*.mlp.*' and 'mlp.*'."""
    return _below(glob, told_apart(stem, (glob,)))


def told_apart(stem: str, globs: Iterable[str]) -> str:
    """`stem` with its number as 0 where only stars of the globs can match one, so that they leave the same below every layer's."""
    return stem if any(map(_numbers, globs)) else _NUMBER.sub("0", stem)


@functools.lru_cache(maxsize=4096)
def _numbers(glob: str) -> bool:
    """Whether something other than a star may match a number that stands alone, as a layer's does: not the 1 of 'linear_fc1'."""
    tokens = ["", *_TOKEN.findall(glob)]
    digit = [token == "?" or token[:1] == "[" or token.isdigit() for token in tokens]
    alone = [before in ("", ".", "*") or also for before, also in zip(tokens, digit, strict=True)]
    return any(map(operator.and_, digit[1:], alone))


@functools.lru_cache(maxsize=4096)
def _below(glob: str, stem: str) -> tuple[str, ...]:
    tokens = _TOKEN.findall(glob)
    states = _through_stars(tokens, {0})
    for letter in stem:
        moved = set()
        for at in states:
            if at < len(tokens) and tokens[at] == "*":
                moved.add(at)
            elif at < len(tokens) and fnmatch.fnmatchcase(letter, tokens[at]):
                moved.add(at + 1)
        states = _through_stars(tokens, moved)
    rest = ["".join(tokens[at:]) for at in sorted(states)]
    return tuple(dict.fromkeys(text for text in rest if text))


def within(glob: str, stem: str) -> tuple[str, ...]:
    """The globs to match below `stem`: the glob itself, unless it has a full path's prefix and so matches no name below a layer, plus those from `below`."""
    own = () if glob.startswith(_WHOLE) else (glob,)
    left = (rest for rest in below(glob, stem) if not rest.startswith("."))
    return tuple(dict.fromkeys((*own, *left)))


def _through_stars(tokens: list[str], states: set[int]) -> set[int]:
    """The states, plus those after stars that match nothing."""
    found = set(states)
    for at in sorted(states):
        after = at
        while after < len(tokens) and tokens[after] == "*":
            after += 1
            found.add(after)
    return found
