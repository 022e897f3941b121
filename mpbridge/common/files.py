"""Opens files from untrusted sources and writes every output: only regular files, never through a link; strict and bounded parsing of JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn
from weakref import WeakKeyDictionary, WeakValueDictionary

from mpbridge.common.errors import CheckpointError

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of one kind of file is read."""

    size: int
    """Bytes."""
    steps: int = 0
    """Instructions, values or bytes of a line; 0: the size bounds them."""


LIMITS: Mapping[str, Limit] = {
    "json": Limit(1 << 28),  # the index of a checkpoint with a million shards has a quarter of that
    "json lines": Limit(1 << 34, 1 << 20),  # a line of some 300 bytes for each step; a line has at most `steps` bytes
    "text": Limit(1 << 26),
    # of this and other stacks, scripts and Python files too; real ones are a hundred times smaller
    "configuration": Limit(4_000_000),
    "vocabulary": Limit(1 << 28),  # a tokenizer of a million tokens has a tenth of that
    "note": Limit(4096),  # a name, a number or a few facts
    "safetensors header": Limit(100_000_000),  # the format's own limit
    "pickle": Limit(1 << 30, 50_000_000),  # a checkpoint's table of a thousand ranks has a tenth of that
    "arguments": Limit(1 << 26, 2_000_000),  # they take kilobytes; tensors stand outside of their pickle
    "argument values": Limit(0, 100_000),  # a model has hundreds of settings
    "launch script": Limit(400_000, 1_000_000),  # the steps are characters of expanded values: a real one has thousands
}
"""Kind of file -> its limits: of every reader of what somebody else may have written."""

_KINDS = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip
# opening a FIFO must not block; a flag that the system lacks is not used
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def kind_of(mode: int) -> str:
    """The kind of a file that is not regular, with its article."""
    return _KINDS.get(stat.S_IFMT(mode), "a special file")


def opened(file: Path) -> IO[bytes]:
    """Opens `file` for reading in binary. Raises CheckpointError naming it if it is not a regular file, FileNotFoundError if it does not exist."""
    return os.fdopen(_descriptor(file, os.O_RDONLY), "rb")


def opened_inside(folder: Path, name: str) -> IO[bytes]:
    """Opens `folder`/`name` for reading; no folder on the path below `folder` may be a link either. Raises as `opened` does."""
    place = folder
    for part in name.split("/")[:-1]:
        place = place / part
        if stat.S_ISLNK(os.lstat(place).st_mode):
            why = "links in a checkpoint are not followed"
            raise CheckpointError(f"{place} is a symbolic link, expected a folder: {why}")
    return opened(folder / name)


def opened_to_write(file: Path, *, append: bool = False) -> IO[str]:
    """Opens `file` for writing text, creating it if it is missing; truncates it unless `append`.

    Raises CheckpointError if it is a link, not a regular file, or has a second name elsewhere (a hard link), since its content may belong to someone else.
    """
    handle = _descriptor(file, os.O_RDWR | os.O_CREAT | (os.O_APPEND if append else 0), 0o666)
    if not append:
        os.ftruncate(handle, 0)
    return os.fdopen(handle, "a+" if append else "w+", encoding="utf-8", buffering=1)


def write(file: Path, content: str | bytes, *, append: bool = False) -> None:
    """Writes a whole output file, or adds to its end; text as UTF-8.

    Raises as `opened_to_write` does, and OSError with the file's name if there is no room: a new file is removed then, and the room is reserved before
    an old one is changed."""
    data, new = content.encode() if isinstance(content, str) else content, not os.path.lexists(file)
    handle = _descriptor(file, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0), 0o666)
    before = os.fstat(handle)
    regular = stat.S_ISREG(before.st_mode)
    try:
        with os.fdopen(handle, "wb", buffering=0) as stream:
            if regular:
                _reserve(handle, before.st_size, len(data) + (before.st_size if append else 0))
            rest = memoryview(data)
            while rest:
                rest = rest[stream.write(rest) :]
            if regular and not append:
                stream.truncate()
    except OSError as error:
        if regular and new:
            os.unlink(file)
        raise OSError(error.errno, error.strerror, str(file)) from None


def _reserve(handle: int, there: int, wanted: int) -> None:
    """Takes room for an old file that grows, and gives it back if there is not enough. Raises OSError."""
    if not 0 < there < wanted or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle, there, wanted - there)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
    finally:
        os.ftruncate(handle, there)


NO_ROOM = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
"""The disk, the limit on a file's size or the quota is exhausted: nothing is wrong with what was asked for."""


@contextlib.contextmanager
def folder_for(folder: Path) -> Iterator[None]:
    """Creates the folder with its parents; if the body fails, those that did not exist and are empty again are removed. Raises OSError."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for one in made:
                one.rmdir()
        raise


def folder_inside(folder: Path, name: str) -> Path:
    """`folder`/`name`, for what a library writes there. Raises CheckpointError if it is a link: it may lead elsewhere."""
    place = folder / name
    if place.is_symlink():
        why = "nothing is written through it; remove it"
        raise CheckpointError(f"{place} is a symbolic link, expected a folder: {why}")
    return place


def _descriptor(file: Path, flags: int, mode: int = 0) -> int:
    try:
        handle = os.open(file, flags | _SAFE, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EMLINK, errno.EOPNOTSUPP):
            _refuse(file, os.lstat(file).st_mode)
        raise
    found = os.fstat(handle)
    if flags & os.O_CREAT and stat.S_ISCHR(found.st_mode):  # such as /dev/null: nobody's content
        return handle
    if not stat.S_ISREG(found.st_mode) or (flags & os.O_CREAT and found.st_nlink > 1):
        os.close(handle)
        if stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{file} has a second name elsewhere (a hard link): it is not written to; remove it")
        _refuse(file, found.st_mode)
    os.set_blocking(handle, True)
    return handle


def _refuse(file: Path, mode: int) -> NoReturn:
    raise CheckpointError(f"{file} is {kind_of(mode)}, expected a regular file: it is neither followed nor opened")


def regular(file: Path | str) -> IO[bytes]:
    """Opens a file named by the user for reading in binary; links are followed. Raises OSError stating what it is if it is not a regular file, without
    waiting for a FIFO's writer."""
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, expected a regular file", os.fspath(file))
    return os.fdopen(handle, "rb")


def text_of(file: Path | str, *, errors: str = "strict", kind: str = "text") -> str:
    """The whole text of such a file, as UTF-8. kind: of LIMITS.

    Raises as `regular` does, OSError for a file above the limit (a sparse one of terabytes costs nothing to make), and UnicodeDecodeError unless `errors` is
    'replace'."""
    return bytes_of(file, kind=kind).decode("utf-8", errors)


def bytes_of(file: Path | str, *, kind: str) -> bytes:
    """The whole content of such a file. Raises as `text_of` does."""
    largest = LIMITS[kind].size
    with regular(file) as stream:
        data = stream.read(largest + 1)
    if len(data) > largest:
        raise OSError(errno.EOVERFLOW, f"it has more than {largest:,} bytes, the limit for a {kind}", os.fspath(file))
    return data


def lines_of(file: Path | str) -> Iterator[str]:
    """The lines of a file with a record a line, with their ends, one at a time; bytes that are not UTF-8 are replaced.

    Raises as `regular` does, and OSError for a longer line than LIMITS has (a sparse file is one) or a larger file."""
    limit, at = LIMITS["json lines"], 0
    with regular(file) as stream:
        while line := stream.readline(limit.steps + 1):
            at += len(line)
            if len(line) > limit.steps or at > limit.size:
                long = len(line) > limit.steps
                what = f"a line of more than {limit.steps:,}" if long else f"more than {limit.size:,}"
                raise OSError(errno.EOVERFLOW, f"it has {what} bytes, the limit for records", os.fspath(file))
            yield line.decode("utf-8", "replace")


def why(error: Exception) -> str:
    """The message of an exception raised while reading, on one line; for OSError only the reason."""
    said = error.strerror if isinstance(error, OSError) else None
    if isinstance(error, UnicodeDecodeError):
        said = f"not text in UTF-8 (byte {error.object[error.start]:#04x} at {error.start}): save it in that encoding"
    return " ".join((said or str(error) or type(error).__name__).split())


def shipped(name: str) -> Any:
    """A JSON file of this package, by its path below it."""
    return json.loads(Path(__file__).parents[1].joinpath(name).read_text(encoding="utf-8"))


def read_json(file: Path) -> Any:
    """The JSON value in `file`. Raises CheckpointError naming the file for anything else: damage, excessive nesting, NaN, another kind of file."""
    with opened(file) as stream:
        text = stream.read(LIMITS["json"].size + 1)
    return parsed(text, str(file))


def parsed(text: bytes, name: str) -> Any:
    """The JSON value in `text`. Raises CheckpointError, which mentions `name`."""
    if len(text) > (largest := LIMITS["json"].size):
        raise CheckpointError(f"{name} cannot be read: larger than {largest} bytes")
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(f"{name} cannot be read: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be read ({error})") from error


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


class Locked(Exception):
    """The lock is held, by another process or in this one; `holder` is what the holder wrote into the file."""

    def __init__(self, stream: IO[str]) -> None:
        self.holder = ""
        with contextlib.suppress(ValueError):  # closed meanwhile, by another thread
            stream.seek(0)
            self.holder = stream.read().strip()
        super().__init__(self.holder)


_held: WeakValueDictionary[tuple[int, Path], IO[str]] = WeakValueDictionary()
"""(process, file) -> the stream of its lock. POSIX's locks are the process's: it would be granted its own again, and closing either stream would end both."""
_takers: WeakKeyDictionary[IO[str], threading.Thread] = WeakKeyDictionary()
"""The stream of a lock -> the thread that took it."""
_taking = threading.Lock()
if hasattr(os, "register_at_fork"):  # another thread of the parent may have it, and lives on there alone
    os.register_at_fork(after_in_child=lambda: globals().update(_taking=threading.Lock()))


def lock(path: Path, *, wait: bool) -> IO[str]:
    """Opens `path` for writing and locks it until it is closed; creates its folder. wait: block until it is free, unless this thread holds it; otherwise raises Locked.

    The lock ends with the process, however that ends, and is not inherited by forked children. On a file system without locks, and on an operating
    system without POSIX's, only this process is kept out.
    Raises OSError if the file cannot be created or its name never leads to what was locked, CheckpointError if it is a link or not a regular file."""
    for _ in range(100):  # nobody loses that many files in a row to others
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = _opened_once(path, wait=wait)
        try:
            import fcntl

            fcntl.lockf(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except ModuleNotFoundError:  # Windows
            pass
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                with stream:
                    raise Locked(stream) from error
        except BaseException:  # an interrupt, whose traceback may keep the stream
            stream.close()
            raise
        if is_at(stream, path):
            return stream
        stream.close()  # the holder before removed the file: somebody else may lock another by its name
    said = "its inode number differs at each look, as on some network file systems, so a lock cannot be told to hold; name a folder on another file system"
    raise OSError(errno.ESTALE, said, str(path))


def is_at(stream: IO[str], path: Path) -> bool:
    """Whether `path` still names the file of `stream`: it may have been removed, and another made."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(stream.fileno()), os.lstat(path))
    return False


def _opened_once(path: Path, *, wait: bool) -> IO[str]:
    key = os.getpid(), path.parent.resolve() / path.name
    while True:
        with _taking:
            other = _held.get(key)
            if other is None or other.closed:
                stream = opened_to_write(path, append=True)
                _takers[stream] = threading.current_thread()
                _held[key] = stream
                return stream
            if not wait or _takers[other] is threading.current_thread():
                raise Locked(other)
        time.sleep(0.1)


def write_whole(file: Path, text: str) -> None:
    """Writes a small text file atomically: readers see either the old or the new one."""
    partial = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        with partial.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    sync(file.parent)


def drop_partials(file: Path) -> None:
    """Removes what a `write_whole` of that file left behind when it was killed."""
    for left in file.parent.glob(f".{file.name}-{'[0-9a-f]' * 8}"):
        if left.is_file():
            left.unlink()


def sync(directory: Path) -> None:
    """Makes the names in a folder survive a power failure, where its file system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
