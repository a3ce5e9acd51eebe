"""What all Mosaic GPU kernels here share: how they are called, and references to memory.

JAX's own types of references are not public, so `Ref` says what kernels use of them; what needs JAX's types
is in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array


class Parts(Protocol):
    """`ref.at`."""

    def __getitem__(self, index: object) -> Ref: ...


@runtime_checkable
class Ref(Protocol):
    """An operand inside a kernel: device or shared memory that is read and written by index.

    Attributes:
        at: `ref.at[index]` is a part of the memory, as a reference.
        T: the same memory with its axes in reverse.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> jnp.dtype: ...

    @property
    def at(self) -> Parts: ...

    @property
    def T(self) -> Ref: ...  # noqa: N802 - NumPy's name

    def __getitem__(self, index: object) -> Array: ...

    def __setitem__(self, index: object, value: Array) -> None: ...


Scratch = object
"""Shared memory that a block asks for: `tile(...)`, `arrivals(...)`, or a list of such."""
Barrier = object
"""What a block gets for `arrivals(...)`."""


def tile(height: int, width: int) -> Scratch:
    """A bfloat16 matrix as tensor cores want it."""
    return plgpu.SMEM((height, width), jnp.bfloat16, transforms=swizzled(min(width, 64)))


def arrivals(num_copies: int) -> Scratch:
    """A barrier that so many copies to shared memory pass."""
    return plgpu.Barrier(num_arrivals=num_copies)


def kernel(
    name: str,
    body: Callable[..., None],
    out_types: Sequence[jax.ShapeDtypeStruct],
    grid: dict[str, int],
    *,
    interpreted: bool,
    scratch: Sequence[Scratch] = (),
    warpgroups: int = 1,
    fast_math: bool = False,
    in_step: bool = True,
) -> Callable[..., list[Array]]:
    """A kernel of one block a grid point.

    Args:
        name: as profiles show it.
        body: called with references to the operands, the results and the scratch memory.
        out_types: of the results.
        grid: the size of each of the grid's axes, by name.
        interpreted: run it in Python on a CPU.
        scratch: what each block gets of shared memory.
        warpgroups: of four warps each, in a block; with several, the axis "warpgroup" tells them apart.
        fast_math: exponentials and divisions to within a few units of float32's last place.
        in_step: the block's threads wait for each other before and after each store, so that each sees what
            the others stored. Without, only `plgpu.commit_smem()` and sums over the block make them wait.
    """

    def named(*refs: object) -> None:
        body(*refs)

    named.__name__ = name
    made: Callable[..., list[Array]] = plgpu.kernel(
        named,
        out_type=list(out_types),
        scratch_types=list(scratch),  # type: ignore[arg-type]
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="warpgroup" if warpgroups > 1 else None,
        compiler_params=plgpu.CompilerParams(approx_math=fast_math, unsafe_no_auto_barriers=not in_step),
        interpret=plgpu.InterpretGPUParams() if interpreted else None,
    )
    return made


def one_by_one(run: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
    """A kernel that `jax.vmap` calls once for each element: kernels have no batch axis of their own."""
    mapped: Callable[..., list[Array]] = jax.custom_batching.sequential_vmap(lambda *operands: run(*operands))
    return mapped


def in_place(run: Callable[..., list[Array]]) -> Callable[..., tuple[list[Array], Array]]:
    """A kernel over an arena: `(arena, *operands) -> (results, arena)`.

    The kernel gets the arena as its last operand, by reference, and writes it in place where XLA finds that
    nobody needs the arena as it was. `jax.vmap` calls it once for each element.
    """

    def whole(arena: Array, *operands: object) -> tuple[list[Array], Array]:
        memory = jax.new_ref(arena)
        return run(*operands, memory), jax.freeze(memory)

    mapped: Callable[..., tuple[list[Array], Array]] = jax.custom_batching.sequential_vmap(whole)
    return mapped


def load(ref: Ref, layout: plgpu.SomeLayout) -> Array:
    """What a reference holds, in registers, shared by the block's threads as the layout says."""
    loaded: Array = plgpu.load(ref, layout=layout, optimized=False)  # type: ignore[arg-type]
    return loaded


def read(tile: Ref, layout: plgpu.SomeLayout) -> Array:
    """What a tile in shared memory holds, in registers and float32."""
    loaded: Array = plgpu.load(tile, layout=layout)  # type: ignore[arg-type]
    return loaded.astype(jnp.float32)


def broadcast(x: Array, shape: tuple[int, ...], axes: tuple[int, ...] = ()) -> Array:
    """`x` along the named axes of a larger shape; kernels broadcast nothing by themselves."""
    return jax.lax.broadcast_in_dim(x, shape, axes)


def fetch(source: Ref, target: Ref, arrived: Barrier) -> None:
    """Begins to copy device memory to shared memory; `wait_for(arrived)` waits for it."""
    plgpu.copy_gmem_to_smem(source, target, arrived)  # type: ignore[arg-type]


def wait_for(arrived: Barrier) -> None:
    """Waits for all copies, or warpgroups, that count towards a barrier."""
    plgpu.barrier_wait(arrived)  # type: ignore[arg-type]


def arrive(barrier: Barrier) -> None:
    """Says that a warpgroup has come so far, having handed over what it stored."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)  # type: ignore[arg-type]


def send(staged: Ref, target: Ref) -> None:
    """Begins to copy shared memory, once all threads have filled it, to device memory."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, target)  # type: ignore[arg-type]


def wait_for_sent() -> None:
    """Waits until all that was sent has left shared memory."""
    plgpu.wait_smem_to_gmem(0)


def write(staged: Ref, target: Ref) -> None:
    """Moves shared memory, once all threads have filled it, to device memory."""
    send(staged, target)
    wait_for_sent()


def indices(shape: tuple[int, int], layout: plgpu.SomeLayout) -> tuple[Array, Array]:
    """Row and column of each element of a matrix in registers."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))
    return row, column


def add_product(sums: Ref, left: Ref, right: Ref) -> None:
    """`sums += left @ right`, begun on the tensor cores; it is done after `plgpu.wgmma_wait(0)`."""
    plgpu.wgmma(sums, left, right)  # type: ignore[arg-type]


Pair = tuple[Array | Ref, Ref]
"""Two matrices to multiply: the left in shared memory or in registers, the right in shared memory."""


class Products:
    """Sums of products of bfloat16 matrices of one shape, by the tensor cores.

    A left matrix in registers must have been computed from data: one made of indices alone, such as a mask,
    is read wrongly (seen with JAX 0.11.2).

    Args:
        shape: of results.
        interpreted: of the kernel. JAX's interpreter knows no left matrices in registers: there they are put
            in shared memory first.
    """

    def __init__(self, shape: tuple[int, int], *, interpreted: bool) -> None:
        self._shape, self._interpreted = shape, interpreted

    def __call__(self, *pairs: Pair) -> Array:
        """The float32 sum of the pairs' products, in registers."""
        return self.at_once(pairs)[0]

    def at_once(self, *sums: Sequence[Pair]) -> list[Array]:
        """Several such sums, waited for together."""

        def run(*accumulators: Ref) -> list[Array]:
            for accumulator, pairs in zip(accumulators, sums, strict=True):
                for left, right in pairs:
                    self._add(accumulator, left, right)
            return [accumulator[...] for accumulator in accumulators]

        made = [plgpu.WGMMAAccumulatorRef(self._shape, jnp.float32) for _ in sums]
        result: list[Array] = pl.run_scoped(run, *made)
        return result

    def _add(self, accumulator: Ref, left: Array | Ref, right: Ref) -> None:
        def from_shared(staged: Ref) -> None:
            assert isinstance(left, jax.Array)
            staged[...] = left
            plgpu.commit_smem()
            add_product(accumulator, staged, right)

        if not isinstance(left, jax.Array):
            add_product(accumulator, left, right)
        elif self._interpreted:
            pl.run_scoped(from_shared, tile(*left.shape))
        else:
            plgpu.wgmma(accumulator, left, right)  # type: ignore[arg-type]
            # Registers may serve another purpose before a product that still runs has read them.
            plgpu.wgmma_wait(0)


def in_two(x: Array) -> tuple[Array, Array]:
    """A float32 matrix as two bfloat16 ones whose sum is exact to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def swizzled(width: int, itemsize: int = 2) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """How tensor cores want tiles `width` wide to lie in shared memory; threads reach them best there."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(itemsize * width)  # type: ignore[abstract]
