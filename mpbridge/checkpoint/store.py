"""Checkpoint folders on disk: written under another name, sealed by checksums and a rename, pruned, found again. Loads no framework.

A folder of checkpoints holds `step_00000120/` for each one and `latest`, a text file that names the newest. What is still being written is
called `.partial-...` and what is being removed `.dropped-...`, so whatever is called `step_...` is whole. `.writer` names the run that saves there.
Whatever lies there may be a stranger's: links are not followed, and only regular files are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from mpbridge.errors import CheckpointError
from mpbridge.files import opened_inside, read_json
from mpbridge.locks import Locked, lock

MANIFEST = "manifest.json"
"""Name -> size and sha256 of every other file in a checkpoint."""
LATEST = "latest"
WRITER = ".writer"
SCHEMA = 2
CONVERTIBLE = 1
"""Schema of checkpoints that hold pickles: they are converted before they are loaded."""
AuditMark = Literal["good", "suspect", "unaudited"]
"""What the audit said of the state that a checkpoint holds."""
LAST_STEP = 1 << 40
"""No run takes more steps: a larger number was not counted."""
_NAME = re.compile(r"^step_(\d{8,})$")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One sealed checkpoint."""

    step: int
    path: Path


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
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
    """The checkpoint that `where` means: itself, or the newest inside it that no audit called suspect; raises CheckpointError."""
    if os.path.lexists(where / MANIFEST) or _NAME.match(where.name) or os.path.lexists(where / ".metadata"):
        return where
    inside = saved(where)
    for entry in inside:
        if not _is_suspect(entry.path):
            return entry.path
    if inside:
        raise CheckpointError(
            f"{where}: an audit found every checkpoint in it suspect (the newest is {inside[0].path.name}); "
            "to resume from one anyway, name it (checkpoint.load=FOLDER)"
        )
    found = "a folder without checkpoints" if where.is_dir() else "a file" if where.exists() else "no such folder"
    raise CheckpointError(f"{where}: {found} (expected {name_of(0)[:-1]}... folders in it, or one of them)")


def claim(folder: Path) -> IO[str]:
    """Makes this process the one that saves to `folder`, until what comes back is closed. Raises CheckpointError that names who is it already."""
    try:
        stream = lock(folder / WRITER, wait=False)
    except Locked as other:
        raise CheckpointError(
            f"{folder} is where {other.holder or 'another process'} saves its run: wait for it, stop it, or choose another checkpoint.save"
        ) from None
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    stream.flush()
    return stream


def step_of(path: Path) -> int:
    """Steps done at the checkpoint in `path`, whatever the folder is called; raises CheckpointError."""
    return step_in(read_manifest(path), path)


def step_in(manifest: Mapping[str, Any], path: Path) -> int:
    """Steps done when the checkpoint in `path` was written, from its manifest; raises CheckpointError where that is not a step count."""
    step = manifest.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= LAST_STEP:
        raise CheckpointError(f"{path / MANIFEST} has step {str(step)[:40]}, expected a number of steps")
    return step


def audit_of(path: Path) -> AuditMark:
    """What the audit said of a checkpoint: 'good', 'suspect', or 'unaudited'; raises CheckpointError."""
    found = read_manifest(path).get("audit", "unaudited")
    if found not in get_args(AuditMark):
        raise CheckpointError(f"{path / MANIFEST} has audit {str(found)[:40]!r}, expected good, suspect or unaudited")
    return found  # type: ignore[no-any-return]


def mark(path: Path, audit: AuditMark) -> None:
    """Writes what an audit said into a sealed checkpoint; its other files stay as they are. Raises CheckpointError."""
    write_whole(path / MANIFEST, _text(read_manifest(path) | {"audit": audit}))


def last_good(folder: Path) -> Saved | None:
    """The newest checkpoint in `folder` that an audit found good; None when there is none."""
    return next((entry for entry in saved(folder) if _has(entry.path, "good")), None)


def _is_suspect(path: Path) -> bool:
    return _has(path, "suspect")


def _has(path: Path, audit: AuditMark) -> bool:
    with contextlib.suppress(CheckpointError):
        return audit_of(path) == audit
    return False


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Renames checkpoints of more than `after` steps, so that they are not taken for the newest of a run that goes on from there; the new paths."""
    newer = [entry.path for entry in saved(folder) if entry.step > after]
    return [path.rename(path.with_name(f"aside-{path.name}-{secrets.token_hex(4)}")) for path in newer]


def begin(folder: Path, step: int) -> Path:
    """A new empty folder to write the checkpoint of `step` into; leftovers of killed writers are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (".partial-*", ".dropped-*", ".switch-*", ".converted-*", f".{LATEST}-*"):
        for leaving in folder.glob(pattern):
            _remove(leaving)
    # a random name: a killed run's orphan that still writes cannot reach this folder
    partial = folder / f".partial-{name_of(step)}-{secrets.token_hex(4)}"
    partial.mkdir()
    return partial


def seal(
    partial: Path,
    step: int,
    *,
    known: Mapping[str, Mapping[str, Any]] | None = None,
    audit: AuditMark = "unaudited",
    foreign: bool = False,
) -> Path:
    """Gives a written folder its checksums and its name, and points `latest` to it. Returns the new path; a crash at any point leaves no partial checkpoint.

    known: size and sha256 of files that their writers have summed and flushed already. foreign: another program wrote what this was converted from.
    """
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    names = [file.relative_to(partial).as_posix() for file in files if file.name != MANIFEST]
    entries = {name: (known or {}).get(name) or _facts(partial / name) for name in names}
    facts = {"schema": SCHEMA, "step": step, "audit": audit, "files": entries} | ({"foreign": True} if foreign else {})
    write_whole(partial / MANIFEST, _text(facts))
    for directory in {partial, *(file.parent for file in files)}:
        _sync(directory)
    folder, final = partial.parent, partial.parent / name_of(step)
    if os.path.lexists(final):
        _drop(final)  # the same step saved again, after a rollback
    partial.rename(final)
    _sync(folder)
    write_whole(folder / LATEST, final.name + "\n")
    return final


def discard(partial: Path) -> None:
    """Removes what `begin` made, after a save that failed."""
    _remove(partial)


def prune(folder: Path, *, keep_last: int | None, keep_every: int | None) -> list[Saved]:
    """Removes all but the newest `keep_last`, the newest that an audit found good, and those at multiples of `keep_every` steps; returns what went.

    None or 0 for keep_last: all stay.
    """
    if not keep_last:
        return []
    good = last_good(folder)
    gone = [
        entry
        for entry in saved(folder)[keep_last:]
        if entry != good and not (keep_every and entry.step % keep_every == 0)
    ]
    for entry in gone:
        _drop(entry.path)
    return gone


def check(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is there and unchanged.

    Raises CheckpointError that names the damaged file and the checkpoint before it.
    """
    manifest = read_manifest(path)
    for name, facts in sorted(manifest["files"].items()):
        fault = _fault(path, name, facts)
        if fault:
            raise CheckpointError(f"{path / name} {fault}. {offer_before(path)}")
    return manifest


def whole(path: Path) -> None:
    """Whether every file that the manifest lists is there in its size; checksums are `check`'s, which reads every byte. Raises CheckpointError that names
    the first that is not, and the checkpoint before it."""
    for name, facts in sorted(read_manifest(path)["files"].items()):
        fault = _fault(path, name, facts, summed=False)
        if fault:
            raise CheckpointError(f"{path / name} {fault}. {offer_before(path)}")


def offer_before(path: Path) -> str:
    """A sentence that offers the newest older checkpoint that is whole."""
    match = _NAME.match(path.name)
    step = int(match[1]) if match else None
    for entry in saved(path.parent):
        if step is not None and entry.step < step:
            try:
                files = read_manifest(entry.path)["files"]
            except CheckpointError:
                continue
            if not _is_suspect(entry.path) and not any(_fault(entry.path, *item) for item in files.items()):
                return f"The one before it is whole: go on with checkpoint.load={entry.path}"
    return "There is no complete checkpoint before it: start over, or restore the file"


def write_whole(file: Path, text: str) -> None:
    """Writes a small text file so that a reader sees the old or the new one, never a part."""
    partial = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        with partial.open("x", encoding="utf-8") as stream:
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


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1, sort_keys=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, its files not looked at; raises CheckpointError that names it."""
    file = path / MANIFEST
    try:
        data = read_json(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{file} is missing: {path} was not written by mpbridge, or copied incompletely. {offer_before(path)}"
        ) from error
    except (OSError, CheckpointError) as error:
        said = str(error) if isinstance(error, CheckpointError) else f"{file} cannot be read ({error})"
        raise CheckpointError(f"{said}. {offer_before(path)}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in (SCHEMA, CONVERTIBLE) or isinstance(schema, bool) or not isinstance(data.get("files"), dict):
        raise CheckpointError(
            f"{file}: expected a manifest of schema {SCHEMA} (or {CONVERTIBLE}). {offer_before(path)}"
        )
    strange = [name for name in data["files"] if not _plain_name(name)]
    if strange:
        raise CheckpointError(f"{file} names files outside of its folder: {', '.join(strange)}")
    return dict(data)


def _plain_name(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and "\\" not in name and "\0" not in name and not any(part in ("", ".", "..") for part in parts)


def _fault(folder: Path, name: str, facts: Any, *, summed: bool = True) -> str | None:
    if not isinstance(facts, dict) or not {"bytes", "sha256"} <= set(facts):
        return "has no size and checksum in the manifest"
    try:
        with opened_inside(folder, name) as stream:
            found = os.fstat(stream.fileno()).st_size
            if found != facts["bytes"]:
                return f"has {found} bytes, expected {str(facts['bytes'])[:40]}: it was cut off or changed"
            damaged = summed and _sha256(stream) != facts["sha256"]
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except CheckpointError as error:
        said = str(error)
        return (
            said.removeprefix(f"{folder / name} ")
            if said.startswith(f"{folder / name} ")
            else f"cannot be used: {said}"
        )
    return "differs from its checksum: it was damaged or changed after the save" if damaged else None


def _facts(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": _sha256(stream, sync=True)}


def _sha256(stream: IO[bytes], *, sync: bool = False) -> str:
    digest = hashlib.sha256()
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
        try:
            shutil.rmtree(path, ignore_errors=True)
        except RecursionError:
            raise CheckpointError(f"{path} is nested too deeply to be removed: remove it by hand") from None


def newest_whole(folder: Path) -> Saved | None:
    """The newest checkpoint in `folder` that passes `check` and is not suspect; None when there is none."""
    for entry in saved(folder):
        with contextlib.suppress(CheckpointError):
            check(entry.path)
            if not _is_suspect(entry.path):
                return entry
    return None
