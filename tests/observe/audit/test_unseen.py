"""What excuses a fact that nothing was seen of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpbridge.observe.audit.unseen import why_unseen


class _Theirs(torch.nn.Module):
    __module__ = "transformer_engine.pytorch.module"


@pytest.mark.parametrize(
    ("module", "settings", "excused"),
    [
        pytest.param(_Theirs, {"cross_entropy_loss_fusion": True}, True, id="fused"),
        pytest.param(_Theirs, {"cross_entropy_loss_fusion": False}, False, id="not fused"),
        pytest.param(_Theirs, {}, True, id="nothing says"),
        pytest.param(torch.nn.Identity, {}, False, id="no Transformer Engine"),
    ],
)
def test_a_loss_is_excused_only_where_it_may_be_one_kernel(
    module: Any, settings: dict[str, bool], excused: bool
) -> None:
    engine: Any = SimpleNamespace(model=[module()], configs=SimpleNamespace(model=SimpleNamespace(**settings)))
    promises: Any = None
    assert bool(why_unseen(engine, promises, "loss")) is excused
