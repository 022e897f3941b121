"""A file lock in the kernel that allows one writer at a time."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

from mpbridge.common.files import opened_to_write


class Locked(Exception):
    """Another process holds the lock; `holder` is what it wrote into the file."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(holder)


def lock(path: Path, *, wait: bool) -> IO[str]:
    """Opens `path` for writing and locks it for this process until it is closed; creates its folder. wait: block until it is free; otherwise raises Locked.

    The lock ends with the process, however that ends, and is not inherited by forked children. On a file system without locks, and on an operating
    system without POSIX's, nothing is locked.
    Raises OSError if the file cannot be created, CheckpointError if it is a link or not a regular file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = opened_to_write(path, append=True)
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return stream
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return stream
        stream.seek(0)
        with stream:
            raise Locked(stream.read().strip()) from error
    return stream
