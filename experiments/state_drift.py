"""How far 16-bit states drift from float32 ones over a long conversation.

    python3 -m experiments.state_drift --model demo --tokens 4096

samples texts of so many tokens with float32 states, then reads each token by token with states kept in each
16-bit type, rounded after every token, and compares the log-probabilities of the tokens that were drawn:
their mean and largest difference, and the mean in either half, where rounding that piles up shows. "same
choice" is how often the likeliest token is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

import wkvm_jax
from wkvm_jax.models.model import Model
from wkvm_jax.models.rwkv7 import STATE_DTYPES
from wkvm_jax.state import State


def sampled_text(model: Model, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    """The prompt and tokens drawn after it, at temperature 1."""

    @jax.jit
    def draw(token: Int32[Array, ""], state: State, key: Array) -> tuple[Array, State]:
        logits, state = model.apply(model.params, token[None, None], state)
        return jax.random.categorical(key, logits[0, 0]).astype(jnp.int32), state

    _, state = model(jnp.asarray([prompt[:-1]], jnp.int32), model.init_state(1))
    token, text = jnp.int32(prompt[-1]), list(prompt)
    for key in jax.random.split(jax.random.key(seed), num_tokens):
        token, state = draw(token, state, key)
        text.append(int(token))
    return text


@partial(jax.jit, static_argnames="model")
def _read(
    params: object, text: Int32[Array, " t"], state: State, model: _ByIdentity
) -> Float32[Array, "t v"]:
    def one(state: State, token: Array) -> tuple[State, Array]:
        logits, state = model.model.apply(params, token[None, None], state)
        return state, jax.nn.log_softmax(logits[0, 0])

    return jax.lax.scan(one, state, text)[1]


@dataclasses.dataclass(frozen=True, eq=False)
class _ByIdentity:
    """A model as a static argument."""

    model: Model


def log_probs(model: Model, text: list[int]) -> np.ndarray:
    """The log-probabilities `[token, vocabulary]` after each token, one token at a time."""
    tokens = jnp.asarray(text[:-1], jnp.int32)
    return np.asarray(_read(model.params, tokens, model.init_state(1), _ByIdentity(model)))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="as for wkvm generate (default: demo)")
    parser.add_argument("--prompt", default="KING HENRY. What news", help="where the text begins")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens to draw (default: 4096)")
    parser.add_argument("--texts", type=int, default=3, help="texts, with seeds from 0 on (default: 3)")
    options = parser.parse_args(arguments)
    models = {dtype: wkvm_jax.load(options.model, state_dtype=dtype) for dtype in STATE_DTYPES}
    exact = models["float32"]
    assert exact.tokenizer is not None
    prompt = list(exact.tokenizer.encode(options.prompt))
    columns = ("mean", "worst", "1st half", "2nd half", "same choice")
    print(f"{'states':10} {'text':>5} " + " ".join(f"{column:>11}" for column in columns))
    for seed in range(options.texts):
        text = sampled_text(exact, prompt, options.tokens, seed)
        wanted = log_probs(exact, text)
        rows, drawn = np.arange(len(text) - 1), np.asarray(text[1:])
        for dtype in STATE_DTYPES[1:]:
            got = log_probs(models[dtype], text)
            apart = np.abs(got - wanted)[rows, drawn]
            half = len(apart) // 2
            same = np.mean(got.argmax(-1) == wanted.argmax(-1))
            figures = (apart.mean(), apart.max(), apart[:half].mean(), apart[half:].mean())
            shown = " ".join(f"{figure:>11.5f}" for figure in figures)
            print(f"{dtype:10} {seed:>5} {shown} {same:>11.2%}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
