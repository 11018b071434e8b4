"""The accelerator script on a CPU, in a process that has only what a bare GPU machine has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jaxtyping", "grain", "tokenizers", "tensorflow_datasets", "ml_collections", "tensorboardX"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "jaxtyping" else spec(name, *a)
sys.argv = sys.argv[1:]
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_it_needs_jax_and_flax_only(tmp_path):
    script = [str(ROOT / "benchmarks/accelerator.py"), "--toy", f"--out={tmp_path / 'out.json'}"]
    run = subprocess.run([sys.executable, "-c", BARE, *script], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert [row["gates"] for row in result["step"]] == ["none", "g1", "g1:headwise"] and not result["skipped"]
    assert all(row["tokens_per_second"] > 0 and row["mfu"] is None and 4 < row["loss"] < 8 for row in result["step"])
    assert 0 < result["probe"]["share_of_run"] < 1 and result["moe"]["tokens_per_second"] > 0
    measured = {(row["kernel"], row["case"]) for row in result["attention"] if "refused" not in row}
    assert {(kernel, case) for kernel in ("reference", "chunked") for case in ("causal", "packed")} <= measured
    assert "annotations are ignored" in run.stderr


def test_no_section_begins_when_the_time_is_up(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import accelerator

    result = accelerator.main(["--toy", "--seconds=0", "--sections=moe"])
    assert result["skipped"] == ["moe"] and "moe" not in result
