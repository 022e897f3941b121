"""Sections as attributes, and what an editor and mypy are told of them."""

from __future__ import annotations

import copy
import pickle

import pytest

from mpbridge.common.errors import UnknownName
from mpbridge.settings.container import ConfigContainer
from mpbridge.settings.sections import Train
from tests.settings.test_schema import generator


def test_the_stub_is_what_the_schema_says() -> None:
    made = generator("make_typing")
    assert made.PLACE.read_text(encoding="utf-8") == made.text(), "run scripts/generate/make_typing.py"


def test_a_setting_is_a_key_and_an_attribute() -> None:
    given = {"num_layers": 4}
    config = ConfigContainer(model=given)
    config.model.hidden_size = 64
    assert config.model == {"num_layers": 4, "hidden_size": 64}
    assert (config.model.num_layers, config.model["hidden_size"]) == (4, 64)
    assert given == {"num_layers": 4}  # the caller's mapping is copied
    del config.model.hidden_size
    assert config.model == given


def test_a_setting_that_was_not_given_reads_as_its_default_and_is_not_stored() -> None:
    config = ConfigContainer()
    assert (config.train.micro_batch_size, config.ddp.grad_reduce_in_fp32) == (4, False)
    assert config.train == {}


@pytest.mark.parametrize(
    ("section", "name", "nearest"),
    [("optimizer", "lrr", "lr"), ("model", "num_layer", "num_layers"), ("train", "train_iter", "train_iters")],
)
def test_a_misspelled_attribute_raises_with_the_nearest(section: str, name: str, nearest: str) -> None:
    config = ConfigContainer()
    for use in (lambda: getattr(getattr(config, section), name), lambda: setattr(getattr(config, section), name, 1)):
        with pytest.raises(UnknownName) as caught:
            use()
        assert nearest in caught.value.near
    assert getattr(config, section) == {}


def test_a_misspelled_section_raises_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="nearest: mixed_precision"):
        ConfigContainer(mixed_precison="bf16_mixed")
    for use in (lambda: ConfigContainer().optimiser, lambda: setattr(ConfigContainer(), "optimiser", {})):
        with pytest.raises(UnknownName, match="nearest: optimizer"):
            use()


def test_a_copy_has_sections_of_its_own() -> None:
    config = ConfigContainer(model={"num_layers": 4}, train=Train(train_iters=5))
    for made in (config.copy(), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        made.model.num_layers = 8
        made.train.train_iters = 9
        assert (config.model.num_layers, config.train.train_iters) == (4, 5)
        assert (made.model.num_layers, made.train.train_iters) == (8, 9)


def test_an_editor_is_offered_every_setting() -> None:
    assert {"lr", "use_precision_aware_optimizer", "get"} <= set(dir(ConfigContainer().optimizer))
