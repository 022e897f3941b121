"""Permanently restricts this process to what converting a checkpoint needs: no other files (Landlock, Linux 5.13), no children, bounded output, time and memory.

Restrictions that the kernel lacks are skipped: pickles are never executed anyway (safe_unpickler.py); this is a second line of defence. Loads no framework.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System calls landlock_create_ruleset, landlock_add_rule, landlock_restrict_self: the same numbers on every architecture."""
_READ = (1 << 0) | (1 << 2) | (1 << 3)
"""LANDLOCK_ACCESS_FS_EXECUTE, READ_FILE, READ_DIR (linux/landlock.h)."""
_ALL = (1 << 13) - 1
"""Every access right of the first version."""
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES, _PARENT_DEATH_SIGNAL = 38, 1


def confine(source: str, out: str) -> bool:
    """From now on only `source` and Python's own files can be read, and only `out` written; True if the kernel enforces it."""
    _limit(source)
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    return _landlock(libc, [(source, _READ), (out, _ALL), *((path, _READ) for path in _python())])


def _limit(source: str) -> None:
    size = sum(file.stat().st_size for file in Path(source).iterdir() if file.is_file() and not file.is_symlink())
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 2 * size + (1 << 26)),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CPU, 300 + size // (1 << 22)),
        (resource.RLIMIT_AS, 4 * size + (4 << 30)),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))


def _python() -> list[str]:
    """Folders from which modules may still be loaded."""
    return [path for path in {*sys.path, sys.prefix, sys.base_prefix} if path and os.path.isdir(path)]


def _landlock(libc: ctypes.CDLL, rules: list[tuple[str, int]]) -> bool:
    wanted = ctypes.create_string_buffer(struct.pack("=Q", _ALL))
    ruleset = libc.syscall(_CREATE, wanted, ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    try:
        for path, rights in rules:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, handle))
            added = libc.syscall(_ADD, ruleset, _PATH_BENEATH, rule, 0)
            os.close(handle)
            if added:
                return False
        restricted: int = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(_RESTRICT, ruleset, 0)
        return restricted == 0
    finally:
        os.close(ruleset)
