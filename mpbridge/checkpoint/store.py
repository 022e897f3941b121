"""Checkpoint folders on disk: written under another name, sealed by checksums and a rename, pruned, found again. Loads no framework.

A folder of checkpoints holds `step_00000120/` for each one and `latest`, a text file that names the newest. What is still being written is
called `.partial-...` and what is being removed `.dropped-...`, so whatever is called `step_...` is whole. `.writer` names the run that saves there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mpbridge.errors import CheckpointError

MANIFEST = "manifest.json"
"""Name -> size and sha256 of every other file in a checkpoint."""
LATEST = "latest"
WRITER = ".writer"
SCHEMA = 1
_NAME = re.compile(r"^step_(\d{8,})$")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One sealed checkpoint."""

    step: int
    path: Path


def name_of(step: int) -> str:
    """Folder name of the checkpoint behind `step` steps."""
    return f"step_{step:08d}"


def saved(folder: Path) -> list[Saved]:
    """Every sealed checkpoint in `folder`, newest first; links are not followed."""
    if not folder.is_dir():
        return []
    found = (
        (entry, _NAME.match(entry.name)) for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()
    )
    return sorted((Saved(step=int(match[1]), path=entry) for entry, match in found if match), key=lambda s: -s.step)


def locate(where: Path) -> Path:
    """The checkpoint that `where` means: itself, or the newest inside it; raises CheckpointError."""
    if (where / MANIFEST).is_file() or _NAME.match(where.name):
        return where
    inside = saved(where)
    if inside:
        return inside[0].path
    found = "a folder without checkpoints" if where.is_dir() else "no such folder"
    raise CheckpointError(f"{where}: {found} (expected {name_of(0)[:-1]}... folders in it, or one of them)")


def claim(folder: Path) -> IO[str]:
    """Makes this process the one that saves to `folder`, until what comes back is closed. Raises CheckpointError that names who is it already.

    The lock is the kernel's: it ends with the process, however that ends, and a forked child has none. Where the file system knows no locks nothing is held.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    stream = (folder / WRITER).open("a+", encoding="utf-8")
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return stream
        stream.seek(0)
        with stream:
            who = stream.read().strip() or "another process"
        raise CheckpointError(
            f"{folder} is where {who} saves its run: wait for it, stop it, or choose another checkpoint.save"
        ) from error
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    stream.flush()
    return stream


def step_of(path: Path) -> int:
    """Steps behind the checkpoint in `path`, whatever the folder is called; raises CheckpointError."""
    step = _manifest(path).get("step")
    if not isinstance(step, int):
        raise CheckpointError(f"{path / MANIFEST} names no step: it was not written by mpbridge")
    return step


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Renames checkpoints of more than `after` steps, so that they are not taken for the newest of a run that goes on from there; the new paths."""
    newer = [entry.path for entry in saved(folder) if entry.step > after]
    return [path.rename(path.with_name(f"aside-{path.name}-{secrets.token_hex(4)}")) for path in newer]


def begin(folder: Path, step: int) -> Path:
    """A new empty folder to write the checkpoint of `step` into; leavings of writers that were killed are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (".partial-*", ".dropped-*", ".switch-*", f".{LATEST}-*"):
        for leaving in folder.glob(pattern):
            _remove(leaving)
    # a random name: an orphan of a killed run that still writes meets no folder of ours
    partial = folder / f".partial-{name_of(step)}-{secrets.token_hex(4)}"
    partial.mkdir()
    return partial


def seal(partial: Path, step: int) -> Path:
    """Gives a written folder its checksums and its name, and points `latest` to it. Returns the new path; a crash at any point leaves no half."""
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    entries = {file.relative_to(partial).as_posix(): _facts(file) for file in files if file.name != MANIFEST}
    text = json.dumps({"schema": SCHEMA, "step": step, "files": entries}, indent=1, sort_keys=True)
    write_whole(partial / MANIFEST, text)
    for directory in {partial, *(file.parent for file in files)}:
        _sync(directory)
    folder, final = partial.parent, partial.parent / name_of(step)
    if final.exists():
        _drop(final)  # the same step saved again, behind a rollback
    partial.rename(final)
    _sync(folder)
    write_whole(folder / LATEST, final.name + "\n")
    return final


def discard(partial: Path) -> None:
    """Removes what `begin` made, after a save that failed."""
    _remove(partial)


def prune(folder: Path, *, keep_last: int | None, keep_every: int | None) -> list[Saved]:
    """Removes all but the newest `keep_last` and those at multiples of `keep_every` steps; returns what went. None or 0 for keep_last: all stay."""
    if not keep_last:
        return []
    gone = [entry for entry in saved(folder)[keep_last:] if not (keep_every and entry.step % keep_every == 0)]
    for entry in gone:
        _drop(entry.path)
    return gone


def check(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is there and unchanged.

    Raises CheckpointError that names the damaged file and the checkpoint before it.
    """
    manifest = _manifest(path)
    for name, facts in sorted(manifest["files"].items()):
        fault = _fault(path / name, facts)
        if fault:
            raise CheckpointError(f"{path / name} {fault}. {offer_before(path)}")
    return manifest


def offer_before(path: Path) -> str:
    """A sentence that offers the newest older checkpoint that is whole."""
    match = _NAME.match(path.name)
    step = int(match[1]) if match else None
    for entry in saved(path.parent):
        if step is not None and entry.step < step:
            try:
                files = _manifest(entry.path)["files"]
            except CheckpointError:
                continue
            if not any(_fault(entry.path / name, facts) for name, facts in files.items()):
                return f"The one before it is whole: go on with checkpoint.load={entry.path}"
    return "There is no whole checkpoint before it: start anew, or restore the file"


def write_whole(file: Path, text: str) -> None:
    """Writes a small text file so that a reader sees the old or the new one, never a part."""
    partial = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    _sync(file.parent)


def size(path: Path) -> int:
    """Bytes of all files in a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file} is missing: {path} was not written by mpbridge, or not wholly copied. {offer_before(path)}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). {offer_before(path)}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("files"), dict):
        raise CheckpointError(f"{file}: expected a manifest of schema {SCHEMA}. {offer_before(path)}")
    strange = [name for name in data["files"] if not _plain_name(name)]
    if strange:
        raise CheckpointError(f"{file} names files outside of its folder: {', '.join(strange)}")
    return data


def _plain_name(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and "\\" not in name and "\0" not in name and not any(part in ("", ".", "..") for part in parts)


def _fault(file: Path, facts: Any) -> str | None:
    if not isinstance(facts, dict) or not {"bytes", "sha256"} <= set(facts):
        return "has no size and checksum in the manifest"
    if not file.is_file() or file.is_symlink():
        return "is missing"
    found = file.stat().st_size
    if found != facts["bytes"]:
        return f"has {found} bytes, expected {facts['bytes']}: it was cut off or changed"
    return (
        None
        if _sha256(file) == facts["sha256"]
        else "differs from its checksum: it was damaged or changed behind the save"
    )


def _facts(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": _sha256(file, sync=True)}


def _sha256(file: Path, *, sync: bool = False) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
        if sync:
            os.fsync(stream.fileno())
    return digest.hexdigest()


def _sync(directory: Path) -> None:
    # so that the rename itself survives a power cut; not every file system can
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _drop(path: Path) -> None:
    away = path.with_name(f".dropped-{path.name}-{secrets.token_hex(4)}")
    path.rename(away)
    _remove(away)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def newest_whole(folder: Path, entries: Iterable[Saved] | None = None) -> Saved | None:
    """The newest checkpoint in `folder` that passes `check`; None when there is none."""
    for entry in entries if entries is not None else saved(folder):
        with contextlib.suppress(CheckpointError):
            check(entry.path)
            return entry
    return None
