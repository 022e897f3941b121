"""Tokenizers by name, all through megatron-core's MegatronTokenizer; 'byte' needs no file and no network."""

from __future__ import annotations

import importlib
from typing import Any

from mpbridge.errors import DataError

BYTE_VOCABULARY = 259
"""256 bytes, then end of document (256), padding (257) and begin of sequence (258)."""


def tokenizer(name: str = "byte") -> Any:
    """The tokenizer called `name`: 'byte', or 'package.module:factory' for a function that returns one.

    What comes back has `tokenize(text) -> list[int]`, `eod`, `vocab_size` and `unique_identifiers`, as megatron-core's
    GPTDataset asks of it. Raises DataError.
    """
    if name == "byte":
        from megatron.core.tokenizers import MegatronTokenizer

        # the library's default end of document is 0, which is also a byte
        special = {"_eos_id": 256, "_pad_id": 257, "_bos_id": 258}
        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": "byte-level"}, vocab_size=BYTE_VOCABULARY, **special
        )
    module, colon, factory = name.partition(":")
    if not colon:
        raise DataError(f"data.tokenizer={name!r} is unknown: expected 'byte' or 'package.module:factory'")
    try:
        return getattr(importlib.import_module(module), factory)()
    except Exception as error:
        raise DataError(f"data.tokenizer={name!r} could not be made: {type(error).__name__}: {error}") from error


def identity(tok: Any) -> str:
    """A text that changes whenever `tok` may encode differently; part of the cache's key."""
    facts = getattr(tok, "unique_identifiers", None) or {"class": type(tok).__qualname__}
    return repr(
        sorted((str(key), str(value)) for key, value in {**facts, "eod": tok.eod, "vocab_size": tok.vocab_size}.items())
    )
