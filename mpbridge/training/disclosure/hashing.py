"""SHA-256 of every file of a folder, several files at a time."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mpbridge.common.files import ProgressCallback, opened_inside

_CHUNK = 1 << 22
_MOST = 16
"""Threads: hashing releases the interpreter's lock."""


def digests(
    folder: Path, without: Collection[str], told: ProgressCallback, *, only: Collection[str] | None = None
) -> dict[str, str]:
    """Name below `folder` -> SHA-256, sorted by name. told: of bytes done and in all.

    Raises CheckpointError for anything that is neither a regular file nor a folder: links are not followed.
    """
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = sorted(path.relative_to(folder).as_posix() for path in paths) if only is None else sorted(only)
    names = [name for name in names if name not in without]
    total = sum((folder / name).lstat().st_size for name in names)
    done, lock = 0, threading.Lock()

    def digest(name: str) -> str:
        nonlocal done
        found = hashlib.sha256()
        with opened_inside(folder, name) as stream:
            while chunk := stream.read(_CHUNK):
                found.update(chunk)
                with lock:
                    done += len(chunk)
                    told(done, total)
        return found.hexdigest()

    with ThreadPoolExecutor(max_workers=min(_MOST, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))
