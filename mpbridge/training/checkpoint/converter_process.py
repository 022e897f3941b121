"""Converts a checkpoint in megatron-core's own format to data. Runs as an isolated process; loads no framework.

    python -I -c '... import converter_process; converter_process.main()' SOURCE OUT ours|foreign

Writes `data.bin`, the index and, for a checkpoint of mpbridge, the state to OUT; exits with 1 and one line on stderr if a file contains anything but data. It first
restricts itself for good to what that needs: no other files (Landlock, Linux 5.13), no children, bounded output, time and memory. Restrictions that the kernel lacks
are skipped: pickles are never executed anyway (safe_unpickler.py); this is a second line of defence.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mpbridge.common.errors import CheckpointError, MpbridgeError
from mpbridge.common.files import opened
from mpbridge.common.safe_unpickler import Name, UnpickledCall, read
from mpbridge.precision.megatron_spec.versions import COMMON_OBJECTS, PICKLED
from mpbridge.training.checkpoint import extra_state
from mpbridge.training.checkpoint.archive import Tensor, dtype_of, load, spelled
from mpbridge.training.checkpoint.format import COMMON, METADATA, STATE, Index, encoded

DATA = "data.bin"
LARGEST_METADATA = 1 << 30
_DCP = "torch.distributed.checkpoint"
_RECORDS = frozenset(
    {
        (f"{_DCP}.metadata", "Metadata"), (f"{_DCP}.metadata", "MetadataIndex"), (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"), (f"{_DCP}.metadata", "ChunkStorageMetadata"), (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "StorageMeta"), (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (f"{_DCP}.filesystem", "_StorageInfo"),
        (f"{_DCP}.filesystem", "_StoragePrefix"), (f"{_DCP}.planner", "SavePlan"), (f"{_DCP}.planner", "WriteItem"),
        (f"{_DCP}.planner", "WriteItemType"), (f"{_DCP}.planner", "TensorWriteData"), ("torch.serialization", "_get_layout"),
        ("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), *PICKLED,
    }
)  # fmt: skip
"""Classes that torch's and megatron-core's writers put into `.metadata`: read as records, never as classes."""


def convert(source: Path, out: Path, *, ours: bool) -> None:
    """Writes the contents of the checkpoint in `source` to `out`. Raises CheckpointError naming a file that is missing or contains anything else."""
    entries, places = _metadata(source / METADATA)
    index = Index()
    common: Any = None
    with (out / DATA).open("xb") as data:
        for file, items in sorted(places.items()):
            with _named(source / file), opened(source / file) as stream:
                room = os.fstat(stream.fileno()).st_size
                for key, offset, start, length in items:
                    if not 0 <= start <= start + length <= room:
                        raise CheckpointError(f"{key} is outside it")
                    kind = entries.get(key)
                    if kind == "bytes":
                        if ours and key in COMMON_OBJECTS:
                            common = spelled(_alone(load(stream, start, start + length)))
                        elif ours:
                            index.objects[key] = _object(key, load(stream, start, start + length), data)
                    elif isinstance(kind, tuple):
                        index.add(key, *kind, _tensor(key, load(stream, start, start + length), offset, kind, data))
                    else:
                        raise CheckpointError(f"{key} is in no table")
        data.flush()
        os.fsync(data.fileno())
    index.write(out, str(source / METADATA))
    state = (common or _common_file(source)) if ours else encoded({})
    (out / STATE).write_text(json.dumps(state, separators=(",", ":")), encoding="utf-8")


def _common_file(source: Path) -> Any:
    file = source / COMMON
    if not file.exists():
        objects = " or ".join(dict.fromkeys(name.partition("/")[0] for name in COMMON_OBJECTS))
        raise CheckpointError(f"{source} holds neither {COMMON} nor the object {objects}")
    with _named(file), opened(file) as stream:
        return spelled(load(stream, 0, os.fstat(stream.fileno()).st_size))


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Converts a file's errors to CheckpointError naming it."""
    try:
        yield
    except CheckpointError as error:
        if str(file) in str(error):
            raise
        raise CheckpointError(f"{file} is refused: {error}") from error
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file} is refused: {type(error).__name__}: {str(error)[:120]}") from error


def _record(name: Name, args: tuple[Any, ...]) -> Any:
    if (name.module, name.name) == ("torch", "Size"):
        return tuple(args[0])
    if (name.module, name.name) == ("collections", "OrderedDict") and not args:
        return {}
    if (name.module, name.name) in _RECORDS:
        return UnpickledCall(name, args)
    raise CheckpointError(f"it refers to {name}, which checkpoint writers never use")


Entries = dict[str, Any]
Places = dict[str, list[tuple[str, Any, int, int]]]


def _metadata(file: Path) -> tuple[Entries, Places]:
    """(key -> 'bytes' or (dtype, global shape), data file -> [(key, offset, first byte, bytes)]) of torch's table."""
    with _named(file):
        with opened(file) as stream:
            raw = stream.read(LARGEST_METADATA + 1)
        if len(raw) > LARGEST_METADATA:
            raise CheckpointError(f"larger than {LARGEST_METADATA} bytes")
        table, _ = read(raw, _record)
        entries: Entries = {}
        for key, entry in _record_of(table, "Metadata").get("state_dict_metadata").items():
            if not isinstance(key, str) or not isinstance(entry, UnpickledCall):
                raise CheckpointError("no table of tensors")
            if entry.name.name == "BytesStorageMetadata":
                entries[key] = "bytes"
                continue
            found = _record_of(entry, "TensorStorageMetadata").get("properties")
            properties = _record_of(found, "TensorProperties").state
            dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
            entries[key] = (dtype_of(dtype), tuple(entry.get("size")))
        places: Places = {}
        for index, info in table.get("storage_data").items():
            index, info = _record_of(index, "MetadataIndex"), _record_of(info, "_StorageInfo")
            name, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
            if not isinstance(name, str) or "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
                raise CheckpointError(
                    f"it points outside its folder ({name[:80] if isinstance(name, str) else type(name).__name__})"
                )
            if type(start) is not int or type(length) is not int or info.state.get("transform_descriptors"):
                raise CheckpointError(f"an invalid storage location in {name}")
            places.setdefault(name, []).append((index.get("fqn"), index.state.get("offset"), start, length))
        return entries, places


def _record_of(value: Any, name: str) -> UnpickledCall:
    if not isinstance(value, UnpickledCall) or value.name.name != name:
        raise CheckpointError(f"expected a {name}")
    return value


def _tensor(
    key: str, value: Any, offset: Any, kind: tuple[str, tuple[int, ...]], data: IO[bytes]
) -> tuple[str, int, Any, Any]:
    if not isinstance(value, Tensor) or value.dtype != kind[0]:
        raise CheckpointError(f"{key} is not the {kind[0]} tensor that the table lists")
    ends = [begin + side for begin, side in zip(offset, value.shape, strict=True)]
    if any(begin < 0 for begin in offset) or any(end > side for end, side in zip(ends, kind[1], strict=True)):
        raise CheckpointError(f"{key}: a piece outside the tensor")
    at = data.tell() + -data.tell() % 64
    data.write(bytes(at - data.tell()))
    data.write(value.content())
    return DATA, at, offset, value.shape


def _object(key: str, value: Any, data: IO[bytes]) -> tuple[str, int, int]:
    inner = _alone(value)
    text = extra_state.converted(inner) if extra_state.is_extra(key) else spelled(inner)
    raw = json.dumps(text, separators=(",", ":")).encode()
    at = data.tell()
    data.write(raw)
    return DATA, at, len(raw)


def _alone(value: Any) -> Any:
    """megatron-core saves an object as a list of the shards that a rank holds: one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


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
    # modules may still be loaded
    python = [path for path in {*sys.path, sys.prefix, sys.base_prefix} if path and os.path.isdir(path)]
    return _landlock(libc, [(source, _READ), (out, _ALL), *((path, _READ) for path in python)])


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


def main() -> None:
    """The process's entry point: SOURCE OUT ours|foreign in sys.argv."""
    source, out, whose = sys.argv[1:4]
    confine(source, out)
    try:
        convert(Path(source), Path(out), ours=whose == "ours")
    except MpbridgeError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    except (OSError, MemoryError) as error:
        print(f"{source} cannot be converted: {error}", file=sys.stderr)
        raise SystemExit(1) from None
