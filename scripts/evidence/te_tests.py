"""Runs Transformer Engine's own tests on mpbridge's kernels, from a clone: `python scripts/evidence/te_tests.py CLONE [FILE ...] --te 2.11 --store FOLDER`.

The clone is only read; it must be at the tag of the release given as --te. A file's tests run in the same order everywhere: its test
functions in turn, each with its parameters shuffled (seed 0). A call draws the first --least tests of that order, and further ones until the file has
used its --minutes; so the drawn tests are an unbiased sample that includes every test function. Every result is kept in the store, and the
next call continues where this one ended. A test that used --each seconds of CPU time is out of time, which counts as failed. `--table` prints the
results of the store by file; `--docs PAGE` writes them into a page, where rows of files that were run whole stay if the store lacks the file.

If jemalloc is installed (Debian: libjemalloc2), the tests run with it: glibc gives the memory of every large tensor back to the system, and clearing
it again for the next one is most of what these tests would cost.
"""

from __future__ import annotations

import argparse
import collections
import ctypes.util
import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from te_folders import ROOT

from mpbridge.te_cpu.refusals import reason_of as why_refused

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
    "mxfp8/test_mxfp8_dequantize_extreme_scales.py": BLACKWELL,
    "mxfp8/test_mxfp8_master_weight_empty_shard.py": BLACKWELL,
    "test_mxfp8_2d_quantize.py": BLACKWELL,
    "nvfp4/test_nvfp4_quantize_exact.py": BLACKWELL,
    "nvfp4/test_nvfp4_gemm_exact.py": BLACKWELL,
    "nvfp4/test_nvfp4_module_exact.py": BLACKWELL,
    "nvfp4/test_nvfp4_rht_quantize_exact.py": BLACKWELL,
    "nvfp4/test_nvfp4_sr_quantize.py": BLACKWELL,
    "nvfp4/test_nvfp4_group_quantize.py": BLACKWELL,
    "nvfp4/test_nvfp4_group_quantize_graph_safe.py": BLACKWELL,
    "nvfp4/test_nvfp4_2d_quantize_swizzle_fusion.py": BLACKWELL,
    "nvfp4/test_nvfp4_rht_quantize_swizzle_fusion.py": BLACKWELL,
    "nvfp4/test_nvfp4_weight_swizzle_cache.py": BLACKWELL,
    "nvfp4/test_nvfp4_fsdp2_hooks.py": BLACKWELL,
    "test_recipe.py": BLACKWELL,
    "test_custom_recipe.py": BLACKWELL,
    "test_fused_optimizer.py": BLACKWELL,
    "test_multi_tensor.py": HOPPER,
    "test_partial_cast.py": BLACKWELL,
    "test_numerics.py": BLACKWELL,
    "test_grouped_linear.py": BLACKWELL,
    "test_grouped_tensor.py": HOPPER,
    "test_sanity.py": BLACKWELL,
    "test_permutation.py": HOPPER,
    "test_fused_rope.py": HOPPER,
    "test_fused_router.py": HOPPER,
    "test_deferred_init.py": HOPPER,
    "test_checkpoint.py": BLACKWELL,
    "test_fusible_ops.py": BLACKWELL,
}
"""File under tests/pytorch -> the machines played for it: Blackwell if MXFP8 or NVFP4 is tested, since it runs every recipe."""
WHOLE = ("mxfp8/test_*.py", "nvfp4/test_*.py", "test_*float8*.py", "test_mxfp8*.py")
"""Files of a clone of which none may be missing in FILES: those of a quantization."""
ALONE = "test_numerics.py"
"""It runs in a separate process, because environment variables are set for it."""
AS_IN_QA = {
    "PYTORCH_JIT": "0",
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NVTE_FUSED_ATTN": "0",
}
"""Variables that Transformer Engine's qa/L0_pytorch_unittest/test.sh sets for test_numerics.py."""
KEEP_MEMORY = "thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0,narenas:1"
"""jemalloc's options: huge pages, nothing is given back (but between tests, by the reporter), also not what is larger than 8 MiB, and the backward
pass's thread takes from the same memory."""
WALL = 10
"""Maximum ratio of a test's wall time to its CPU time, on a machine shared with others."""
EXCLUDED = (
    (r"cuda\.(max_)?memory_allocated|memory_allocated\(", "it measures CUDA memory, of which none is allocated"),
    (
        r"the Triton kernel \w+ runs on a GPU only \(launched from \S+/tests/",
        "the test's own reference is a Triton kernel",
    ),
    (r"CUDAGraph|cuda\.graph|make_graphed_callables|_cuda_getCurrentRawStream", "CUDA graphs"),
    (r"cuda\.(Event|current_stream).*elapsed_time", "it measures the time of CUDA kernels"),
    (
        r"No dot product attention backend is available",
        "attention that only the fused kernels compute (in FP8, with sinks)",
    ),
    (r"assert 'cpu' == 'cuda'", "it requires a tensor to be on a GPU, or moves it from one"),
)
"""A failure's text -> the excluded feature that it needs, besides the kernels that are refused by name."""
REPORTER = """
import collections, ctypes, gc, json, os, random, signal, sys, time
from pathlib import Path
import numpy, pytest, torch
OUT, SECONDS, TESTS = json.loads(os.environ["TE_TESTS_OUT"]), float(os.environ["TE_TESTS_SECONDS"]), Path(os.environ["TE_TESTS"])
LEAST, EACH = int(os.environ["TE_TESTS_LEAST"]), float(os.environ["TE_TESTS_EACH"])
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * float(os.environ["TE_TESTS_SPARE"])
LEFT = {}
def _divided(divide):  # CUDA multiplies by the reciprocal of a number (torch's BinaryDivTrueKernel.cu): the tests' own references rely on that
    def div(a, b, **how):
        if isinstance(b, (int, float)) and not how and torch.is_tensor(a) and a.dtype is torch.float32:
            return a * (1.0 / torch.tensor(b, dtype=torch.float32))
        return divide(a, b, **how)
    return div
torch.div = _divided(torch.div)
def _normed(norm):  # torch's CPU kernel sums the gradients of weight and bias in BF16, CUDA's in FP32
    def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
        if x.dtype not in (torch.bfloat16, torch.float16):
            return norm(x, shape, weight, bias, eps)
        wide = [None if t is None else t.float() for t in (x, weight, bias)]
        return norm(wide[0], shape, *wide[1:], eps).to(x.dtype)
    return layer_norm
torch.nn.functional.layer_norm = _normed(torch.nn.functional.layer_norm)
LATTICE = {torch.bfloat16: (torch.uint8, 8), torch.float16: (torch.int16, 11), torch.float32: (torch.int32, 24)}  # torch.rand's values: k / 2**bits
CPU = torch.device("cpu")
LIBC = ctypes.CDLL(None)
LIBC.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
def _same_bytes(one, other):  # same places in memory with the same bytes, several times as fast as torch.equal, and no NaN
    laid = one.stride() == other.stride() and one.storage_offset() == other.storage_offset() and one.dtype in LATTICE and one.device == other.device == CPU
    own, others = one.untyped_storage(), other.untyped_storage()
    whole = laid and own.nbytes() == others.nbytes() == one.nbytes
    return whole and LIBC.memcmp(own.data_ptr(), others.data_ptr(), own.nbytes()) == 0 and not bool(one.detach().amax().isnan())
def _equal_is_close(assert_close):  # equal tensors are close: one pass over them instead of a dozen
    def close(actual, expected, *how, **options):
        plain = type(actual) is type(expected) is torch.Tensor and not how and options.keys() <= {"rtol", "atol", "msg"}
        plain = plain and actual.layout is expected.layout is torch.strided and actual.dtype is expected.dtype and actual.shape == expected.shape
        if plain and actual.numel() and (_same_bytes(actual, expected) or torch.equal(actual, expected)):
            return
        assert_close(actual, expected, *how, **options)
    return close
torch.testing.assert_close = _equal_is_close(torch.testing.assert_close)
def _drawn(rand):  # torch's distribution of large tensors from a faster generator, seeded by torch's: a GPU's numbers are others, too
    def draw(*size, **how):
        plain = size and how.keys() <= {"dtype", "device"} and how.get("dtype") in LATTICE and torch.device(how.get("device") or CPU).type != "meta"
        shape = torch.Size(size if isinstance(size[0], int) else size[0]) if plain else torch.Size()
        if shape.numel() < 1 << 20:
            return rand(*size, **how)
        kind, bits = LATTICE[how["dtype"]]
        numbers = numpy.random.SFC64(int(torch.randint(1 << 62, ())))
        drawn = torch.empty(shape, dtype=how["dtype"])
        for part in drawn.view(-1).split(1 << 20):
            raw = torch.from_numpy(numbers.random_raw(-(-part.numel() * kind.itemsize // 8))).view(kind)[:part.numel()]
            part.copy_(raw.bitwise_and_((1 << bits) - 1).float().mul_(2.0**-bits))
        return drawn
    return draw
torch.rand = _drawn(torch.rand)
def _cloned(clone):  # large tensors share their memory until either is written: what one test holds at a time would not fit otherwise
    def cloned(self, *, memory_format=torch.preserve_format):
        plain = type(self) is torch.Tensor and self.layout is torch.strided and self.device == CPU and memory_format is torch.preserve_format
        if plain and self.dtype in LATTICE and self.nbytes == self.untyped_storage().nbytes() >= 1 << 26:
            return torch._lazy_clone(self)
        return clone(self, memory_format=memory_format)
    return cloned
torch.Tensor.clone = _cloned(torch.Tensor.clone)
DONE = {file: set(names) for file, names in json.load(open(os.environ["TE_TESTS_DONE"])).items()}
USED, FILE_OF, BEGAN = collections.Counter(), {}, {}
def _used(nodeid):
    now = time.process_time()
    return now - BEGAN.get(nodeid, now)  # a mark skipped it before it began
def _name(nodeid):
    return nodeid.split("::", 1)[-1]
def _write(file, **row):
    with open(OUT[file], "a") as out:
        out.write(json.dumps(row) + "\\n")
def _out_of_time(*_):
    pytest.fail(f"Timeout (>{EACH} s of CPU time)")
signal.signal(signal.SIGPROF, _out_of_time)
def pytest_collection_modifyitems(session, config, items):
    by_file = collections.OrderedDict((file, []) for file in OUT)
    for item in items:
        FILE_OF[item.nodeid] = item.path.relative_to(TESTS).as_posix()
        by_file[FILE_OF[item.nodeid]].append(item)
    items.clear()
    for file, found in by_file.items():
        by_function, ordered = collections.OrderedDict(), []
        for item in found:
            by_function.setdefault(_name(item.nodeid).split("[")[0], []).append(item)
        for group in by_function.values():
            random.Random(0).shuffle(group)
        while any(by_function.values()):
            ordered += [group.pop() for group in by_function.values() if group]
        if found and not config.option.keyword:
            _write(file, collected=[_name(item.nodeid) for item in ordered])
        LEFT[file] = len([item for item in ordered[:LEAST] if _name(item.nodeid) not in DONE[file]])
        items += [item for item in ordered if _name(item.nodeid) not in DONE[file]]
def pytest_runtest_setup(item):
    if distributed := sys.modules.get("transformer_engine.pytorch.distributed"):
        # checkpoint(use_reentrant=False) leaves this switch behind, and LayerNormMLP reads it outside of checkpoints, too: in the file's own order
        # no test comes later that would see it
        distributed._USE_REENTRANT_ACTIVATION_RECOMPUTE = True
    _write(FILE_OF[item.nodeid], began=_name(item.nodeid))
    BEGAN[item.nodeid] = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, EACH)
def _give_back():  # what jemalloc kept
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    if int(available.split()[1]) * 1024 < MEMORY:
        gc.collect()
        if purge := getattr(LIBC, "mallctl", None):
            purge(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))
def pytest_runtest_teardown(item, nextitem):
    signal.setitimer(signal.ITIMER_PROF, 0)
    _give_back()
    file = FILE_OF[item.nodeid]
    USED[file] += _used(item.nodeid)
    LEFT[file] -= 1
    if USED[file] > SECONDS and LEFT[file] <= 1:  # the next test is announced already, those behind it go
        items = item.session.items
        at = items.index(item) + 2
        items[at:] = [later for later in items[at:] if FILE_OF[later.nodeid] != file]
def pytest_collectreport(report):
    file = next((file for file in OUT if report.nodeid.endswith(file)), None)
    if file and (report.skipped or report.failed):
        _write(file, node="the whole file", outcome=report.outcome, text=str(report.longrepr)[-3000:])
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _write(FILE_OF[report.nodeid], node=_name(report.nodeid), outcome=report.outcome, text="" if report.passed else str(report.longrepr)[-4000:], cpu=round(_used(report.nodeid), 3))
"""


@dataclasses.dataclass
class Found:
    """Results of one file on one played machine."""

    te: str
    target: str
    file: str
    collected: list[str]
    results: dict[str, tuple[str, str, float]]
    """Test -> outcome, text of a failure, seconds of CPU time."""
    on: str
    """Day of the last result."""

    def count(self) -> collections.Counter[str]:
        """Drawn tests by outcome; 'slow': out of time."""
        return collections.Counter(outcome for outcome, _, _ in self.results.values())

    def weighted(self) -> tuple[float, float]:
        """How many of the file's tests pass and how many count, estimated from the drawn ones: each test function is weighted by its number of tests."""
        sizes = collections.Counter(function_of(node) for node in self.collected)
        drawn: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for node, (outcome, _, _) in self.results.items():
            drawn[function_of(node)][outcome] += 1
        weights = {name: sizes[name] / count.total() for name, count in drawn.items()}
        passed = sum(weights[name] * count["passed"] for name, count in drawn.items())
        countable = sum(weights[name] * sum(count[key] for key in COUNTED) for name, count in drawn.items())
        return passed, countable

    def hours(self) -> float:
        """CPU hours that all tests of the file take, by `weighted`'s weights; one that is out of time counts with its limit."""
        sizes = collections.Counter(function_of(node) for node in self.collected)
        spent: dict[str, list[float]] = collections.defaultdict(list)
        for node, (_, _, seconds) in self.results.items():
            spent[function_of(node)].append(seconds)
        return sum(sizes[name] * sum(seconds) / len(seconds) for name, seconds in spent.items()) / 3600

    def unseen(self) -> int:
        """Number of tests in functions of which no test was drawn."""
        drawn = {function_of(node) for node in self.results}
        return sum(function_of(node) not in drawn for node in self.collected)


COUNTED = ("passed", "failed", "slow")
"""Outcomes that count; what the test itself skips and what needs an excluded feature do not."""


def function_of(node: str) -> str:
    """The test function of a test, without its parameters."""
    return node.split("[")[0]


def place(store: Path, te: str, target: str, name: str) -> Path:
    """The path of a file's results on a machine."""
    return store / f"{te}-{target}-{name.removesuffix('.py').replace('/', '+')}.jsonl"


def read(store: Path, te: str, target: str, name: str) -> Found:
    """The stored results of a file on a machine; the last result of a test counts."""
    path = place(store, te, target, name)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    collected: list[str] = next((row["collected"] for row in reversed(rows) if "collected" in row), [])
    results = {
        row["node"]: (outcome_of(row["outcome"], row["text"]), row["text"], row.get("cpu", row.get("seconds", 0.0)))
        for row in rows
        if "node" in row
    }
    if collected:
        known = set(collected)
        results = {node: result for node, result in results.items() if node in known}
    on = datetime.date.fromtimestamp(path.stat().st_mtime).isoformat() if path.exists() else "-"
    return Found(te, target, name, collected, results, on)


def outcome_of(outcome: str, text: str) -> str:
    """passed, failed, skipped; slow: it ran out of time; refused: it tests an excluded feature."""
    if outcome != "failed":
        return outcome
    if reason_of(text):
        return "refused"
    return "slow" if "Timeout (>" in text or "Timeout >" in text else outcome


def reason_of(text: str) -> str | None:
    """The excluded feature that a failure names, if any."""
    refused = re.search(r"transformer_engine_torch\.(\w+) runs on a GPU only", text)
    if refused and (why := why_refused(refused[1])):
        return f"{refused[1]}: {why}"
    return next((reason for pattern, reason in EXCLUDED if re.search(pattern, text)), None)


def run_files(clone: Path, names: list[str], te: str, target: str, options: argparse.Namespace) -> str:
    """Runs the tests of some files that the store lacks, and returns the end of pytest's output.

    All run in one process. If that is killed, the test that ran has failed, and the others go on in a new one, with --minutes for each file again.
    """
    killed: dict[str, list[str]] = {name: [] for name in names}
    while True:
        done = {name: read(options.store, te, target, name).results for name in names}
        keep = {
            name: [*killed[name], *(node for node, (outcome, _, _) in results.items() if outcome not in options.again)]
            for name, results in done.items()
        }
        ran = run_once(clone, names, te, target, keep, options)
        unfinished = {name: node for name in names if (node := interrupted(options.store, te, target, name))}
        if ran.returncode >= 0 or not unfinished:
            return (ran.stdout + ran.stderr)[-1500:]
        for name, node in unfinished.items():
            text = f"signal {-ran.returncode} killed the process (9: it is out of memory)"
            with place(options.store, te, target, name).open("a", encoding="utf-8") as out:
                out.write(json.dumps({"node": node, "outcome": "failed", "text": text, "cpu": 0.0}) + "\n")
            killed[name].append(node)


def interrupted(store: Path, te: str, target: str, name: str) -> str | None:
    """The test that began and left no result, if it is the last one."""
    path = place(store, te, target, name)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return rows[-1].get("began") if rows else None


def run_once(
    clone: Path, names: list[str], te: str, target: str, keep: dict[str, list[str]], options: argparse.Namespace
) -> subprocess.CompletedProcess[str]:
    """Runs the tests of some files except `keep` in one process."""
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
            "TE_TESTS_LEAST": str(options.least),
            "TE_TESTS_EACH": str(options.each),
            "TE_TESTS_SPARE": str(options.spare),
            "TE_PATH": str(clone),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "MPBRIDGE_PLAYED": target,
            "MPBRIDGE_TE": te,
            **allocator(),
        }
        if "test_checkpoint.py" in names:
            script = tests / "test_checkpoint.py"
            environment["NVTE_TEST_CHECKPOINT_ARTIFACT_PATH"] = write_checkpoints(script, folder, environment)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mpbridge.te_cpu.pytest_plugin"]
        command += ["-p", "te_tests_reporter", "-p", "no:cacheprovider", "-n0", "--continue-on-collection-errors"]
        command += ["--rootdir", str(tests), "-c", os.devnull, "--timeout", str(WALL * options.each), "-W", "ignore"]
        command += [*(["-k", options.expression] if options.expression else []), *(str(tests / name) for name in names)]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def allocator() -> dict[str, str]:
    """Variables under which a process allocates with jemalloc; none if it is not installed."""
    found = ctypes.util.find_library("jemalloc")
    return {"LD_PRELOAD": found, "MALLOC_CONF": KEEP_MEMORY} if found else {}


def write_checkpoints(script: Path, folder: str, environment: dict[str, str]) -> str:
    """The checkpoints that test_checkpoint.py loads, written by the file itself, as in Transformer Engine's QA."""
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


def share(passed: float, of: float) -> str:
    """'97.3 %', or a dash."""
    return f"{100 * passed / of:.1f} %" if of else "-"


@dataclasses.dataclass
class Row:
    """One line of the table."""

    file: str
    """Without '.py'."""
    machine: str
    tests: int
    count: collections.Counter[str]
    """Drawn tests by outcome."""
    passed: float
    """How many of the file's tests pass and how many count, by `Found.weighted`."""
    countable: float
    on: str

    @property
    def part(self) -> bool:
        """Whether some of the file's tests were not run."""
        return self.count.total() < self.tests

    @classmethod
    def of(cls, found: Found) -> Row:
        machine = {"h100": "H100", "b200": "B200"}[found.target]
        name = found.file.removesuffix(".py")
        return cls(name, machine, len(found.collected), found.count(), *found.weighted(), found.on)

    @classmethod
    def read(cls, line: str) -> Row | None:
        """The row that a line of a page is; None if it is none. Of a file that was not run whole the weighted counts are unknown: those of the drawn tests."""
        cells = [cell.strip() for cell in line.strip("|\n ").split("|")]
        if len(cells) != len(HEAD.strip("| ").split("|")) or not cells[2].isdigit() or not cells[1]:
            return None
        count = collections.Counter(dict(zip(OUTCOMES, map(int, cells[4:9]), strict=True)))
        counted = sum(count[key] for key in COUNTED)
        return cls(cells[0], cells[1], int(cells[2]), count, count["passed"], counted, cells[-1])

    def __str__(self) -> str:
        """The share excludes tests that need an excluded feature and tests that skip themselves."""
        cells = [self.tests, self.count.total(), *(self.count[key] for key in OUTCOMES)]
        ran = share(self.count["passed"], sum(self.count[key] for key in COUNTED))
        whole = share(self.passed, self.countable)
        return "| " + " | ".join([self.file, self.machine, *map(str, cells), ran, whole, self.on]) + " |"


OUTCOMES = ("passed", "failed", "slow", "refused", "skipped")
"""In the order of the table's columns."""


def table(everything: list[Found], page: str = "") -> list[str]:
    """The results by release, file and machine, in Markdown, with a line per release and the reasons why tests do not count.

    page: an older table; its rows of files that were run whole stay if `everything` lacks the file.
    """
    lines = []
    older = re.split(r"^Release ([\d.]+):$", page, flags=re.MULTILINE)
    before = {
        te: [row for line in text.splitlines() if (row := Row.read(line))]
        for te, text in zip(older[1::2], older[2::2], strict=True)
    }
    for te in sorted({found.te for found in everything}):
        found_of = [found for found in everything if found.te == te]
        rows = {(row.file, row.machine): row for row in map(Row.of, found_of)}
        for row in before.get(te, ()):
            if not row.part:
                rows.setdefault((row.file, row.machine), row)
            elif (row.file, row.machine) not in rows:
                print(
                    f"{te}: {row.file} was not run whole and is not in the store: its row is dropped", file=sys.stderr
                )
        places = {name.removesuffix(".py"): at for at, name in enumerate(FILES)}
        ordered = sorted(rows.values(), key=lambda row: places[row.file])
        count = sum((row.count for row in ordered), collections.Counter[str]())
        tests, passed, countable = (
            sum(getattr(row, key) for row in ordered) for key in ("tests", "passed", "countable")
        )
        whole = Row("all", "", tests, count, passed, countable, "")
        lines += [
            f"Release {te}:",
            "",
            HEAD,
            "|---|---|" + "--:|" * 9 + "---|",
            *map(str, ordered),
            str(whole),
            "",
        ]
        lines += [*short(ordered), *unseen(found_of), cost(found_of), *reasons(found_of), ""]
    return lines


HEAD = "| file | machine | tests | drawn | passed | failed | out of time | needs a GPU | skips itself | passed of what counts | the file, by function | on |"


WANTED = 0.95
"""Share that every file should reach."""


def short(rows: list[Row]) -> list[str]:
    """Files that do not reach that share in the last column."""
    below = [row.file for row in rows if row.countable and row.passed / row.countable < WANTED]
    return [f"- below {100 * WANTED:.0f} % by function: {', '.join(below) or 'none'}"]


def unseen(found_of: list[Found]) -> list[str]:
    """Functions of which no test was drawn, and the tests that were not run."""
    functions = {found.file.removesuffix(".py"): found.unseen() for found in found_of if found.unseen()}
    told = ", ".join(f"{name} ({count} tests)" for name, count in functions.items())
    missing = {found.file.removesuffix(".py"): len(found.collected) - found.count().total() for found in found_of}
    left = ", ".join(f"{name} {count}" for name, count in missing.items() if count > 0)
    lines = [f"- not run: {left}"] if left else []
    return lines + ([f"- functions of which no test was drawn: {told}"] if told else [])


def cost(found_of: list[Found]) -> str:
    """How long all tests would take: the files that cost most, and the sum."""
    hours = sorted(((found.hours(), found.file.removesuffix(".py")) for found in found_of), reverse=True)
    most = ", ".join(f"{name} {time:.1f}" for time, name in hours if time >= LONG)
    rest = sum(time for time, _ in hours if time < LONG)
    return f"- CPU hours of all tests, by the drawn ones: {most or 'none'}, the others {rest:.1f}; {sum(time for time, _ in hours):.0f} in all"


LONG = 0.5
"""CPU hours from which a file is named."""


def reasons(found_of: list[Found]) -> list[str]:
    """Why drawn tests do not count: the excluded feature that they need, and their own reasons for skipping."""
    refused, skipped = collections.Counter[str](), collections.Counter[str]()
    for found in found_of:
        for outcome, text, _ in found.results.values():
            if outcome == "refused":
                refused[str(reason_of(text))] += 1
            elif outcome == "skipped":
                said = re.search(r"Skipped: (.*?)['\"]?\)?$", text.strip(), re.S)
                skipped[said[1] if said else text[-100:]] += 1
    lines = [f"- needs a GPU, {count} times: {reason}" for reason, count in refused.most_common()]
    most = "; ".join(f"{' '.join(said.split())} ({count})" for said, count in skipped.most_common(SAID))
    rest = sum(count for _, count in skipped.most_common()[SAID:])
    return lines + ([f"- skips itself, most often: {most}; other reasons ({rest})"] if most else [])


SAID = 8
"""Number of the tests' own reasons that are listed."""


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


def write_page(page: Path, everything: list[Found]) -> None:
    """Writes the table between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(START, 1)
    old, after = rest.split(END, 1)
    lines = table(everything, old)
    page.write_text(before + START + "\n" + "\n".join(lines).strip() + "\n" + END + after, encoding="utf-8")


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, nargs="?", help="a checkout of NVIDIA/TransformerEngine at --te's tag")
    parser.add_argument("files", nargs="*", help="under tests/pytorch (default: all files in this script's table)")
    parser.add_argument("--te", default="2.11")
    parser.add_argument("--target", nargs="+", help="machines (default: those that the file's subject requires)")
    parser.add_argument("--store", type=Path, default=Path("te_tests"), help="folder of the results")
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="of CPU time for one file on one machine, in this call"
    )
    parser.add_argument(
        "--least", type=int, default=20, help="minimum number of tests of a file that run, whatever they cost"
    )
    parser.add_argument("--each", type=int, default=60, help="seconds of CPU time for one test")
    parser.add_argument(
        "--spare", type=float, default=0.25, metavar="SHARE",
        help="between tests, memory that jemalloc kept is given back if less than this share of the machine's is available",
    )  # fmt: skip
    parser.add_argument(
        "--again", nargs="*", default=[], choices=["failed", "slow", "refused", "passed", "skipped"],
        help="outcomes that run again",
    )  # fmt: skip
    parser.add_argument("--show", type=int, default=0, help="failures to print for each file")
    parser.add_argument("--table", action="store_true", help="only print the stored results")
    parser.add_argument("--docs", type=Path, help="a page whose table is rewritten")
    parser.add_argument("-k", dest="expression")
    options = parser.parse_args(arguments)
    if options.clone is None and not options.table and options.docs is None:
        parser.error("expected a clone, --table or --docs")
    return options


def report(names: list[str], target: str, said: str, options: argparse.Namespace) -> None:
    """Prints a line per file, and some failures."""
    for name in names:
        found = read(options.store, options.te, target, name)
        print(f"{options.te} {Row.of(found)}", flush=True)
        failed = [(node, text) for node, (outcome, text, _) in found.results.items() if outcome == "failed"]
        for missing in sorted({said for _, text in failed for said in re.findall(r"No module named '(\w+)", text)}):
            print(
                f"{name} imports {missing}, which is not installed: pip install {missing}, and run it again with --again failed",
                file=sys.stderr,
            )
        for node, text in failed[: options.show]:
            print(f"--- {node}\n{text}", file=sys.stderr)
    if not any(read(options.store, options.te, target, name).results for name in names):
        print(said, file=sys.stderr)


def unlisted_files(clone: Path) -> list[str]:
    """Files of `WHOLE` in a clone that FILES lacks."""
    folder = clone / "tests/pytorch"
    return sorted({str(file.relative_to(folder)) for pattern in WHOLE for file in folder.glob(pattern)} - set(FILES))


def main() -> int:
    options = options_of()
    options.store.mkdir(parents=True, exist_ok=True)
    if options.clone is not None:
        names = options.files or [name for name in FILES if (options.clone / "tests/pytorch" / name).exists()]
        if unlisted := unlisted_files(options.clone):
            sys.exit(
                f"{options.clone} has files that the table would leave out in silence: {', '.join(unlisted)}: list them in FILES"
            )
        for target in options.target or (*HOPPER, *BLACKWELL):
            here = [name for name in names if options.target or target in FILES[name]]
            for group in ([name for name in here if name != ALONE], [name for name in here if name == ALONE]):
                if group:
                    said = run_files(options.clone.resolve(), group, options.te, target, options)
                    report(group, target, said, options)
    if options.table:
        print("\n".join(table(stored(options.store))))
    if options.docs:
        write_page(options.docs, stored(options.store))
    return 0


if __name__ == "__main__":
    sys.exit(main())
