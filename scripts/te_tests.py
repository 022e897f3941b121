"""Transformer Engine's own tests over mpbridge's kernels, from a clone: `python scripts/te_tests.py CLONE --te 2.11 [--target h100 b200] [FILE ...]`.

Prints a table by file: passed, failed, refused by name (an excluded feature, with the reason), skipped by the test itself, and not reached in
the time given. What was not reached counts as failed. The clone is read, never written; its tests at the release's tag belong to --te.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpbridge.te_cpu.refusals import REASONS

FILES = (
    "test_float8tensor.py", "test_float8_current_scaling_exact.py", "test_float8_blockwise_scaling_exact.py",
    "test_float8_blockwise_gemm_exact.py", "test_float8blockwisetensor.py", "mxfp8/test_mxfp8_quantize_swizzle_fusion.py", "nvfp4/test_nvfp4_quantize_exact.py",
    "nvfp4/test_nvfp4_gemm_exact.py", "nvfp4/test_nvfp4_module_exact.py", "nvfp4/test_nvfp4_rht_quantize_exact.py",
    "nvfp4/test_nvfp4_sr_quantize.py", "nvfp4/test_nvfp4_group_quantize.py", "test_recipe.py", "test_custom_recipe.py",
    "test_fused_optimizer.py", "test_multi_tensor.py", "test_partial_cast.py", "test_numerics.py", "test_sanity.py", "test_permutation.py",
    "test_fused_rope.py", "test_fused_router.py", "test_deferred_init.py", "test_checkpoint.py", "test_fusible_ops.py",
)  # fmt: skip
REPORTER = """
import json, os
OUT = os.environ["TE_TESTS_OUT"]
def _write(**row):
    with open(OUT, "a") as file:
        file.write(json.dumps(row) + "\\n")
def pytest_collection_finish(session):
    _write(collected=[item.nodeid for item in session.items])
def pytest_collectreport(report):
    if report.skipped and report.nodeid.endswith(".py"):
        _write(node=report.nodeid, outcome="skipped", text=str(report.longrepr)[-300:])
    elif report.failed:
        _write(node=report.nodeid, outcome="failed", text=str(report.longrepr)[-1500:])
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _write(node=report.nodeid, outcome=report.outcome, text="" if report.passed else str(report.longrepr)[-1500:], seconds=round(report.duration, 2))
"""


def run_file(
    clone: Path, name: str, te: str, target: str, seconds: int, each: int, more: list[str]
) -> dict[str, object]:
    """What became of every test of one file on one played machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.jsonl")
        Path(folder, "te_tests_reporter.py").write_text(REPORTER, encoding="utf-8")
        root = str(Path(__file__).resolve().parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, folder, *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            "TE_TESTS_OUT": str(out),
            "TE_PATH": str(clone),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "MPBRIDGE_PLAYED": target,
            "MPBRIDGE_TE": te,
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "mpbridge.te_cpu.pytest_plugin",
            "-p",
            "te_tests_reporter",
        ]
        command += ["-p", "no:cacheprovider", "--rootdir", str(clone / "tests/pytorch"), "-c", os.devnull]
        command += ["--timeout", str(each), "-W", "ignore", *more, str(clone / "tests/pytorch" / name)]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
            tail, cut = (done.stdout + done.stderr)[-1500:], False
        except subprocess.TimeoutExpired:
            tail, cut = "", True
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    collected = next((row["collected"] for row in rows if "collected" in row), [])
    results: dict[str, tuple[str, str]] = {}
    for row in rows:
        if "node" in row:
            results[row["node"]] = (outcome_of(row["outcome"], row["text"]), row["text"])
    return {"file": name, "target": target, "collected": collected, "results": results, "cut": cut, "tail": tail}


def outcome_of(outcome: str, text: str) -> str:
    """passed, failed, skipped, or refused where our own refusal by name is the cause, or GPU memory is what is tested."""
    if outcome == "failed" and "runs on a GPU only" in text and any(name in text for name in REASONS):
        return "refused"
    if outcome == "failed" and "cuda.memory_allocated" in text:
        return "refused"  # it measures CUDA memory
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a checkout of NVIDIA/TransformerEngine at the tag of --te")
    parser.add_argument("files", nargs="*", help="under tests/pytorch (default: all that the project promises)")
    parser.add_argument("--te", default="2.11")
    parser.add_argument("--target", nargs="+", default=["h100", "b200"])
    parser.add_argument("--minutes", type=float, default=15.0, help="for one file on one machine")
    parser.add_argument("--each", type=int, default=120, help="seconds for one test")
    parser.add_argument("--show", type=int, default=0, help="failures to print for each file")
    parser.add_argument("--json", type=Path, help="where to write every result")
    parser.add_argument("-k", dest="expression")
    args = parser.parse_args()
    more = ["-k", args.expression] if args.expression else []
    names = args.files or [name for name in FILES if (args.clone / "tests/pytorch" / name).exists()]
    print(
        "| file | machine | passed | failed | refused | skipped | not reached | passed of those that need no excluded feature |"
    )
    print("|---|---|---|---|---|---|---|---|")
    everything, total = [], collections.Counter()
    for name in names:
        for target in args.target:
            found = run_file(args.clone.resolve(), name, args.te, target, int(args.minutes * 60), args.each, more)
            results: dict = found["results"]  # type: ignore[assignment]
            count = collections.Counter(outcome for outcome, _ in results.values())
            missing = len(set(found["collected"]) - set(results))  # type: ignore[call-overload]
            wanted = count["passed"] + count["failed"] + missing
            share = f"{100 * count['passed'] / wanted:.1f} %" if wanted else "-"
            print(
                f"| {name} | {target} | {count['passed']} | {count['failed']} | {count['refused']} | {count['skipped']} | {missing} | {share} |",
                flush=True,
            )
            total.update({"passed": count["passed"], "wanted": wanted})
            everything.append(found)
            if not results:
                print(found["tail"], file=sys.stderr)
            for node, (outcome, text) in list(results.items()):
                if outcome == "failed" and args.show:
                    print(f"--- {node}\n{text}", file=sys.stderr)
    if total["wanted"]:
        print(f"\n{total['passed']} of {total['wanted']}: {100 * total['passed'] / total['wanted']:.1f} %")
    for reason, nodes in collections.Counter(
        reason_of(text) for found in everything for outcome, text in found["results"].values() if outcome == "refused"
    ).items():  # type: ignore[attr-defined]
        print(f"refused {nodes} times: {reason}")
    if args.json:
        args.json.write_text(json.dumps(everything), encoding="utf-8")
    return 0


def reason_of(text: str) -> str:
    """The kernel that was refused, and why."""
    if "cuda.memory_allocated" in text:
        return "it measures CUDA memory, of which none is allocated"
    return next((f"{name}: {reason}" for name, reason in REASONS.items() if f".{name} runs" in text), "?")


if __name__ == "__main__":
    sys.exit(main())
