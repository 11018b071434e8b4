"""`python -m gatedattn COMMAND`: one thin function per tool, each importing what it needs only when it runs.

A command is a function of the parsed arguments, registered by `@command` with its help line and its arguments; it may return an exit
code. Invalid use prints one line that says what to type instead, and exits with 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
    from gatedattn.transformer import count
    from gatedattn.variants import table

    records = table(count)
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


@command(
    "weights in and out: Hugging Face and GGUF to a folder of ours, any MODEL to a Hugging Face folder",
    argument("direction", choices=("from-hf", "to-hf", "from-gguf")),
    argument("source", help="a Hugging Face folder, a .gguf file; to-hf: any MODEL (a run, a checkpoint, a converted folder)"),
    argument("destination", help="a new folder"),
    argument("--layout", default="stock", choices=("stock", "authors"), help="to-hf: a stock class, or the authors' code"),
)
def convert(args):
    from gatedattn.interop import models

    print(models.convert(args.direction, args.source, args.destination, args.layout))


ROPE = argument(
    "--rope",
    default="",
    metavar="SETTINGS",
    help="read further than it was trained to: yarn,factor=4 or linear,factor=2 or theta=1000000 (settings of RopeConfig)",
)


@command(
    "text from a model, streamed to standard output",
    argument("model", metavar="MODEL", help="a run, a checkpoint, a converted or Hugging Face folder, a .gguf file"),
    argument("--prompt", default="", help="what the text continues; it is not repeated"),
    argument("--max_tokens", "--max-tokens", type=int, default=256, help="how many new tokens at most (256)"),
    argument("--temperature", type=float, default=0.0, help="0: always the most likely token"),
    argument("--top_k", "--top-k", type=int, default=0, help="draw from the K most likely tokens only; 0: from all"),
    argument("--top_p", "--top-p", type=float, default=1.0, help="draw from the likeliest tokens that sum to this probability"),
    argument("--seed", type=int, default=0),
    argument("--cache", default="full", help="what the cache keeps: full, window:512 or streaming:4+508"),
    ROPE,
)
def generate(args):
    from gatedattn import inference
    from gatedattn.config import ConfigError

    # Everything that can be wrong with the request before a model is read.
    inference.Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if not args.prompt.isprintable() and any(0xD800 <= ord(c) < 0xE000 for c in args.prompt):
        raise ConfigError("--prompt is not valid UTF-8")
    policy = inference.CachePolicy.parse(args.cache)

    model, tokenizer = load_with_tokenizer(args.model, to_read="the prompt", rope=args.rope)
    options = dict(max_tokens=args.max_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    for piece in inference.stream_text(model, tokenizer, args.prompt, policy=policy, **options):
        print(piece, end="", flush=True)
    print()


def numbers(text: str) -> list[int]:
    """ "0,3,7" as a list."""
    return [int(word) for word in text.split(",")]


@command(
    "sinks, gates and massive activations of models on a text: JSON, a table and figures",
    argument(
        "models", nargs="+", metavar="MODEL", help="a run, a checkpoint, a converted or Hugging Face folder, a .gguf file"
    ),
    argument("--text", required=True, help="a text file"),
    argument("--out", required=True, help="the folder to write to"),
    argument("--names", type=lambda text: text.split(","), default=(), help="what to call the models, comma-separated"),
    argument("--length", type=int, default=512, help="tokens in a row (512); memory grows with rows x length"),
    argument("--rows", type=int, default=4, help="rows of text (4)"),
    argument("--layers", type=numbers, default=(), help="layers whose attention is drawn, e.g. 0,6,20 (four of them)"),
    argument("--window", type=int, default=24, help="tokens whose attention is drawn (24)"),
    ROPE,
)
def analyze(args):
    from gatedattn import analysis

    options = {name: getattr(args, name) for name in ("names", "length", "rows", "layers", "window", "rope")}
    print(analysis.analyze(args.models, args.text, args.out, **options), end="")


@command(
    "one self-contained HTML page for a run, or several side by side",
    argument("runs", nargs="+", metavar="DIR", help="run directories"),
    argument("--out", help="the page (DIR/report.html; for several, report.html beside the first)"),
)
def report(args):
    from gatedattn import report

    print(report.build(args.runs, args.out))


@command(
    "a run's curves and heat maps to Weights & Biases, while it trains or afterwards",
    argument("run", metavar="DIR", help="a run directory"),
    argument("--project", default="gatedattn", help="the project there (gatedattn); WANDB_MODE=offline keeps all on disk"),
    argument("--follow", action="store_true", help="go on sending what is logged, until Ctrl-C"),
)
def wandb(args):
    from gatedattn.report.mirror import mirror

    mirror(args.run, args.project, args.follow)


@command(
    "loss spikes of training curves: a table that compares them, and each event",
    argument("curves", nargs="+", metavar="CURVE", help=".jsonl or .csv files, or runs"),
    argument("--columns", type=lambda text: text.split(","), default=(), help="curves to read, comma-separated (loss)"),
    argument("--json", action="store_true", help='an object a line: {"curve": ..., "events": [{"start", "end", "height", ...}], ...}'),
)  # fmt: skip
def spikes(args):
    from gatedattn.probes import spikes as lib

    found = []
    for path in map(Path, args.curves):
        found += [
            (curve, lib.detect(curve)) for curve in lib.read(path / "metrics.jsonl" if path.is_dir() else path, args.columns)
        ]
    if args.json:
        for curve, events in found:
            print(json.dumps(lib.summary(curve, events) | {"events": [dataclasses.asdict(event) for event in events]}))
        return
    rows = [lib.summary(curve, events) for curve, events in found]
    print_table(list(rows[0]), [[f"{v:.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows])
    for curve, events in found:
        for event in events:
            print(
                f"{curve.name}: steps {event.start:.12g} to {event.end:.12g}, {event.length} points, {event.height:.4g} above the median"
            )


@command(
    "loss, perplexity and bits per byte of texts, every token counted once",
    argument("model", metavar="MODEL", help="a run, a checkpoint, a converted or Hugging Face folder, a .gguf file"),
    argument(
        "--text", action="append", required=True, metavar="[NAME=]GLOB", help="a set of files, each a document; may be repeated"
    ),
    argument("--length", type=int, default=2048, help="tokens in a window (2048)"),
    argument("--stride", type=int, help="tokens that count in each window but the first of a document (--length)"),
    argument("--batch", type=int, default=4, help="windows at a time (4)"),
    ROPE,
    argument("--json", action="store_true", help="one object: sets, by_position in each, and their average"),
)
def perplexity(args):
    from gatedattn.evaluation import perplexity as lib

    sets = lib.text_sets(args.text)

    model, tokenizer = load_with_tokenizer(args.model, to_read="texts", rope=args.rope)
    sizes = dict(length=args.length, stride=args.stride, batch=args.batch)
    found = {name: lib.measure(model, tokenizer, lib.texts(files), progress=name, **sizes) for name, files in sets.items()}
    average = lib.average(list(found.values()))
    if args.json:
        print(json.dumps({"sets": found, "average": average}, indent=1))
        return
    columns = ("set", "loss", "perplexity", "bits per byte", "tokens", "documents")
    rows = [
        (name, *(f"{r[k]:.4f}" for k in ("loss", "perplexity", "bits_per_byte")), r["tokens"], r["documents"])
        for name, r in found.items()
    ]
    print_table(columns, [*rows, ("average", *(f"{average[k]:.4f}" for k in ("loss", "perplexity", "bits_per_byte")), "", "")])


@command(
    "any task of EleutherAI's lm-evaluation-harness",
    argument("model", metavar="MODEL", help="a run, a checkpoint, a converted or Hugging Face folder, a .gguf file"),
    argument(
        "--tasks", required=True, type=lambda text: text.split(","), help="comma-separated; `lm_eval ls tasks` lists them"
    ),
    argument("--include_path", "--include-path", help="a folder with task files of your own"),
    argument("--limit", type=int, help="only the first N items of each task"),
    argument("--num_fewshot", "--num-fewshot", type=int, help="examples before each item (the task's own number)"),
    argument("--max_length", "--max-length", type=int, help="tokens the model may look at (its max_seq_len)"),
    argument("--batch_size", "--batch-size", type=int, default=8, help="prompts at a time in generation (8)"),
    argument("--cache", help="a file that keeps answers: a second run gives only what is missing"),
    ROPE,
    argument("--out", help="write all results, per item too, to this JSON file"),
)
def harness(args):
    from gatedattn.evaluation import harness as lib

    model, tokenizer = load_with_tokenizer(args.model, to_read="tasks", rope=args.rope)
    subject = lib.HarnessModel(model, tokenizer, max_length=args.max_length, batch_size=args.batch_size)
    options = dict(limit=args.limit, num_fewshot=args.num_fewshot, use_cache=args.cache, log_samples=bool(args.out))
    results = lib.evaluate(subject, args.tasks, include_path=args.include_path, **options)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1, default=str) + "\n")
    print(lib.utils.make_table(results))


@command(
    "RULER: retrieval, tracing and counting in long contexts; a score a length, as in the paper's Table 5",
    argument(
        "models", nargs="+", metavar="MODEL", help="a run, a checkpoint, a converted or Hugging Face folder, a .gguf file"
    ),
    argument("--lengths", type=numbers, default=[4096], help="tokens of context, prompt and answer together (4096)"),
    argument("--tasks", type=lambda text: text.split(","), default=(), help="comma-separated (all 13 that have their file)"),
    argument("--samples", type=int, default=500, help="of each task and length (500)"),
    argument("--seed", type=int, default=42),
    argument("--out", default="runs/ruler", help="the folder to write to (runs/ruler); what is in it is not done again"),
    argument("--names", type=lambda text: text.split(","), default=(), help="what to call the models, comma-separated"),
    argument("--haystack", metavar="GLOB", help="text files to hide needles in (State of the Union speeches)"),
    argument("--qa_1", "--qa-1", metavar="FILE", help="questions in SQuAD's JSON form; without it qa_1 is left out"),
    argument("--qa_2", "--qa-2", metavar="FILE", help="questions in HotpotQA's JSON form; without it qa_2 is left out"),
    argument("--batch_size", "--batch-size", type=int, default=8, help="prompts at a time, fewer if they are long (8)"),
    ROPE,
)
def ruler(args):
    from gatedattn.analysis.write import name_apart
    from gatedattn.config import ConfigError, suggest
    from gatedattn.evaluation import ruler as lib

    files = {task: path for task in ("qa_1", "qa_2") if (path := getattr(args, task))}
    for task in args.tasks:
        if task not in lib.TASKS:
            raise ConfigError(f"--tasks: there is no {task}{suggest(task, lib.TASKS)}; there is: {', '.join(lib.TASKS)}")
        if task.startswith("qa") and task not in files:
            raise ConfigError(f"--tasks: {task} takes --{task}=FILE")
    tasks = [task for task in lib.TASKS if (task in args.tasks if args.tasks else not task.startswith("qa") or task in files)]
    if not args.tasks and len(files) < 2:
        missing = " and ".join(task for task in ("qa_1", "qa_2") if task not in files)
        print(
            f"[ruler] left out: {missing} (give --qa_1=FILE in SQuAD's, --qa_2=FILE in HotpotQA's JSON form)", file=sys.stderr
        )
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}={getattr(args, name)}: must be at least 1")
    names = args.names or name_apart(args.models)
    if len(set(names)) != len(args.models):
        raise ConfigError(f"--names: {len(args.models)} models take as many different names, or none")
    material = lib.Material.read(args.haystack, files)
    settings = {"seed": args.seed, "haystack": material.essay.digest}
    settings |= {task: questions.digest for task, questions in material.questions.items()}
    book = lib.Book(args.out, settings)
    options = dict(tasks=tasks, lengths=sorted(set(args.lengths)), samples=args.samples, seed=args.seed)
    for name, path in zip(names, args.models):
        model, tokenizer = load_with_tokenizer(path, to_read="tasks", rope=args.rope)
        lib.evaluate(model, tokenizer, material, book, name=name, batch_size=args.batch_size, **options)
        del model
    print(book.write(), end="")


@command(
    "a corpus tokenized and packed once, for any number of runs and hosts; the same command goes on after a kill",
    argument("source", metavar="SOURCE", help="tfds:NAME or text:GLOB"),
    argument("folder", metavar="DIR", help="where it goes; train with --config.data.source=prepared:DIR"),
    argument("--tokenizer", default="bpe:4096", help="bytes, bpe:SIZE, FILE.json or FILE.model (bpe:4096)"),
    argument("--seq_len", "--seq-len", type=int, required=True, help="tokens in a row: the train.seq_len of the runs"),
    argument("--bos", default="document", help="document or row, as data.bos"),
    argument("--valid_fraction", "--valid-fraction", type=float, default=0.05, help="share held out of a text: source (0.05)"),
    argument("--workers", type=int, default=0, help="processes; 0: one per core"),
)
def prepare(args):
    from gatedattn.data.prepare import prepare

    about = prepare(
        args.source,
        args.folder,
        tokenizer=args.tokenizer,
        seq_len=args.seq_len,
        bos=args.bos,
        valid_fraction=args.valid_fraction,
        workers=args.workers,
    )
    for name, split in about["splits"].items():
        rows, tokens = (sum(file[key] for file in split["files"]) for key in ("rows", "tokens"))
        print(f"{name}: {split['documents']} documents, {tokens} tokens in {rows} rows, {len(split['files'])} files")
    print(
        f"train with --config.data.source=prepared:{args.folder} --config.train.seq_len={args.seq_len} --config.data.bos={args.bos}"
    )


def load_with_tokenizer(path: str, to_read: str, rope: str = ""):
    """A MODEL and its tokenizer. Raises `ConfigError` if it has none."""
    from gatedattn.config import ConfigError
    from gatedattn.interop import models

    model, tokenizer = models.load_model(path, rope=rope)
    if tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer to read {to_read} with")
    return model, tokenizer


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

    from absl import logging

    from gatedattn.config import ConfigError

    logging.set_verbosity(logging.ERROR)  # Orbax warns of opening a checkpoint read-only, which is what we mean to do
    try:
        code = args.function(args) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) has had enough; what is still buffered must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"gatedattn {args.command}: interrupted", file=sys.stderr)
        return 130
    except ConfigError as error:
        print(f"gatedattn {args.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"gatedattn {args.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
