"""`python -m gatedattn COMMAND`: one thin function per tool, each importing what it needs only when it runs.

A command is a function of the parsed arguments, registered by `@command` with its help line and its arguments; it may return an exit
code. Invalid use prints one line that says what to type instead, and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

COMMANDS: dict[str, tuple[Callable, str, tuple]] = {}


def argument(*names, **options):
    """What `ArgumentParser.add_argument` takes."""
    return names, options


def command(summary: str, *arguments):
    """Register a function as the subcommand of its name."""

    def register(function):
        COMMANDS[function.__name__.replace("_", "-")] = (function, summary, arguments)
        return function

    return register


@command(
    "the paper's rows by name, with their parameters counted", argument("--json", action="store_true", help="a list of objects")
)
def variants(args):
    from gatedattn.variants import table

    records = table()
    if args.json:
        print(json.dumps(records, indent=1))
        return
    columns = ("name", "row", "on", "spec", "added M", "paper M", "ppl", "note")
    print_table(columns, [_variant_row(r) for r in records])


def _variant_row(record: dict) -> tuple:
    def nested(value) -> str:
        return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)

    changes = {k: v for k, v in record["changes"].items() if k != "moe"}
    if "moe" in record["changes"]:
        changes |= {f"moe.{k}": record["changes"]["moe"][k] for k in ("num_experts", "top_k")}
    spec = " ".join(filter(None, (record["spec"], nested(changes))))
    paper = record["paper_added_params_m"]
    added = f"{record['added_params'] / 1e6:.3f}"
    return (
        record["name"], ", ".join((record["paper_row"], *record["also"])), record["base"], spec, added,
        "" if paper is None else f"{paper:g}", "" if record["ppl"] is None else f"{record['ppl']:.3f}", record["note"],
    )  # fmt: skip


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left-aligned columns, as wide as they need to be; the last is not padded."""
    widths = [max(len(str(row[i])) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, ["-" * w for w in widths[:-1]] + ["-" * len(columns[-1])], *rows):
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        from gatedattn.config import suggest

        known = ", ".join(COMMANDS)
        print(f"gatedattn: unknown command {argv[0]!r}{suggest(argv[0], COMMANDS)}; there is: {known}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="gatedattn", description="Gated attention (arXiv 2505.06708) in JAX.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (function, summary, arguments) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=summary, description=summary)
        for names, options in arguments:
            sub.add_argument(*names, **options)
        sub.set_defaults(function=function)
    args = parser.parse_args(argv)

    from gatedattn.config import ConfigError

    try:
        code = args.function(args) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) has had enough; what is still buffered must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as error:
        print(f"gatedattn {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
