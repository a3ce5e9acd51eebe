"""One story of requests and states, told by an engine on each of several meshes of 8 simulated devices.

Run in a process of its own, since the number of devices is fixed once JAX has started. Prints one JSON
object: a mesh's shape to what came out of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import jax
import numpy as np

from tests.engine.engines import CONFIG, model_named
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.engine import Engine
from wkvm_jax.engine.request import SamplingParams
from wkvm_jax.errors import MeshError
from wkvm_jax.models.model import Model
from wkvm_jax.store.memory import MemoryRecords


def story(model: Model, mesh: jax.sharding.Mesh | None, config: EngineConfig) -> dict[str, object]:
    """Tokens of everything that an engine does, and how many slots are free before and after."""
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    drawn = dataclasses.replace(greedy, temperature=0.8, seed=3, presence_penalty=0.5)
    with Engine(model, config, MemoryRecords(), mesh) as engine:
        free = engine.slots().free
        engine.warm_up()
        prompts = [[1 + (7 * row + 3 * place) % 90 for place in range(2 + 9 * row)] for row in range(6)]
        crowd = [engine.submit(prompt, params=params) for prompt in prompts for params in (greedy, drawn)]
        choices = engine.submit_choices([5, 6, 7, 8], 2, params=drawn)
        created = engine.states.create("read", list(range(1, 40)))
        forks = engine.states.fork(created.handle, "fork", 3)
        continued = [engine.submit([9], state=fork.handle, save_as="more", params=greedy) for fork in forks]
        running = engine.submit([11, 12], params=dataclasses.replace(greedy, max_tokens=40))
        for _, _token in zip(range(5), running, strict=False):
            pass
        snapshot = engine.states.snapshot(running, "snapshot")
        tokens = [request.result().token_ids for request in [*crowd, *choices, *continued, running]]
        resumed = engine.submit([], state=snapshot.handle, params=greedy).result().token_ids
        position = snapshot.num_tokens - 2
        assert resumed[: 40 - position] == running.result().token_ids[position : position + 12]
        state = engine.states.load(created.handle, max_length=64)
        put = engine.states.put("put", state)
        tokens.append(engine.submit([9], state=put.handle, params=greedy).result().token_ids)
        leaves = {name: np.abs(np.asarray(leaf)).sum().item() for name, leaf in state.leaves.items()}
        for record in engine.states.list():
            engine.states.delete(record.handle)
        return {"tokens": tokens, "leaves": leaves, "lost": free - engine.slots().free}


def main(name: str, shapes: list[list[int]]) -> dict[str, object]:
    model = model_named(name)
    config = dataclasses.replace(CONFIG, num_slots=64, max_rows=32, prefill_chunks=(16,))
    told: dict[str, object] = {"none": story(model, None, config)}
    for shape in shapes:
        mesh = jax.make_mesh(tuple(shape), ("data", "model")[-len(shape) :])
        try:
            told[str(shape)] = story(model, mesh, config)
        except MeshError as error:
            told[str(shape)] = str(error)
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
