"""The package's front door."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mpbridge


@pytest.mark.parametrize("name", mpbridge.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(mpbridge, name) is not None
    assert name in dir(mpbridge)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'aply'"):
        mpbridge.aply  # noqa: B018


def test_importing_the_package_and_resolving_every_recipe_loads_no_framework() -> None:
    code = (
        "import sys, mpbridge\nfor name in mpbridge.recipes:\n    mpbridge.resolve(mpbridge.get_mixed_precision_config(name)).fingerprint()\n"
        "assert not {'torch', 'megatron', 'numpy', 'matplotlib', 'transformer_engine'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
