"""One writer at a time: a lock of the kernel's on a file."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import IO

from mpbridge.files import opened_to_write


class Locked(Exception):
    """Another process holds the lock; `holder` is what it wrote into the file."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(holder)


def lock(path: Path, *, wait: bool) -> IO[str]:
    """`path`, open for writing and held by this process until it is closed; its folder is made. wait: until it is free; else raises Locked.

    The lock ends with the process, however that ends, and a forked child does not have it. On a file system without locks nothing is held.
    Raises OSError when the file cannot be made, CheckpointError where it is a link or no regular file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = opened_to_write(path, append=True)
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return stream
        stream.seek(0)
        with stream:
            raise Locked(stream.read().strip()) from error
    return stream
