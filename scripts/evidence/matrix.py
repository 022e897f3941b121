"""Runs a chosen part of the suite in environments with other Pythons and other releases, and writes the table of docs/reference/compatibility.md.

    python scripts/evidence/matrix.py [--only NAME ...] [--folder FOLDER] [--again] [--table]

Each environment is a virtual environment in FOLDER (several GB each, installed from the package index) with mpbridge from this checkout. A run that was
interrupted continues: environments that were completed and parts that have a report are kept; --again runs the parts once more, and --table runs none: it writes what there are reports of. Exit code 1 if a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/compatibility.md"
MARKS = ("<!-- matrix -->", "<!-- end of matrix -->")
SHOWN = ("torch", "megatron-core", "numpy", "torchao", "pytest")


@dataclass(frozen=True)
class Environment:
    """A Python, the releases that are asked for, and why."""

    name: str
    python: str
    pins: tuple[str, ...]
    why: str
    lowest: bool = False
    """Whether every direct dependency is the lowest that pyproject.toml allows."""


ENVIRONMENTS = (
    Environment("constraints", "3.11", ("-c", str(ROOT / "scripts/constraints.txt")), "what the scripts install"),
    Environment("newest", "3.13", ("torch==2.15.0", "megatron-core==0.16.1"), "the newest Python and torch that were tried"),
    Environment("oldest", "3.11", ("torch==2.6.0", "megatron-core==0.16.1"), "the oldest Python and torch that pyproject.toml allows"),
    Environment("core-0.16.0", "3.12", ("torch==2.11.0", "megatron-core==0.16.0"), "the oldest megatron-core, on the Python in between"),
    Environment("lowest-direct", "3.11", (), "the lowest release of every direct dependency", lowest=True),
)  # fmt: skip
PARTS = {
    "tests/cli tests/common tests/guide": "the interpreter: processes, signals, closed pipes, files",
    "tests/precision tests/settings tests/planning/rules": "megatron-core's config classes against the field table and the rules",
    "tests/numerics": "torch's casts and products, to the bit or in their bounds",
    "tests/backend": "engines, process groups, torch FSDP2, Megatron-FSDP, torchao",
    "tests/training/checkpoint tests/training/test_survives.py": "torch's checkpoint planner, threads, resume",
    "tests/observe/audit": "the audit of live tensors and of the wire",
}
"""What is run, and what of another release it depends on. Transformer Engine's releases have their own tests (tests/te_cpu), and the rest of planning and
interop reads no other package."""


def interpreter(version: str) -> str | None:
    """A Python of that version that can make environments: on the path, or in pyenv."""
    found = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    ask = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {tuple(map(int, version.split('.')))})"
    for one in filter(None, found):
        if subprocess.run([str(one), "-c", ask], capture_output=True, check=False).returncode == 0:
            return str(one)
    return None


def make(one: Environment, home: Path) -> Path:
    """The environment's Python; installs what it lacks."""
    python, mark = home / "bin/python", home / "complete"
    if mark.exists():
        return python
    base = interpreter(one.python)
    if base is None:
        raise SystemExit(
            f"no Python {one.python} with the module venv on the path or in ~/.pyenv, which {one.name} needs"
        )
    print(f"{one.name}: installing", flush=True)
    subprocess.run([base, "-m", "venv", str(home)], check=True)
    install = [str(python), "-m", "pip", "install", "-q"]
    pins = list(one.pins)
    if one.lowest:
        subprocess.run([*install, "uv"], check=True)
        listed = home / "lowest.txt"
        compiled = ["pip", "compile", "-q", "--resolution", "lowest-direct", "--extra", "dev", "-o", str(listed), str(ROOT / "pyproject.toml")]  # fmt: skip
        subprocess.run([str(home / "bin/uv"), *compiled], check=True)
        pins = ["-c", str(listed)]
    subprocess.run([*install, *pins, "-e", f"{ROOT}[dev]"], check=True)
    mark.touch()
    return python


def run(python: Path, part: str, report: Path) -> None:
    """One part of the suite; its report is complete or absent."""
    partial = report.with_suffix(".partial")
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"),
        f"--junitxml={partial}",
        *part.split(),
    ]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
    if partial.exists():
        partial.rename(report)


def read(report: Path) -> list[tuple[str, str, str]]:
    """(test, passed, failure, error or skipped; the first line of why)."""
    cases = []
    for case in ET.parse(report).iter("testcase"):
        kind = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        why = "" if kind is None else (kind.get("message") or "").strip().partition("\n")[0]
        why = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", why)  # folders of the machine that ran it
        cases.append((f"{case.get('classname', '')}::{case.get('name')}", "passed" if kind is None else kind.tag, why))
    return cases


def row(one: Environment, python: Path, reports: list[Path]) -> tuple[str, list[str]]:
    """The environment's line of the table, and a line for each test that failed."""
    ask = f"import importlib.metadata as m, platform; print(platform.python_version(), *(m.version(n) for n in {SHOWN!r}))"
    have = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    cases = [case for report in reports for case in read(report)]
    counted = Counter(kind for _, kind, _ in cases)
    wrong = [(test, why) for test, kind, why in cases if kind in ("failure", "error")]
    done = f"{len(reports)} of {len(PARTS)}"
    cells = [one.why, *have[: len(SHOWN)], done, str(counted["passed"]), str(counted["skipped"]), str(len(wrong))]
    lines = [f"* `{one.name}`: `{test}`: {re.sub(r'[`|<>]', '', why)[:200]}" for test, why in wrong]
    return f"| {' | '.join(cells)} |", lines


def write(rows: list[str], wrong: list[str]) -> None:
    """The table between the page's marks."""
    head = ["environment", "Python", *SHOWN[:-1], "parts run", "passed", "skipped", "failed"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    text = [f"Commit {commit}, {datetime.date.today()}.", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    text += [*rows, "", *(["What failed, with the first line of why:", "", *wrong] if wrong else ["Nothing failed."])]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text("\n".join([before + MARKS[0], *text, MARKS[1]]) + after, encoding="utf-8")


def main() -> int:
    """Every environment in turn; the page is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/matrix")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in ENVIRONMENTS])
    parser.add_argument("--again", action="store_true", help="run parts that have a report")
    parser.add_argument("--table", action="store_true", help="only write the page, from the reports that there are")
    args = parser.parse_args()
    rows, wrong = [], []
    for one in ENVIRONMENTS:
        home, results = args.folder.resolve() / one.name, args.folder.resolve() / "results" / one.name
        reports = [results / f"{number}.xml" for number in range(len(PARTS))]
        if not args.table and (not args.only or one.name in args.only):
            python = make(one, home)
            results.mkdir(parents=True, exist_ok=True)
            for part, report in zip(PARTS, reports, strict=True):
                if args.again or not report.exists():
                    print(f"{one.name}: {part}", flush=True)
                    run(python, part, report)
        reports = [report for report in reports if report.exists()]
        if reports:
            line, failures = row(one, home / "bin/python", reports)
            rows.append(line)
            wrong += failures
            write(rows, wrong)
    print("\n".join([*rows, *wrong]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
