"""Runs the test suite, or a part of it, on another megatron-core and prints differences from the installed one.

    python scripts/evidence/other_core.py FOLDER [FOLDER ...] [-- pytest's arguments]

FOLDER: folders to put at the front of the path; the first contains `megatron/core` (a source tree of Megatron-LM with compiled data helpers), others what it needs
besides (triton). Exit code 0 if every test ends as it does here, 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PART = [
    "tests/precision/sync",
    "tests/planning/rules",
    "tests/settings",
    "tests/backend/models",
    "tests/backend/engines",
    "tests/numerics",
    "tests/backend/devices",
    "tests/training/checkpoint",
    "tests/backend/contract",
]
"""Tests that depend on megatron-core's version; `-- tests` runs all."""


def outcomes(folders: list[str], arguments: list[str]) -> tuple[str, dict[str, tuple[str, str]]]:
    """(megatron-core's version, test -> (passed, failed, error or skipped; the first line of why))."""
    path = os.pathsep.join([str(ROOT), *folders])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    ask = "from mpbridge.common.probe import installed; print(installed().megatron_core)"
    version = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        print(f"megatron-core {version}: pytest {' '.join(arguments)}", flush=True)
        begun = time.monotonic()
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
        found = {}
        for case in ET.parse(report).iter("testcase"):
            kind = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            why = "" if kind is None else (kind.get("message") or "").strip().partition("\n")[0][:160]
            found[f"{case.get('classname')}::{case.get('name')}"] = ("passed" if kind is None else kind.tag, why)
    counted = ", ".join(f"{count} {kind}" for kind, count in Counter(kind for kind, _ in found.values()).most_common())
    print(f"megatron-core {version}: {counted} in {time.monotonic() - begun:.0f} s", flush=True)
    return version, found


def main() -> int:
    """Both runs, and their differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    own, _, rest = " ".join(sys.argv[1:]).partition(" -- ")
    folders = [str(Path(folder).resolve()) for folder in parser.parse_args(own.split()).folders]
    arguments = rest.split() or [path for path in PART if (ROOT / path).exists()]
    here, mine = outcomes([], arguments)
    there, theirs = outcomes(folders, arguments)
    differing = 0
    for test in sorted({*mine, *theirs}):
        one, other = mine.get(test, ("absent", "")), theirs.get(test, ("absent", ""))
        if one[0] != other[0]:
            differing += 1
            print(f"{test}\n    {here}: {' '.join(filter(None, one))}\n    {there}: {' '.join(filter(None, other))}")
    print(f"{len(mine)} tests on {here}, {len(theirs)} on {there}: {differing} end differently")
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
