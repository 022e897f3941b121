"""Runs Megatron-LM's own unit tests on mpbridge's kernels, from a checkout: `python scripts/evidence/megatron_tests.py CHECKOUT [FILE ...] --te 2.20 --store FOLDER`.

The checkout is only read; another project's, such as Megatron Bridge's, serves too (`--name "Megatron Bridge"`, with what it imports in PYTHONPATH). Each file under tests/unit_tests runs in a world of its own under mpbridge's pytest plugin, an H100 played: first with one rank; what fails or
skips there for want of ranks runs again with 2, then 4 and 8 (--ranks; Megatron-LM's CI has 8: --ranks 8 gives every file those, --ranks 1 8 what wants more than one). A case's result is the one of the largest world that it was run in. Every
result is kept in the store, which begins with the committed results in data/, and the next call runs what is missing there; --again runs some outcomes anew. A file has --minutes
in a call; a test that takes --each seconds ends its world. Calls with files of their own may share a store. `--table` prints the results by folder and by cause; `--docs PAGE` writes
them into a page, between the marks of --name; `--keep` writes the results to be committed; `--check` names the cases that passed the time before and no longer do.

A case that needs a feature of the list EXCLUDED does not count; neither does one that skips itself.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import te_folders  # noqa: F401  # it says where Transformer Engine lies

from mpbridge.te_cpu.ranks import Merged, Ranks

UNIT = "tests/unit_tests"
PRELOAD = (
    "megatron.core",
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.training",
    "megatron.bridge.training.pretrain",
)
"""Imported once, before the ranks are forked."""
SIZES = (1, 2, 4, 8)
MORE_RANKS = re.compile(
    r"world.?size|at least \S+ (\w+ )?(rank|GPU)|\b(two|[2468]) (or more |distributed )?(rank|GPU)|ranks? (are|is) (not )?(required|available)|>= ?[2468] ?(rank|GPU)"
    r"|even number of (at least \d )?ranks|requires exactly \d|specifically requires|requires (a )?multi|Multi-rank|torch\.cuda\.device_count\(\)|\(\d+\) is not divisible by|not divisible by .*parallel"
    r"|decoder world size|GPUs, but only|global rank \d+ (is )?not|invalid.*rank|world_size|non-existing rank|list index out of range.*parallel",
    re.IGNORECASE,
)
"""The text of a failure or a skip for want of ranks."""
EXCLUDED: tuple[tuple[str, str], ...] = (
    (r"CUDAGraph|cuda_?graph|CudaGraph|graphsafe|make_graphed_callables|torch\.cuda\.graph", "CUDA graphs: they record the work of a GPU"),
    (r"the Triton kernel \S+ runs on a GPU only|triton", "Megatron-LM's own Triton kernels"),
    (r"symm(etric)?_?mem|SymmetricMemory|NVLS|nvshmem|multicast|nvlink|torch_memory_saver|nccl_allocator\.so", "symmetric memory over NVLink, NVSHMEM, CUDA virtual memory, NCCL's allocator (a CUDA extension)"),
    (r"flash.?attn|flash attention|flash_mla|flashinfer|FlashAttention|FlashInfer|FA[23]\b|dynamic batching", "FlashAttention's and FlashInfer's kernels"),
    (r"runs on a GPU only: .*attention|No dot product attention backend|fused_attn|FusedAttention", "attention that only fused kernels compute (in FP8, with context parallelism)"),
    (r"mamba_ssm|mamba-ssm|causal_conv1d|Mamba SSM|MambaSSM|mamba", "mamba_ssm and causal_conv1d: CUDA extensions"),
    (r"\bfla\b|FLA is not|flash.linear.attention", "flash-linear-attention: Triton kernels"),
    (r"deep_?ep\b|DeepEP|HybridEP|expert dispatch by NCCL|_comm_ptr|deep_gemm|userbuffers|Userbuffers|nixl", "DeepEP, NCCL's expert dispatch, DeepGEMM, NIXL and Userbuffers: communication and GEMMs written for GPUs"),
    (r"\bamp_C\b|\bapex\b|Apex", "Apex's compiled extensions"),
    (r"emerging_optimizers|emerging-optimizers", "emerging_optimizers, which is on no package index"),
    (r"modelopt|ModelOpt", "NVIDIA ModelOpt with its compiled parts"),
    (r"kitchen", "NVIDIA's kitchen, which is not public"),
    (r"nemo.lens|nemo\.lens|energon|multistorageclient|multi-storage-client|MSC|tensorrt_llm|TRT|torchvision", "nemo-lens, Energon, multi-storage-client, TensorRT-LLM, torchvision: not installed"),
    (r"nvidia_resiliency_ext|nvrx|NVRx", "nvidia-resiliency-ext 0.6, which is on no package index"),
    (r"huggingface|Hugging ?Face|Connection|resolve host|/opt/data|No such file or directory.*data|urlopen|ConnectError|offline", "data or tokenizers from the network"),
    (r"Blackwell|sm_?100|compute capability 10|MXFP8 is supported|NVFP4|nvfp4", "Blackwell: an H100 is played"),
    (r"memory_allocated|mem_allocated|peak training memory|max_memory|elapsed_time|memory_reserved", "it measures CUDA memory or the time of kernels"),
)  # fmt: skip
"""The text of a failure -> the feature that it needs. The list is closed: what is on it cannot be had on a CPU, or cannot be installed."""
KEPT = Path(__file__).resolve().parent / "data"
LONGEST = 6000
"""Characters of a reason that the store keeps."""


@dataclasses.dataclass
class Case:
    """The last result of a test in the largest world that it was run in."""

    test: str
    ranks: int
    outcome: str
    text: str
    seconds: float
    before: str = ""
    """Its result in that world the time before."""

    @property
    def file(self) -> str:
        """Below tests/unit_tests."""
        return self.test.split("::")[0].removeprefix(UNIT + "/")

    @property
    def excluded(self) -> str | None:
        """The excluded feature that it needs."""
        if self.outcome == "passed":
            return None
        return next((why for pattern, why in EXCLUDED if re.search(pattern, self.error)), None)

    @property
    def error(self) -> str:
        """The line of the reason that names the error: the first one, for a module that cannot be imported the last; for a world that was ended after
        a rank had failed that rank's."""
        lines = self.text.strip().splitlines() or [""]
        if " was ended in this test" in lines[0]:
            failed = [after for line, after in itertools.pairwise(lines) if re.fullmatch(r"rank \d+: failed.*", line)]
            lines = [line for line in failed if "Connection closed by peer" not in line] or lines
        raised = [line[1:].strip() for line in lines if line.startswith("E ")]
        return (raised[-1] if raised and "::" not in self.test else lines[0])[:400]

    @property
    def brief(self) -> str:
        """Of the reason, what `error` and `wants_ranks` read."""
        if self.outcome == "passed":
            return ""
        more = MORE_RANKS.search(self.text)
        text = f"{'' if '::' in self.test else 'E '}{self.error}\n{more[0] if more else ''}"
        # of a machine's paths, what all machines have; a test's own data lies under /opt
        return re.sub(r"(?<![\w.…])/(?!opt/)(?:[\w.+-]+/)*((?:[\w.+-]+/){2}[\w.+-]+)", r"\1", text)

    @property
    def wants_ranks(self) -> bool:
        """Whether it might do otherwise with more ranks."""
        return self.outcome != "passed" and MORE_RANKS.search(self.text) is not None


class Store:
    """Results of one commit under one release of Transformer Engine: a line for each case and world."""

    def __init__(self, folder: Path, commit: str, te: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{commit[:10]}-te{te}.jsonl"
        self.kept = KEPT / f"megatron_tests-{commit[:10]}-te{te}.jsonl.xz"

    def rows(self) -> list[dict[str, object]]:
        """Everything, oldest first."""
        kept = lzma.decompress(self.kept.read_bytes()).decode() if self.kept.exists() else ""
        here = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return [json.loads(line) for line in (kept + here).splitlines()]

    def keep(self) -> None:
        """Writes each case's last result, with what its table needs of the text, and the files that were run whole."""
        cases = [
            {"file": case.file, "ranks": case.ranks, "test": case.test, "outcome": case.outcome, "text": case.brief, "seconds": case.seconds}
            for _, case in sorted(self.cases().items())
        ]  # fmt: skip
        whole = [{"file": file, "ranks": ranks, "whole": True} for ranks in SIZES for file in sorted(self.whole(ranks))]
        text = "".join(json.dumps(row) + "\n" for row in cases + whole)
        self.kept.write_bytes(lzma.compress(text.encode(), preset=9))

    def add(self, file: str, ranks: int, merged: Merged | None) -> None:
        """One result; None: the file has been run to its end."""
        row: dict[str, object] = {"file": file, "ranks": ranks}
        if merged is None:
            row["whole"] = True
        else:
            row |= {
                "test": merged.test,
                "outcome": merged.outcome,
                "text": merged.text[:LONGEST],
                "seconds": round(merged.seconds, 2),
            }
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def cases(self) -> dict[str, Case]:
        """Every case by name."""
        out: dict[str, Case] = {}
        for row in self.rows():
            if "test" not in row:
                continue
            test, ranks = str(row["test"]), int(str(row["ranks"]))
            old = out.get(test)
            if old is None or ranks >= old.ranks:
                before = old.outcome if old and old.ranks == ranks else ""
                out[test] = Case(test, ranks, str(row["outcome"]), str(row["text"]), float(str(row["seconds"])), before)
        modules = {test.split("::")[0] for test in out if "::" in test}
        return {test: case for test, case in out.items() if "::" in test or test not in modules}

    def whole(self, ranks: int) -> set[str]:
        """Files that were run to their end in a world of this size."""
        return {str(row["file"]) for row in self.rows() if row.get("whole") and row["ranks"] == ranks}


def files_of(checkout: Path, names: list[str]) -> list[str]:
    """Test files below tests/unit_tests, or those that are named and those of named folders, in order."""
    folder = checkout / UNIT
    found = (path for name in names or ["."] for path in [folder / name, *(folder / name).rglob("test_*.py")])
    return sorted(
        path.relative_to(folder).as_posix()
        for path in found
        if path.suffix == ".py" and path.name != "test_utilities.py"
    )


def wanted(store: Store, file: str, ranks: int, first: bool, again: list[str]) -> list[str] | None:
    """The tests of a file to run in a world: [] for all of them, None for nothing. first: the call's smallest world."""
    cases = [case for case in store.cases().values() if case.file == file]
    anew = [
        case.test
        for case in cases
        if case.ranks == ranks and case.outcome in again and standing(case) not in ("excluded", "ranks")
    ]
    if first:
        return anew or ([] if file not in store.whole(ranks) else None)
    return anew + [case.test for case in cases if case.ranks < ranks and case.wants_ranks] or None


def run(options: argparse.Namespace, store: Store) -> None:
    """Runs what the store lacks."""
    os.chdir(options.checkout)
    sys.path.insert(0, str(options.checkout))
    for ranks in options.ranks:
        with Ranks(ranks, "h100", options.te, preload=PRELOAD, grace=options.grace, each=options.each) as world:
            for file in files_of(options.checkout, options.files):
                tests = wanted(store, file, ranks, ranks == options.ranks[0], options.again)
                if tests is None:
                    continue
                # in the order of the file: a test may rely on the process group that one before it has made
                known = {
                    row["test"]
                    for row in store.rows()
                    if row.get("file") == file and "test" in row and (tests or row["ranks"] == ranks)
                }
                arguments = [
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "-W",
                    "ignore",
                    "-p",
                    "no:randomly",
                    "--maxfail=0",  # the addopts of core_v0.16.1 end a file at its first failure
                    f"{UNIT}/{file}",
                ]
                counted: collections.Counter[str] = collections.Counter()
                for merged in world.run(arguments, 60 * options.minutes, sorted(map(str, known - set(tests)))):
                    store.add(file, ranks, merged)
                    counted[merged.outcome] += 1
                    if options.show and merged.outcome == "failed":
                        print(f"--- {merged.test}\n{merged.text[: options.show]}", flush=True)
                if not (tests or world.unfinished):
                    store.add(file, ranks, None)
                left = " (out of time)" if world.unfinished else ""
                print(
                    f"{ranks} {file}: {', '.join(f'{count} {name}' for name, count in counted.items()) or 'nothing'}{left}",
                    flush=True,
                )


def cause(case: Case) -> str:
    """A failure's error without what differs between cases that have the same cause."""
    text = re.sub(r"^\[\w+, rank [\d, ]+ of \d+\] ", "", case.error)
    text = re.sub(r"\((\S+):\d+\)$", lambda found: "(" + "/".join(found[1].split("/")[-2:]) + ")", text)
    return re.sub(r" from '[^']*'|0x[0-9a-f]+|\b\d{3,}\b|tensor\(.*", "…", text)[:180].strip()


def standing(case: Case) -> str:
    """passed, failed, skipped; excluded: it needs a feature of the list; ranks: it wants a larger world than it was run in."""
    if case.outcome == "passed":
        return "passed"
    if case.wants_ranks and case.ranks < max(SIZES):
        return "ranks"
    return "excluded" if case.excluded and case.outcome == "failed" else case.outcome


def sums(cases: list[Case]) -> Iterator[str]:
    """The table by folder."""
    yield "| tests/unit_tests | cases | passed | failed | wants a larger world, not run there yet | needs an excluded feature | skips itself | passed, of passed and failed |"
    yield "|---|" + "--:|" * 7
    folders = collections.defaultdict(list)
    for case in cases:
        folders[case.file.split("/")[0] if "/" in case.file else "(files)"].append(case)
    for name, found in [*sorted(folders.items()), ("all", cases)]:
        count = collections.Counter(map(standing, found))
        of = count["passed"] + count["failed"]
        share = f"{100 * count['passed'] / of:.1f} %" if of else "-"
        numbers = [len(found), *(count[key] for key in ("passed", "failed", "ranks", "excluded", "skipped"))]
        yield f"| {name} | {' | '.join(map(str, numbers))} | {share} |"


def causes(cases: list[Case], most: int) -> Iterator[str]:
    """Excluded features with their cases, then the causes of what failed."""
    needs = collections.Counter(case.excluded for case in cases if standing(case) == "excluded")
    yield from (f"- excluded, {count} cases: {why}" for why, count in needs.most_common())
    failed = collections.defaultdict(list)
    for case in cases:
        if standing(case) == "failed":
            failed[cause(case)].append(case)
    ordered = sorted(failed.items(), key=lambda item: -len(item[1]))
    for text, found in ordered[:most]:
        names = sorted({case.file for case in found})
        yield f"- failed, {len(found)} cases ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}): `{text.replace('|', '/').replace('`', chr(39))}`"
    if rest := sum(len(found) for _, found in ordered[most:]):
        yield f"- failed, {rest} cases of {len(ordered) - most} other causes: in the store"


def table(store: Store, commit: str, te: str, most: int, name: str = "") -> list[str]:
    """What stands in docs."""
    cases = list(store.cases().values())
    worlds: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in cases:
        worlds[case.ranks][standing(case)] += 1
    of = ", ".join(
        f"{found.total()} in a world of {size} ({found['passed']} passed, {found['failed']} failed)"
        for size, found in sorted(worlds.items())
    )
    ended = sum(standing(case) == "failed" and " was ended in this test" in case.error for case in cases)
    files = len({case.file for case in cases})
    return [
        f"{name or 'Megatron-LM'} {commit[:10]}, Transformer Engine {te}, an H100 played; {files} files, cases: {of}. {ended} failures are a limit of the run.",
        "",
        *sums(cases),
        "",
        *causes(cases, most),
    ]


END = "<!-- end of megatron_tests -->"


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", help="or folders below tests/unit_tests (default: all)")
    parser.add_argument(
        "--name", default="", help="of the project in the table, and in the page's mark: <!-- megatron_tests NAME -->"
    )
    parser.add_argument("--commit", help="default: git's answer in the checkout")
    parser.add_argument("--te", default="2.20")
    parser.add_argument("--store", type=Path, default=Path("megatron_tests"))
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        choices=SIZES,
        help="all files in the first world, what wants more ranks in the next ones",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="for one file in this call")
    parser.add_argument("--each", type=float, default=120.0, help="seconds for one test")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds that other ranks have after one has failed")
    parser.add_argument("--again", nargs="*", default=[], choices=["failed", "skipped", "passed"])
    parser.add_argument("--show", type=int, default=0, metavar="N", help="characters of each failure to print")
    parser.add_argument("--most", type=int, default=25, help="causes in the table")
    parser.add_argument("--table", action="store_true", help="only print the stored results")
    parser.add_argument("--docs", type=Path, help="only write them into a page")
    parser.add_argument("--keep", action="store_true", help="only write the results to be committed")
    parser.add_argument(
        "--check", action="store_true", help="only name cases that passed the time before and no longer do"
    )
    return parser.parse_intermixed_args()


def main() -> int:
    """The exit status."""
    options = options_of()
    options.checkout, options.store = options.checkout.resolve(), options.store.resolve()
    commit = (
        options.commit
        or subprocess.run(
            ["git", "-C", str(options.checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    store = Store(options.store, commit, options.te)
    if options.check:
        lost = [case.test for case in store.cases().values() if case.before == "passed" and case.outcome == "failed"]
        print("\n".join(lost) or "no case that passed fails")
        return bool(lost)
    if options.keep:
        store.keep()
    if not (options.table or options.docs or options.keep):
        run(options, store)
    lines = table(store, commit, options.te, options.most, options.name)
    if options.table:
        print("\n".join(lines))
    if options.docs:
        text = options.docs.read_text(encoding="utf-8")
        start = f"<!-- {f'megatron_tests {options.name}'.strip()} -->"
        before, rest = text.split(start, 1)
        options.docs.write_text(
            before + start + "\n" + "\n".join(lines) + "\n" + END + rest.split(END, 1)[1], encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
