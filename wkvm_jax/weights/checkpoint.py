"""A checkpoint, whatever it is stored as: a torch file, a safetensors file, or a directory of them."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from wkvm_jax.errors import CheckpointError
from wkvm_jax.weights.listing import listed, quoted
from wkvm_jax.weights.safetensors_file import read_safetensors
from wkvm_jax.weights.sniff import WEIGHTS, Kind, fault_of_name, refusal, sniff
from wkvm_jax.weights.torch_file import read_torch

_CONFIG = "config.json"
_INDEX_ENDING = ".index.json"
_WEIGHT_ENDINGS = (".safetensors", ".pth", ".pt", ".bin")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The tensors of a checkpoint by name, and its configuration.

    The arrays are read-only views of mapped files: their bytes are read when they are touched, so listing
    names and shapes costs nothing. They need not be contiguous or aligned. The files must stay as they are
    while a view lives.
    """

    path: Path
    """What the user named."""
    directory: Path
    """Where the tokenizer's files would lie."""
    tensors: Mapping[str, np.ndarray] = field(repr=False)
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    config: Mapping[str, object] | None = field(repr=False)
    """The object in `config.json`, or None where there is no such file."""


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at `path`, a file or a directory; what a file is, its content says, not its name.

    In a directory, the shards that a `*.index.json` lists are taken, each tensor from the shard that the
    index gives; without an index, all safetensors files together; without those, the one torch file. Hidden
    files and subdirectories are left alone. `config.json` is read from the directory, or from beside the
    file, where there is one.

    Raises:
        CheckpointError: nothing is there, or no weights are; a file is damaged, or is something else (a
            git-lfs pointer, a web page, ...); shards or tensors are missing, or tensors are there twice;
            several checkpoints lie there and nothing says which is meant.
    """
    path = Path(path)
    try:
        is_directory = path.is_dir()
        if not is_directory and not path.exists():
            raise CheckpointError(path, "does not exist. Models are read from local files: download it first")
    except OSError as error:
        raise CheckpointError(path, f"cannot be opened: {error.strerror}") from error
    directory = path if is_directory else path.parent
    tensors = _read_directory(path) if is_directory else _read_file(path)
    return Checkpoint(
        path=path,
        directory=directory,
        tensors=MappingProxyType(tensors),
        shapes=MappingProxyType({name: tuple(tensor.shape) for name, tensor in tensors.items()}),
        config=_read_config(directory),
    )


def _read_config(directory: Path) -> Mapping[str, object] | None:
    path = directory / _CONFIG
    return MappingProxyType(_read_json(path)) if path.is_file() else None


def _read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file. It may hold `Infinity` and `NaN`, as Python writes them."""
    kind = sniff(path)
    if kind in (Kind.EMPTY, Kind.LFS_POINTER, Kind.HTML):
        raise refusal(path, kind)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(path, f"should hold a JSON object and holds a {type(content).__name__}")
    return content


def _read_file(path: Path) -> dict[str, np.ndarray]:
    kind = sniff(path)
    if kind is Kind.SAFETENSORS:
        return read_safetensors(path)
    if kind is Kind.TORCH_ZIP:
        return read_torch(path)
    raise refusal(path, kind)


def _read_directory(directory: Path) -> dict[str, np.ndarray]:
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if entry.is_file())
    except OSError as error:
        raise CheckpointError(directory, f"cannot be listed: {error.strerror}") from error
    names = [name for name in names if not name.startswith(".")]
    kinds = {name: sniff(directory / name) for name in names}
    index = _choose_index(directory, kinds)
    if index is not None:
        return _read_indexed(directory, *index, kinds)
    safetensors = [name for name in names if kinds[name] is Kind.SAFETENSORS]
    if safetensors:
        # A shard that did not arrive would otherwise show as hundreds of missing tensors.
        broken = [name for name in names if name.endswith(".safetensors") and name not in safetensors]
        if broken:
            raise refusal(directory / broken[0], kinds[broken[0]])
        return _merge(directory, safetensors)
    torch_files = [name for name in names if kinds[name] is Kind.TORCH_ZIP]
    if len(torch_files) > 1:
        raise CheckpointError(
            directory,
            f"holds {len(torch_files)} torch files; name one:{listed(list(map(quoted, torch_files)))}",
        )
    if torch_files:
        return read_torch(directory / torch_files[0])
    raise _nothing_there(directory, kinds)


def _nothing_there(directory: Path, kinds: Mapping[str, Kind]) -> CheckpointError:
    """Why a directory has no weights: files that should be weights and are not, else what does lie there."""
    telling = [
        fault_of_name(name, kind)
        for name, kind in kinds.items()
        if name.endswith(_WEIGHT_ENDINGS) or kind in (Kind.GGUF, Kind.PICKLE)
    ]
    if telling:
        return CheckpointError(directory, f"holds no readable weights:{listed(telling)}")
    if not kinds:
        return CheckpointError(directory, "is an empty directory: name the one that holds the weights")
    return CheckpointError(
        directory,
        f"holds no safetensors and no torch file, only:{listed(list(map(quoted, kinds)))}",
    )


def _merge(directory: Path, names: list[str]) -> dict[str, np.ndarray]:
    """All tensors of several files, each of which must be in one of them alone."""
    tensors: dict[str, np.ndarray] = {}
    owners: dict[str, str] = {}
    twice: list[str] = []
    for name in names:
        for tensor_name, tensor in read_safetensors(directory / name).items():
            if tensor_name in owners:
                twice.append(f"{quoted(tensor_name)} in {quoted(owners[tensor_name])} and in {quoted(name)}")
            owners[tensor_name] = name
            tensors[tensor_name] = tensor
    if twice:
        raise CheckpointError(
            directory,
            "holds tensors twice, so it is several checkpoints or a leftover beside one; name one file, or "
            f"remove what does not belong:{listed(twice)}",
        )
    return tensors


def _choose_index(directory: Path, kinds: Mapping[str, Kind]) -> tuple[str, Mapping[str, str]] | None:
    """The index to follow, if any. Of several, safetensors go before torch, and the more complete wins."""
    indexes = {name: _read_index(directory / name) for name in kinds if name.endswith(_INDEX_ENDING)}
    if not indexes:
        return None
    ranks = {name: _rank(weight_map, kinds) for name, weight_map in indexes.items()}
    best = max(ranks.values())
    chosen = [name for name, rank in ranks.items() if rank == best]
    if len(chosen) > 1:
        raise CheckpointError(
            directory,
            f"holds {len(chosen)} indexes that could be meant; keep one:{listed(list(map(quoted, chosen)))}",
        )
    weight_map = indexes[chosen[0]]
    found = {kinds[shard] for shard in set(weight_map.values()) if shard in kinds}
    if found == {Kind.TORCH_ZIP} and Kind.SAFETENSORS in kinds.values():
        return None
    return chosen[0], weight_map


def _rank(weight_map: Mapping[str, str], kinds: Mapping[str, Kind]) -> tuple[bool, float]:
    """Whether all shards of an index are safetensors files, and the share of them that is there."""
    found = [kinds.get(shard) for shard in set(weight_map.values())]
    complete = all(kind is Kind.SAFETENSORS for kind in found)
    return complete, sum(kind is not None for kind in found) / len(found)


def _read_index(path: Path) -> dict[str, str]:
    """The index's map of tensor names to file names."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "has no weight_map, which should tell each tensor's file")
    for shard in weight_map.values():
        # A symbolic link of that name is fine (download caches are made of them), a path is not.
        if not isinstance(shard, str):
            raise CheckpointError(path, "has a weight_map whose values are not file names")
        if shard in ("", ".", "..") or any(character in shard for character in "/\\\0"):
            raise CheckpointError(
                path, f"names {quoted(shard)} as a shard; only files in the same directory are read"
            )
    return weight_map


def _read_indexed(
    directory: Path, index: str, weight_map: Mapping[str, str], kinds: Mapping[str, Kind]
) -> dict[str, np.ndarray]:
    """Each tensor of the index, from the shard that the index gives."""
    shards = sorted(set(weight_map.values()))
    faults: list[str] = []
    contents: dict[str, dict[str, np.ndarray]] = {}
    for shard in shards:
        if shard not in kinds:
            faults.append(f"{quoted(shard)} is missing")
        elif kinds[shard] in WEIGHTS:
            contents[shard] = _read_file(directory / shard)
        else:
            faults.append(fault_of_name(shard, kinds[shard]))
    for name, shard in weight_map.items():
        if shard in contents and name not in contents[shard]:
            faults.append(f"{quoted(shard)} lacks {quoted(name)}")
    if faults:
        raise CheckpointError(
            directory / index,
            f"lists {len(shards)} shards that are not there as it says; fetch them again:{listed(faults)}",
        )
    return {name: contents[shard][name] for name, shard in weight_map.items()}
