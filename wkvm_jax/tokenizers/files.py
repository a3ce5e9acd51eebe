"""Reading the small JSON files that stand beside a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from wkvm_jax.errors import TokenizerError


def read_json_object(path: Path) -> dict[str, object]:
    """The object in `path`, empty when there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as fault:
        raise TokenizerError(path, f"is not valid JSON: {fault}") from fault
    if not isinstance(content, dict):
        raise TokenizerError(path, f"must hold a JSON object, not {type(content).__name__}")
    return content
