"""Ampere's kernels on meshes of simulated devices, interpreted: greedy tokens of a few requests.

Run in a process of its own, since the number of devices is fixed once JAX has started. Prints one JSON
object: a mesh's shape to the tokens.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from wkvm_jax import Engine, EngineConfig
from wkvm_jax.models import rwkv7
from wkvm_jax.models.model import Model
from wkvm_jax.models.registry import RWKV7

CONFIG = rwkv7.Config(
    vocab_size=64, hidden_size=256, num_layers=2, head_dim=64, intermediate_size=256, value_dim=256,
    decay_rank=32, iclr_rank=32, value_rank=32, gate_rank=32,
)  # fmt: skip


def main(dtype: str, shapes: list[list[int]]) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), dtype), rwkv7.param_spec(CONFIG)
    )
    model = Model(RWKV7, CONFIG, params, kernels="ampere_interpreted")
    config = EngineConfig(num_slots=8, max_rows=4, prefill_chunks=(8,))
    told = {}
    for shape in [None, *shapes]:
        mesh = None if shape is None else jax.make_mesh(tuple(shape), ("data", "model"))
        with Engine(model, config=config, mesh=mesh) as engine:
            outputs = engine.generate([[1, 2, 3], [4], [5, 6]], max_tokens=2, ignore_eos=True)
            told[str(shape)] = [list(output.token_ids) for output in outputs]
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
