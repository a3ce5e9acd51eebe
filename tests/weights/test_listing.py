"""Names from files cannot break or flood a message."""

from wkvm_jax.weights.listing import listed, quoted


def test_names_stay_on_one_line_and_short() -> None:
    assert quoted("blocks.0") == "'blocks.0'"
    assert quoted("a\n\x1b[31m") == r"'a\n\x1b[31m'"
    assert len(quoted("a" * 10_000)) < 200
    assert "10000 characters" in quoted("a" * 10_000)


def test_lists_are_cut() -> None:
    assert listed([]) == ""
    assert listed(["a", "b"]) == "\n  a\n  b"
    assert listed([str(number) for number in range(25)]).splitlines()[-2:] == ["  19", "  ... and 5 more"]
