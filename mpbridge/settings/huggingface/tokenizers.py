"""Reads a tokenizer's files without any library: where they are, the number of tokens, the end-of-text token and the padding token."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.files import text_of
from mpbridge.settings.huggingface.folder import CONFIG, PREFIX, read_json_file
from mpbridge.settings.huggingface.vocabulary import ENDS, TokenizerKind, Vocabulary, is_ranks, trained, vocabulary

BYTE = "byte"
"""The built-in tokenizer."""
LIBRARY: Mapping[TokenizerKind, str] = {
    "json": "tokenizers",
    "parts": "transformers",
    "sentencepiece": "sentencepiece",
    "tiktoken": "tiktoken",
}
"""The package that encodes with such a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer on this machine."""

    name: str
    """As given."""
    kind: TokenizerKind
    file: Path
    """Its main file."""
    size: int
    """Number of tokens: the largest id plus one."""
    end: int | None
    """Id of the end-of-text token; None if the files name none or several."""
    ends_by: str
    """Where this is stated, as text; if `end` is None, why."""
    end_token: str = ""
    """The token itself, if the files contain it."""
    pad: int | None = None
    """Id of the padding token; None if the files name none that can be told from text."""
    pad_by: str = ""
    """Where this is stated, as text; if `pad` is None, why."""

    def without_end(self) -> str:
        """The fault if `end` is None."""
        return f"data.tokenizer={self.name!r} does not say which token ends a text{f' ({self.ends_by})' if self.ends_by else ''}: set it, for example data.end_of_text='</s>'"

    def end_line(self) -> str:
        """The end-of-text token and where it is stated, if known."""
        if self.end is None:
            return ""
        token = f" {self.end_token!r}" if self.end_token else ""
        return f"a text ends with token {self.end}{token}: {self.ends_by}"


def is_factory(name: str) -> bool:
    """Whether `name` is package.module:function."""
    module, colon, function = name.partition(":")
    names = all(part.isidentifier() for part in (*module.split("."), function))
    return bool(colon) and names and not name.startswith(PREFIX)


def tokenizer_files(name: str, end: str | int | None = None) -> TokenizerFiles:
    """The files that `name` means: a folder, a file in it, or the id of a repository in the Hugging Face cache.

    end: the end-of-text token or its id, instead of the files' own. Raises BadValue with the cure.
    """
    path = _located(name)
    kind, file = _main_file(path, name)
    words = vocabulary(kind, file)
    size, tokens = words.size, words.tokens
    number: int | None
    if end is not None:
        number, who = _given(name, tokens, size, end), "data.end_of_text"
    else:
        number, who = _end(file, kind, tokens, size)
    # tiktoken's ranks do not include special tokens: the end-of-text token may come after the last rank
    size = max(size, (number or 0) + 1)
    token = next((text for text, place in tokens.items() if place == number), "")
    pad, pad_by = _pad(file, kind, words, end=number)
    return TokenizerFiles(
        name=name, kind=kind, file=file, size=size, end=number, ends_by=who, end_token=token, pad=pad, pad_by=pad_by
    )


def _located(name: str) -> Path:
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if path.exists():
        return path
    found = cached(name)
    if found is not None:
        return found
    if is_repository(name):
        raise BadValue(
            f"data.tokenizer={name!r}: no such file or folder here, and the Hugging Face cache has no repository of that name. "
            f"If the hub is reachable: mpbridge data inspect --tokenizer {name} (downloads it once; needs the extra hf). Otherwise give a local folder"
        )
    raise BadValue(
        f"data.tokenizer={name!r}: expected 'byte', a folder with tokenizer.json, a tokenizer file, a repository's id, or package.module:function"
    )


def is_repository(name: str) -> bool:
    """Whether `name` could be a repository's id: 'gpt2' or 'owner/name'."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".-~" and set(part) <= _ID for part in parts)


_ID = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


def cached(name: str) -> Path | None:
    """The newest copy of a repository in huggingface_hub's cache; None if there is none."""
    if not is_repository(name):
        return None
    home = Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = hub / f"models--{name.replace('/', '--')}"
    try:
        revision = text_of(repository / "refs" / "main", kind="note").strip()
    except (OSError, UnicodeDecodeError):
        return None
    place = repository / "snapshots" / revision
    return place if place.is_dir() else None


def _main_file(path: Path, name: str) -> tuple[TokenizerKind, Path]:
    if path.is_file():
        if path.name == "vocab.json":
            return "parts", path
        if path.name.endswith(".json"):
            return "json", path
        return ("tiktoken", path) if is_ranks(path) else ("sentencepiece", path)
    for file, kind in (("tokenizer.json", "json"), ("tokenizer.model", ""), ("vocab.json", "parts")):
        found = path / file
        if found.is_file():
            return (kind or ("tiktoken" if is_ranks(found) else "sentencepiece")), found  # type: ignore[return-value]
    ranks = sorted(path.glob("*.tiktoken"))
    if ranks:
        return "tiktoken", ranks[0]
    raise BadValue(
        f"data.tokenizer={name!r}: {path} contains none of tokenizer.json, tokenizer.model, *.tiktoken, vocab.json with merges.txt"
    )


def _given(name: str, tokens: Mapping[str, int], size: int, given: str | int) -> int:
    number = tokens.get(given) if isinstance(given, str) else given
    if number is None or not 0 <= number < size:
        raise BadValue(f"data.end_of_text={given!r}: the tokenizer {name!r} has no such token (it has {size:,} tokens)")
    return number


def _end(file: Path, kind: TokenizerKind, tokens: Mapping[str, int], size: int) -> tuple[int | None, str]:
    """(the id of the end-of-text token, where it is stated), or None and why: it is not stated, or two statements differ."""
    said = [(who, tokens[text]) for who, text in _said(file, kind) if text in tokens]
    if len({number for _, number in said}) > 1:
        return None, " and ".join(f"{who} says {number}" for who, number in said)
    numbers = _eos_numbers(file.parent, size if kind != "tiktoken" else 2 * size)
    if said:
        who, number = said[0]
        if numbers and number not in numbers:
            return None, f"{who} says {number}, eos_token_id of {CONFIG} says {' or '.join(map(str, numbers))}"
        return number, who
    if numbers:
        listed = f"eos_token_id of {CONFIG}"
        return (numbers[0], listed) if len(numbers) == 1 else (None, f"{listed} lists {', '.join(map(str, numbers))}")
    if kind == "tiktoken":
        return size - 1, "its file names no such token, so its id is the one after the last rank"
    usual = [text for text in ENDS if text in tokens]
    if len(usual) == 1:
        return tokens[usual[0]], "by its name only, since the files do not state it (data.end_of_text sets another)"
    return None, f"{' and '.join(map(repr, usual))} are both possible" if usual else ""


def _pad(file: Path, kind: TokenizerKind, words: Vocabulary, *, end: int | None) -> tuple[int | None, str]:
    """(the id of the padding token, where it is stated), or None and why: the first statement decides, and a text token or the end-of-text token cannot be padding."""
    named = [(who, words.tokens[text]) for who, text in _spelled(file, "pad_token") if text in words.tokens]
    if words.padding in words.tokens:
        inside = "pad_piece of the model" if kind == "sentencepiece" else f"padding of {file.name}"
        named.append((inside, words.tokens[words.padding]))
    number = _optional(file.parent / CONFIG).get("pad_token_id")
    if type(number) is int and words.special is not None:  # (a number alone may be any token's)
        named.append((f"pad_token_id of {CONFIG}", number))
    if not named:
        return None, ""
    who, number = named[0]
    if number == end:
        return None, f"{who} says {number}, which ends a text"
    if words.special is not None and number not in words.special:
        return None, f"{who} says {number}, which is not a special token"
    return number, who


def _said(file: Path, kind: TokenizerKind) -> Iterator[tuple[str, str]]:
    """(where, eos_token) from SentencePiece's own model, else from tokenizer_config.json and special_tokens_map.json."""
    found = False
    for who, text in _spelled(file, "eos_token"):
        found = True
        yield who, text
    if kind == "sentencepiece" and not found:
        yield "eos_piece of the model", trained(file, 47, "</s>")


def _spelled(file: Path, field: str) -> Iterator[tuple[str, str]]:
    """(where, the token) for a field in tokenizer_config.json and special_tokens_map.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _optional(file.parent / name).get(field)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            yield f"{field} of {name}", text


def _eos_numbers(folder: Path, size: int) -> list[int]:
    """The ids in eos_token_id of config.json, one or several."""
    said = _optional(folder / CONFIG).get("eos_token_id")
    return [
        number for number in (said if isinstance(said, list) else [said]) if type(number) is int and 0 <= number < size
    ]


def _optional(file: Path) -> Mapping[str, Any]:
    data = read_json_file(file) if file.is_file() else {}
    return data if isinstance(data, dict) else {}
