"""Decoding on a CPU: this engine against the `rwkv` package, same weights, in one run.

Both take turns, round by round, so that a noisy machine treats them alike. The package runs in an
interpreter of its own, since it needs torch, which this project does not:

    python3 -m venv peer && peer/bin/pip install torch rwkv safetensors numpy
    python3 -m experiments.compare_rwkv --peer-python peer/bin/python

The package decodes one sequence; the engine is measured with 1 and with 32 rows against that figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import jax

from wkvm_jax import Engine, EngineConfig
from wkvm_jax.models.loading import DEMO_DIRECTORY, load
from wkvm_jax.models.model import Model

PEER = """
import json, os, sys, time
os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="1", RWKV_CUDA_ON="0")
import torch
from safetensors.torch import load_file
source, target, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.save(load_file(source), target + ".pth")
from rwkv.model import RWKV
model = RWKV(model=target, strategy="cpu fp32")
def seconds():
    logits, state = model.forward([1], None)
    start = time.perf_counter()
    for _ in range(steps):
        logits, state = model.forward([int(logits.argmax())], state)
    return time.perf_counter() - start
seconds()
print("torch", torch.__version__, "threads", torch.get_num_threads(), file=sys.stderr, flush=True)
for line in sys.stdin:
    print(seconds(), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer-python", required=True, help="an interpreter with torch, rwkv and safetensors"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds; medians are printed (default: 7)")
    parser.add_argument("--steps", type=int, default=100, help="tokens a round (default: 100)")
    parser.add_argument(
        "--cpu-devices",
        type=int,
        default=1,
        help="with 32 rows, spread them over so many CPU devices, one a core (default: 1)",
    )
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.cpu_devices)
    mesh = jax.make_mesh((arguments.cpu_devices,), ("data",)) if arguments.cpu_devices > 1 else None
    model = load("demo")
    (weights,) = DEMO_DIRECTORY.glob("*.safetensors")
    with tempfile.TemporaryDirectory() as scratch:
        peer = subprocess.Popen(
            [
                arguments.peer_python,
                "-c",
                PEER,
                str(weights),
                str(Path(scratch) / "demo"),
                str(arguments.steps),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        peer_s: list[float] = []
        ours: dict[int, list[float]] = {1: [], 32: []}
        for _ in range(arguments.rounds):
            peer_s.append(_peer_seconds(peer))
            for rows, rates in ours.items():
                spread = mesh if rows > 1 else None
                rates.append(engine_tokens_per_s(model, rows, arguments.steps, spread))
        peer.kill()
    peer_rate = arguments.steps / statistics.median(peer_s)
    print(f"{'':24} {'tokens/s':>10} {'ratio':>7}")
    print(f"{'rwkv, 1 sequence':24} {peer_rate:>10,.0f} {1.0:>7.2f}")
    for rows, rates in ours.items():
        rate = statistics.median(rates)
        print(f"{f'engine, {rows} rows':24} {rate:>10,.0f} {rate / peer_rate:>7.2f}")


def engine_tokens_per_s(model: Model, rows: int, steps: int, mesh: jax.sharding.Mesh | None) -> float:
    """Of greedy rows in one batch, once everything is compiled."""
    with Engine(model, config=EngineConfig(num_slots=2 * rows, max_rows=rows), mesh=mesh) as engine:
        for num_tokens in (4, steps):
            started = time.perf_counter()
            engine.generate([[1]] * rows, max_tokens=num_tokens, ignore_eos=True)
    return rows * steps / (time.perf_counter() - started)


def _peer_seconds(peer: subprocess.Popen[str]) -> float:
    assert peer.stdin is not None and peer.stdout is not None
    peer.stdin.write("go\n")
    peer.stdin.flush()
    while not _is_number(line := peer.stdout.readline()):
        if not line:
            raise SystemExit("the peer ended; run its interpreter by hand to see why")
    return float(json.loads(line))


def _is_number(line: str) -> bool:
    return line.strip().replace(".", "", 1).replace("e-", "", 1).isdigit()


if __name__ == "__main__":
    main()
