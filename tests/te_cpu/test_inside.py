"""Transformer Engine's own Python over our kernels, release by release and machine by machine, each in a process of its own:

megatron-core decides at import whether there is a Transformer Engine, and keeps its classes.
"""

import pytest

from tests.te_cpu.wheels import NEWEST, OLDEST, ROOT, between, ran, release_or_skip


def inside(te: str, machine: str, *files: str, options: tuple[str, ...] = (), timeout: float = 840) -> None:
    plugins = ("-p", "no:cacheprovider", "-p", "mpbridge.te_cpu.pytest_plugin", "--played", machine, "--te", te)
    paths = [str(ROOT / "tests/te_cpu/inside" / file) for file in files]
    done = ran("-m", "pytest", "-q", "-x", "-n0", "-W", "ignore", *plugins, *options, *paths, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


KERNELS = ("kernels.py", "answers.py", "groups.py", "group_refusals.py", "gemm_refusals.py", "nvfp4_layouts.py")
"""Single functions of the extension."""
MATRIX = ("matrix.py", "measured.py")
"""What has to train, and statistics."""
FAULTS = ("training.py", "audited.py", "witnessed.py", "agreement.py")
"""Runs of the engine, faults planted into them, and the agreement with the emulation."""
BRIEF = ("matrix.py::test_grouped_experts_train", "resumed.py")
"""Runs of grouped experts, and runs that stop and go on."""
OWN = {"h100": ("hopper.py", "resumed.py"), "b200": ("blackwell.py",)}
"""Delayed scaling's histories are kept beside every module under the oldest release, and beside its own alone later."""
PARTS = {
    ("h100", OLDEST): (*KERNELS, *FAULTS, *MATRIX),
    ("b200", NEWEST): (*KERNELS, *FAULTS, *BRIEF, "mixed.py"),
}
"""Each machine under one release; all four pairs are slow."""


@pytest.mark.parametrize(("machine", "te"), PARTS)
def test_functions_layers_and_runs(machine: str, te: str) -> None:
    inside(release_or_skip(te), machine, *dict.fromkeys((*PARTS[machine, te], *OWN[machine])))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("te", [OLDEST, NEWEST])
@pytest.mark.parametrize("machine", OWN)
def test_everything_and_every_recipe_of_the_registry(machine: str, te: str) -> None:
    files = (*KERNELS, *MATRIX, *FAULTS, BRIEF[-1], OWN[machine][0])
    inside(release_or_skip(te), machine, *files, options=("-m", "slow or not slow"), timeout=2300)


def test_what_is_redirected_is_given_back() -> None:
    done = ran(str(ROOT / "tests/te_cpu/inside/given_back.py"), release_or_skip(OLDEST))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("given back")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("package", between(), ids=lambda package: getattr(package, "version", "none installed"))
@pytest.mark.parametrize("machine", OWN)
def test_every_release_between(package, machine: str) -> None:
    """Its kernels, and every scaling of the machine in audited runs, dense (training.py) and with grouped experts (matrix.py)."""
    files = (*KERNELS, OWN[machine][0], "training.py", "matrix.py")
    options = ("-k", "not test_it_trains and not registry", "-m", "not slow")
    inside(package.version, machine, *files, options=options, timeout=900)
