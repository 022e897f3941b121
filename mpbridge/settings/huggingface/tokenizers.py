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

BYTE = "byte"
"""The built-in tokenizer."""
BYTE_VOCABULARY = 259
"""256 bytes, then end of document (256), padding (257) and begin of sequence (258)."""
FILE = "tokenizer.json"
LIBRARY = "tokenizers"
"""The package that encodes."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""Usual end-of-text tokens of the common families, used if none is stated; ambiguous if a vocabulary has two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of one file."""

    size: int
    """The largest id plus one."""
    tokens: Mapping[str, int]
    special: frozenset[int]
    """Ids that no text is encoded to."""
    padding: str
    """The padding token that the file names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer on this machine."""

    name: str
    """As given."""
    file: Path
    """Its tokenizer.json."""
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
        why = f" ({self.ends_by})" if self.ends_by else ""
        cure = "set it, for example data.end_of_text='</s>'"
        return f"data.tokenizer={self.name!r} does not say which token ends a text{why}: {cure}"

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
    file = path / FILE if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        raise BadValue(
            f"data.tokenizer={name!r}: {path} is or contains no {FILE}; the library transformers makes one of any other form: "
            "transformers.AutoTokenizer.from_pretrained('FOLDER').save_pretrained('NEW')"
        )
    words = vocabulary(file)
    number, who = _end(file, words) if end is None else (_given(name, words, end), "data.end_of_text")
    token = next((text for text, place in words.tokens.items() if place == number), "")
    pad, pad_by = _pad(file, words, end=number)
    return TokenizerFiles(
        name=name, file=file, size=words.size, end=number, ends_by=who, end_token=token, pad=pad, pad_by=pad_by
    )


def _located(name: str) -> Path:
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if (found := path if path.exists() else cached(name)) is not None:
        return found
    text = "expected 'byte', a tokenizer.json or a folder with one, a repository's id, or package.module:function"
    if is_repository(name):
        hub = f"mpbridge data inspect --tokenizer {name} (downloads it once; needs the extra hf)"
        text = "no such file or folder here, and the Hugging Face cache has no repository of that name. "
        text += f"If the hub is reachable: {hub}. Otherwise give a local folder"
    raise BadValue(f"data.tokenizer={name!r}: {text}")


def is_repository(name: str) -> bool:
    """Whether `name` could be a repository's id: 'gpt2' or 'owner/name'."""
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".-~" and set(part) <= _ID for part in parts)


_ID = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


def cached(name: str) -> Path | None:
    """The newest copy of a repository in huggingface_hub's cache; None if there is none."""
    if not is_repository(name):
        return None
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = hub / f"models--{name.replace('/', '--')}"
    try:
        revision = text_of(repository / "refs" / "main", kind="note").strip()
    except (OSError, UnicodeDecodeError):
        return None
    place = repository / "snapshots" / revision
    return place if place.is_dir() else None


def _given(name: str, words: Vocabulary, given: str | int) -> int:
    number = words.tokens.get(given) if isinstance(given, str) else given
    if number is None or not 0 <= number < words.size:
        has = f"the tokenizer {name!r} has no such token (it has {words.size:,} tokens)"
        raise BadValue(f"data.end_of_text={given!r}: {has}")
    return number


def _end(file: Path, words: Vocabulary) -> tuple[int | None, str]:
    """(the id of the end-of-text token, where it is stated), or None and why: it is not stated, or two statements differ."""
    tokens = words.tokens
    said = [(who, tokens[text]) for who, text in _spelled(file, "eos_token") if text in tokens]
    if len({number for _, number in said}) > 1:
        return None, " and ".join(f"{who} says {number}" for who, number in said)
    ids = _optional(file.parent / CONFIG).get("eos_token_id")
    numbers = [one for one in (ids if isinstance(ids, list) else [ids]) if type(one) is int and 0 <= one < words.size]
    if said:
        who, number = said[0]
        if numbers and number not in numbers:
            return None, f"{who} says {number}, eos_token_id of {CONFIG} says {' or '.join(map(str, numbers))}"
        return number, who
    if numbers:
        listed = f"eos_token_id of {CONFIG}"
        return (numbers[0], listed) if len(numbers) == 1 else (None, f"{listed} lists {', '.join(map(str, numbers))}")
    usual = [text for text in ENDS if text in tokens]
    if len(usual) == 1:
        return tokens[usual[0]], "by its name only, since the files do not state it (data.end_of_text sets another)"
    return None, f"{' and '.join(map(repr, usual))} are both possible" if usual else ""


def _pad(file: Path, words: Vocabulary, *, end: int | None) -> tuple[int | None, str]:
    """(the id of the padding token, where it is stated), or None and why: the first statement decides, and a text token or the end-of-text token cannot be padding."""
    named = [(who, words.tokens[text]) for who, text in _spelled(file, "pad_token") if text in words.tokens]
    if words.padding in words.tokens:
        named.append((f"padding of {file.name}", words.tokens[words.padding]))
    number = _optional(file.parent / CONFIG).get("pad_token_id")
    if type(number) is int:
        named.append((f"pad_token_id of {CONFIG}", number))
    if not named:
        return None, ""
    who, number = named[0]
    if number == end:
        return None, f"{who} says {number}, which ends a text"
    if number not in words.special:
        return None, f"{who} says {number}, which is not a special token"
    return number, who


def _spelled(file: Path, field: str) -> Iterator[tuple[str, str]]:
    """(where, the token) for a field in tokenizer_config.json and special_tokens_map.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _optional(file.parent / name).get(field)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            yield f"{field} of {name}", text


def _optional(file: Path) -> Mapping[str, Any]:
    data = read_json_file(file) if file.is_file() else {}
    return data if isinstance(data, dict) else {}


def vocabulary(file: Path) -> Vocabulary:
    """The tokens of a tokenizer.json. Raises BadValue."""
    data = read_json_file(file, kind="vocabulary")
    model = data.get("model") if isinstance(data, dict) else None
    listed = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[Any, Any]
    if isinstance(listed, list):  # Unigram: [piece, score]
        pieces = {number: entry[0] for number, entry in enumerate(listed) if isinstance(entry, list) and entry}
        tokens = {piece: number for number, piece in pieces.items() if isinstance(piece, str)}
    elif isinstance(listed, dict):
        tokens = dict(listed)
    else:
        raise BadValue(f"{file}: expected a tokenizer of the library tokenizers, with model.vocab")
    more = data["added_tokens"] if isinstance(data.get("added_tokens"), list) else []
    added = [entry for entry in more if isinstance(entry, dict) and isinstance(entry.get("content"), str)]
    tokens |= {entry["content"]: entry.get("id") for entry in added}
    special = {entry["id"] for entry in added if entry.get("special") is True and type(entry.get("id")) is int}
    filled = data.get("padding")
    padding = filled.get("pad_token") if isinstance(filled, dict) else None
    if not tokens or any(type(number) is not int or not 0 <= number < 1 << 31 for number in tokens.values()):
        raise BadValue(f"{file}: expected tokens with numbers from 0")
    named, size = padding if isinstance(padding, str) else "", max(tokens.values()) + 1
    return Vocabulary(size=size, tokens=tokens, special=frozenset(special), padding=named)
