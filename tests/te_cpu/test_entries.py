"""The one list of Transformer Engine's GEMM entry points, against what the releases call."""

import re

import pytest

from mpbridge.common.transformer_engine import GEMM_ENTRIES, choose
from mpbridge.te_cpu.module import make_module
from mpbridge.te_cpu.played import KERNELS
from tests.te_cpu.wheels import FOLDERS, NEWEST, OLDEST, release_or_skip

OTHERS = re.compile("workspace|swizzle|^bulk_overlap_|^gemm_inf$")
"""Sizes and layouts of GEMMs, overlap with communication, and the name of an operator for ONNX: none multiplies."""


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_what_a_release_multiplies_with_is_in_the_list(release: str) -> None:
    release_or_skip(release)
    number = tuple(map(int, release.split(".")[:2]))
    package = choose(release, FOLDERS).folder / "transformer_engine/pytorch"
    called = {
        name
        for file in package.rglob("*.py")
        for name in re.findall(r"\btex\.(\w*gemm\w*)", file.read_text(encoding="utf-8"))
        if not OTHERS.search(name)
    }
    assert called == {name for name, since in GEMM_ENTRIES.items() if since <= number}


def test_every_entry_has_a_kernel_and_every_gemm_kernel_is_an_entry() -> None:
    make_module((2, 20))
    assert {name for name in KERNELS if re.search(r"gemm(_for_\w+)?$", name) and "swizzle" not in name} == set(
        GEMM_ENTRIES
    )
