"""`python run.py ARGS`, many times over: in forks of one process that has imported everything (to import JAX anew takes seconds)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

RECIPE = """
from gatedattn.config import *

def get_config(arg=None):
    args = parse_recipe_args(arg, layers=2)
    return to_config_dict(RunConfig(
        name="little",
        model=TransformerConfig(
            vocab_size=257, d_model=32, num_layers=args.layers, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48,
            gates=args.gate or "g1",
        ),
        data=DataConfig(source="text:TEXTS/*.txt", tokenizer="bytes", cache_dir="TEXTS/cache"),
        train=TrainConfig(steps=4, batch_size=4, seq_len=16),
        optimizer=OptimizerConfig(warmup_steps=1),
    ))
"""

FORKS = """
import json, os, sys
import absl.app, flax.nnx, gatedattn.inference.sample, gatedattn.interop.models, gatedattn.training.loop
import run
for number, argv in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if not pid:
        os.dup2(os.open(f"{number}.out", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(f"{number}.err", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv = ["run.py", *argv]
        code = 0
        try:
            absl.app.run(run.run, argv=sys.argv, flags_parser=run.parse)
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # to take all these modules down again would cost seconds
    _, status, usage = os.wait4(pid, 0)
    print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float  # of processor time


def write_recipe(folder: Path) -> str:
    """A little recipe over four texts in `folder`, as the flag that names it."""
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"The {i} gates open, and {i} sinks close. " * 20)
    path = folder / "little.py"
    path.write_text(RECIPE.replace("TEXTS", str(folder)))
    return f"--config={path}"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def run(folder: Path, *cases) -> list[Done]:
    """What becomes of `python run.py ARGS`, typed in `folder`, for each list of arguments."""
    env = environment() | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-W", "ignore", "-c", FORKS, json.dumps(cases)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    results = [line.split() for line in done.stdout.splitlines()]
    texts = [((folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text()) for i in range(len(cases))]
    return [Done(int(code), *text, float(seconds)) for (code, seconds), text in zip(results, texts, strict=True)]


def told(err: str) -> list[str]:
    """The lines for the user, without those on the preparation of data."""
    return [line for line in err.splitlines() if not line.startswith("[data]")]
