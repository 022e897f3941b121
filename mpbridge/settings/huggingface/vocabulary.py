"""Reads one tokenizer file without any library: its tokens with their ids, which of them are special, and its padding token."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpbridge.common.errors import BadValue
from mpbridge.common.files import regular
from mpbridge.settings.huggingface.folder import content_of, read_json_file

TokenizerKind = Literal["json", "sentencepiece", "tiktoken", "parts"]
"""A tokenizer.json of the library tokenizers; SentencePiece's model; ranks of tiktoken; vocab.json with merges.txt."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
"""Usual end-of-text tokens of the common families, used if none is stated; ambiguous if a vocabulary has two of them."""
_CONTROL = 3
"""SentencePiece's type for control pieces, which never encode text (sentencepiece_model.proto)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of one file."""

    size: int
    """The largest id plus one."""
    tokens: Mapping[str, int]
    special: frozenset[int] | None
    """Ids that no text is encoded to; None: the file does not say."""
    padding: str = ""
    """The padding token that the file names."""


def vocabulary(kind: TokenizerKind, file: Path) -> Vocabulary:
    """The file's tokens. Raises BadValue."""
    return _READERS[kind](file)


def is_ranks(file: Path) -> bool:
    """Whether a file has tiktoken's lines: base64, blank, rank. (Llama 3's tokenizer.model is one.)"""
    with regular(file) as stream:
        token, blank, rank = stream.readline(4096).partition(b" ")
    try:
        base64.b64decode(token, validate=True)
    except binascii.Error:
        return False
    return bool(token and blank) and rank.strip().isdigit()


def _of_json(file: Path) -> Vocabulary:
    data = read_json_file(file, kind="vocabulary")
    model = data.get("model") if isinstance(data, dict) else None
    listed = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[Any, Any]
    if isinstance(listed, list):  # Unigram: [piece, score]
        tokens = {
            entry[0]: number
            for number, entry in enumerate(listed)
            if isinstance(entry, list) and entry and isinstance(entry[0], str)
        }
    elif isinstance(listed, dict):
        tokens = dict(listed)
    else:
        raise BadValue(f"{file}: expected a tokenizer of the library tokenizers, with model.vocab")
    added = [entry for entry in _listed(data.get("added_tokens")) if isinstance(entry.get("content"), str)]
    tokens |= {entry["content"]: entry.get("id") for entry in added}
    special = {entry["id"] for entry in added if entry.get("special") is True and type(entry.get("id")) is int}
    filled = data.get("padding")
    padding = filled.get("pad_token") if isinstance(filled, dict) else None
    return _counted(tokens, file, frozenset(special), padding if isinstance(padding, str) else "")


def _listed(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _of_parts(file: Path) -> Vocabulary:
    tokens = read_json_file(file, kind="vocabulary")
    if not isinstance(tokens, dict) or not (file.parent / "merges.txt").is_file():
        raise BadValue(f"{file}: expected tokens with their ids, and merges.txt next to it")
    return _counted(tokens, file, None)


def _of_ranks(file: Path) -> Vocabulary:
    """tiktoken's ranks; the end-of-text token gets the id after the last."""
    largest = -1
    for line in content_of(file, kind="vocabulary").splitlines():
        rank = line.rpartition(b" ")[2].strip()
        if rank.isdigit():
            largest = max(largest, int(rank))
    # (special tokens are not in the file: as many more ids may be theirs)
    return Vocabulary(
        size=largest + 2, tokens={ENDS[0]: largest + 1}, special=frozenset(range(largest + 1, 2 * largest + 4))
    )


def _counted(tokens: Mapping[str, Any], file: Path, special: frozenset[int] | None, padding: str = "") -> Vocabulary:
    if not tokens or any(type(number) is not int or not 0 <= number < 1 << 31 for number in tokens.values()):
        raise BadValue(f"{file}: expected tokens with numbers from 0")
    return Vocabulary(size=max(tokens.values()) + 1, tokens=tokens, special=special, padding=padding)


def _of_sentencepiece(file: Path) -> Vocabulary:
    """SentencePiece's ModelProto: field 1 repeated is a piece, whose field 1 is its text and 3 its type (sentencepiece_model.proto)."""
    try:
        pieces = [_piece(piece) for number, piece in _fields(content_of(file, kind="vocabulary")) if number == 1]
        padding = trained(file, 48, "<pad>") if pieces else ""
    except (IndexError, ValueError):
        pieces, padding = [], ""
    if not pieces:
        raise BadValue(
            f"{file}: expected a tokenizer.json, a SentencePiece model, or lines of tiktoken (base64 and rank)"
        )
    tokens = {text: number for number, (text, _) in enumerate(pieces)}
    special = frozenset(number for number, (_, kind) in enumerate(pieces) if kind == _CONTROL)
    return Vocabulary(
        size=len(pieces), tokens=tokens, special=special, padding=padding if tokens.get(padding) in special else ""
    )


def trained(file: Path, field: int, default: str) -> str:
    """A piece named by the model's TrainerSpec (field 2 of ModelProto): 47 is end of text, 48 padding. Raises ValueError, IndexError."""
    found = [_texts(spec, field) for number, spec in _fields(content_of(file, kind="vocabulary")) if number == 2]
    return next((text for texts in found for text in texts), default)


def _piece(data: int | bytes) -> tuple[str, int]:
    kind = next((value for number, value in _fields(data) if number == 3 and isinstance(value, int)), 1)
    return next(iter(_texts(data, 1)), ""), kind


def _texts(data: int | bytes, field: int) -> list[str]:
    return [
        text.decode("utf-8", "replace") for number, text in _fields(data) if number == field and isinstance(text, bytes)
    ]


def _fields(data: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, content) of a protobuf message's integer and length-delimited fields. Raises ValueError, IndexError."""
    if isinstance(data, int):
        raise ValueError("a number instead of a message")
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
            value, at = _varint(data, at)
            yield tag >> 3, value
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
