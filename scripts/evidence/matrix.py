"""Runs a chosen part of the suite in environments with other Pythons, other releases and other kinds of CPU, and writes the table of docs/reference/compatibility.md.

    python scripts/evidence/matrix.py [--only NAME ...] [--parts NUMBER ...] [--folder FOLDER] [--again] [--table]

Each environment is a virtual environment in FOLDER (several GB each, installed from the package index; it can be deleted when its parts ran) with mpbridge
from this checkout. A run that was interrupted continues: environments that were completed and parts that have a report are kept. What failed in a part runs
once more alone, so that a time limit that was missed beside other work is told from a fault. The page has one row for each environment and part, with the
commit that it ran on; rows of earlier runs, here or on another machine, stay until their part runs again. --again runs parts that have a report once more,
and --table runs none: it writes what there are reports of. Exit code 1 if a test failed alone as well.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/compatibility.md"
MARKS = ("<!-- matrix -->", "<!-- end of matrix -->")
WRONG = ("failure", "error")
SHOWN = ("torch", "megatron-core", "numpy", "torchao", "pytest")
EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
"""What a CPU may have, the widest first."""


@dataclass(frozen=True)
class Environment:
    """A Python, the releases that are asked for, and why."""

    name: str
    python: str
    pins: tuple[str, ...]
    why: str
    lowest: bool = False
    """Whether every direct dependency is the lowest that pyproject.toml allows."""
    variables: tuple[str, ...] = ()
    """What plays another kind of CPU, as NAME=value; the packages are those of the first environment then."""

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of the parts that depend on what is other here."""
        return (2, 3, 5, 6, 7) if self.variables else (0, 1, 2, 3, 4, 5)


ENVIRONMENTS = (
    Environment("constraints", "3.11", ("-c", str(ROOT / "scripts/constraints.txt")), "what the scripts install"),
    Environment("newest", "3.13", ("torch==2.15.0", "megatron-core==0.16.1"), "the newest Python and torch that were tried"),
    Environment("oldest", "3.11", ("torch==2.6.0", "megatron-core==0.16.1"), "the oldest Python and torch that pyproject.toml allows"),
    Environment("core-0.16.0", "3.12", ("torch==2.11.0", "megatron-core==0.16.0"), "the oldest megatron-core, on the Python in between"),
    Environment("lowest-direct", "3.11", (), "the lowest release of every direct dependency", lowest=True),
    *(
        Environment(one, "3.11", (), "another kind of CPU", variables=tuple(one.split()))
        for one in (
            "ONEDNN_MAX_CPU_ISA=SSE41", "ONEDNN_MAX_CPU_ISA=AVX2", "ONEDNN_MAX_CPU_ISA=AVX512_CORE", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX", "ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2", "OMP_NUM_THREADS=2", "OMP_NUM_THREADS=3", "OMP_NUM_THREADS=4",
        )
    ),
)  # fmt: skip
PARTS = {
    "tests/cli tests/common tests/guide": "the interpreter: processes, signals, closed pipes, files",
    "tests/precision tests/settings tests/planning/rules": "megatron-core's config classes against the field table and the rules",
    "tests/numerics": "torch's casts and products, to the bit or in their bounds",
    "tests/backend": "engines, process groups, torch FSDP2, Megatron-FSDP, torchao",
    "tests/training/checkpoint tests/training/test_survives.py": "torch's checkpoint planner, threads, resume",
    "tests/observe/audit": "the audit of live tensors and of the wire",
    "tests/te_cpu tests/gpu tests/known_bugs": "Transformer Engine's Python over our kernels, for kinds of CPU: its releases have their own tests there",
    "tests/training tests/observe/witnessing tests/observe/telemetry tests/observe/diagnose": "trained numbers, for kinds of CPU",
}
"""What is run, and what it depends on. The rest of planning and interop reads no other package and multiplies nothing."""


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
    if one.variables:
        return make(ENVIRONMENTS[0], home.parent / ENVIRONMENTS[0].name)
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


def run(python: Path, part: str, report: Path, variables: tuple[str, ...]) -> None:
    """One part of the suite, then alone what failed in it; its report is complete or absent."""
    partial, alone, cache = report.with_suffix(".partial"), report.with_suffix(".alone"), report.with_suffix(".cache")
    given = dict(one.split("=") for one in variables)
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | given
    shutil.rmtree(cache, ignore_errors=True)
    alone.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-o", f"cache_dir={cache}", "--continue-on-collection-errors"]
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"]
    began = ran_on(python)
    subprocess.run([*command, *workers, f"--junitxml={partial}", *part.split()], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)  # fmt: skip
    if not partial.exists():
        return
    if any(kind in WRONG for kind, _ in read(partial).values()):
        again = ["--last-failed", "--last-failed-no-failures=none", f"--junitxml={alone}"]
        subprocess.run([*command, *again, *part.split()], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)  # fmt: skip
    report.with_suffix(".json").write_text(json.dumps(began), encoding="utf-8")
    partial.rename(report)


def ran_on(python: Path) -> dict[str, str]:
    """The commit of this checkout, with a plus where files differ from it, the day, and the releases of an environment."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: E731
    changed = git("status", "--porcelain", "-uno", "--", ".", f":!{PAGE.relative_to(ROOT)}").strip()
    commit = git("rev-parse", "--short=8", "HEAD").strip() + ("+" if changed else "")
    ask = f"import importlib.metadata as m, platform; print(platform.python_version(), *(m.version(n) for n in {SHOWN!r}))"
    have = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].partition("\n")[0].split())
    cpu = next((one for one in EXTENSIONS if one in flags), platform.machine())
    return {
        "CPU": cpu,
        "commit": commit,
        "day": str(datetime.date.today()),
        **dict(zip(("Python", *SHOWN), have, strict=True)),
    }


def read(report: Path) -> dict[str, tuple[str, str]]:
    """Test: (passed, failure, error or skipped; the first line of why)."""
    cases = {}
    for case in ET.parse(report).iter("testcase"):
        kind = next((child for child in case if child.tag in (*WRONG, "skipped")), None)
        why = "" if kind is None else (kind.get("message") or "").strip().partition("\n")[0]
        why = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", why)  # folders of the machine that ran it
        cases[f"{case.get('classname', '')}::{case.get('name')}"] = "passed" if kind is None else kind.tag, why
    return cases


def rows(name: str, part: str, report: Path) -> tuple[str, list[str]]:
    """The table's row for a part in an environment, and a line for each test that failed."""
    ran = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))
    cases, alone = read(report), report.with_suffix(".alone")
    later = read(alone) if alone.exists() else {}
    wrong = {test: why for test, (kind, why) in cases.items() if kind in WRONG}
    passed_alone = {test for test in wrong if later.get(test, ("", ""))[0] == "passed"}
    kinds = [kind for kind, _ in cases.values()]
    counts = (kinds.count("passed"), kinds.count("skipped"), len(passed_alone), len(wrong) - len(passed_alone))
    cells = [name, f"`{part}`", *(ran[key] for key in ("Python", *SHOWN, "CPU", "commit", "day")), *map(str, counts)]
    lines = [
        f"* {name}, `{part}`: `{test}`{' (passed alone)' if test in passed_alone else ''}: {re.sub(r'[`|<>*]', '', why)[:200]}"
        for test, why in wrong.items()
    ]
    return f"| {' | '.join(cells)} |", lines


def write(folder: Path) -> tuple[list[str], list[str]]:
    """The table between the page's marks: what there are reports of in the folder, and the page's own rows of what there are none of."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    old, _, after = rest.partition(MARKS[1])
    table, wrong = [], []
    for name, (number, part) in itertools.product([one.name for one in ENVIRONMENTS], enumerate(PARTS)):
        report = folder / "results" / name / f"{number}.xml"
        if report.exists():
            line, failures = rows(name, part, report)
            table.append(line)
            wrong += failures
        else:
            table += [line for line in old.splitlines() if line.startswith(f"| {name} | `{part}` |")]
            wrong += [line for line in old.splitlines() if line.startswith(f"* {name}, `{part}`:")]
    head = [
        "environment",
        "part",
        "Python",
        *SHOWN,
        "CPU",
        "commit",
        "day",
        "passed",
        "skipped",
        "failed, passed alone",
        "failed",
    ]
    text = ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *table]
    text += ["", *(["What failed, with the first line of why:", "", *wrong] if wrong else ["Nothing failed."]), ""]
    PAGE.write_text("\n".join([before + MARKS[0], *text, MARKS[1]]) + after, encoding="utf-8")
    return table, wrong


def main() -> int:
    """Every environment in turn; the page is written after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/matrix")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in ENVIRONMENTS])
    parser.add_argument("--parts", nargs="+", type=int, choices=range(len(PARTS)), help="numbers, in the order to run")
    parser.add_argument("--again", action="store_true", help="run parts that have a report")
    parser.add_argument("--table", action="store_true", help="only write the page, from the reports that there are")
    args = parser.parse_args()
    folder = args.folder.resolve()
    for one in () if args.table else ENVIRONMENTS:
        if args.only and one.name not in args.only:
            continue
        python, results = make(one, folder / one.name), folder / "results" / one.name
        results.mkdir(parents=True, exist_ok=True)
        for number in args.parts if args.parts is not None else one.parts:
            part, report = list(PARTS)[number], results / f"{number}.xml"
            if args.again or not report.exists():
                print(f"{one.name}: {part}", flush=True)
                run(python, part, report, one.variables)
                write(folder)
    table, wrong = write(folder)
    print("\n".join([*table, *wrong]))
    return int(any("(passed alone)" not in line for line in wrong))


if __name__ == "__main__":
    sys.exit(main())
