"""Tokens of a step beside those before: what is unlike them, and what only wanders."""

from __future__ import annotations

import math

import torch

from mpbridge.observe.telemetry.hook import Tokens

VOCABULARY = 512


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(VOCABULARY, 4)
        self.position_embeddings = torch.nn.Embedding(VOCABULARY, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(tokens) + self.position_embeddings(tokens * 0 + 300)


def text(step: int) -> torch.Tensor:
    return torch.randint(97, 123, (2, 64), generator=torch.Generator().manual_seed(step))


def seen(tokens: Tokens, model: Model, batch: torch.Tensor) -> tuple[float, float | None] | None:
    tokens.on = True
    model(batch)
    tokens.on = False
    # evaluation is not counted
    model(torch.full((2, 64), 400))
    return tokens.step()


def test_text_is_like_text_and_other_bytes_are_unlike_it_as_long_as_they_come() -> None:
    tokens, model = Tokens(), Model()
    assert tokens.step() is None
    tokens.attach([model])
    for step in range(20):
        found = seen(tokens, model, text(step))
        assert found is not None
        assert found[1] is None, step
    assert found is not None
    assert math.isclose(found[0], math.log(26), abs_tol=0.4), "26 letters, each as often"
    for _ in range(3):
        other = seen(tokens, model, torch.full((2, 64), 200))
        assert other is not None
        assert other[0] > 7
        assert other[1] is not None
    found = seen(tokens, model, text(21))
    assert found is not None
    assert found[1] is None
    tokens.close()
    tokens.step()
    assert seen(tokens, model, text(22)) == (0.0, None), "nothing listens any more"
