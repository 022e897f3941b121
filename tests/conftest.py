"""Before any test imports megatron: a Transformer Engine without its CUDA parts must not be in its way."""

import gc
import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Generator

import pytest

import mpbridge  # noqa: F401
from mpbridge.cli import text
from mpbridge.cli.main import main
from tests.schemas import wrong

_answer_of = text.answer_of


def _held(data):
    """Every answer that a test has printed as JSON, held against the schema of its verb."""
    answer, frame = _answer_of(data), sys._getframe(2)
    # a verb's module, or its class in the module of another
    owner, _, method = frame.f_code.co_qualname.rpartition(".")
    verb = (
        re.sub(r"(?<=.)([A-Z])", r"-\1", owner.removesuffix("Verb")).lower()
        if owner.endswith("Verb") and method
        else frame.f_globals["__name__"].rpartition(".")[2]
    )
    path = text.SCHEMAS / f"{verb.rstrip('_').replace('_', '-')}.json"
    if path.exists():
        faults = wrong(json.loads(json.dumps(answer, default=str)), json.loads(path.read_text()))
        assert not faults, f"{verb} --json: {faults[:5]}: python scripts/generate/make_schemas.py {verb}"
    return answer


text.answer_of = _held

# a suite's worker knows the width of the terminal that the suite was started in; what commands print without one is not broken to it
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# the emulation's kernels give the same bits compiled (numerics/conftest.py) and cost each process seconds; processes of tests inherit it, and with the
# second one megatron-core's import leaves the compiler alone, which is a third of that import
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# a suite started in the background or under nohup inherits ignored signals, and a run leaves those alone: tests that send them would see nothing
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


LACKED = (
    "engine=fsdp2 needs a torch whose FSDP2", "torch.optim.Muon", "module 'torch.optim' has no attribute 'Muon'", "got an unexpected keyword argument 'no_dist'",
    "module 'torch.utils._pytree' has no attribute 'register_constant'", "needs a torch with FakeWork", "'Stream' object has no attribute 'record_event'",
    "module 'torch' has no attribute 'float4_e2m1fn_x2'", "AssertionError: libcuda.so cannot found!",
)  # fmt: skip
"""What a torch before 2.7 says of what it lacks (FSDP2 on a CPU; its Triton, where it is built for CUDA, asks for libcuda): there is nothing to test then."""
OLD = tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) < (2, 7)
collect_ignore = ["training/simulate/test_simulate.py"] if OLD else []  # it records steps with FakeWork


def _tried() -> Generator[None, object, object]:
    """Runs a part of a test; what ends it because the torch is too old is a skip."""
    try:
        return (yield)
    except Exception as error:
        if OLD and (lacks := next((text for text in LACKED if text in str(error)), "")):
            pytest.skip(f"this torch lacks it: {lacks}")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """A fixture's part."""
    return (yield from _tried())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """The test's own."""
    return (yield from _tried())


LONGEST = (
    "te_cpu/test_inside.py", "planning/rules/test_answers.py", "training/checkpoint/test_resume.py", "te_cpu/test_on_cpu.py", "observe/audit/test_faults.py", "te_cpu/test_two_ranks.py",
    "guide/test_six_ways.py", "training/test_torchrun.py", "training/test_survives.py", "observe/audit/test_healthy_runs.py", "observe/audit/test_between_steps.py", "known_bugs/test_known_bugs.py",
    "observe/witnessing/test_trainers.py", "te_cpu/test_ranks.py", "training/test_soak.py", "observe/audit/test_two_ranks.py", "te_cpu/test_their_tests.py", "cli/test_strangers.py",
    "numerics/test_mcore.py", "cli/test_faults.py", "planning/estimate/test_layouts.py", "planning/estimate/test_one_answer.py", "planning/estimate/test_predict.py", "training/tune/test_module.py", "backend/engines/test_sharded_worlds.py",
    "backend/contract/test_mcore.py", "te_cpu/test_checkpoints.py", "training/simulate/test_simulate.py", "training/simulate/test_quantized.py", "training/test_faults_ranks.py",
)  # fmt: skip
"""Files that take half a minute and more, the longest first: a worker that gets one of them last would end alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, all others in their order."""
    here = pathlib.Path(__file__).parent
    place = {here / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Every engine that closes collects garbage, and so does megatron-core with every checkpoint: a third of such a test would be spent on walking
    through the modules of torch and megatron-core, which stay. (Tests of recipes build megatron-core's configs and no engine.)"""
    if "torch" not in sys.modules or all("precision" in item.path.parts for item in session.items):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo  # noqa: F401

        import mpbridge.backend.models.gpt
        import mpbridge.training.loop  # noqa: F401
    gc.collect()
    gc.freeze()


@pytest.fixture
def cli(capsys):
    """Runs a command and checks its exit code and its stream; returns its answer, or else its error; joined: without line breaks.

    command: as it is typed; words: its further arguments, one each. code: the exit code, or all that may be. error: whether it prints an error and no
    answer, as it does by default where it exits with 2; "beside": an error after an answer.
    """

    def run(command, *words, code=0, error=None, joined=False):
        capsys.readouterr()  # what was printed before is not its answer
        ended = main([*shlex.split(command), *map(str, words)])
        answer, complaint = capsys.readouterr()
        said = answer + complaint
        assert ended in (code if isinstance(code, tuple) else (code,)), said
        assert bool(complaint) is (ended == 2 if error is None else bool(error)), said
        assert bool(answer and complaint) is (error == "beside"), said
        printed = complaint or answer
        return " ".join(printed.split()) if joined else printed

    return run


@pytest.fixture
def file(tmp_path):
    """Writes a file of that name; returns its path."""

    def write(name, text):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write
