"""`Model`: a family, its config, its weights and its tokenizer, as one object with pure functions."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer

from wkvm_jax.kernels.dispatch import Kernels
from wkvm_jax.models.family import Family, FamilyConfig
from wkvm_jax.models.stacking import apart, stacked
from wkvm_jax.state import State, StateSpec, identity_batch
from wkvm_jax.tokenizers.base import Tokenizer
from wkvm_jax.types import Params

SCORE_CHUNK = 256
"""Positions whose logits exist at once while scoring; a vocabulary of 65,536 takes 64 MiB a row."""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model that is ready to run.

    Calling it runs tokens through it from a state and returns logits and the next state. Nothing is
    changed in place; `apply` and `hidden` work under `jit`, `vmap` and `grad`, for parameters and states.

    Attributes:
        family: what the weights mean.
        config: the family's sizes.
        params: the weights, a pytree as the family's `param_spec` lays it out; where kernels run, the layers
            may be one `LayerStack`, which costs a step less and means the same.
        tokenizer: None for a checkpoint that brought none; such a model takes and gives ids.
        name: what it was loaded as.
        kernels: what computes it; `wkvm_jax.load` chooses.
    """

    family: Family
    config: FamilyConfig
    params: Params
    tokenizer: Tokenizer | None = None
    name: str = "model"
    kernels: Kernels = "xla"

    @cached_property
    def state_spec(self) -> StateSpec:
        """One conversation's state: leaves, shapes, dtypes and kinds."""
        return self.family.state_spec(self.config)

    @property
    def weight_bytes_a_step(self) -> int:
        """Bytes of weights that a step reads: all but an embedding that is not the head as well."""
        sizes = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(p)) for name, p in self.params.items()}
        unread = sizes.get("embedding", 0) if "head" in sizes else 0
        return sum(sizes.values()) - unread

    @cached_property
    def fingerprint(self) -> str:
        """A digest of architecture, shapes, weights and tokenizer; states remember it."""
        from wkvm_jax.weights import weights_digest

        tokenizer = self.tokenizer.digest if self.tokenizer else "none"
        # The weights' shapes do not tell epsilons and variants.
        config = hashlib.blake2b(repr(self.config).encode(), digest_size=8).hexdigest()
        return f"{self.family.name}-{config}-{weights_digest(apart(self.params))}-{tokenizer}"

    def laid_out(self, params: Params) -> Params:
        """Weights as a step of this model wants them: for kernels with their layers stacked, as a copy."""
        return params if self.kernels == "xla" else stacked(params)

    def init_state(self, batch_size: int, max_length: int | None = None) -> State:
        """A batch of fresh states.

        Args:
            batch_size: rows.
            max_length: tokens a row may reach; needed by models with paged leaves, ignored by others.

        Raises:
            ValueError: `batch_size` is not positive, or a paged model got no `max_length`.
        """
        if batch_size < 1:
            raise ValueError(f"{batch_size=} must be at least 1")
        if max_length is not None and max_length < 1:
            raise ValueError(f"{max_length=} must be at least 1")
        if self.state_spec.paged and max_length is None:
            raise ValueError("this model keeps keys and values of every token: pass max_length=")
        pages = self.state_spec.pages_for(max_length or 0)
        return self.state_spec.allocate(batch_size, batch_size * pages)

    def __call__(
        self,
        tokens: Integer[Array | np.ndarray, "b t"],
        state: State,
        lengths: Integer[Array | np.ndarray, " b"] | None = None,
    ) -> tuple[Float32[Array, "b t vocab"], State]:
        """Logits of every position, and the states after the last.

        Args:
            tokens: ids. Ids outside the vocabulary are the caller's fault and are clamped, as JAX does.
            state: one state a row.
            lengths: how many tokens of each row count, for rows of unequal length padded on the right.
        """
        return self._jitted_apply(self.params, tokens, state, lengths)

    def apply(
        self,
        params: Params,
        tokens: Integer[Array | np.ndarray, "b t"],
        state: State,
        lengths: Integer[Array | np.ndarray, " b"] | None = None,
    ) -> tuple[Float32[Array, "b t vocab"], State]:
        """As calling the model, with the weights given: the function to differentiate."""
        hidden, state = self._forward(params, tokens, state, lengths)
        return self.family.head(params, hidden, config=self.config), state

    def hidden(
        self,
        tokens: Integer[Array | np.ndarray, "b t"],
        state: State,
        lengths: Integer[Array | np.ndarray, " b"] | None = None,
    ) -> tuple[Float[Array, "b t d"], State]:
        """The final norm's output of every position, and the states after the last."""
        return self._jitted_hidden(self.params, tokens, state, lengths)

    def score(
        self, tokens: Integer[Array | np.ndarray, "b t"], state: State | None = None
    ) -> Float32[Array, "b t_minus_1"]:
        """Log-probability of each token after the first, given those before it, in one pass.

        Args:
            tokens: ids, at least two a row.
            state: where rows start from; fresh states by default.
        """
        rows, width = tokens.shape
        if width < 2:
            raise ValueError(f"scoring needs at least two tokens a row; got {width}")
        state = self.init_state(rows, max_length=width) if state is None else state
        return self._jitted_score(self.params, jnp.asarray(tokens, jnp.int32), state)

    def _forward(
        self, params: Params, tokens: Array | np.ndarray, state: State, lengths: Array | np.ndarray | None
    ) -> tuple[Array, State]:
        if tokens.shape[1] < 1:
            raise ValueError(f"a pass needs at least one token a row; got {tokens.shape=}")
        counted = None if lengths is None else jnp.asarray(lengths, jnp.int32)
        batch = identity_batch(jnp.asarray(tokens, jnp.int32), state, counted)
        return self.family.forward(params, batch, state, config=self.config, kernels=self.kernels)

    def functions(
        self, model_axis: str | None
    ) -> tuple[Callable[..., tuple[Array, State]], Callable[..., Array]]:
        """The family's `forward` and `head` for this model, as a step calls them.

        Args:
            model_axis: the mesh axis that heads are spread over where the step runs, if any.
        """
        forward = partial(self.family.forward, config=self.config, kernels=self.kernels)
        head = partial(self.family.head, config=self.config)
        if model_axis is None:
            return forward, head
        return partial(forward, model_axis=model_axis), partial(head, model_axis=model_axis)

    @cached_property
    def _jitted_apply(self) -> jax.stages.Wrapped:
        return jax.jit(self.apply)

    @cached_property
    def _jitted_hidden(self) -> jax.stages.Wrapped:
        return jax.jit(self._forward)

    @cached_property
    def _jitted_score(self) -> jax.stages.Wrapped:
        return jax.jit(self._score)

    def _score(self, params: Params, tokens: Array, state: State) -> Array:
        hidden, _ = self._forward(params, tokens[:, :-1], state, None)
        head = partial(self.family.head, params, config=self.config)
        return target_log_probs(head, hidden, tokens[:, 1:])


def target_log_probs(
    head: Callable[[Array], Array], hidden: Float[Array, "b t d"], targets: Integer[Array | np.ndarray, "b t"]
) -> Float32[Array, "b t"]:
    """Log-probabilities of the targets, with logits of only `SCORE_CHUNK` positions alive at once."""
    rows, width, channels = hidden.shape
    size = min(width, SCORE_CHUNK)
    pad = -width % size
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(rows, -1, size, channels)
    padded = jnp.pad(targets, ((0, 0), (0, pad))).reshape(rows, -1, size)

    @jax.checkpoint
    def one_chunk(chunk: tuple[Array, Array]) -> Array:
        log_probs = jax.nn.log_softmax(head(chunk[0]))
        return jnp.take_along_axis(log_probs, chunk[1][..., None], axis=-1)[..., 0]

    scores = jax.lax.map(one_chunk, (jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(padded, 1, 0)))
    return jnp.moveaxis(scores, 0, 1).reshape(rows, -1)[:, :width]
