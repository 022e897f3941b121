"""Tokenizers by name: megatron-core's 'byte', a tokenizer.json through the library tokenizers, or a user's function."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import Any

from mpbridge.common.errors import DataError, MpbridgeError
from mpbridge.settings.huggingface.tokenizers import (
    BYTE,
    FILE,
    LIBRARY,
    TokenizerFiles,
    is_factory,
    is_repository,
    tokenizer_files,
)
from mpbridge.training.data.sources import EXTRA

BYTE_VOCABULARY = 259
"""256 bytes, then end of document (256), padding (257) and begin of sequence (258)."""
FETCHED = [FILE, "tokenizer_config.json", "special_tokens_map.json", "config.json"]
"""Files of a repository that make up a tokenizer; none of them is code."""


class FileTokenizer:
    """A tokenizer from files with the interface of megatron-core's GPTDataset. Special tokens that appear in a text are treated as text."""

    def __init__(self, files: TokenizerFiles, encode: Callable[[str], list[int]]) -> None:
        if files.end is None:
            raise DataError(files.without_end())
        self.end_line = files.end_line()
        self.tokenize, self.eod, self.vocab_size = encode, files.end, files.size
        if files.pad is not None:
            # megatron-core's GPTDataset pads with it and masks its loss; without the attribute it uses an id that no token has
            self.pad = files.pad
        with files.file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        self.unique_identifiers = {"library": LIBRARY, "sha256": digest}


def tokenizer(name: str = BYTE, end: str | int | None = None, *, code: bool = True) -> Any:
    """The tokenizer called `name`: 'byte', a local folder or file, a repository in the Hugging Face cache, or 'package.module:function'.

    end: the end-of-text token or its id, instead of the files' own. code: False refuses functions, for names that a file gave. The result has
    `tokenize(text) -> list[int]`, `eod`, `vocab_size` and `unique_identifiers`. Raises DataError.
    """
    if name == BYTE:
        return _bytes(end)
    if is_factory(name):
        if not code:
            raise DataError(
                f"data.tokenizer={name!r} is a function that a file names, and files do not run code: if you trust it, name it yourself (data.tokenizer={name})"
            )
        module, _, function = name.partition(":")
        try:
            return getattr(importlib.import_module(module), function)()
        except Exception as error:
            raise DataError(f"data.tokenizer={name!r} could not be created: {type(error).__name__}: {error}") from error
    try:
        files = tokenizer_files(name, end)
    except MpbridgeError as error:
        raise DataError(str(error)) from None
    try:
        encode = _encoder(files)
    except ImportError:
        raise DataError(f"data.tokenizer={name!r} needs the package {LIBRARY}: {EXTRA}") from None
    except Exception as error:
        raise DataError(f"data.tokenizer={name!r}: {LIBRARY} cannot use {files.file}: {error}") from error
    return FileTokenizer(files, encode)


def _bytes(end: str | int | None) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer

    if end is not None:
        raise DataError(f"data.end_of_text={end!r}: with data.tokenizer=byte it is 256")
    # the library's default end of document is 0, which is also a byte
    special = {"_eos_id": 256, "_pad_id": 257, "_bos_id": 258}
    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"}, vocab_size=BYTE_VOCABULARY, **special
    )


def _encoder(files: TokenizerFiles) -> Callable[[str], list[int]]:
    """Encoding by the library: nothing added, truncated or padded, and no special tokens recognised in a text."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(files.file))
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        found: list[int] = made.encode(text, add_special_tokens=False).ids
        return found

    return encode


def fetch(name: str) -> None:
    """Downloads a repository's tokenizer into the Hugging Face cache, if `name` is a repository without a local copy. Raises DataError."""
    if name == BYTE or is_factory(name):
        return
    try:
        tokenizer_files(name)
        return
    except MpbridgeError as error:
        if not is_repository(name) or "no such file or folder here" not in str(error):
            raise DataError(str(error)) from None
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise DataError(
            f"data.tokenizer={name!r} is not on this machine, and downloading it needs the package huggingface_hub: {EXTRA}"
        ) from None
    try:
        snapshot_download(name, allow_patterns=FETCHED)
    except Exception as error:
        kind = type(error).__name__
        said = _REFUSED.get(kind) or f"{kind}: {' '.join(str(error).split())[:120]}"
        raise DataError(
            f"data.tokenizer={name!r} is not on this machine and could not be downloaded ({said}): give a local folder, the id OWNER/NAME of a repository, or {BYTE!r}"
        ) from None


_REFUSED = {
    "RepositoryNotFoundError": "the hub has no such repository, or a private one: HF_TOKEN=...",
    "GatedRepoError": "its terms must be accepted on the hub: then HF_TOKEN=...",
    "LocalEntryNotFoundError": "the hub cannot be reached",
}
"""What huggingface_hub raises -> what it means; its own words fill a page."""


def identity(tok: Any) -> str:
    """A text that changes whenever `tok` may encode differently; part of the cache's key."""
    facts = getattr(tok, "unique_identifiers", None) or {"class": type(tok).__qualname__}
    return repr(
        sorted((str(key), str(value)) for key, value in {**facts, "eod": tok.eod, "vocab_size": tok.vocab_size}.items())
    )
