"""What a tokenizer's files say without any library: where they are, how many tokens there are, which token ends a text."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpbridge.errors import BadValue
from mpbridge.huggingface.folder import CONFIG, PREFIX, read_json_file

BYTE = "byte"
"""The built-in tokenizer."""
TokenizerKind = Literal["json", "sentencepiece", "tiktoken", "parts"]
"""A tokenizer.json of the library tokenizers; SentencePiece's model; ranks of tiktoken; vocab.json with merges.txt."""
LIBRARY: Mapping[TokenizerKind, str] = {
    "json": "tokenizers",
    "parts": "transformers",
    "sentencepiece": "sentencepiece",
    "tiktoken": "tiktoken",
}
"""The package that encodes with such files."""
LARGEST = 1 << 27
"""Bytes of a tokenizer's file that is read at all."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""Tokens that end a text where nothing says which one does, by the usual families; two of them are no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer on this machine."""

    name: str
    """As it was given."""
    kind: TokenizerKind
    file: Path
    """Its main file."""
    size: int
    """Tokens: the largest number plus one."""
    end: int | None
    """Number of the token that ends a text; None where the files say none, or several."""
    ends_by: str
    """Who says so, in words; where `end` is None: why not."""
    end_token: str = ""
    """The token itself, where the files spell it."""

    def without_end(self) -> str:
        """What is wrong, where `end` is None."""
        return f"data.tokenizer={self.name!r} does not say which token ends a text{f' ({self.ends_by})' if self.ends_by else ''}: give it, as in data.end_of_text='</s>'"

    def end_line(self) -> str:
        """The token that ends a text and who says so, where one is known."""
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
    """The files that `name` means: a folder, a file in it, or a repository's id of which the Hugging Face cache has a copy.

    end: the token that ends a text, or its number, in place of the files' own. Raises BadValue with the cure.
    """
    path = _located(name)
    kind, file = _main_file(path, name)
    size, tokens = _READERS[kind](file)
    number: int | None
    if end is not None:
        number, who = _given(name, tokens, size, end), "data.end_of_text"
    else:
        number, who = _end(file, kind, tokens, size)
    # ranks of tiktoken leave special tokens out: the one that ends a text may stand behind the last of them
    size = max(size, (number or 0) + 1)
    token = next((text for text, place in tokens.items() if place == number), "")
    return TokenizerFiles(name=name, kind=kind, file=file, size=size, end=number, ends_by=who, end_token=token)


def _located(name: str) -> Path:
    path = Path(name.removeprefix(PREFIX)).expanduser()
    if path.exists():
        return path
    found = cached(name)
    if found is not None:
        return found
    if is_repository(name):
        raise BadValue(
            f"data.tokenizer={name!r}: no such file or folder here, and the Hugging Face cache has no copy of a repository of that name. "
            f"Where it can be reached: mpbridge data inspect --tokenizer {name} (fetches it once, needs the extra hf), or give a local folder"
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
    """The newest copy of a repository in huggingface_hub's cache; None where there is none."""
    if not is_repository(name):
        return None
    home = Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = hub / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    place = repository / "snapshots" / revision
    return place if place.is_dir() else None


def _main_file(path: Path, name: str) -> tuple[TokenizerKind, Path]:
    if path.is_file():
        if path.name.endswith(".json"):
            return "json", path
        return ("tiktoken", path) if _is_ranks(path) else ("sentencepiece", path)
    for file, kind in (("tokenizer.json", "json"), ("tokenizer.model", ""), ("vocab.json", "parts")):
        found = path / file
        if found.is_file():
            return (kind or ("tiktoken" if _is_ranks(found) else "sentencepiece")), found  # type: ignore[return-value]
    ranks = sorted(path.glob("*.tiktoken"))
    if ranks:
        return "tiktoken", ranks[0]
    raise BadValue(
        f"data.tokenizer={name!r}: {path} holds none of tokenizer.json, tokenizer.model, *.tiktoken, vocab.json with merges.txt"
    )


def _is_ranks(file: Path) -> bool:
    """Whether a file has tiktoken's lines: base64, blank, rank. (Llama 3's tokenizer.model is one.)"""
    with file.open("rb") as stream:
        token, blank, rank = stream.readline(4096).partition(b" ")
    try:
        base64.b64decode(token, validate=True)
    except binascii.Error:
        return False
    return bool(token and blank) and rank.strip().isdigit()


def _of_json(file: Path) -> tuple[int, Mapping[str, int]]:
    data = read_json_file(file, largest=LARGEST)
    model = data.get("model") if isinstance(data, dict) else None
    listed = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(listed, list):  # Unigram: [piece, score]
        tokens = {entry[0]: number for number, entry in enumerate(listed) if isinstance(entry, list) and entry}
    elif isinstance(listed, dict):
        tokens = dict(listed)
    else:
        raise BadValue(f"{file}: expected a tokenizer of the library tokenizers, with model.vocab")
    added = data.get("added_tokens") or []
    tokens |= {
        entry["content"]: entry["id"]
        for entry in added
        if isinstance(entry, dict) and {"content", "id"} <= entry.keys()
    }
    return _counted(tokens, file)


def _of_parts(file: Path) -> tuple[int, Mapping[str, int]]:
    tokens = read_json_file(file, largest=LARGEST)
    if not isinstance(tokens, dict) or not (file.parent / "merges.txt").is_file():
        raise BadValue(f"{file}: expected tokens with their numbers, and merges.txt beside it")
    return _counted(tokens, file)


def _of_ranks(file: Path) -> tuple[int, Mapping[str, int]]:
    """tiktoken's ranks; the token that ends a text gets the number behind the last."""
    largest = -1
    with file.open("rb") as stream:
        for line in stream:
            rank = line.rpartition(b" ")[2].strip()
            if rank.isdigit():
                largest = max(largest, int(rank))
    return largest + 2, {ENDS[0]: largest + 1}


def _counted(tokens: Mapping[str, Any], file: Path) -> tuple[int, Mapping[str, int]]:
    if not tokens or any(type(number) is not int or not 0 <= number < 1 << 31 for number in tokens.values()):
        raise BadValue(f"{file}: expected tokens with numbers from 0")
    return max(tokens.values()) + 1, tokens


def _of_sentencepiece(file: Path) -> tuple[int, Mapping[str, int]]:
    """SentencePiece's ModelProto: field 1 repeated is a piece, whose field 1 is its text (sentencepiece_model.proto)."""
    if file.stat().st_size > LARGEST:
        raise BadValue(f"{file} cannot be read: larger than {LARGEST} bytes")
    try:
        pieces = [_text(piece) for number, piece in _fields(file.read_bytes()) if number == 1]
    except (IndexError, ValueError):
        pieces = []
    if not pieces:
        raise BadValue(
            f"{file}: expected a tokenizer.json, a SentencePiece model, or lines of tiktoken (base64 and rank)"
        )
    return len(pieces), {piece: number for number, piece in enumerate(pieces)}


def _text(piece: bytes) -> str:
    return next((text.decode("utf-8", "replace") for number, text in _fields(piece) if number == 1), "")


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of a protobuf message's length-delimited fields; the others are passed over. Raises ValueError, IndexError."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError("cut off")
            yield tag >> 3, data[at : at + length]
            at += length
        elif kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("no such kind of field")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number without an end")


_READERS = {"json": _of_json, "parts": _of_parts, "sentencepiece": _of_sentencepiece, "tiktoken": _of_ranks}


def _given(name: str, tokens: Mapping[str, int], size: int, given: str | int) -> int:
    number = tokens.get(given) if isinstance(given, str) else given
    if number is None or not 0 <= number < size:
        raise BadValue(f"data.end_of_text={given!r}: the tokenizer {name!r} has no such token (it has {size:,})")
    return number


def _end(file: Path, kind: TokenizerKind, tokens: Mapping[str, int], size: int) -> tuple[int | None, str]:
    """(the token that ends a text, who says so), or None and why: nobody does, or two differ."""
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
        return size - 1, "its file names no such token, so it takes the id after the last rank"
    usual = [text for text in ENDS if text in tokens]
    if len(usual) == 1:
        return tokens[usual[0]], "by its name alone, nothing in the files says so (data.end_of_text gives another)"
    return None, f"{' and '.join(map(repr, usual))} could both be it" if usual else ""


def _said(file: Path, kind: TokenizerKind) -> Iterator[tuple[str, str]]:
    """(where, eos_token) of SentencePiece's own model, else of tokenizer_config.json and special_tokens_map.json."""
    found = False
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _optional(file.parent / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found = True
            yield f"eos_token of {name}", text
    if kind == "sentencepiece" and not found:
        yield "eos_piece of the model", _eos_piece(file)


def _eos_piece(file: Path) -> str:
    """Field 47 of TrainerSpec, which is field 2 of ModelProto; its default is </s> (sentencepiece_model.proto)."""
    trained = [content for number, content in _fields(file.read_bytes()) if number == 2]
    return next((text.decode("utf-8", "replace") for spec in trained for number, text in _fields(spec) if number == 47), "</s>")  # fmt: skip


def _eos_numbers(folder: Path, size: int) -> list[int]:
    """eos_token_id of config.json, one or several."""
    said = _optional(folder / CONFIG).get("eos_token_id")
    return [
        number for number in (said if isinstance(said, list) else [said]) if type(number) is int and 0 <= number < size
    ]


def _optional(file: Path) -> Mapping[str, Any]:
    data = read_json_file(file) if file.is_file() else {}
    return data if isinstance(data, dict) else {}
