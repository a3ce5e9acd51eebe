"""The command line: help that teaches, outcomes, errors without a traceback."""

from __future__ import annotations

import io
import json

import pytest

from wkvm_jax.serving import cli

COMMANDS = (
    ["generate"],
    ["serve"],
    ["demo"],
    ["bench"],
    ["bench", "decode"],
    ["bench", "prefill"],
)


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_help_shows_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "example" in shown and "wkvm " + " ".join(command) in shown


def test_generate_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["generate", "User: Mira's code is 4821.\nBot:", "--max-tokens", "7", "--stop", "\n"]) == 0
    )
    assert capsys.readouterr().out == " Noted.\n"


def test_generate_takes_and_prints_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--ids", "75,73 78", "--max-tokens", "3"]) == 0
    assert len(capsys.readouterr().out.split()) == 3


def test_generate_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("K"))
    assert cli.main(["generate", "-", "--max-tokens", "2"]) == 0
    assert len(capsys.readouterr().out.rstrip("\n")) == 2


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["generate", "--model", "no/such/place", "x"], "does not exist"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "--temperature", "-1", "x"], "temperature=-1.0"),
        (["generate", "--ids", "1 x"], "'x' is none"),
        (["generate", "--max-tokens", "-3", "x"], "max_tokens=-3"),
        (["serve", "--store", "states"], "--store"),
        (["serve", "--max-rows", "3"], "power of two"),
    ],
)
def test_errors_say_what_was_wrong(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    assert fault in capsys.readouterr().err


def test_bench_prints_both_rates_and_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "decode", "--rows", "1", "--steps", "4", "--rounds", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["step_tokens_per_s"] > 0 and row["engine_tokens_per_s"] > 0
    assert row["weights_mib"] > 20 and row["arena_mib"] > row["state_mib"] > 0.5
    assert cli.main(["bench", "prefill", "--lengths", "40", "--rows", "2", "--rounds", "1"]) == 0
    assert "engine tok/s" in capsys.readouterr().out
