"""A digest of parameters, by which a saved state knows the weights that made it."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_CHUNK_BYTES = 16 << 20
_DIGEST_BYTES = 16
_MAX_THREADS = 16


def weights_digest(params: object) -> str:
    """32 hex digits over the path, shape, dtype and every byte of each array of a pytree.

    It does not depend on the device, its layout of the arrays, the number of threads or the order of dict
    keys, nor on whether a level is a list or a tuple; any other difference, be it the sign of a zero,
    changes it. Arrays come to the host one at a time, and 16 MiB pieces are hashed in threads (BLAKE2b
    outside the interpreter lock): about 1 GB/s a core, and not faster than the device's copies to the host.

    Raises:
        TypeError: a leaf is no array of numbers.
        ValueError: two leaves have one path.
    """
    import jax

    leaves = {}
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = jax.tree_util.keystr(key_path, simple=True, separator=".")
        if path in leaves:
            raise ValueError(f"two leaves have the path {path}")
        leaves[path] = leaf
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for path in sorted(leaves):
            array = np.asarray(leaves[path])
            if array.dtype.hasobject or array.dtype.kind in "SUMm":
                raise TypeError(f"the leaf {path} is no array of numbers: {array.dtype}")
            described = json.dumps([path, array.dtype.name, array.shape]).encode()
            total.update(len(described).to_bytes(8, "little") + described)
            # As bytes, for NumPy hands out no buffer of bfloat16.
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            pieces = [content[start : start + _CHUNK_BYTES] for start in range(0, content.size, _CHUNK_BYTES)]
            for piece_digest in pool.map(_digest, pieces):
                total.update(piece_digest)
    return total.hexdigest()


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.blake2b(piece.data, digest_size=_DIGEST_BYTES).digest()
