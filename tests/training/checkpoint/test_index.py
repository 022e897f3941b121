"""Which pieces make a whole tensor."""

from __future__ import annotations

import pytest

from mpbridge.training.checkpoint.format import Index, StoredPiece, StoredTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]


def whole(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    pieces = tuple(StoredPiece("f", 0, offset, sides) for offset, sides in boxes)
    return not Index({"w": StoredTensor("float32", shape, pieces)}, {}).incomplete()


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        pytest.param((8,), [((0,), (4,)), ((4,), (4,))], True, id="halves"),
        pytest.param((8,), [((0,), (4,)), ((0,), (4,))], False, id="one half twice"),
        pytest.param((8,), [((0,), (4,))], False, id="one half"),
        pytest.param((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))], True, id="columns"),
        pytest.param((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], True, id="uneven"),
        pytest.param((4, 4), [((0, 0), (3, 2)), ((2, 1), (2, 3)), ((0, 3), (2, 2))], False, id="a corner twice"),
        pytest.param((4,), [((0,), (0,)), ((0,), (4,))], True, id="an empty shard"),
        pytest.param((), [((), ())], True, id="a number"),
    ],
)
def test_a_tensor_is_whole_where_its_pieces_fill_it_once(
    shape: tuple[int, ...], boxes: list[Box], expected: bool
) -> None:
    assert whole(shape, boxes) is expected
