"""The `wkvm` command. Subcommands import what they need, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

EXAMPLES = """\
examples:
  wkvm demo
  wkvm generate --model demo "ROMEO:" --max-tokens 120 --temperature 0.8
  wkvm serve --model demo --port 8000
  wkvm bench decode --model demo --rows 1 8 32
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status: 0, 1 for a refused request, 2 for wrong usage."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    from wkvm_jax.errors import WkvmError

    try:
        return run(arguments)
    except WkvmError as error:
        print(f"wkvm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="wkvm",
        description="An engine for models whose memory is a state.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"wkvm {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_serve(commands)
    _add_demo(commands)
    _add_bench(commands)
    return parser


def _version() -> str:
    import wkvm_jax

    return wkvm_jax.__version__


Commands = argparse._SubParsersAction


def _add_generate(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "generate",
        "Complete one prompt and print the text as it comes.",
        """\
examples:
  wkvm generate --model demo "To be, or not to be" --max-tokens 80
  wkvm generate --model model.pth --temperature 0.7 --top-p 0.9 --seed 1 "Once upon a time"
  echo "User: Hello" | wkvm generate --model demo --stop "User:" -
""",
    )
    _add_model(parser)
    parser.add_argument("prompt", help="the text to continue; - reads it from standard input")
    parser.add_argument(
        "--ids",
        action="store_true",
        help="the prompt is token ids, and ids are printed: for models without text",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens at most (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0 is off"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="drop tokens under this share of the likeliest"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is off")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    parser.set_defaults(run=_run_generate)


def _add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "serve",
        "Serve a model over HTTP, in OpenAI's dialect.",
        """\
examples:
  wkvm serve --model demo --port 8000
  wkvm serve --model ./rwkv7-1.5b.pth --num-slots 512 --port 8000

then:
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "ROMEO:", "max_tokens": 64}'
""",
    )
    _add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes any free port (default: 8000)")
    _add_engine(parser)
    parser.add_argument(
        "--max-tokens-limit",
        type=int,
        default=32_768,
        metavar="N",
        help="refuse larger max_tokens (default: 32768)",
    )
    parser.add_argument("--no-warmup", action="store_true", help="compile shapes at first use, not at start")
    parser.set_defaults(run=_run_serve)


def _add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "demo",
        "Show the model in the box at work: prose, memory, and 32 conversations in one batch.",
        "example:\n  wkvm demo\n",
    )
    parser.set_defaults(run=_run_demo)


def _add_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    bench = _command(commands, "bench", "Measure speed.", "example:\n  wkvm bench decode --model demo\n")
    kinds = bench.add_subparsers(metavar="KIND", required=True)
    decode = _command(
        kinds,
        "decode",
        "Tokens a second of the bare jitted step and through the engine, and the memory they take.",
        """\
examples:
  wkvm bench decode --model demo --rows 1 8 32
  wkvm bench decode --model demo --rows 32 --rounds 7 --json
  wkvm bench decode --size 1.5b --rows 1 32 256
""",
    )
    _add_bench_common(decode)
    decode.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (default: 1 8 32)"
    )
    decode.add_argument("--steps", type=int, default=100, help="tokens a row and round (default: 100)")
    decode.set_defaults(run=_run_bench_decode)
    prefill = _command(
        kinds,
        "prefill",
        "Tokens a second of reading prompts: the bare jitted step on all at once, and through the engine.",
        """\
examples:
  wkvm bench prefill --model demo --lengths 256 2048
  wkvm bench prefill --size 1.5b --lengths 4096
  wkvm bench prefill --size 1.5b --rows 8 --lengths 1024 --json
""",
    )
    _add_bench_common(prefill)
    prefill.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 2048], help="prompt lengths in tokens"
    )
    prefill.add_argument(
        "--rows", type=int, nargs="+", default=[1], help="prompts of each length at once (default: 1)"
    )
    prefill.set_defaults(run=_run_bench_prefill)


def _command(
    commands: Commands[argparse.ArgumentParser], name: str, summary: str, epilog: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="demo",
        metavar="M",
        help='"demo", a .pth or .safetensors file, or a Hugging Face or fla-hub directory (default: demo)',
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of the weights (default: as stored; float32 on a CPU)",
    )
    parser.add_argument(
        "--state-dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="what states are kept in; 16 bits take half the memory and lose some of it (default: float32)",
    )
    parser.add_argument(
        "--kernels",
        default="auto",
        metavar="K",
        help="what computes the model: xla, ampere, hopper, or auto, the fastest here (default: auto)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-slots", type=int, default=64, metavar="N", help="states the arena holds (default: 64)"
    )
    parser.add_argument("--max-rows", type=int, metavar="N", help="requests that run at once, a power of two")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="one decode and one prefill shape: a request's tokens do not depend on its company",
    )
    parser.add_argument("--store", metavar="DIR", help="directory for durable states (not in this version)")


def _add_bench_common(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--size",
        choices=["0.1b", "0.4b", "1.5b", "2.9b", "7.2b"],
        help="in place of a model: random bfloat16 weights in the shape of the RWKV-7 model of this size",
    )
    parser.add_argument(
        "--ffn-zeros",
        type=float,
        default=0.87,
        metavar="SHARE",
        help="with --size: part of the channel mix's squared relus that is zero, 0.5 to 1; trained models "
        "have 0.84 to 0.90 (default: 0.87)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are printed (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON lines in place of a table")


def _run_generate(arguments: argparse.Namespace) -> int:
    from wkvm_jax.serving.generate import generate

    return generate(arguments)


def _run_serve(arguments: argparse.Namespace) -> int:
    from wkvm_jax.serving.start import start_server

    return start_server(arguments)


def _run_demo(arguments: argparse.Namespace) -> int:
    from wkvm_jax.serving.demo import demo

    return demo()


def _run_bench_decode(arguments: argparse.Namespace) -> int:
    from wkvm_jax.serving.bench import bench_decode

    return bench_decode(arguments)


def _run_bench_prefill(arguments: argparse.Namespace) -> int:
    from wkvm_jax.serving.bench_prefill import bench_prefill

    return bench_prefill(arguments)


if __name__ == "__main__":
    sys.exit(main())
