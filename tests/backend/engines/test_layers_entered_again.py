"""An engine that was built in one device layer steps in a later one: the caller may leave it between build and step."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from mpbridge.backend.devices import device_layer
from mpbridge.backend.engines.mcore import McoreEngine
from tests.backend.engines import tiny
from tests.backend.engines.worker import MOE


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", None])
def test_an_engine_steps_in_a_layer_entered_after_the_one_that_built_it(world: Any, dispatcher: str | None) -> None:
    model = {"model": MOE | {"moe_token_dispatcher_type": dispatcher}} if dispatcher else {}
    losses = []
    for later in (None, 2, 0):  # the layer that built it, another one, none
        with ExitStack() as layer:
            layer.enter_context(device_layer(False))
            engine = McoreEngine.build(tiny.run("bf16", world=1, **model))
            if later is not None:
                layer.close()
            for _ in range(later or 0):
                layer.close()
                layer.enter_context(device_layer(False))
            losses += tiny.losses(engine, 1)
            engine.close()
    assert losses[0] == losses[1] == losses[2]
    assert torch.get_default_dtype() is torch.float32
