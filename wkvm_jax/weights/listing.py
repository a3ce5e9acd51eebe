"""How names and lists out of untrusted files are put into messages: short, and on one line each."""

from collections.abc import Sequence

_MAX_NAME_CHARS = 160


def quoted(name: str) -> str:
    """`name` as a Python literal, cut to a length that a message can hold."""
    if len(name) <= _MAX_NAME_CHARS:
        return repr(name)
    return f"{name[:_MAX_NAME_CHARS]!r}... ({len(name)} characters)"


def listed(lines: Sequence[str], limit: int = 20) -> str:
    """The first `limit` of `lines`, one a line and indented, then how many more there are."""
    shown = [f"\n  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"\n  ... and {len(lines) - limit} more")
    return "".join(shown)
