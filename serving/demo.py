"""`wkvm demo`: the model in the box at work, in the terminal."""

from __future__ import annotations

import sys
import time

from wkvm_jax.api import Engine
from wkvm_jax.config import EngineConfig
from wkvm_jax.engine.engine import Engine as RunningEngine
from wkvm_jax.engine.request import SamplingParams
from wkvm_jax.models.loading import load
from wkvm_jax.models.model import Model

NUM_SESSIONS = 32
PROSE_PROMPT = "KING HENRY.\n"
FACTS = (
    "User: Mira's locker code is 4821.\nBot: Noted.\n"
    "User: Tobias lives in Lisbon.\nBot: Noted.\n"
    "User: The spare key is under the green carpet.\nBot: Noted.\n"
    "User: How are you today?\nBot:"
)
QUESTIONS = ("What is Mira's locker code?", "Where does Tobias live?", "Where is the spare key?")

SERVE_LINES = """\
Serve it, and call it with curl or with the openai client:

    wkvm serve --model demo --port 8000

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"prompt": "KING HENRY.\\n", "max_tokens": 80, "temperature": 0.7}'

    python -c 'from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    print(client.completions.create(model="demo", prompt="KING HENRY.\\n", max_tokens=80).choices[0].text)'
"""


def demo() -> int:
    """Runs the command; returns the exit status."""
    started = time.perf_counter()
    model = load("demo")
    _heading(f"The model in the box: {_describe(model)}")
    config = EngineConfig(num_slots=2 * NUM_SESSIONS, max_rows=NUM_SESSIONS, prefill_chunks=(64, 256))
    with Engine(model, config=config) as engine:
        # What the first two parts need comes first; the batch's step compiles while people read.
        engine.compile([(1, 64), (1, 1)])
        show_prose(engine, started)
        show_memory(engine)
        show_batch(engine, model)
    _heading("Next")
    print(SERVE_LINES)
    return 0


def show_prose(engine: RunningEngine, started: float) -> None:
    """A continuation, streamed."""
    _heading("Prose, as it is drawn (temperature 0.6)")
    print(PROSE_PROMPT, end="", flush=True)
    request = engine.submit(PROSE_PROMPT, max_tokens=240, temperature=0.6, seed=7, ignore_eos=True)
    first_s = None
    for token in request:
        first_s = first_s or time.perf_counter() - started
        print(token.text, end="", flush=True)
    print(f"\n[first token {first_s or 0:.1f} s after the start]")


def show_memory(engine: RunningEngine) -> None:
    """Facts told once; then each question asked of the same kept state, not of the text."""
    _heading("Memory: facts told once, the state kept, each question asked of that state")
    record = engine.states.create("facts", FACTS)
    print(FACTS, end="")
    answer = engine.submit("", state="facts", save_as="facts", max_tokens=64, stop="\n").result()
    print(answer.text)
    for question in QUESTIONS:
        text = f"User: {question}\nBot:"
        output = engine.submit(text, state="facts", max_tokens=32, stop="\n").result()
        print(f"{text}{output.text}")
    print(
        f"[the state: {record.bytes / 1024:.0f} KiB, whatever the length of the conversation; "
        f"each question read {output.num_prompt_tokens} tokens, not the "
        f"{output.num_cached_tokens} before them]"
    )


def show_batch(engine: RunningEngine, model: Model) -> None:
    """Many sessions in one batch."""
    _heading(f"{NUM_SESSIONS} sessions in one batch")
    print("compiling the step ...", end="", flush=True)
    engine.compile([(1 << power, 1) for power in range(NUM_SESSIONS.bit_length())])
    prompt = "To be, or not to be, that is the question:\n"
    params = [
        SamplingParams(max_tokens=128, temperature=0.8, seed=seed, ignore_eos=True)
        for seed in range(NUM_SESSIONS)
    ]
    started = time.perf_counter()
    requests = [engine.submit(prompt, params=one) for one in params]
    outputs = [request.result() for request in requests]
    seconds = time.perf_counter() - started
    print("\r" + " " * 24 + "\r", end="")
    for index in (0, 1, 2):
        print(f"session {index}: {(outputs[index].text or '')[:70]!r} ...")
    num_tokens = sum(len(output.token_ids) for output in outputs)
    state_bytes = model.state_spec.slot_bytes
    print(
        f"[{num_tokens} tokens in {seconds:.1f} s, prompts included: {num_tokens / seconds:,.0f} tokens/s; "
        f"{state_bytes / 1024:.0f} KiB a state, {NUM_SESSIONS * state_bytes / 2**20:.0f} MiB for all]"
    )


def _describe(model: Model) -> str:
    import jax

    num_params = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    device = jax.devices()[0].device_kind
    return f"{model.family.name}, {num_params / 1e6:.1f} M parameters, bytes for tokens, on {device}"


def _heading(text: str) -> None:
    bar = "-" * len(text)
    print(f"\n{text}\n{bar}" if sys.stdout.isatty() is False else f"\n\033[1m{text}\033[0m\n{bar}")
