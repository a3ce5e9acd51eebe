"""Progress lines for people who wait, written to standard error when that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

SHOW_AFTER_S = 1.0


def loading_progress() -> Callable[[int, int], None]:
    """For `load`: gigabytes read, once it has taken a second."""
    return _progress_line("loading", lambda done, total: f"{done / 1e9:.1f} of {total / 1e9:.1f} GB")


def compiling_progress() -> Callable[[int, int], None]:
    """For `Engine.warm_up`: shapes compiled."""
    return _progress_line("compiling", lambda done, total: f"{done} of {total} shapes")


def _progress_line(verb: str, amount: Callable[[int, int], str]) -> Callable[[int, int], None]:
    started = time.perf_counter()

    def show(done: int, total: int) -> None:
        elapsed_s = time.perf_counter() - started
        if not sys.stderr.isatty() or elapsed_s < SHOW_AFTER_S:
            return
        end = "\n" if done >= total else ""
        sys.stderr.write(f"\r{verb}: {amount(done, total)}, {elapsed_s:.0f} s{end}")
        sys.stderr.flush()

    return show
