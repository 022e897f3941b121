"""Steps that the witness's hooks do not enclose as they expect: changed behind the update, without one, with a closure, with sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import mpbridge
from mpbridge.common.errors import BadValue
from tests.observe.witnessing.loops import Tiny, adam, loss_of, tokens

Step = Callable[[Any, Any, int], None]
Act, Acts = Callable[[Any], None], Callable[[Any, Any], None]


def stepping(
    *, before: Act = lambda model: None, after: Acts = lambda model, optimizer: None, steps: Any = None
) -> Step:
    """A loop's step. before: acts on the model between backward and the update; after: on model and optimizer behind it; steps: whether the n-th of several
    optimizers takes the step."""

    def step(model: Any, optimizer: Any, number: int) -> None:
        every = optimizer if isinstance(optimizer, list) else [optimizer]
        for one in every:
            one.zero_grad()
        loss_of(model, tokens(number), autocast=False).backward()
        before(model)
        for which, one in enumerate(every):
            if steps is None or steps(which, number):
                one.step()
        with torch.no_grad():
            after(model, optimizer)

    return step


def put_back(from_: int) -> Step:
    """The update is taken back, but for the first so many elements of each tensor behind the very first, which is sampled, as the last is."""

    def step(model: Any, optimizer: Any, number: int) -> None:
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        plain(model, optimizer, number)
        for parameter, old in zip(model.parameters(), kept, strict=True):
            moved = parameter.detach().view(-1)[1:from_].clone()
            parameter.data.copy_(old)
            parameter.data.view(-1)[1:from_] = moved

    return step


def each(act: Callable[[torch.Tensor], Any]) -> Acts:
    def all_of(model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            act(parameter)

    return all_of


def moments(act: Callable[[torch.Tensor], Any], *names: str) -> Acts:
    def all_of(model: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            for name in names:
                act(state[name])

    return all_of


def gradients_times(factor: float, part: Callable[[Any], Any] = lambda model: model) -> Act:
    def act(model: Any) -> None:
        for parameter in part(model).parameters():
            parameter.grad.mul_(factor)

    return act


def clipped_while_scaled(model: Any) -> None:
    """What `clip_grad_norm_` does before `GradScaler.unscale_`."""
    gradients_times(65536.0)(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    gradients_times(1 / 65536.0)(model)


def normalized(parameter: torch.Tensor) -> None:
    """What nGPT does, and is no fault."""
    if parameter.dim() == 2:
        parameter.div_(parameter.norm(dim=1, keepdim=True))


plain = stepping()
BEHIND = {
    "put back": (put_back(1), "weights moved"),
    "put back but for one element": (put_back(2), "weights moved"),
    "weights rounded": (stepping(after=each(lambda one: one.copy_(one.bfloat16()))), "bits of states"),
    "moments rounded": (stepping(after=moments(lambda one: one.copy_(one.bfloat16()), "exp_avg")), "bits of states"),
    "moments zeroed": (stepping(after=moments(torch.Tensor.zero_, "exp_avg", "exp_avg_sq")), "bits of states"),
    # an optimizer that is made anew for every step
    "moments dropped": (stepping(after=lambda model, optimizer: optimizer.state.clear()), "bits of states"),
    "gradients turned round": (stepping(before=gradients_times(-1.0)), "gradients"),
    "clipped while they are scaled": (stepping(before=clipped_while_scaled), "gradients"),
    "no update": (stepping(steps=lambda which, number: False), "optimizer stepped"),
}


def observed(
    step: Step, model: Any = None, optimizer: Any = None, policy: str | None = None, *, steps: int = 2, **how: Any
) -> Any:
    """The report of the last of these steps, of a model under AdamW where nothing else is said."""
    model = Tiny() if model is None else model
    optimizer = adam(model) if optimizer is None else optimizer
    seen = mpbridge.witness(model, optimizer, policy, at={steps}, **how)
    for number in range(steps):
        with seen.step():
            step(model, optimizer, number)
    return seen.report


def wrong(report: Any) -> set[str]:
    return {one.subject for one in report.report.findings if not one.ok and not one.unseen}


@pytest.mark.parametrize("case", BEHIND)
@pytest.mark.parametrize("policy", [None, "fp32"])
def test_what_happens_behind_the_update_or_instead_of_it_is_named(case: str, policy: str | None) -> None:
    step, subject = BEHIND[case]
    assert subject in wrong(observed(step, policy=policy))


@pytest.mark.parametrize("step", [plain, stepping(after=each(normalized))], ids=["plain", "normalized"])
def test_a_loop_may_change_weights_after_the_update(step: Step) -> None:
    assert observed(step).ok


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
    without_the_embedding = torch.optim.SGD(model.head.parameters(), lr=0.1)
    assert "optimizer holds" in wrong(observed(step, model, without_the_embedding, "fp32"))


# --- several optimizers ------------------------------------------------------------------------------------------------------------------------
def actor_and_critic(model: Any) -> list[Any]:
    return [
        torch.optim.AdamW(model.layers.parameters(), lr=1e-3),
        torch.optim.AdamW([*model.emb.parameters(), *model.norm.parameters(), *model.head.parameters()], lr=1e-3),
    ]


def clipped(model: Any) -> None:
    for one in actor_and_critic(model):
        torch.nn.utils.clip_grad_norm_(one.param_groups[0]["params"], 0.1)


def in_turns(model: Any, optimizers: Any, step: int) -> None:
    """The order of a GAN: the second part's gradients of the first backward pass are thrown away."""
    for number, one in enumerate(optimizers):
        one.zero_grad()
        loss_of(model, tokens(2 * step + number), autocast=False).backward()
        one.step()


TURNS = {
    "clipped apart": stepping(before=clipped),
    "the actor in every other step": stepping(steps=lambda which, number: not which or number % 2 == 0),
    "in turns": in_turns,
}


@pytest.mark.parametrize("case", TURNS)
@pytest.mark.parametrize("policy", [None, "fp32"])
def test_several_optimizers_are_not_accused(case: str, policy: str | None) -> None:
    model = Tiny()
    report = observed(TURNS[case], model, actor_and_critic(model), policy)
    assert wrong(report) == set()
    unseen = {one.subject for one in report.report.findings if one.unseen}
    assert ("gradients" in unseen) is (case == "in turns")


def test_the_gradients_of_an_optimizer_that_steps_are_followed_while_another_waits() -> None:
    doubled = stepping(before=gradients_times(2.0, lambda model: model.layers), steps=lambda which, number: not which)
    model = Tiny()
    assert wrong(observed(doubled, model, actor_and_critic(model))) == {"gradients"}


def test_an_update_inside_of_the_backward_pass_is_followed() -> None:
    model = Tiny()
    each = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}

    def update(parameter: Any) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    report = observed(lambda m, o, i: loss_of(m, tokens(i), autocast=False).backward(), model, list(each.values()))
    assert wrong(report) == set()
    assert {one.subject: one.count for one in report.report.findings}["gradients"] > 5


def test_a_parameter_that_two_optimizers_update_is_named() -> None:
    model = Tiny()
    twice = [adam(model), torch.optim.AdamW(model.head.parameters(), lr=1e-3)]
    report = observed(plain, model, twice)
    (found,) = [one for one in report.report.findings if not one.ok]
    assert (found.subject, list(found.offenders)) == ("optimizer holds", ["head.weight: in several optimizers"])


# --- gradients of zero, and none -----------------------------------------------------------------------------------------------------------------
def test_gradients_that_are_zero_by_construction_are_no_fault() -> None:
    """A head that begins at zero, as residual branches and low-rank adapters do: nothing behind it gets a gradient in the first step."""
    model = Tiny()
    torch.nn.init.zeros_(model.head.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    report = observed(plain, model, optimizer, steps=1)
    assert wrong(report) == set()
    assert "with gradients of zero" in str({one.found for one in report.report.findings})


def test_a_layer_that_is_dropped_in_the_observed_step_is_no_fault() -> None:
    class Dropping(Tiny):
        steps = 0

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            hidden = self.emb(batch)
            for layer in self.layers if self.steps != 2 else self.layers[:1]:
                hidden = hidden + F.gelu(layer(hidden))
            logits: torch.Tensor = self.head(self.norm(hidden))
            return logits

    assert wrong(observed(plain, Dropping())) == set()


def test_two_linears_that_share_a_weight_are_followed() -> None:
    model = Tiny()
    model.layers[1].weight = model.layers[0].weight
    assert wrong(observed(plain, model)) == set()


@pytest.mark.parametrize("policy", [None, "fp32"])
def test_a_loop_that_says_that_it_never_clips_is_held_to_it(policy: str | None) -> None:
    halved = stepping(before=gradients_times(0.5))
    assert wrong(observed(halved, policy=policy, steps=1, clip=0.0)) == {"gradients"}


def test_a_callback_takes_a_scaler() -> None:
    from mpbridge.observe.witnessing.callbacks import Following

    model, scaler = Tiny(), torch.amp.GradScaler("cpu")
    following = Following(None, scaler=scaler)
    following.begins(1, model, adam(model))
    assert following.witness is not None
    assert following.witness._loop.scaler is scaler
    following.gives_up()


@pytest.mark.parametrize("unfreezing", [False, True])
def test_a_backbone_that_is_frozen_though_the_optimizer_holds_it_is_no_fault(unfreezing: bool) -> None:
    model = Tiny()
    model.emb.requires_grad_(False)
    model.layers.requires_grad_(False)
    optimizer = adam(model)
    seen = mpbridge.witness(model, optimizer, at={1, 2})
    for step in range(2):
        if unfreezing and step:
            model.layers.requires_grad_(True)
        with seen.step():
            plain(model, optimizer, step)
        assert wrong(seen.report) == set()


def test_a_parameter_that_is_frozen_after_the_witness_was_made_is_named() -> None:
    model = Tiny()
    optimizer = adam(model)
    seen = mpbridge.witness(model, optimizer)
    model.emb.requires_grad_(False)
    with seen.step():
        plain(model, optimizer, 0)
    assert "optimizer holds" in wrong(seen.report)


# --- steps that cannot be followed -----------------------------------------------------------------------------------------------------------------
def test_an_update_that_the_loop_skips_by_hand_is_no_fault() -> None:
    def skipping(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        (loss_of(model, tokens(step), autocast=False) * float("inf")).backward()
        if torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()

    report = observed(skipping)
    assert wrong(report) == set()
    assert any("not finite" in one.unseen for one in report.report.findings)


def test_a_transform_of_torch_func_is_not_observed_and_ends_nothing() -> None:
    def per_sample(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        state = {name: one.detach() for name, one in model.named_parameters()}

        def loss(state: Any, one: torch.Tensor) -> torch.Tensor:
            logits = torch.func.functional_call(model, state, (one.unsqueeze(0),))
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), one)

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, tokens(step))
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name].mean(0)
        optimizer.step()

    report = observed(per_sample)
    assert wrong(report) == set()
    assert any("torch.func" in one.unseen for one in report.report.findings)


@pytest.mark.parametrize("at", [5, None, "1"])
def test_steps_that_are_no_numbers_are_refused(at: Any) -> None:
    model = Tiny()
    with pytest.raises(BadValue, match="expected numbers of steps"):
        mpbridge.witness(model, adam(model), at=at)


def test_a_callback_whose_trainer_starts_again_after_an_exception_begins_anew() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from mpbridge.observe.witnessing.callbacks import FabricWitness

    following = FabricWitness()
    first = Tiny()
    following.on_train_batch_start(first, adam(first))  # and the step ends in an exception
    second = Tiny()
    optimizer = adam(second)
    following.on_train_batch_start(second, optimizer)
    plain(second, optimizer, 0)
    following.on_train_batch_end()
    assert wrong(following.report) == set()
    assert _get_current_dispatch_mode() is None
