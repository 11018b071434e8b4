"""Train, evaluate or count a model from a recipe.

python run.py --config=configs/tiny.py                                   train into runs/tiny; the same command goes on with it
python run.py --config=configs/tiny.py:gate=none --config.train.steps=200 --workdir=DIR
python run.py --config=configs/tiny.py --mode=eval --workdir=DIR         the newest checkpoint on all held-out text: JSON lines
python run.py --config=configs/dense1b7.py --mode=count                  parameters and FLOPs as JSON, nothing allocated
python run.py --config=configs/moe15b.py:gate=g1 --mode=aot --topology=v5p-128   the training step compiled for a pod, no TPU needed:
    memory, collectives, roofline; --report=FILE.json writes them, --fit looks for the best remat policy and microbatches;
    --topology=h100-64 for eight hosts of eight GPUs

Exit codes: 0 done, 1 too many bad steps in a row or the last checkpoint could not be written, 2 the request cannot run (a line on
stderr says why), 130 or 143 stopped by Ctrl-C or SIGTERM with everything saved.
"""

import json
import os
import re
import runpy
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from gatedattn.config import ConfigError, RunConfig, from_mapping, suggest

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file("config", None, "Recipe, with arguments after a colon: configs/tiny.py:gate=g2,smoke")
flags.DEFINE_string("workdir", None, "Where the run lives; runs/NAME of the recipe by default")
flags.DEFINE_string(
    "coordinator", None, "Several processes, where no TPU pod, Slurm or MPI says so: HOST:PORT of the first one"
)
flags.DEFINE_integer("process_count", None, "How many processes there are, with --coordinator")
flags.DEFINE_integer("process_id", None, "Which of them this is, from 0, with --coordinator")
flags.DEFINE_enum("mode", "train", ["train", "eval", "count", "aot"], "What to do")
flags.DEFINE_string(
    "topology",
    None,
    "aot: the machine, as the cloud names it: v5p-128, 2xv5p-128, v5e-256, v6e-256, tpu7x-128, h100-8, h200-64",
)
flags.DEFINE_string("report", None, "aot: a JSON file to write the report to")
flags.DEFINE_bool("fit", False, "aot: search remat policy and sequences per device for the best that fits")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ConfigError(f"unexpected argument {argv[1]!r}" + f" (did you mean --config={argv[1]}?)" * (".py" in argv[1]))
    from gatedattn.training import hosts

    config = from_mapping(RunConfig, FLAGS.config.to_dict())
    workdir = Path(FLAGS.workdir or f"runs/{config.name}")
    logging.set_verbosity(
        logging.FATAL
    )  # Orbax tells of every file it writes, and of a full disk in pages; we say it in a line
    sys.unraisablehook = unraisable
    if FLAGS.mode in ("train", "eval"):
        hosts.join(FLAGS.coordinator, FLAGS.process_count, FLAGS.process_id)
    work = {"train": train, "eval": evaluate, "count": count, "aot": ahead_of_time}[FLAGS.mode]
    hosts.guarded(lambda: work(config, workdir))


def unraisable(event) -> None:
    """What TensorStore's threads still had to say to a save that a full disk has ended is no news."""
    if str(event.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(event)


def train(config: RunConfig, workdir: Path) -> None:
    import jax
    from flax import nnx

    from gatedattn.inference import sample
    from gatedattn.training import compiler, loop, step

    origin = None
    if config.train.init_from and not any((workdir / "checkpoints").glob("[0-9]*")):
        from gatedattn.interop import models

        source = models.open_model(config.train.init_from)
        origin = loop.Origin(config.train.init_from, source.config, source.params, source.tokenizer)
    evaluators = None
    if config.eval.tasks:
        from gatedattn.evaluation import midway

        evaluators = midway.build
    compiler.cache_compilations()
    try:
        result = loop.train(config, workdir, origin=origin, evaluators=evaluators)
    except (loop.Diverged, loop.NotSaved) as error:
        fail(str(error), 1)
    if result.signum:
        sys.exit(128 + result.signum)
    if jax.process_count() > 1:
        return  # generation is for one process
    model = nnx.merge(step.graph(config.model), result.params)
    print(f"  a sample        {sample.text(model, result.data.tokenizer, temperature=0.8)!r}")


def evaluate(config: RunConfig, workdir: Path) -> None:
    from gatedattn.training import hosts, loop

    for line in loop.evaluate_checkpoint(config, workdir):
        if hosts.is_first():
            print(json.dumps(line))


def count(config: RunConfig, workdir: Path) -> None:
    from gatedattn import transformer

    flops = transformer.flops_per_token(config.model, config.train.seq_len)
    print(
        json.dumps(
            transformer.count(config.model) | {"flops_per_token_train": flops, "seq_len": config.train.seq_len}, indent=2
        )
    )


def ahead_of_time(config: RunConfig, workdir: Path) -> None:
    import jax

    from gatedattn import aot

    jax.config.update(
        "jax_platforms", jax.config.jax_platforms or "cpu"
    )  # the machine compiled for is not here: do not look for it
    if not FLAGS.topology:
        raise ConfigError("compile for which machine? Give one, e.g. --topology=v5p-128")
    if code := aot.main(config, FLAGS.topology, FLAGS.report, FLAGS.fit):
        sys.exit(code)


# --- the command line --------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> list[str]:
    """absl's flag parsing, with every mistake of the user told in a line."""
    try:
        given = [re.split(r"=", arg, maxsplit=1)[1] for arg in argv if re.match(r"--?config=", arg)]
        path = Path(given[-1].partition(":")[0]) if given else None
        if path and not path.is_file():
            near = suggest(str(path), Path().glob("configs/*.py"))
            raise ConfigError(f"no such recipe: {path}{near} (looked from {Path.cwd()})")
        if path and path.suffix != ".py":
            raise ConfigError(f"--config={path}: a recipe is a .py file, e.g. configs/tiny.py")
        rest = FLAGS(argv)
        if not given and FLAGS.config is None and not any(FLAGS[name].value for name in ("help", "helpfull", "helpshort")):
            raise ConfigError("which recipe? Give one, e.g. --config=configs/tiny.py")
        return rest
    except (KeyError, AttributeError, ConfigError, flags.Error) as error:
        if message := explain(argv, error):
            fail(message)
        raise


def explain(argv: list[str], error: BaseException) -> str | None:
    """What a person can use of an error from absl or ml_collections; None for a bug in a recipe, whose traceback helps."""
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    refused = [str(cause) for cause in causes if isinstance(cause, ConfigError)]
    if refused or isinstance(error, flags.Error):
        return refused[-1] if refused else str(error)
    recipe = next(arg.partition("=")[2] for arg in reversed(argv) if re.match(r"--?config=", arg))
    path, _, args = recipe.partition(":")
    for override in (match[1] for arg in argv if (match := re.match(r"--?config\.([\w.]+)", arg))):
        group = runpy.run_path(path)["get_config"](args or None)
        for key in override.split("."):
            if not hasattr(group, "keys"):
                return f"unknown config key '{override}': it goes deeper than the config does"
            if key not in group:
                return f"unknown config key '{override}'{suggest(key, group)}; known here: {', '.join(sorted(group))}"
            group = group[key]
    return None


def fail(message: str, code: int = 2) -> None:
    if "jax" in sys.modules:
        from gatedattn.training import hosts

        hosts.leave(message, code)
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def run(argv: list[str]) -> None:
    try:
        main(argv)
    except ConfigError as error:
        fail(str(error))
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    app.run(run, flags_parser=parse)
