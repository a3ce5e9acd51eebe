"""The Pallas kernels on a GPU, at real shapes, against XLA. `python -m pytest -m gpu tests/gpu` runs it."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import wkvm_jax
from wkvm_jax.engine.step import LIKELIEST_STEP, STEP, Device, Sizes
from wkvm_jax.kernels.dispatch import Kernels, choose_kernels
from wkvm_jax.kernels.products import products
from wkvm_jax.kernels.products import workloads as product_workloads
from wkvm_jax.kernels.rwkv7 import Projections, Variant, time_mix
from wkvm_jax.kernels.rwkv7 import workloads as decode_workloads
from wkvm_jax.kernels.token_shift import TokenShift
from wkvm_jax.models import rwkv7
from wkvm_jax.models.model import Model
from wkvm_jax.models.registry import RWKV7
from wkvm_jax.models.sizes import SIZES, random_model
from wkvm_jax.state import Batch

pytestmark = pytest.mark.gpu
VARIANT = Variant(1e-5, False)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    chosen = choose_kernels()
    assert chosen != "xla", "this GPU runs no kernels"
    return chosen


def close(got: Array, wanted: Array, tolerance: float) -> None:
    """Within a part of the largest value."""
    got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("workload", decode_workloads.PUBLISHED, ids=lambda w: str(w.rows))
def test_time_mix_in_a_large_arena(workload: decode_workloads.Decode, kernels: Kernels) -> None:
    """The last layer of each arena; with 1,024 rows it lies beyond the element 2^31."""
    operands = decode_workloads.make_operands(workload)
    layer, slots = workload.layers - 1, operands.batch.read_slots

    @partial(jax.jit, donate_argnums=0)
    def run(arena: Array) -> tuple[Array, Array]:
        return time_mix(
            arena, layer, operands.batch, operands.projections, operands.params, operands.ln_x,
            variant=VARIANT, kernels=kernels,
        )  # fmt: skip

    arena = decode_workloads.make_arena(workload)
    before = jax.jit(lambda arena: arena[slots, layer])(arena)
    others = jax.jit(lambda arena: (jnp.sum(arena[:, :layer]), jnp.sum(arena[:2, layer])))
    rest = others(arena)
    out, arena = run(arena)
    after = jax.jit(lambda arena: arena[slots, layer])(arena)
    assert [x.item() for x in others(arena)] == [x.item() for x in rest]

    own = jnp.arange(workload.rows, dtype=jnp.int32)
    batch = operands.batch.replace(read_slots=own, write_slots=own)
    wanted, wanted_after = time_mix(
        before[:, None], 0, batch, jax.tree.map(lambda x: x.astype(jnp.float32), operands.projections),
        operands.params, operands.ln_x, variant=VARIANT, kernels="xla",
    )  # fmt: skip
    close(after, wanted_after[:, 0], 1e-5)
    close(out, wanted, 8e-3)


@pytest.mark.parametrize("lengths", [(1000, 517, 0), (64, 1, 65)])
@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.float16])
def test_time_mix_of_prompts(lengths: tuple[int, ...], state_dtype: jnp.dtype, kernels: Kernels) -> None:
    """Ragged rows between scattered slots, against the XLA path on float32 copies of the operands."""
    workload = decode_workloads.Prefill(3, 1000, 32, 2)
    operands = decode_workloads.make_operands(workload)
    arena = decode_workloads.make_arena(workload).astype(state_dtype)
    arena = jnp.concatenate([arena, jnp.full((3, *arena.shape[1:]), jnp.nan, state_dtype)])
    read, write = operands.batch.read_slots, jnp.asarray([7, 5, 6], jnp.int32)
    batch = operands.batch.replace(lengths=jnp.asarray(lengths, jnp.int32), write_slots=write)

    @partial(jax.jit, static_argnums=1)
    def run(arena: Array, kernels: Kernels) -> tuple[Array, Array]:
        projections = operands.projections
        if kernels == "xla":
            projections = jax.tree.map(lambda x: x.astype(jnp.float32), projections)
        return time_mix(
            arena, 1, batch, projections, operands.params, operands.ln_x, variant=VARIANT, kernels=kernels
        )

    out, after = run(arena, kernels)
    wanted, wanted_after = run(arena, "xla")
    for row, length in enumerate(lengths):
        if length:
            assert distance(out[row, :length], wanted[row, :length]) < 2.6e-3
        assert distance(after[write[row], 1], wanted_after[write[row], 1]) < 1.5e-3
    np.testing.assert_array_equal(after[:, 0], arena[:, 0])
    np.testing.assert_array_equal(after[read, 1], arena[read, 1])


def distance(got: Array, wanted: Array) -> float:
    """Of the norms: what is reported of other implementations."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("group", product_workloads.PUBLISHED, ids=lambda g: f"{g.rows} {g.name}")
def test_groups_of_products(group: product_workloads.Group, kernels: Kernels) -> None:
    jobs = product_workloads.make_jobs(group, product_workloads.make_weights(group))
    run = jax.jit(lambda xs, weights, kernels: _outs(xs, weights, group, kernels), static_argnums=2)
    xs, weights = [job.x for job in jobs], [job.weight for job in jobs]
    for got, wanted in zip(run(xs, weights, kernels), run(xs, weights, "xla"), strict=True):
        got, wanted = (x.sum(0) if group.in_parts else x for x in (got, wanted))
        close(got[..., : wanted.shape[-1]], wanted, 8e-3)


def _outs(xs: list[Array], weights: list[Array], group: product_workloads.Group, kernels: Kernels):
    activations = [activation for _, _, activation in group.shapes]
    jobs = [product_workloads.Product(*job) for job in zip(xs, weights, activations, strict=True)]
    return products(jobs, kernels=kernels, in_parts=group.in_parts)


@pytest.mark.parametrize("width", [768, 1024, 2048, 2560, 4096])
@pytest.mark.parametrize("rows", [1, 40])
def test_token_shift(rows: int, width: int, kernels: Kernels) -> None:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    x, parts = (
        jax.random.normal(next(keys), (rows, 1, width)),
        jax.random.normal(next(keys), (4, rows, 1, width)),
    )
    leaf = jax.random.normal(next(keys), (2 * rows + 2, 3, 2, width))
    norm = {name: jax.random.normal(next(keys), (width,)) for name in ("scale", "bias")}
    mixes = jax.random.normal(next(keys), (6, width))
    batch = Batch(
        tokens=jnp.zeros((rows, 1), jnp.int32),
        lengths=jnp.ones((rows,), jnp.int32),
        read_slots=jnp.arange(2, rows + 2, dtype=jnp.int32),
        write_slots=jnp.arange(rows + 2, 2 * rows + 2, dtype=jnp.int32),
        page_table=jnp.zeros((rows, 0), jnp.int32),
    )

    def run(kernels: Kernels) -> tuple[Array, list[Array], Array]:
        shift = TokenShift(leaf, batch, kernels)
        for layer in range(3):
            for place in range(2):
                summed, mixed = shift.mix(x, parts, layer, place, norm, mixes, eps=1e-5, dtype=jnp.float32)
        return summed, mixed, shift.finish()

    jax.tree.map(lambda a, b: close(a, b, 1e-5), jax.jit(run, static_argnums=0)(kernels), run("xla"))


def test_a_step_copies_no_arena(kernels: Kernels) -> None:
    config = dataclasses.replace(SIZES["0.4b"], num_layers=2)
    leaves, tree = jax.tree.flatten(rwkv7.param_spec(config))
    params = jax.tree.unflatten(tree, [jnp.zeros(leaf.shape, jnp.bfloat16) for leaf in leaves])
    model = Model(RWKV7, config, params, kernels=kernels)
    for rows in (1, 32, 128):
        device = Device(model, Sizes(3 * rows + 2, 0, rows + 1, 0))
        device.compile([(rows, 1)])
        shape = ",".join(map(str, device.arena.leaves["wkv"].shape))
        for name in (STEP, LIKELIEST_STEP):
            text = device._compiled[name, (rows, 1)].as_text()
            assert not re.findall(rf"f32\[{shape}\][^=\n]* copy(?:-start)?\(", text)


def test_gradients_are_those_of_xla(kernels: Kernels) -> None:
    workload = decode_workloads.Decode(4, 4, 2, jnp.float32)
    operands, arena = decode_workloads.make_operands(workload), decode_workloads.make_arena(workload)

    def loss(kernels: Kernels, arena: Array, projections: Projections, params: dict[str, Array]) -> Array:
        out, arena = time_mix(
            arena, 1, operands.batch, projections, params, operands.ln_x, variant=VARIANT, kernels=kernels
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(arena))

    gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    got, wanted = (gradient(k, arena, operands.projections, operands.params) for k in (kernels, "xla"))
    jax.tree.map(lambda a, b: close(a, b, 1e-4), got, wanted)


def test_a_random_model_steps_as_xla_does(kernels: Kernels) -> None:
    """Float32 weights, so that only the order of sums differs: 12 layers, 16 tokens, one after the other."""
    model = random_model("0.1b", jnp.float32, kernels=kernels)
    other = random_model("0.1b", jnp.float32, kernels="xla")
    state, other_state = model.init_state(3), other.init_state(3)
    for token in range(16):
        tokens = jnp.asarray([[token], [7 * token], [65_535 - token]], jnp.int32)
        logits, state = model(tokens, state)
        wanted, other_state = other(tokens, other_state)
        close(logits, wanted, 1e-3)
    jax.tree.map(lambda a, b: close(a, b, 1e-3), state, other_state)


PROMPTS = [
    "ROMEO.\n", "KING HENRY. What news", "To be, or not to be", "In the beginning", "User: Hello\nBot:",
    "And it came to pass", "Of Man's first disobedience", "Enter three witches.\n", "O Lord, ", "What is",
    "User: Mira's dog is called Rindo.\nBot:", "The fox", "Shall I compare thee", "Friends", "12, 13,",
    "My name is", "A horse! A horse!", "Thou shalt not", "FIRST WITCH.\nWhen", "Once upon a time",
]  # fmt: skip


Chosen = list[tuple[int, float, float]]
"""Each token of a text with its margin to the runner-up and the largest logit."""


def greedy(model: Model, num_tokens: int) -> list[Chosen]:
    """What a model writes after each prompt, all of them read in one rectangle and continued together."""
    assert model.tokenizer is not None
    prompts = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), 64), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    logits, state = model(tokens, model.init_state(len(prompts)), lengths)
    last = np.asarray(logits, np.float64)[np.arange(len(prompts)), lengths - 1]
    chosen: list[Chosen] = [[] for _ in prompts]
    for _ in range(num_tokens):
        second, first = np.sort(last)[:, -2:].T
        for text, *facts in zip(chosen, last.argmax(1), first - second, np.abs(last).max(1), strict=True):
            text.append((int(facts[0]), facts[1], facts[2]))
        logits, state = model(last.argmax(1).astype(np.int32)[:, None], state)
        last = np.asarray(logits, np.float64)[:, 0]
    return chosen


@pytest.fixture(scope="module")
def texts(kernels: Kernels) -> list[tuple[Chosen, Chosen]]:
    """Of each prompt, what this GPU's kernels write and what a CPU writes, in bfloat16."""
    there = greedy(wkvm_jax.load("demo", jnp.bfloat16, kernels=kernels), 64)
    with jax.default_device(jax.devices("cpu")[0]):
        here = greedy(wkvm_jax.load("demo", jnp.bfloat16, kernels="xla"), 64)
    return list(zip(there, here, strict=True))


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_the_demo_model_writes_as_on_a_cpu(index: int, texts: list[tuple[Chosen, Chosen]]) -> None:
    """64 tokens in bfloat16; a first difference must be a tie within bfloat16's 8 bits."""
    there, here = texts[index]
    for (token, _, _), (wanted, margin, largest) in zip(there, here, strict=True):
        if token != wanted:
            assert margin <= 2**-7 * largest
            break
