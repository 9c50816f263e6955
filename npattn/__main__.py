"""The command line: ``npattn info``, ``npattn demo``, ``npattn bench``."""

import argparse
import sys

import npattn


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, got {text}")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="npattn", description="Attention without a deep-learning framework."
    )
    parser.add_argument("--version", action="version", version=f"npattn {npattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, processor features, threads, usable backends")
    demo = commands.add_parser("demo", help="attention on a real text, training and graphs, in a minute")
    demo.add_argument("--tokens", type=int, default=8192, help="words of the text to attend over")
    demo.add_argument("--seconds", type=_seconds, default=20.0, help="how long the character model trains")
    bench = commands.add_parser("bench", help="a one-minute benchmark of this machine")
    bench.add_argument("--seconds", type=_seconds, default=60.0, help="roughly how long to measure")
    options = parser.parse_args(arguments)
    try:
        if options.command == "info":
            from npattn._cli.info import info

            info()
        elif options.command == "demo":
            from npattn._cli.demo import demo as run_demo

            run_demo(tokens=options.tokens, train_seconds=options.seconds)
        else:
            from npattn.testing.bench import bench as run_bench

            run_bench(seconds=options.seconds)
    except ValueError as error:
        print(f"npattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
