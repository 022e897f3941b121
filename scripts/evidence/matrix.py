"""Runs the suite in environments with other Pythons, other releases and other kinds of CPU, several times in a row, and writes the table of docs/reference/compatibility.md.

    python scripts/evidence/matrix.py [--only NAME ...] [--times N] [--folder FOLDER] [--again] [--table] [--megatron-core FOLDER ...]

What plays another kind of CPU runs in the checkout's own .venv, which `bash scripts/test.sh` makes; other releases get a virtual environment in FOLDER (several
GB each, installed from the package index; it can be deleted when its runs are done). A script that was interrupted continues: environments that were completed
and runs that have a report are kept. What failed runs once more alone, so that a time limit that was missed beside other work is told from a fault. The page
has one row for each environment, with the commit that its runs were on; rows of earlier runs, here or on another machine, stay until their environment runs
again. --again runs anew what has a report, --table runs nothing: it writes what there are reports of. --megatron-core: a source tree of Megatron-LM with
compiled data helpers, and folders with what it needs besides (triton), for the environment `megatron-core main`. Exit code 1 if a test failed alone as well.
"""

from __future__ import annotations

import argparse
import datetime
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
    """A Python, the releases that are asked for, and what plays another kind of machine."""

    name: str
    python: str = ""
    pins: tuple[str, ...] = ()
    """What is asked of the package index; none: the checkout's own .venv."""
    lowest: bool = False
    """Whether every direct dependency is the lowest that pyproject.toml allows."""
    variables: str = ""
    """NAME=value of the environment."""
    busy: int = 0
    """Processes that do nothing but compute beside the suite."""


CPUS = (
    "ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16", "ONEDNN_MAX_CPU_ISA=AVX512_CORE", "ONEDNN_MAX_CPU_ISA=AVX2", "ONEDNN_MAX_CPU_ISA=SSE41",
    "ATEN_CPU_CAPABILITY=default", "ATEN_CPU_CAPABILITY=avx2", "OMP_NUM_THREADS=2", "OMP_NUM_THREADS=3", "OMP_NUM_THREADS=4",
)  # fmt: skip
ENVIRONMENTS = (
    Environment("constraints"),
    Environment("newest", "3.13", ("torch==2.15.0", "megatron-core==0.16.1")),
    Environment("oldest", "3.11", ("torch==2.6.0", "megatron-core==0.16.1")),
    Environment("megatron-core 0.16.0", "3.12", ("torch==2.11.0", "megatron-core==0.16.0")),
    Environment("lowest-direct", "3.11", lowest=True),
    Environment("megatron-core main"),
    *(Environment(one, variables=one) for one in CPUS),
    Environment("oneDNN off"),
    Environment("8 busy processes", busy=8),
)
OFF = """# torch without oneDNN in every Python that has this folder on its path; torch is imported when somebody asks for it
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.backends.mkldnn":
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        ran = found.loader.exec_module
        def switched_off(module):
            ran(module)
            sys.modules["torch"]._C._set_mkldnn_enabled(False)
        found.loader.exec_module = switched_off
        return found

sys.meta_path.insert(0, Finder())
"""
"""sitecustomize.py of the environment `oneDNN off`."""


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
    if not (one.pins or one.lowest):
        own = ROOT / ".venv/bin/python"
        if not own.exists():
            raise SystemExit(f"{one.name} runs in the checkout's .venv, which there is none of: bash scripts/test.sh makes it")  # fmt: skip
        return own
    python, mark = home / "bin/python", home / "complete"
    if mark.exists():
        return python
    base = interpreter(one.python)
    if base is None:
        raise SystemExit(f"no Python {one.python} with the module venv on the path or in ~/.pyenv, which {one.name} needs")  # fmt: skip
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


def surroundings(one: Environment, folder: Path, core: list[Path]) -> dict[str, str]:
    """The variables of the environment's processes."""
    variables = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    variables.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # the suite starts hundreds of processes: each would compile the package again
    if one.variables:
        variables |= [one.variables.split("=")]
    if one.name == "oneDNN off":
        (folder / "off").mkdir(parents=True, exist_ok=True)
        (folder / "off/sitecustomize.py").write_text(OFF, encoding="utf-8")
        variables["PYTHONPATH"] = str(folder / "off")
    if one.name == "megatron-core main":
        alone = folder / "core/megatron"  # beside megatron the tree has packages of its own, such as tests
        alone.parent.mkdir(parents=True, exist_ok=True)
        alone.unlink(missing_ok=True)
        alone.symlink_to(core[0].resolve() / "megatron")
        variables["PYTHONPATH"] = os.pathsep.join(
            map(str, (ROOT, alone.parent, *(path.resolve() for path in core[1:])))
        )
    return variables


def run(python: Path, report: Path, variables: dict[str, str], busy: int, tests: list[str]) -> None:
    """The suite, then alone what failed in it; its report is complete or absent."""
    partial, alone, cache = report.with_suffix(".partial"), report.with_suffix(".alone"), report.with_suffix(".cache")
    shutil.rmtree(cache, ignore_errors=True)
    alone.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-o", f"cache_dir={cache}", "--continue-on-collection-errors"]
    workers = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"]
    began = ran_on(python, variables)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with report.with_suffix(".log").open("w") as log:
            subprocess.run([*command, *workers, f"--junitxml={partial}", *tests], cwd=ROOT, env=variables, stdout=log, check=False)  # fmt: skip
            if not partial.exists():
                return
            if any(kind in WRONG for kind, _ in read(partial).values()):
                again = ["--last-failed", "--last-failed-no-failures=none", f"--junitxml={alone}"]
                subprocess.run([*command, *again, *tests], cwd=ROOT, env=variables, stdout=log, check=False)
    finally:
        for one in others:
            one.kill()
            one.wait()
    report.with_suffix(".json").write_text(json.dumps(began), encoding="utf-8")
    partial.rename(report)


def ran_on(python: Path, variables: dict[str, str]) -> dict[str, str]:
    """The commit of this checkout, with a plus where files differ from it, the day, and the releases of an environment."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: E731
    changed = git("status", "--porcelain", "-uno", "--", ".", f":!{PAGE.relative_to(ROOT)}").strip()
    commit = git("rev-parse", "--short=8", "HEAD").strip() + ("+" if changed else "")
    ask = (
        "import importlib.metadata as m, platform; from mpbridge.common.probe import installed\n"
        f"print(platform.python_version(), *(m.version(n) if n != 'megatron-core' else installed().megatron_core for n in {SHOWN!r}))"
    )
    have = subprocess.run([str(python), "-c", ask], cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout.split()  # fmt: skip
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


def row(name: str, reports: list[Path]) -> tuple[str, list[str]]:
    """The table's row for an environment's runs of one commit, and a line for each test that failed in one of them."""
    ran = json.loads(reports[-1].with_suffix(".json").read_text(encoding="utf-8"))
    counts, alone, wrong = [], 0, {}
    for report in reports:
        cases, again = read(report), report.with_suffix(".alone")
        later = read(again) if again.exists() else {}
        for test, (kind, why) in cases.items():
            if kind in WRONG:
                passed = later.get(test, ("", ""))[0] == "passed"
                alone += passed
                wrong[test] = (passed and wrong.get(test, (True, ""))[0], why)
        kinds = [kind for kind, _ in cases.values()]
        counts.append((kinds.count("passed"), kinds.count("skipped"), sum(map(kinds.count, WRONG))))
    passed, skipped, failed = zip(*counts, strict=True)
    cells = [name, *(ran[key] for key in ("Python", *SHOWN, "CPU", "commit", "day")), len(reports), min(passed), max(skipped), alone, sum(failed) - alone]  # fmt: skip
    lines = [
        f"* {name}: `{test}`{' (passed alone)' if one else ''}: {re.sub(r'[`|<>*]', '', why)[:200]}"
        for test, (one, why) in wrong.items()
    ]
    return f"| {' | '.join(map(str, cells))} |", lines


def of_one_commit(results: Path) -> list[Path]:
    """An environment's reports of the commit of the last one, in their order."""
    reports = sorted(results.glob("*.xml"), key=lambda path: path.stat().st_mtime)
    commit = lambda path: json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["commit"]  # noqa: E731
    return [path for path in reports if commit(path) == commit(reports[-1])]


def write(folder: Path) -> tuple[list[str], list[str]]:
    """The table between the page's marks: what there are reports of in the folder, and the page's own rows of what there are none of."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    old, _, after = rest.partition(MARKS[1])
    table, wrong = [], []
    for one in ENVIRONMENTS:
        if reports := of_one_commit(folder / "results" / one.name):
            line, failures = row(one.name, reports)
            table.append(line)
            wrong += failures
        else:
            table += [line for line in old.splitlines() if line.startswith(f"| {one.name} |")]
            wrong += [line for line in old.splitlines() if line.startswith(f"* {one.name}: ")]
    head = ["environment", "Python", *SHOWN, "CPU", "commit", "day", "runs in a row", "passed", "skipped", "failed, passed alone", "failed"]  # fmt: skip
    text = ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *table]
    text += ["", *(["What failed, with the first line of why:", "", *wrong] if wrong else ["Nothing failed."]), ""]
    PAGE.write_text("\n".join([before + MARKS[0], *text, MARKS[1]]) + after, encoding="utf-8")
    return table, wrong


def main() -> int:
    """Every environment in turn; the page is written after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/matrix")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in ENVIRONMENTS], metavar="NAME", help=", ".join(one.name for one in ENVIRONMENTS))  # fmt: skip
    parser.add_argument("--times", type=int, default=1, metavar="N", help="runs in a row")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files or folders instead of the whole suite")
    parser.add_argument(
        "--megatron-core", type=Path, nargs="+", default=[], metavar="FOLDER", help="for `megatron-core main`"
    )
    parser.add_argument("--again", action="store_true", help="run anew what has a report")
    parser.add_argument("--table", action="store_true", help="only write the page, from the reports that there are")
    args = parser.parse_args()
    folder = args.folder.resolve()
    for one in () if args.table else ENVIRONMENTS:
        if args.only and one.name not in args.only:
            continue
        if one.name == "megatron-core main" and not args.megatron_core:
            print(f"{one.name}: left out, since --megatron-core names no source tree")
            continue
        # torch's compiler and shells' words take no path with a space
        python, results = make(one, folder / one.name.replace(" ", "-")), folder / "results" / one.name
        results.mkdir(parents=True, exist_ok=True)
        variables = surroundings(one, folder, args.megatron_core)
        for number in range(args.times):
            report = results / f"{number + 1}.xml"
            if args.again or not report.exists():
                print(f"{one.name}: run {number + 1}", flush=True)
                run(python, report, variables, one.busy, args.tests)
                write(folder)
    table, wrong = write(folder)
    print("\n".join([*table, *wrong]))
    return int(any("(passed alone)" not in line for line in wrong))


if __name__ == "__main__":
    sys.exit(main())
