"""One training step, the optimizer, and the loop that logs, measures, checkpoints and resumes."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, Float, UInt8

from . import net
from .batches import Batch, Phase, batches, phase_at
from .card import RUNS
from .dialogues import ANSWER, PROSE, WEIGHT_UNIT
from .net import Params, Shape
from .probe import Probe

_DECAYED = ("receptance", "key", "value", "output", "ffn.key", "ffn.value", "head")
_CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, besides the texts and the machine's rounding."""

    shape: Shape
    phases: tuple[Phase, ...]
    num_steps: int
    seed: int = 0
    peak_rate: float = 1.5e-3
    warmup_steps: int = 200
    hold: float = 0.3
    weight_decay: float = 0.1
    prose_dropout: float = 0.1
    recurrence: str = "xla"
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Loop:
    """How a run goes about it: nothing here changes the result."""

    texts: Path
    folder: Path
    log_every: int = 50
    measure_every: int = 500
    save_every: int = 1000
    num_workers: int = 2
    stop_after_s: float = float("inf")


def learning_rate(recipe: Recipe) -> optax.Schedule:
    """Up to the peak, along it for a share of the steps, and straight down to almost nothing."""
    held = max(recipe.warmup_steps + 1, round(recipe.hold * recipe.num_steps))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, recipe.peak_rate, recipe.warmup_steps),
            optax.constant_schedule(recipe.peak_rate),
            optax.linear_schedule(recipe.peak_rate, 0.01 * recipe.peak_rate, max(1, recipe.num_steps - held)),
        ],
        [recipe.warmup_steps, held],
    )


def _by_name(params: Params, names: tuple[str, ...]) -> dict[str, dict[str, bool]]:
    return {group: {name: name in names for name in leaves} for group, leaves in params.items()}


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon for the layers' matrices and AdamW for the rest, over clipped gradients."""
    mask = partial(_by_name, names=_DECAYED)
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)

    def which(params: Params) -> dict[str, dict[str, optax.contrib.MuonDimensionNumbers | None]]:
        chosen = _by_name(params, _DECAYED)
        chosen["ends"] = dict.fromkeys(chosen["ends"], False)
        return jax.tree.map(lambda is_matrix: numbers if is_matrix else None, chosen)

    inner = optax.contrib.muon(
        learning_rate(recipe), weight_decay=recipe.weight_decay, weight_decay_mask=mask, consistent_rms=0.2,
        adam_b1=0.9, adam_b2=0.99, muon_weight_dimension_numbers=which,
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(_CLIP), inner)


def _keep(recipe: Recipe, step: Array, is_prose: Bool[Array, " b"]) -> Float[Array, "l 2 b 1 d"]:
    """Dropout of whole channels of each branch for a row, in rows of prose only: they are seen many times."""
    shape = (recipe.shape.num_layers, 2, is_prose.shape[0], 1, recipe.shape.hidden_size)
    key = jax.random.fold_in(jax.random.key(recipe.seed + 1), step)
    kept = jax.random.bernoulli(key, 1.0 - recipe.prose_dropout, shape) / (1.0 - recipe.prose_dropout)
    return jnp.where(is_prose[:, None, None], kept, 1.0)


def byte_losses(logits: Float[Array, "b t v"], targets: UInt8[Array, "b t"]) -> Float[Array, "b t"]:
    """Cross-entropy of each byte in nats."""
    picked = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0.0), -1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def loss(
    params: Params,
    text: UInt8[Array, "b t1"],
    weights: UInt8[Array, "b t1"],
    keep: Array | None,
    recipe: Recipe,
) -> tuple[Array, dict[str, Array]]:
    """The weighted mean loss of a batch, and what to log."""
    out = net.logits(
        params, text[:, :-1], shape=recipe.shape, recurrence=net.RECURRENCES[recipe.recurrence],
        dtype=jnp.dtype(recipe.dtype), keep=keep,
    )  # fmt: skip
    targets, weights = text[:, 1:], weights[:, 1:]
    each = byte_losses(out, targets)
    weight = weights.astype(jnp.float32) / WEIGHT_UNIT
    total = jnp.sum(each * weight) / jnp.sum(weight)
    is_prose, is_answer = weights == PROSE, weights == ANSWER
    right = jnp.argmax(out, -1) == targets
    return total, {
        "loss": total,
        "prose_bits": jnp.sum(each * is_prose) / jnp.maximum(jnp.sum(is_prose), 1) / jnp.log(2.0),
        "answer_bytes_right": jnp.sum(right & is_answer) / jnp.maximum(jnp.sum(is_answer), 1),
    }


def make_step(recipe: Recipe) -> jax.stages.Wrapped:
    """`step(params, opt_state, at, text, weights, is_prose)` gives the first two anew, and metrics."""
    transform = optimizer(recipe)

    def step(
        params: Params, opt_state: optax.OptState, at: Array, text: Array, weights: Array, is_prose: Array
    ):
        keep = _keep(recipe, at, is_prose) if recipe.prose_dropout else None
        gradients, metrics = jax.grad(loss, has_aux=True)(params, text, weights, keep, recipe)
        metrics["gradient_norm"] = jnp.sqrt(
            sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients))
        )
        updates, opt_state = transform.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    return jax.jit(step, donate_argnums=(0, 1))


class Compiled:
    """The step for each batch shape: the first is compiled at once, the others meanwhile in a thread."""

    def __init__(self, recipe: Recipe, state: dict[str, object], first: Phase) -> None:
        self._lock = threading.Lock()
        self._step = make_step(recipe)
        self._state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        self._ready: dict[tuple[int, int], jax.stages.Compiled] = {}
        self.get(first)
        later = recipe.phases[recipe.phases.index(first) + 1 :]
        threading.Thread(target=self._rest, args=(later,), daemon=True).start()

    def _rest(self, phases: tuple[Phase, ...]) -> None:
        for phase in phases:
            self.get(phase)

    def get(self, phase: Phase) -> jax.stages.Compiled:
        """The compiled step for a phase."""
        shape = (phase.num_rows, phase.length)
        with self._lock:
            if shape not in self._ready:
                began = time.monotonic()
                text = jax.ShapeDtypeStruct((phase.num_rows, phase.length + 1), jnp.uint8)
                is_prose = jax.ShapeDtypeStruct((phase.num_rows,), jnp.bool_)
                at = jax.ShapeDtypeStruct((), jnp.int32)
                lowered = self._step.lower(
                    self._state["params"], self._state["opt_state"], at, text, text, is_prose
                )
                self._ready[shape] = lowered.compile()
                print(
                    f"compiled {shape[0]} rows x {shape[1]} bytes in {time.monotonic() - began:.1f} s",
                    flush=True,
                )
            return self._ready[shape]


class Log:
    """Metrics gathered on the device, averaged and printed now and then."""

    def __init__(self, recipe: Recipe, path: Path) -> None:
        self._recipe, self._path = recipe, path
        self._waiting: list[dict[str, Array]] = []
        self._bytes, self._began = 0, time.monotonic()

    def add(self, metrics: dict[str, Array], num_bytes: int) -> None:
        """Take one step's metrics, without waiting for them."""
        self._waiting.append(metrics)
        self._bytes += num_bytes

    def write(self, num_done: int) -> None:
        """Print and append the mean of what was added since the last time."""
        fetched = jax.device_get(self._waiting)
        means = {name: float(np.mean([step[name] for step in fetched])) for name in fetched[0]}
        seconds = time.monotonic() - self._began
        left_s = (self._recipe.num_steps - num_done) * seconds / len(fetched)
        self.record({"step": num_done, **means, "bytes_a_s": self._bytes / seconds})
        told = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
        print(
            f"step {num_done}/{self._recipe.num_steps}: {told}, {self._bytes / seconds / 1e6:.2f} MB/s, "
            f"{left_s:.0f} s left", flush=True,
        )  # fmt: skip
        self._waiting, self._bytes, self._began = [], 0, time.monotonic()

    def record(self, entry: dict[str, float]) -> None:
        """Append one line to the log file."""
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def initial_state(recipe: Recipe) -> dict[str, object]:
    """Parameters and optimizer state before the first step."""
    with jax.default_device(jax.devices("cpu")[0]):  # a GPU would compile for longer than this takes
        params = net.init_params(recipe.shape, jax.random.key(recipe.seed))
        state = {"params": params, "opt_state": optimizer(recipe).init(params)}
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), jax.devices()[0]), state)


def _restored(manager: ocp.CheckpointManager, state: dict[str, object]) -> tuple[dict[str, object], int]:
    """The newest checkpoint's state and the number of steps done, or the given state and 0."""
    done = manager.latest_step()
    if done is None:
        return state, 0
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    return manager.restore(done, args=ocp.args.StandardRestore(abstract)), done


def train(recipe: Recipe, loop: Loop) -> tuple[Params, int]:
    """Train on from the newest checkpoint, to the end or until the time is up.

    Returns the parameters and how many steps are done in all.
    """
    stop_at = time.monotonic() + loop.stop_after_s
    loop.folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager((loop.folder / "checkpoints").resolve(), options=options) as manager:
        state, done = _restored(manager, initial_state(recipe))
        print(
            f"{sum(leaf.size for leaf in jax.tree.leaves(state['params'])):,} parameters, {done} steps done",
            flush=True,
        )
        if done < recipe.num_steps:
            made = batches(
                loop.texts,
                recipe.seed,
                recipe.phases,
                recipe.num_steps,
                first_step=done,
                num_workers=loop.num_workers,
            )
            first_step, began = done, time.monotonic()
            state, done = _run(recipe, loop, manager, state, done, made, stop_at)
            _record_run(recipe, loop.folder / RUNS, first_step, done, time.monotonic() - began)
    return state["params"], done


def _record_run(recipe: Recipe, path: Path, first_step: int, done: int, seconds: float) -> None:
    """Add this run to the list of those that led to the weights."""
    runs = json.loads(path.read_text()) if path.exists() else []
    phase = recipe.phases[0]
    run = {
        "first_step": first_step,
        "last_step": done,
        "num_steps": recipe.num_steps,
        "bytes_a_step": phase.num_rows * phase.length,
        "optimizer": "muon",
        "peak_rate": recipe.peak_rate,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seconds": round(seconds),
    }
    path.write_text(json.dumps([*runs, run], indent=2) + "\n")


def _run(
    recipe: Recipe, loop: Loop, manager: ocp.CheckpointManager, state: dict[str, object], done: int,
    made: Iterator[Batch], stop_at: float,
) -> tuple[dict[str, object], int]:  # fmt: skip
    params, opt_state = state["params"], state["opt_state"]
    compiled = Compiled(recipe, state, phase_at(recipe.phases, done, recipe.num_steps))
    probe = Probe(loop.texts, recipe.shape, recipe.recurrence, recipe.dtype) if loop.measure_every else None
    log = Log(recipe, loop.folder / "log.jsonl")
    for batch in made:
        step = compiled.get(phase_at(recipe.phases, done, recipe.num_steps))
        params, opt_state, metrics = step(
            params, opt_state, jnp.int32(done), batch.text, batch.weights, batch.is_prose
        )
        done += 1
        log.add(metrics, batch.text.size)
        is_last = done == recipe.num_steps or time.monotonic() > stop_at
        if done % loop.log_every == 0 or is_last:
            log.write(done)
        if probe is not None and (done % loop.measure_every == 0 or is_last):
            measured = probe(params)
            log.record({"step": done, **measured})
            print(
                f"step {done}, held out: " + ", ".join(f"{k} {v:.4g}" for k, v in measured.items()),
                flush=True,
            )
        if done % loop.save_every == 0 or is_last:
            tree = {"params": params, "opt_state": opt_state}
            manager.save(done, args=ocp.args.StandardSave(tree), force=is_last)
        if is_last:
            break
    manager.wait_until_finished()
    return {"params": params, "opt_state": opt_state}, done
