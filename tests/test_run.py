"""The command line. The cases run in forks of one process that has imported everything: to import JAX anew takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
import absl.app, flax.nnx, gatedattn.inference.sample, gatedattn.training.loop
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
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def run(folder, *cases):
    """Exit code, stdout and stderr of `python run.py ARGS` for each list of arguments."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env |= {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-W", "ignore", "-c", FORKS, json.dumps(cases)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    texts = [((folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text()) for i in range(len(cases))]
    return [(int(code), *text) for code, text in zip(done.stdout.split(), texts, strict=True)]


@pytest.fixture
def recipe(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"The {i} gates open, and {i} sinks close. " * 20)
    path = tmp_path / "little.py"
    path.write_text(RECIPE.replace("TEXTS", str(tmp_path)))
    return f"--config={path}"


def test_every_mistake_is_told_in_a_line_and_exits_with_2(recipe, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.py").write_text(RECIPE)
    cases = {
        (): "which recipe?",
        (recipe, "--config.train.stepz=3"): "unknown config key 'train.stepz' (did you mean 'steps'?)",
        (recipe, "--config.trian.steps=3"): "unknown config key 'trian.steps' (did you mean 'train'?)",
        (recipe, "--config.train.steps=many"): "many",
        (recipe, "--config.train.steps=-1"): "TrainConfig.steps=-1: must be positive",
        (recipe, "--config.model.gates=g7"): "gates='g7'",
        (recipe, "--config.model.num_kv_heads=3"): "num_kv_heads may be 1, 2, 4",
        (recipe + ":gtae=g1",): "unknown recipe argument 'gtae' (did you mean 'gate'?)",
        (recipe + ":layers=two",): "layers=two",
        ("--config=configs/tniy.py",): "no such recipe: configs/tniy.py (did you mean 'configs/tiny.py'?)",
        (recipe, "--mode=trian"): "mode",
        (recipe, "--wrokdir=x"): "Unknown command line flag 'wrokdir'",
        (recipe, "extra"): "unexpected argument 'extra'",
        (recipe, f"--config.data.source=text:{tmp_path}/nothing/*.txt"): "matches no file",
        (recipe, "--config.model.vocab_size=100"): "model.vocab_size=257",
        (recipe, "--config.train.platform=tpu"): "JAX found only cpu",
        (recipe, "--mode=eval", "--workdir=nowhere"): "no checkpoint",
        (recipe, "--mode=aot"): "compile for which machine?",
        (recipe, "--mode=aot", "--topology=v5p-100"): "the nearest are v5p-64 and v5p-128",
        (recipe, "--mode=aot", "--topology=v5q-128"): "unknown topology 'v5q-128' (did you mean 'v5p-128'?)",
    }
    for (args, said), (code, out, err) in zip(cases.items(), run(tmp_path, *cases), strict=True):
        assert code == 2, (args, out, err)
        assert said in err, (args, err)
        told = [line for line in err.splitlines() if not line.startswith("[data]")]
        assert len(told) <= 2 and told[0].startswith("error: "), (args, err)
        assert "Traceback" not in err and "compil" not in out


def test_count_allocates_nothing_and_prints_json(recipe, tmp_path):
    huge = [recipe + ":layers=4000", "--mode=count", "--config.model.d_model=65536"]
    (code, out, err), = run(tmp_path, huge)  # fmt: skip
    assert code == 0, err
    counts = json.loads(out)
    assert counts["params_total"] > 1e10
    assert counts["flops_per_token_train"] > 6 * (counts["params_active"] - counts["params_embedding"])


def test_train_then_eval(recipe, tmp_path):
    (code, out, err), (code_eval, out_eval, err_eval) = run(
        tmp_path, [recipe], [recipe, "--mode=eval", "--workdir=runs/little"]
    )
    assert code == 0, err
    assert f"programs are kept in {tmp_path / 'cache'}" in out
    assert "compiled in" in out and "a sample" in out and "mean bos_share" in out
    assert (tmp_path / "runs/little/config.json").exists()
    assert code_eval == 0, err_eval
    line = json.loads(out_eval)
    assert line["step"] == 4 and line["loss"] > 0
