"""`wkvm generate`: one prompt, its text printed as it comes."""

from __future__ import annotations

import argparse
import sys

from wkvm_jax.api import Engine
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.request import SamplingParams
from wkvm_jax.models.loading import load
from wkvm_jax.serving.progress import loading_progress


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
    model = load(arguments.model, arguments.dtype, progress=loading_progress())
    # One row and the chunks that this prompt needs: nothing else is compiled.
    config = EngineConfig(num_slots=2, max_rows=1)
    with Engine(model, config=config) as engine:
        request = engine.submit(prompt, params=params)
        for token in request:
            print(token.text, end="", flush=True)
        output = request.result()
    print()
    if output.error:
        print(f"wkvm: {output.error}", file=sys.stderr)
        return 1
    return 0
