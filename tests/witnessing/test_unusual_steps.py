"""Steps that the witness's hooks do not enclose as they expect: changed behind the update, without one, with a closure, with sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mpbridge
from tests.witnessing.loops import Tiny, adam, loss_of, tokens

Step = Callable[[Any, Any, int], None]


def plain(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, tokens(step), autocast=False).backward()
    optimizer.step()


def put_back(model: Any, optimizer: Any, step: int) -> None:
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    plain(model, optimizer, step)
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), kept, strict=True):
            parameter.copy_(old)


def rounded_weights(model: Any, optimizer: Any, step: int) -> None:
    plain(model, optimizer, step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def rounded_moments(model: Any, optimizer: Any, step: int) -> None:
    plain(model, optimizer, step)
    for state in optimizer.state.values():
        state["exp_avg"].copy_(state["exp_avg"].bfloat16())


def normalized_weights(model: Any, optimizer: Any, step: int) -> None:
    """What nGPT does, and is no fault."""
    plain(model, optimizer, step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.div_(parameter.norm(dim=1, keepdim=True))


def without_an_update(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, tokens(step), autocast=False).backward()


def observed(step: Step, model: Any, optimizer: Any, policy: str | None = None) -> Any:
    seen = mpbridge.witness(model, optimizer, policy, at={2})
    for number in range(2):
        with seen.step():
            step(model, optimizer, number)
    return seen.report


def wrong(report: Any) -> set[str]:
    return {one.subject for one in report.report.findings if not one.ok and not one.unseen}


@pytest.mark.parametrize(
    ("step", "subject"),
    [
        (put_back, "weights moved"),
        (rounded_weights, "bits of states"),
        (rounded_moments, "bits of states"),
        (without_an_update, "optimizer stepped"),
    ],
)
@pytest.mark.parametrize("policy", [None, "fp32"])
def test_what_happens_behind_the_update_or_instead_of_it_is_named(step: Step, subject: str, policy: str | None) -> None:
    model = Tiny()
    assert subject in wrong(observed(step, model, adam(model), policy))


@pytest.mark.parametrize("step", [plain, normalized_weights])
def test_a_loop_may_change_weights_after_the_update(step: Step) -> None:
    model = Tiny()
    assert observed(step, model, adam(model)).ok


def test_an_optimizer_that_runs_its_closure_twice_is_not_followed_and_not_accused() -> None:
    model = Tiny()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def step(model: Any, optimizer: Any, number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, tokens(number), autocast=False)
            loss.backward()
            return loss

        optimizer.step(closure)

    report = observed(step, model, optimizer)
    assert report.ok
    (found,) = (one for one in report.report.findings if one.subject == "gradients")
    assert "ran its closure 2 times" in found.unseen


class Sparse(torch.nn.Module):
    """An embedding with sparse gradients below a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32, sparse=True)
        self.head = torch.nn.Linear(32, 64)


def test_sparse_gradients_are_read() -> None:
    torch.manual_seed(1)
    model = Sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        batch = torch.arange(16) + number
        F.cross_entropy(model.head(model.embedding(batch)), batch + 1).backward()
        optimizer.step()

    assert observed(step, model, optimizer, "fp32").ok
    with torch.no_grad():
        model.embedding.weight.requires_grad_(False)
    assert "optimizer holds" in wrong(observed(step, model, optimizer, "fp32"))
