"""Measures a written demo model with the engine's own forward: exact recall, and bits per byte of prose.

    python3 -m experiments.demo_model.evaluate --model wkvm_jax/demo_model --texts .texts --questions 40

prints a Markdown table (and, with --json PATH, writes the numbers). Questions are asked one by one of the
state after the facts and the talk in between; an answer is right when greedy decoding gives exactly its bytes
up to and with the newline. Since greedy decoding follows the answer as long as it is right, one pass over the
right answer decides that. Prose is cut into windows that each start from the initial state; every byte but a
window's first is counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from wkvm_jax.models import rwkv7
from wkvm_jax.models.model import Model
from wkvm_jax.state import State, identity_batch

from . import corpus, export
from .cases import Case, Kind, make_cases
from .dialogues import Prose

SETTINGS: tuple[tuple[Kind, int, int], ...] = (
    ("recall", 8, 1000), ("recall", 16, 1000), ("recall", 32, 1000),
    ("recall", 8, 4000), ("recall", 16, 4000), ("recall", 32, 4000),
    ("corrected", 8, 1000), ("unknown", 8, 1000),
)  # fmt: skip
_NAMES = {
    "recall": "facts",
    "corrected": "facts, the one asked for corrected",
    "unknown": "facts, another asked for",
}
_WINDOW_BYTES = 512
_QUESTION_BYTES = 256


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def _advance(
    params: rwkv7.ModelParams, tokens: jax.Array, lengths: jax.Array, state: State, config: rwkv7.Config
) -> State:
    return rwkv7.forward(params, identity_batch(tokens, state, lengths), state, config=config)[1]


@partial(jax.jit, static_argnames="config")
def _judge(
    params: rwkv7.ModelParams, tokens: jax.Array, counted: jax.Array, state: State, config: rwkv7.Config
) -> jax.Array:
    """Which rows predict all their counted tokens, each from the tokens before it."""
    hidden, _ = rwkv7.forward(params, identity_batch(tokens, state), state, config=config)
    likeliest = jnp.argmax(rwkv7.head(params, hidden[:, :-1], config=config), axis=-1)
    return jnp.all((likeliest == tokens[:, 1:]) | ~counted[:, 1:], axis=-1)


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def _bits(
    params: rwkv7.ModelParams, tokens: jax.Array, targets: jax.Array, state: State, config: rwkv7.Config
) -> tuple[jax.Array, State]:
    """Bits of each target after its token, and the state after the tokens."""
    hidden, state = rwkv7.forward(params, identity_batch(tokens, state), state, config=config)
    losses = jax.nn.log_softmax(rwkv7.head(params, hidden, config=config))
    return -jnp.take_along_axis(losses, targets[..., None], axis=-1)[..., 0] / jnp.log(2.0), state


def _padded(texts: Sequence[bytes], width: int) -> np.ndarray:
    """The texts as rows of token ids, zeros after their ends."""
    out = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        out[row, : len(text)] = np.frombuffer(text, np.uint8)
    return out


def _after_contexts(model: Model, cases: Sequence[Case]) -> State:
    lengths = np.array([len(case.context) for case in cases])
    width = -(-int(lengths.max()) // _WINDOW_BYTES) * _WINDOW_BYTES
    tokens = _padded([case.context for case in cases], width)
    state = model.init_state(len(cases))
    for at in range(0, width, _WINDOW_BYTES):
        counted = jnp.asarray(np.clip(lengths - at, 0, _WINDOW_BYTES), jnp.int32)
        state = _advance(
            model.params, tokens[:, at : at + _WINDOW_BYTES], counted, state, config=model.config
        )
    return state


def recall(model: Model, cases: Sequence[Case]) -> tuple[int, int]:
    """How many questions are answered exactly, and how many there are."""
    state = _after_contexts(model, cases)
    num_right = num_asked = 0
    for index in range(max(len(case.asks) for case in cases)):
        asks = [case.asks[index % len(case.asks)] for case in cases]
        is_new = np.array([index < len(case.asks) for case in cases])
        tokens = _padded([question + answer for question, answer in asks], _QUESTION_BYTES)
        counted = np.zeros(tokens.shape, bool)
        for row, (question, answer) in enumerate(asks):
            counted[row, len(question) : len(question) + len(answer)] = True
        right = np.asarray(_judge(model.params, tokens, counted, state, config=model.config))
        num_right += int(np.sum(right & is_new))
        num_asked += int(np.sum(is_new))
    return num_right, num_asked


def bits_a_byte(model: Model, text: bytes, *, window_bytes: int, max_rows: int = 64) -> tuple[float, int]:
    """Mean bits a byte over the whole windows of a text, and the number of bytes counted."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    starts = range(0, len(tokens) - window_bytes, window_bytes)
    rows = np.stack([tokens[at : at + window_bytes + 1] for at in starts])
    num_rows = min(max_rows, len(rows))
    total = 0.0
    for at in range(0, len(rows), num_rows):
        some = rows[at : at + num_rows]
        some_padded = np.concatenate([some, np.zeros((num_rows - len(some), window_bytes + 1), np.int32)])
        state = model.init_state(num_rows)
        for left in range(0, window_bytes, _WINDOW_BYTES):
            window = some_padded[:, left : left + _WINDOW_BYTES + 1]
            bits, state = _bits(model.params, window[:, :-1], window[:, 1:], state, config=model.config)
            total += float(np.sum(np.asarray(bits, np.float64)[: len(some)]))
    return total / (len(rows) * window_bytes), len(rows) * window_bytes


def measure(
    model: Model, texts: Path, *, num_questions: int, questions_a_case: int, prose_bytes: int, seed: int = 0
) -> dict[str, dict[str, float]]:
    """All numbers, by name."""
    works = corpus.select(corpus.load_works(texts), "test")
    results: dict[str, dict[str, float]] = {}
    for kind, num_facts, filler_bytes in SETTINGS:
        began = time.monotonic()
        cases = make_cases(seed, Prose(works), kind, num_facts, filler_bytes, num_questions, questions_a_case)
        num_right, num_asked = recall(model, cases)
        entry = {"right": num_right, "asked": num_asked, "share": num_right / num_asked}
        results[f"{num_facts} {_NAMES[kind]}, {filler_bytes:,} bytes between"] = entry
        print(
            f"{kind} {num_facts} {filler_bytes}: {num_right}/{num_asked}, {time.monotonic() - began:.1f} s",
            flush=True,
        )
    total_bits, total_bytes = 0.0, 0
    for group in sorted({work.group for work in works}):
        text = b"".join(work.text for work in works if work.group == group)[:prose_bytes]
        mean, count = bits_a_byte(model, text, window_bytes=4096)
        results[f"prose, {group}"] = {"bits_a_byte": mean, "bytes": count}
        total_bits, total_bytes = total_bits + mean * count, total_bytes + count
    results["prose, all"] = {"bits_a_byte": total_bits / total_bytes, "bytes": total_bytes}
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as a Markdown table."""
    lines = ["| held out | result | measured on |", "|---|---|---|"]
    for name, entry in results.items():
        if "share" in entry:
            lines.append(
                f"| {name} | {entry['share']:.1%} answered exactly | {entry['asked']:,.0f} questions |"
            )
        else:
            lines.append(
                f"| {name} | {entry['bits_a_byte']:.3f} bits per byte | {entry['bytes']:,.0f} bytes |"
            )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with demo.safetensors and config.json"
    )
    parser.add_argument("--texts", type=Path, required=True, help="folder with the two text archives")
    parser.add_argument(
        "--questions", type=int, default=500, help="questions a setting (default %(default)s)"
    )
    parser.add_argument(
        "--questions-a-case", type=int, default=4, help="asked of one state (default %(default)s)"
    )
    parser.add_argument(
        "--prose-bytes", type=int, default=10**9, help="at most so many bytes a kind of prose"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args(arguments)
    model = export.read(options.model)
    results = measure(
        model, options.texts, num_questions=options.questions, questions_a_case=options.questions_a_case,
        prose_bytes=options.prose_bytes,
    )  # fmt: skip
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
