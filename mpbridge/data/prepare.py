"""Files to .bin/.idx, once: cached under a key made of the content, finished atomically, by as many workers as are worth starting."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mpbridge.data.encode import RecordCounts, encode, merge
from mpbridge.data.records import Unit, units
from mpbridge.data.sources import JSON_LINES, TEXT
from mpbridge.data.tokenizer import identity, tokenizer
from mpbridge.errors import DataError

FORMAT = "1"
"""Part of every key: increase it when the same files would be written differently."""
PIECE = 32 << 10
"""Characters in a sequence at most; see `encode.pieces`."""
ONE_WORKER = 64 << 20
"""Bytes of input up to which starting processes (which import torch) costs more than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Finished .bin/.idx pairs and what went into them."""

    prefixes: tuple[str, ...]
    """Pairs that hold at least one document."""
    documents: int
    tokens: int
    skipped: dict[str, int]
    """Records that were left out, by reason."""
    folder: Path
    """Holds one pair for every key, empty ones too."""
    keys: tuple[str, ...]
    cached: bool = False
    """True: nothing was done, an earlier run had written the same."""

    def line(self) -> str:
        """One line for people."""
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        note = f"; skipped {sum(self.skipped.values())} records ({left_out})" if left_out else ""
        return f"{self.documents:,} documents, {self.tokens:,} tokens{note}"


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """Where prepared data is kept: `given`, else mpbridge/ under the user's cache folder."""
    base = (
        Path(given).expanduser()
        if given
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpbridge"
    )
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write the data cache {base} ({error.strerror}); name another folder with data.cache_dir=..."
        ) from error
    return base


def prepare(
    files: Sequence[Path],
    *,
    cache: Path,
    tokenizer_name: str = "byte",
    keys: Sequence[str] = ("text",),
    workers: int | None = None,
) -> Prepared:
    """The pairs for `files`, from the cache where the same content was prepared before.

    workers: processes; None: one for little input, else one per core up to 8. The output does not depend on it.
    Raises DataError when a file cannot be read, a worker fails, or no record is usable; nothing half-written is left behind.
    """
    tok = tokenizer(tokenizer_name)
    home = cache / _key(files, tok, keys)
    if (home / "prepared.json").is_file():
        return _read(home, cached=True)
    with _finished_or_nothing(home) as folder:
        tally = _encode_all(files, tok, tokenizer_name, keys, folder, workers)
        facts = {
            "documents": tally.documents,
            "tokens": tally.tokens,
            "skipped": dict(tally.skipped),
            "keys": list(keys),
        }
        (folder / "prepared.json").write_text(json.dumps(facts, indent=2) + "\n")
    return _read(home, cached=False)


def write_pairs(prepared: Prepared, prefix: Path) -> None:
    """Copies the pairs to `prefix`_<key>_document.bin and .idx; each appears whole or not at all, the index last."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for key in prepared.keys:
        for end in (".bin", ".idx"):
            target = prefix.with_name(f"{prefix.name}_{key}_document{end}")
            part = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copyfile(prepared.folder / f"{key}{end}", part)
            part.replace(target)


def _key(files: Sequence[Path], tok: Any, keys: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((FORMAT, PIECE, identity(tok), tuple(keys))).encode())
    for path in files:
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        digest.update(content + (b"lines" if path.suffix in JSON_LINES else b"text"))
    return digest.hexdigest()[:24]


def _read(home: Path, *, cached: bool) -> Prepared:
    facts = json.loads((home / "prepared.json").read_text())
    if not facts["documents"]:
        reasons = (
            ", ".join(f"{count} {reason}" for reason, count in sorted(facts["skipped"].items())) or "no records at all"
        )
        endings = ", ".join((*TEXT, *JSON_LINES))
        raise DataError(
            f"the corpus holds no usable text ({reasons}); expected {endings} with text under the key(s) {facts['keys']}"
        )
    keys = tuple(facts["keys"])
    pairs = tuple(str(home / key) for key in keys if (home / f"{key}.bin").stat().st_size)
    counts = {name: facts[name] for name in ("documents", "tokens", "skipped")}
    return Prepared(prefixes=pairs, folder=home, keys=keys, cached=cached, **counts)


@contextmanager
def _finished_or_nothing(home: Path) -> Iterator[Path]:
    """A folder beside `home` that becomes `home` in one rename, or vanishes when the body fails."""
    home.parent.mkdir(parents=True, exist_ok=True)
    folder = home.with_name(f".{home.name}.{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(home)
        except OSError:
            # another process finished the same content first; its result is as good
            if not (home / "prepared.json").is_file():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _encode_all(
    files: Sequence[Path], tok: Any, name: str, keys: Sequence[str], folder: Path, workers: int | None
) -> RecordCounts:
    work = units(files)
    size = sum(unit.end - unit.start for unit in work)
    # a small corpus is cut finer, so that a split of one percent still holds something
    piece = min(PIECE, max(1024, size // 200))
    if workers is None:
        workers = 1 if size <= ONE_WORKER else min(8, os.cpu_count() or 1)
    if workers <= 1 or len(work) == 1:
        try:
            return encode(work, tok, keys, folder, piece)
        except Exception as error:
            raise DataError(f"preprocessing failed: {type(error).__name__}: {error}") from error
    shares = [share for share in _shares(work, workers * 4) if share]
    shards = [folder / f"shard{number:05}" for number in range(len(shares))]
    tally = RecordCounts()
    # spawn: a fork would inherit torch's threads and the process group's sockets
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(_work, share, name, tuple(keys), shard, piece)
            for share, shard in zip(shares, shards, strict=True)
        ]
        try:
            for job in jobs:
                tally += job.result()
        except BrokenProcessPool as error:
            raise DataError("a preprocessing worker died (killed, or out of memory); try fewer workers") from error
        except Exception as error:
            pool.shutdown(cancel_futures=True)
            raise DataError(f"a preprocessing worker failed: {type(error).__name__}: {error}") from error
    merge(shards, tok, keys, folder)
    for shard in shards:
        shutil.rmtree(shard)
    return tally


def _shares(work: Sequence[Unit], count: int) -> Iterator[list[Unit]]:
    """`work` in at most `count` contiguous parts of about equal size."""
    total = sum(unit.end - unit.start for unit in work)
    share: list[Unit] = []
    done = 0
    for unit in work:
        share.append(unit)
        done += unit.end - unit.start
        if done * count >= total:
            yield share
            share, done = [], 0
    yield share


def _work(share: Sequence[Unit], name: str, keys: Sequence[str], shard: Path, piece: int) -> RecordCounts:
    """One worker's share, into a folder of its own."""
    shard.mkdir()
    return encode(share, tokenizer(name), keys, shard, piece)
