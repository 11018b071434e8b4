"""The command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import RECIPE, run, told, write_recipe


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path)


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
        (recipe, "--mode=aot", "--topology=h100-12"): "the nearest are h100-8 and h100-16",
        (recipe, "--mode=aot", "--topology=v5q-128"): "unknown topology 'v5q-128' (did you mean 'v5p-128'?)",
    }
    for (args, said), (code, out, err, _) in zip(cases.items(), run(tmp_path, *cases), strict=True):
        assert code == 2, (args, out, err)
        assert said in err, (args, err)
        assert len(told(err)) <= 2 and told(err)[0].startswith("error: "), (args, err)
        assert "Traceback" not in err and "compil" not in out


def test_count_allocates_nothing_and_prints_json(recipe, tmp_path):
    huge = [recipe + ":layers=4000", "--mode=count", "--config.model.d_model=65536"]
    (code, out, err, _), = run(tmp_path, huge)  # fmt: skip
    assert code == 0, err
    counts = json.loads(out)
    assert counts["params_total"] > 1e10
    assert counts["flops_per_token_train"] > 6 * (counts["params_active"] - counts["params_embedding"])


def test_a_reader_that_leaves_gets_no_traceback(recipe):
    """`run.py --mode=count | head -2`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, Path(__file__).parents[1] / "run.py", recipe, "--mode=count"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "Broken pipe" not in done.stderr


@pytest.mark.slow
def test_train_then_eval(recipe, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)  # the tests' own: where would it be without?
    (code, out, err, _), (code_eval, out_eval, err_eval, _) = run(
        tmp_path, [recipe], [recipe, "--mode=eval", "--workdir=runs/little"]
    )
    assert code == 0, err
    assert f"programs are kept in {tmp_path / 'cache'}" in out
    assert "compiled in" in out and "a sample" in out and "mean bos_share" in out
    assert (tmp_path / "runs/little/config.json").exists()
    assert code_eval == 0, err_eval
    line = json.loads(out_eval)
    assert line["step"] == 4 and line["loss"] > 0


def test_threads_of_a_save_that_a_full_disk_ended_are_no_news(capsys, monkeypatch):
    from run import unraisable

    class Thread:
        def __init__(self, text):
            self.text = text

        def __del__(self):  # nobody can catch what is raised here
            raise RuntimeError(self.text)

    monkeypatch.setattr("sys.unraisablehook", unraisable)
    for text in ("Event loop is closed", "something else"):
        Thread(text)
    assert "something else" in (err := capsys.readouterr().err) and "Event loop" not in err
