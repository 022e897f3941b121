"""The one list of Transformer Engine's GEMM entry points, against what the releases call."""

from __future__ import annotations

import re

import pytest

from mpbridge.common.transformer_engine import GEMM_ENTRIES, choose
from mpbridge.te_cpu.module import make_module
from mpbridge.te_cpu.registry import KERNELS
from tests.te_cpu.wheels import FOLDERS, NEWEST, OLDEST, release_or_skip


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_what_a_release_multiplies_with_is_in_the_list(release: str) -> None:
    release_or_skip(release)
    number = tuple(map(int, release.split(".")[:2]))
    package = choose(release, FOLDERS).folder / "transformer_engine/pytorch/cpp_extensions/gemm.py"
    called = set(re.findall(r"\btex\.(\w*gemm\w*)", package.read_text())) - {"get_grouped_gemm_setup_workspace_size"}
    assert called == {name for name, since in GEMM_ENTRIES.items() if since <= number}


def test_every_entry_has_a_kernel_and_every_gemm_kernel_is_an_entry() -> None:
    make_module((2, 20))
    assert {name for name in KERNELS if re.search(r"gemm(_for_\w+)?$", name) and "swizzle" not in name} == set(
        GEMM_ENTRIES
    )
