"""`wkvm serve`: puts model, engine and HTTP application together."""

from __future__ import annotations

import argparse
import sys

from wkvm_jax.api import Engine, default_max_rows
from wkvm_jax.config import EngineConfig
from wkvm_jax.errors import RequestError
from wkvm_jax.serving.app import create_app
from wkvm_jax.serving.chosen import load_chosen
from wkvm_jax.serving.progress import compiling_progress
from wkvm_jax.serving.run import serve


def start_server(arguments: argparse.Namespace) -> int:
    """Runs the command until it is told to end; returns the exit status."""
    if arguments.store is not None:
        raise RequestError("store", "--store: this version keeps states in memory only; leave it out")
    config = EngineConfig(
        num_slots=arguments.num_slots,
        max_rows=arguments.max_rows or default_max_rows(arguments.num_slots),
        deterministic=arguments.deterministic,
    )
    model = load_chosen(arguments)
    engine = Engine(model, config=config)
    if not arguments.no_warmup:
        print("compiling; later starts find the compiled steps on disk", file=sys.stderr)
        engine.warm_up(compiling_progress())
    app = create_app(engine, max_tokens_limit=arguments.max_tokens_limit)
    serve(app, arguments.host, arguments.port)
    return 0
