"""A `Source` is a leaf, and names and shapes go together."""

import jax
import numpy as np
import pytest

from wkvm_jax.weights.source import Source


def test_is_a_leaf_of_a_table() -> None:
    source = Source(("a", "b"), ((2,), (2,)), lambda *arrays: np.stack(arrays))
    table = {"layers": [source, (source, {"deeper": source})]}
    assert jax.tree.leaves(table) == [source] * 3
    assert jax.tree.map(lambda leaf: leaf.names[0], table) == {"layers": ["a", ("a", {"deeper": "a"})]}


@pytest.mark.parametrize(("names", "shapes"), [((), ()), (("a",), ()), (("a",), ((1,), (2,)))])
def test_needs_a_shape_for_each_name(names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="one shape for each name"):
        Source(names, shapes, np.stack)
