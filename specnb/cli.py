"""The `specnb` command: one subcommand per module, imported only when it is asked for.

A subcommand's module has two functions: ``add_arguments(parser)`` declares what it takes, and ``run(arguments)``
does it and returns the exit status (None counts as 0).
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence

# Subcommand → its module, and what it is for, in one line.
COMMANDS = {
    "doctor": ("specnb.doctor", "what speculation would buy on this machine, and with which drafter"),
    "bench": ("specnb.benchmark", "measure drafters against plain decoding, side by side"),
}
INTERRUPTED = 130  # what shells report after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × shows ?, instead of an error
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = parser(words).parse_args(words)
    try:
        return chosen.run(chosen) or 0
    except KeyboardInterrupt:
        print("specnb: stopped.", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, TypeError, OSError) as problem:
        print(f"specnb: {problem}", file=sys.stderr)
        return 1


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for this command line. Only the subcommand named in it is imported: torch takes seconds."""
    whole = argparse.ArgumentParser(prog="specnb", description="Speculative decoding of language models.")
    commands = whole.add_subparsers(metavar="command", required=True)
    named = next((word for word in words if not word.startswith("-")), None)
    for name, (module, purpose) in COMMANDS.items():
        sub = commands.add_parser(name, help=purpose, description=f"specnb {name}: {purpose}.")
        if name == named:
            home = importlib.import_module(module)
            home.add_arguments(sub)
            sub.set_defaults(run=home.run)
    return whole
