"""Where a parameter comes from. Model families write their name tables with this and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from: tensors' names and shapes in the checkpoint, and how they become it.

    `build` gets one array for each name, in that order and of the shape given here, and returns the
    parameter. The arrays may be read-only views of the file: `build` must not write to them, and may
    return a view itself. A table is any nesting of dicts, lists and tuples with a `Source` at each leaf;
    `jax.tree.map` sees a `Source` as a leaf.

    Raises:
        ValueError: there is no name, or not exactly one shape for each name.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    build: Callable[..., np.ndarray]

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.shapes):
            raise ValueError(f"a Source takes one shape for each name: {self.names=} {self.shapes=}")
