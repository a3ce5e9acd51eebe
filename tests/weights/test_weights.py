"""Importing the package costs little."""

import subprocess
import sys

PROGRAM = """
import sys
import wkvm_jax
before = set(sys.modules)
import wkvm_jax.weights
from wkvm_jax.weights.source import Source
added = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not added & {"jax", "jaxlib", "torch", "safetensors"}, sorted(added)
"""


def test_import_is_light() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
