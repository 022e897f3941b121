"""What a stranger can do to a checkpoint: payloads that act when they are unpickled, forged files, sums made anew."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

from mpbridge.training.checkpoint import store


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Any) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def reseal(place: Path) -> None:
    """Writes the checksums anew: a stranger does that too."""
    manifest = json.loads((place / store.MANIFEST).read_text())
    manifest["files"] = {name: store._facts(place / name) for name in manifest["files"]}
    (place / store.MANIFEST).write_text(json.dumps(manifest))


def forge(place: Path, name: str, data: bytes | str) -> None:
    """Puts `data` in place of a file, sums included."""
    (place / name).write_bytes(data.encode() if isinstance(data, str) else data)
    reseal(place)


def rewrite(place: Path, name: str, change: Any) -> None:
    """Puts what `change` makes of a JSON file's value in its place, sums included."""
    data = json.loads((place / name).read_text())
    forge(place, name, json.dumps(change(data) or data))


def pickled(mark: Any) -> bytes:
    """A pickle that makes the folder `mark`."""
    return pickle.dumps(Payload(mark))
