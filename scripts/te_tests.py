"""Transformer Engine's own tests over mpbridge's kernels, from a clone: `python scripts/te_tests.py CLONE --te 2.11 --store FOLDER [FILE ...]`.

The clone is read, never written; its tests at the release's tag belong to --te. Every result is kept in the store, so that the next call goes on
where this one's time ended: the tests of a file run in an order that takes its test functions in turn, with shuffled parameters, and what ran is a
fair sample of the file. `--table` prints the results of the store by file; `--docs PAGE` writes them into a page. A test that has not run counts
as failed in the share of all.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mpbridge.te_cpu.refusals import REASONS

HOPPER, BLACKWELL = ("h100",), ("b200",)
FILES: dict[str, tuple[str, ...]] = {
    "test_float8tensor.py": HOPPER,
    "test_quantized_tensor.py": BLACKWELL,
    "test_float8_current_scaling_exact.py": HOPPER,
    "test_float8_blockwise_scaling_exact.py": HOPPER,
    "test_float8_blockwise_gemm_exact.py": HOPPER,
    "test_float8blockwisetensor.py": HOPPER,
    "mxfp8/test_mxfp8_quantize_swizzle_fusion.py": BLACKWELL,
    "mxfp8/test_mxfp8_group_quantize_graph_safe.py": BLACKWELL,
    "test_mxfp8_2d_quantize.py": BLACKWELL,
    "nvfp4/test_nvfp4_quantize_exact.py": BLACKWELL,
    "nvfp4/test_nvfp4_gemm_exact.py": BLACKWELL,
    "nvfp4/test_nvfp4_module_exact.py": BLACKWELL,
    "nvfp4/test_nvfp4_rht_quantize_exact.py": BLACKWELL,
    "nvfp4/test_nvfp4_sr_quantize.py": BLACKWELL,
    "nvfp4/test_nvfp4_group_quantize.py": BLACKWELL,
    "nvfp4/test_nvfp4_group_quantize_graph_safe.py": BLACKWELL,
    "test_recipe.py": BLACKWELL,
    "test_custom_recipe.py": BLACKWELL,
    "test_fused_optimizer.py": BLACKWELL,
    "test_multi_tensor.py": HOPPER,
    "test_partial_cast.py": BLACKWELL,
    "test_numerics.py": BLACKWELL,
    "test_grouped_linear.py": BLACKWELL,
    "test_sanity.py": BLACKWELL,
    "test_permutation.py": HOPPER,
    "test_fused_rope.py": HOPPER,
    "test_fused_router.py": HOPPER,
    "test_deferred_init.py": HOPPER,
    "test_checkpoint.py": BLACKWELL,
    "test_fusible_ops.py": BLACKWELL,
}
"""File under tests/pytorch -> the machines that are played for it: Blackwell where MXFP8 or NVFP4 is tested, since it runs every recipe."""
ALONE = "test_numerics.py"
"""It runs in a process of its own, since variables are set for it."""
AS_IN_QA = {
    "PYTORCH_JIT": "0",
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NVTE_FUSED_ATTN": "0",
}
"""What Transformer Engine's own qa/L0_pytorch_unittest/test.sh sets for test_numerics.py."""
EXCLUDED = (
    (r"cuda\.(max_)?memory_allocated|memory_allocated\(", "it measures CUDA memory, of which none is allocated"),
    (
        r"the Triton kernel \w+ runs on a GPU only \(launched from \S+/tests/",
        "the test's own reference is a Triton kernel",
    ),
    (r"CUDAGraph|cuda\.graph|make_graphed_callables|_cuda_getCurrentRawStream", "CUDA graphs"),
    (r"cuda\.(Event|current_stream).*elapsed_time", "it measures the time of CUDA kernels"),
)
"""A failure's text -> the excluded feature that it needs, beside the kernels that are refused by name."""
REPORTER = """
import collections, json, os, random, time
from pathlib import Path
OUT, SECONDS, TESTS = json.loads(os.environ["TE_TESTS_OUT"]), float(os.environ["TE_TESTS_SECONDS"]), Path(os.environ["TE_TESTS"])
DONE = {file: set(names) for file, names in json.load(open(os.environ["TE_TESTS_DONE"])).items()}
USED, FILE_OF = collections.Counter(), {}
def _name(nodeid):
    return nodeid.split("::", 1)[-1]
def _write(file, **row):
    with open(OUT[file], "a") as out:
        out.write(json.dumps(row) + "\\n")
def pytest_collection_modifyitems(session, config, items):
    by_file = collections.OrderedDict((file, []) for file in OUT)
    for item in items:
        FILE_OF[item.nodeid] = item.path.relative_to(TESTS).as_posix()
        by_file[FILE_OF[item.nodeid]].append(item)
    items.clear()
    for file, found in by_file.items():
        if found and not config.option.keyword:
            _write(file, collected=[_name(item.nodeid) for item in found])
        by_function = collections.OrderedDict()
        for item in found:
            by_function.setdefault(_name(item.nodeid).split("[")[0], []).append(item)
        for group in by_function.values():
            random.Random(0).shuffle(group)
        while any(by_function.values()):
            items += [group.pop() for group in by_function.values() if group]
    items[:] = [item for item in items if _name(item.nodeid) not in DONE[FILE_OF[item.nodeid]]]
def pytest_runtest_setup(item):
    item.began = time.process_time()
def pytest_runtest_teardown(item, nextitem):
    file = FILE_OF[item.nodeid]
    USED[file] += time.process_time() - item.began
    if USED[file] > SECONDS:  # the file's time is over: the next test is announced already, those behind it go
        items = item.session.items
        at = items.index(item) + 2
        items[at:] = [later for later in items[at:] if FILE_OF[later.nodeid] != file]
def pytest_collectreport(report):
    file = next((file for file in OUT if report.nodeid.endswith(file)), None)
    if file and (report.skipped or report.failed):
        _write(file, node="the whole file", outcome=report.outcome, text=str(report.longrepr)[-3000:])
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _write(FILE_OF[report.nodeid], node=_name(report.nodeid), outcome=report.outcome, text="" if report.passed else str(report.longrepr)[-4000:], seconds=round(report.duration, 2))
"""


@dataclasses.dataclass
class Found:
    """Results of one file on one played machine."""

    te: str
    target: str
    file: str
    collected: list[str]
    results: dict[str, tuple[str, str, float]]
    """Test -> outcome, text of a failure, seconds."""

    def count(self) -> collections.Counter[str]:
        """Tests by outcome, with 'not run' for what is left."""
        count = collections.Counter(outcome for outcome, _, _ in self.results.values())
        count["not run"] = count.pop("slow", 0) + len(set(self.collected) - set(self.results))
        return count


def place(store: Path, te: str, target: str, name: str) -> Path:
    """Where a file's results on a machine are kept."""
    return store / f"{te}-{target}-{name.removesuffix('.py').replace('/', '+')}.jsonl"


def read(store: Path, te: str, target: str, name: str) -> Found:
    """What the store holds of a file on a machine; the last result of a test counts."""
    path = place(store, te, target, name)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    collected = next((row["collected"] for row in reversed(rows) if "collected" in row), [])
    results = {
        row["node"]: (outcome_of(row["outcome"], row["text"]), row["text"], row.get("seconds", 0.0))
        for row in rows
        if "node" in row
    }
    if collected:
        known = set(collected)
        results = {node: result for node, result in results.items() if node in known}
    return Found(te, target, name, collected, results)


def outcome_of(outcome: str, text: str) -> str:
    """passed, failed, skipped; slow: it ran out of its time; refused: an excluded feature is what it tests."""
    if outcome != "failed":
        return outcome
    if reason_of(text):
        return "refused"
    return "slow" if "Timeout (>" in text or "Timeout >" in text else outcome


def reason_of(text: str) -> str | None:
    """The excluded feature that a failure names, if any."""
    refused = re.search(r"transformer_engine_torch\.(\w+) runs on a GPU only", text)
    if refused and refused[1] in REASONS:
        return f"{refused[1]}: {REASONS[refused[1]]}"
    return next((reason for pattern, reason in EXCLUDED if re.search(pattern, text)), None)


def run_files(clone: Path, names: list[str], te: str, target: str, options: argparse.Namespace) -> str:
    """Runs what the store lacks of some files in one process, and returns the end of pytest's output."""
    done = {name: read(options.store, te, target, name).results for name in names}
    keep = {
        name: [node for node, (outcome, _, _) in results.items() if outcome not in options.again]
        for name, results in done.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "te_tests_reporter.py").write_text(REPORTER, encoding="utf-8")
        Path(folder, "done.json").write_text(json.dumps(keep), encoding="utf-8")
        tests = clone / "tests/pytorch"
        environment = {
            **os.environ,
            **(AS_IN_QA if names == [ALONE] else {}),
            "PYTHONPATH": os.pathsep.join([str(ROOT), folder, *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            "TE_TESTS": str(tests),
            "TE_TESTS_OUT": json.dumps({name: str(place(options.store, te, target, name).resolve()) for name in names}),
            "TE_TESTS_DONE": str(Path(folder, "done.json")),
            "TE_TESTS_SECONDS": str(options.minutes * 60),
            "TE_PATH": str(clone),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "MPBRIDGE_PLAYED": target,
            "MPBRIDGE_TE": te,
        }
        if "test_checkpoint.py" in names:
            script = tests / "test_checkpoint.py"
            environment["NVTE_TEST_CHECKPOINT_ARTIFACT_PATH"] = write_checkpoints(script, folder, environment)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mpbridge.te_cpu.pytest_plugin"]
        command += ["-p", "te_tests_reporter", "-p", "no:cacheprovider", "-n0"]
        command += ["--rootdir", str(tests), "-c", os.devnull, "--timeout", str(options.each), "-W", "ignore"]
        command += [*(["-k", options.expression] if options.expression else []), *(str(tests / name) for name in names)]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return (ran.stdout + ran.stderr)[-1500:]


def write_checkpoints(script: Path, folder: str, environment: dict[str, str]) -> str:
    """The checkpoints that test_checkpoint.py loads, written by the file itself as Transformer Engine's QA does."""
    made = Path(folder, "checkpoints")
    command = [sys.executable, "-m", "mpbridge", "on-cpu", "--target", environment["MPBRIDGE_PLAYED"]]
    command += ["--te", environment["MPBRIDGE_TE"], str(script), "--save-checkpoint", "all"]
    subprocess.run(
        command,
        cwd=folder,
        env={**environment, "NVTE_TEST_CHECKPOINT_ARTIFACT_PATH": str(made)},
        capture_output=True,
        check=False,
    )
    return str(made)


def share(passed: int, of: int) -> str:
    """'97.3 %', or a dash."""
    return f"{100 * passed / of:.1f} %" if of else "-"


def table(everything: list[Found]) -> list[str]:
    """The results by release, file and machine, in Markdown, with a line for each release."""
    lines = []
    for te in sorted({found.te for found in everything}):
        found_of = [found for found in everything if found.te == te]
        lines += [
            f"Release {te}:",
            "",
            "| file | machine | passed | failed | not run | needs a GPU | skips itself | passed of what ran | passed of all |",
        ]
        lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|"]
        total: collections.Counter[str] = collections.Counter()
        for found in found_of:
            count = found.count()
            total.update(count)
            lines.append(row(found.file.removesuffix(".py"), {"h100": "H100", "b200": "B200"}[found.target], count))
        lines += [row("all", "", total), ""]
        reasons = collections.Counter(
            reason_of(text) for found in found_of for outcome, text, _ in found.results.values() if outcome == "refused"
        )
        lines += [f"- needs a GPU, {count} times: {reason}" for reason, count in reasons.most_common()]
        lines += [""]
    return lines


def row(name: str, machine: str, count: collections.Counter[str]) -> str:
    """One line of the table: shares leave out what needs an excluded feature and what the test itself skips."""
    ran = count["passed"] + count["failed"]
    cells = [count[key] for key in ("passed", "failed", "not run", "refused", "skipped")]
    shares = share(count["passed"], ran), share(count["passed"], ran + count["not run"])
    return "| " + " | ".join([name, machine, *map(str, cells), *shares]) + " |"


def stored(store: Path) -> list[Found]:
    """Everything in the store, in the table's order."""
    releases = sorted({path.name.split("-")[0] for path in store.glob("*.jsonl")})
    return [
        read(store, te, target, name)
        for te in releases
        for name, targets in FILES.items()
        for target in targets
        if place(store, te, target, name).exists()
    ]


START, END = "<!-- te_tests -->", "<!-- end of te_tests -->"


def write_page(page: Path, lines: list[str]) -> None:
    """Puts the table between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    page.write_text(before + START + "\n" + "\n".join(lines).strip() + "\n" + END + after, encoding="utf-8")


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, nargs="?", help="a checkout of NVIDIA/TransformerEngine at --te's tag")
    parser.add_argument("files", nargs="*", help="under tests/pytorch (default: all that the project promises)")
    parser.add_argument("--te", default="2.11")
    parser.add_argument("--target", nargs="+", help="machines (default: those that the file's subject asks for)")
    parser.add_argument("--store", type=Path, default=Path("te_tests"), help="folder of the results")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="of CPU time for one file on one machine, in this call"
    )
    parser.add_argument("--each", type=int, default=120, help="seconds for one test")
    parser.add_argument(
        "--again", nargs="*", default=[], choices=["failed", "slow", "refused", "passed", "skipped"],
        help="outcomes that run again",
    )  # fmt: skip
    parser.add_argument("--show", type=int, default=0, help="failures to print for each file")
    parser.add_argument("--table", action="store_true", help="only print what the store holds")
    parser.add_argument("--docs", type=Path, help="a page whose table is written anew")
    parser.add_argument("-k", dest="expression")
    options = parser.parse_args(arguments)
    if options.clone is None and not options.table and options.docs is None:
        parser.error("expected a clone, --table or --docs")
    return options


def report(names: list[str], target: str, said: str, options: argparse.Namespace) -> None:
    """Prints a line for each file, and some failures."""
    for name in names:
        found = read(options.store, options.te, target, name)
        print(f"{options.te} {row(name, target, found.count())}", flush=True)
        failed = [(node, text) for node, (outcome, text, _) in found.results.items() if outcome == "failed"]
        for node, text in failed[: options.show]:
            print(f"--- {node}\n{text}", file=sys.stderr)
    if not any(read(options.store, options.te, target, name).results for name in names):
        print(said, file=sys.stderr)


def main() -> int:
    options = options_of()
    options.store.mkdir(parents=True, exist_ok=True)
    if options.clone is not None:
        names = options.files or [name for name in FILES if (options.clone / "tests/pytorch" / name).exists()]
        for target in options.target or (*HOPPER, *BLACKWELL):
            here = [name for name in names if options.target or target in FILES[name]]
            for group in ([name for name in here if name != ALONE], [name for name in here if name == ALONE]):
                if group:
                    said = run_files(options.clone.resolve(), group, options.te, target, options)
                    report(group, target, said, options)
    if options.table:
        print("\n".join(table(stored(options.store))))
    if options.docs:
        write_page(options.docs, table(stored(options.store)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
