"""Checkpoint folders on disk: written under a temporary name, sealed by checksums and a rename, pruned, and found again. Loads no framework.

A folder of checkpoints has a `step_00000120/` for each one and `latest`, a text file that names the newest. Checkpoints being written are
named `.partial-...` and those being removed `.dropped-...`, so every `step_...` is complete. `.replaced-...`: see _REPLACED. `.writer` names the run that saves there.
Whatever lies there may be a stranger's: links are not followed, and only regular files are opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import Locked, folder_for, is_at, lock, opened_inside, read_json, sync, write_whole
from mpbridge.training.checkpoint.format import METADATA

MANIFEST = "manifest.json"
"""File with name -> size and sha256 of every other file in a checkpoint."""
CONFIG = "config.yaml"
"""The resolved configuration's file inside a checkpoint."""
LATEST = "latest"
WRITER = ".writer"
LOGGER = ".logger"
"""As WRITER, in the folder of a run's lines: a folder may be both, and a process holds one lock on a file."""
SCHEMA = 2
CONVERTIBLE = 1
"""Schema of checkpoints with pickles, which are converted before loading."""
AuditMark = Literal["good", "suspect", "unaudited"]
"""The audit's result on the state in a checkpoint."""
LAST_STEP = 1 << 40
"""Upper bound of a run's steps; a larger number is invalid."""
_NAME = re.compile(r"^step_(\d{8,})$")
_REPLACED = re.compile(r"^\.replaced-(step_\d{8,})-[0-9a-f]{8}$")
"""A checkpoint that makes room for a new one of its step, where names cannot be exchanged: a writer killed just then leaves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One sealed checkpoint."""

    step: int
    path: Path


def name_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"step_{step:08d}"


def saved(folder: Path) -> list[Saved]:
    """Every sealed checkpoint in `folder`, newest first; links are not followed. What a killed writer was replacing counts if there is nothing new."""
    if not folder.is_dir():
        return []
    folders = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()]
    found = {match[1]: entry for entry in folders if (match := _REPLACED.match(entry.name))}
    found |= {entry.name: entry for entry in folders if _NAME.match(entry.name)}
    made = (Saved(step=int(name.removeprefix("step_")), path=entry) for name, entry in found.items())
    return sorted(made, key=lambda one: -one.step)


def put_back(folder: Path) -> None:
    """Gives what a killed writer was replacing its name again, or removes it if the new one is there. For the run that has claimed the folder."""
    for entry in list(folder.iterdir()):
        if (match := _REPLACED.match(entry.name)) and entry.is_dir() and not entry.is_symlink():
            final = folder / match[1]
            if os.path.lexists(final):
                discard(_away(entry))
            else:
                entry.rename(final)


def offered(folder: Path) -> list[Saved]:
    """As `saved`, for choosing where to resume. Raises CheckpointError if the newest is a link: not followed, it would silently be an older one, or none."""
    found = saved(folder)
    newest = found[0].step if found else 0
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_symlink() and (match := _NAME.match(entry.name)) and int(match[1]) >= newest:
            raise CheckpointError(
                f"{entry} is a symbolic link, and links among checkpoints are not followed: move the checkpoint there, name it (checkpoint.load={entry}), "
                "or remove the link"
            )
    return found


def locate(where: Path) -> Path:
    """The checkpoint that `where` refers to: itself, or the newest inside it that is not suspect. Raises CheckpointError."""
    if os.path.lexists(where / MANIFEST) or _NAME.match(where.name) or os.path.lexists(where / METADATA):
        return where
    inside = offered(where)
    for entry in inside:
        if not _has(entry.path, "suspect"):
            return entry.path
    if inside:
        raise CheckpointError(
            f"{where}: an audit found every checkpoint in it suspect (the newest is {inside[0].path.name}); "
            "to resume from one anyway, name it (checkpoint.load=FOLDER)"
        )
    found = "a folder without checkpoints" if where.is_dir() else "a file" if where.exists() else "no such folder"
    raise CheckpointError(f"{where}: {found} (expected a folder with {name_of(0)[:-1]}... folders, or one of them)")


@contextlib.contextmanager
def claim(folder: Path, *, setting: str = "checkpoint.save", name: str = WRITER) -> Iterator[None]:
    """Makes this process the one whose run writes to `folder`, which `setting` names. name: of the file that is locked.

    If the body fails, what was not there before (the file, an empty folder) is removed. Raises CheckpointError naming the current holder, if any."""
    file = folder / name
    new = not os.path.lexists(file)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_for(folder))
            stream = lock(file, wait=False)
        except Locked as other:
            raise CheckpointError(
                f"{other.holder or 'another process'} is writing its run to {folder}: wait for it, stop it, or choose another {setting}"
            ) from None
        except OSError as error:
            why = f"{setting}={folder}: {name}: {error.strerror or error} (expected a folder that this user may write to, or a path where one can be created)"
            raise CheckpointError(why) from None
        try:
            stream.truncate(0)
            stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            stream.flush()
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # it would hide what failed
                # the folder may have been removed meanwhile, and another run begun there
                if new and is_at(stream, file):
                    file.unlink()
            raise
        finally:
            with contextlib.suppress(OSError):  # closing writes again
                stream.close()


def step_of(path: Path) -> int:
    """Steps done at the checkpoint in `path`, regardless of the folder's name. Raises CheckpointError."""
    return step_in(read_manifest(path), path)


def step_in(manifest: Mapping[str, Any], path: Path) -> int:
    """Steps done when the checkpoint in `path` was written, from its manifest. Raises CheckpointError for an invalid count."""
    step = manifest.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= LAST_STEP:
        raise CheckpointError(f"{path / MANIFEST} has step {str(step)[:40]}, expected a number of steps")
    return step


def audit_of(path: Path) -> AuditMark:
    """The audit's result on a checkpoint: 'good', 'suspect', or 'unaudited'. Raises CheckpointError."""
    found = _manifest(path).get("audit", "unaudited")
    if found not in get_args(AuditMark):
        raise CheckpointError(f"{path / MANIFEST} has audit {str(found)[:40]!r}, expected good, suspect or unaudited")
    return found  # type: ignore[no-any-return]


def mark(path: Path, audit: AuditMark) -> None:
    """Writes an audit's result into a sealed checkpoint; its other files are unchanged. Raises CheckpointError."""
    write_whole(path / MANIFEST, _text(read_manifest(path) | {"audit": audit}))


def doubt(folder: Path, *, after: int) -> None:
    """Marks the good checkpoints in `folder` after step `after` as suspect."""
    for entry in saved(folder):
        if entry.step > after and _has(entry.path, "good"):
            mark(entry.path, "suspect")


def last_good(folder: Path) -> Saved | None:
    """The newest checkpoint in `folder` that an audit found good; None if there is none."""
    return next((entry for entry in saved(folder) if _has(entry.path, "good")), None)


def _has(path: Path, audit: AuditMark) -> bool:
    with contextlib.suppress(CheckpointError):
        return audit_of(path) == audit
    return False


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Renames checkpoints after step `after`, so that they are not mistaken for the newest of a run that continues from there; returns the new paths."""
    newer = [entry.path for entry in saved(folder) if entry.step > after]
    return [_away(path, "aside-") for path in newer]


def begin(folder: Path, step: int) -> Path:
    """A new empty folder to write the checkpoint of `step` into; leftovers of killed writers are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (".partial-*", ".dropped-*", ".switch-*", ".converted-*", f".{LATEST}-*"):
        for leaving in folder.glob(pattern):
            discard(leaving)
    # a random name, so that an orphan of a killed run that is still writing cannot reach this folder
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
    """Adds checksums to a written folder, renames it, and points `latest` to it. Returns the new path; a crash at any point leaves no partial checkpoint.

    known: size and sha256 of files already checksummed and flushed by their writers. foreign: converted from another program's checkpoint.
    """
    files = sorted(file for file in partial.rglob("*") if file.is_file())
    names = [file.relative_to(partial).as_posix() for file in files if file.name != MANIFEST]
    entries = {name: (known or {}).get(name) or _facts(partial / name) for name in names}
    facts = {"schema": SCHEMA, "step": step, "audit": audit, "files": entries} | ({"foreign": True} if foreign else {})
    write_whole(partial / MANIFEST, _text(facts))
    for directory in {partial, *(file.parent for file in files)}:
        sync(directory)
    folder, final = partial.parent, partial.parent / name_of(step)
    old: Path | None = partial  # the same step saved again, after a rollback: a kill leaves one of the two
    if not _exchanged(partial, final):
        old = _away(final, ".replaced-") if os.path.lexists(final) else None
        partial.rename(final)
    sync(folder)
    write_whole(folder / LATEST, final.name + "\n")
    if old is not None:
        discard(old if old == partial else _away(old))
    return final


def room(run: Any, purpose: str) -> Path:
    """A new folder for a state on its way, inside the run's own folder if it has one; `begin` removes those of killed runs."""
    inside = run.checkpoint.get("save") or run.logger.get("log_dir")
    if inside:
        Path(inside).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{purpose}-", dir=inside))


def prune(folder: Path, *, keep_last: int | None, keep_every: int | None) -> list[Saved]:
    """Removes all but the newest `keep_last`, the newest good one, and those at multiples of `keep_every` steps; returns the removed ones.

    None or 0 for keep_last keeps all.
    """
    if not keep_last:
        return []
    good = last_good(folder)
    older = saved(folder)[keep_last:]
    gone = [one for one in older if one != good and not (keep_every and one.step % keep_every == 0)]
    for entry in gone:
        discard(_away(entry.path))
    return gone


def check(path: Path, *, sums: bool = True) -> dict[str, Any]:
    """The manifest of a checkpoint, after checking that all its files exist and are unchanged. sums: False compares only sizes, which reads no file.

    Raises CheckpointError naming the damaged file and the previous checkpoint.
    """
    manifest = read_manifest(path)
    for name, facts in sorted(manifest["files"].items()):
        fault = _fault(path, name, facts, summed=sums)
        if fault:
            raise CheckpointError(f"{path / name} {fault}. {offer_before(path)}")
    return manifest


def offer_before(path: Path) -> str:
    """A sentence that offers the newest older complete checkpoint."""
    match = _NAME.match(path.name) or _REPLACED.match(path.name)
    entry = newest_whole(path.parent, until=int(match[1].removeprefix("step_")) - 1) if match else None
    if entry is None:
        return "There is no earlier complete checkpoint: start over, or restore the file"
    return f"The previous one is complete: resume with checkpoint.load={entry.path}"


def _sound(path: Path) -> bool:
    with contextlib.suppress(CheckpointError):
        manifest = _manifest(path)
        faults = (_fault(path, *item) for item in manifest["files"].items())
        return manifest.get("audit") != "suspect" and not any(faults)
    return False


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1, sort_keys=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, without checking its files. Raises CheckpointError naming it and the previous checkpoint."""
    try:
        return _manifest(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {offer_before(path)}") from error


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        data = read_json(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{file} is missing: {path} was not written by mpbridge, or copied incompletely"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in (SCHEMA, CONVERTIBLE) or isinstance(schema, bool) or not isinstance(data.get("files"), dict):
        raise CheckpointError(f"{file}: expected a manifest of schema {SCHEMA} (or {CONVERTIBLE})")
    strange = [name for name in data["files"] if not _plain_name(name)]
    if strange:
        raise CheckpointError(f"{file} lists files outside its folder: {', '.join(strange)}")
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
                return f"has {found} bytes, expected {str(facts['bytes'])[:40]}: it was truncated or changed"
            damaged = summed and _sha256(stream) != facts["sha256"]
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except CheckpointError as error:
        said, place = str(error), f"{folder / name} "
        return said.removeprefix(place) if said.startswith(place) else f"cannot be used: {said}"
    return "differs from its checksum: it was damaged or changed after the save" if damaged else None


def _facts(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": _sha256(stream)}


def _sha256(stream: Any) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def _away(path: Path, prefix: str = ".dropped-") -> Path:
    return path.rename(path.with_name(f"{prefix}{path.name}-{secrets.token_hex(4)}"))


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges two names in one step. False, and nothing is done, if one does not exist, and where the system (not Linux) or the file system cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def discard(path: Path) -> None:
    """Removes a folder that is no checkpoint, such as that of a failed save."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        try:
            shutil.rmtree(path, ignore_errors=True)
        except RecursionError:
            raise CheckpointError(f"{path} is nested too deeply to be removed: remove it by hand") from None


def newest_whole(folder: Path, *, until: int = LAST_STEP) -> Saved | None:
    """The newest checkpoint in `folder`, of step `until` at most, that passes `check` and is not suspect; None if there is none."""
    return next((entry for entry in saved(folder) if entry.step <= until and _sound(entry.path)), None)
