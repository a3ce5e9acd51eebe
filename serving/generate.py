"""`wkvm generate`: one prompt, its text printed as it comes."""

from __future__ import annotations

import argparse
import sys

from wkvm_jax.api import Engine
from wkvm_jax.config import DEFAULT_PREFILL_CHUNKS, EngineConfig
from wkvm_jax.engine.request import SamplingParams
from wkvm_jax.engine.submission import encoded
from wkvm_jax.errors import RequestError
from wkvm_jax.serving.chosen import load_chosen

WIDEST_CHUNK = 256


def generate(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    model = load_chosen(arguments)
    prompt_ids = encoded(model, _ids(prompt) if arguments.ids else prompt)
    chunk = next((size for size in DEFAULT_PREFILL_CHUNKS[:-1] if size >= len(prompt_ids) - 1), WIDEST_CHUNK)
    config = EngineConfig(num_slots=2, max_rows=1, prefill_chunks=(chunk,))
    with Engine(model, config=config) as engine:
        # Only what this prompt needs, both shapes at the same time.
        engine.compile([(1, chunk), (1, 1)] if len(prompt_ids) > 1 else [(1, 1)])
        request = engine.submit(prompt_ids, params=params)
        for token in request:
            print(f"{token.token_id} " if arguments.ids else token.text, end="", flush=True)
        output = request.result()
    print()
    if output.error:
        print(f"wkvm: {output.error}", file=sys.stderr)
        return 1
    return 0


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise RequestError("prompt", f"--ids takes whole numbers; {word!r} is none")
    return [int(word) for word in words]
