"""A run's lines as they go to Weights & Biases."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gatedattn.__main__ import main
from gatedattn.report.mirror import events

RUN = Path(__file__).parents[2] / "experiments/tiny/runs/g1-0"


def test_every_line_once(tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    path, sent = tmp_path / "run/metrics.jsonl", {}
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])  # the last one not yet whole
    first = list(events(tmp_path / "run", sent))
    path.write_text("".join(lines))
    (late,) = events(tmp_path / "run", sent)
    assert late["train/loss"] == json.loads(lines[-1])["loss"] and list(events(tmp_path / "run", sent)) == []
    heads = [v for v in first if "heads/bos_share" in v]
    recorded = [json.loads(line) for line in (RUN / "heads.jsonl").read_text().splitlines()]
    assert len(heads) == len(recorded) and len(first) == len(lines) - 1 + len(recorded) + 6
    np.testing.assert_array_equal(heads[3]["heads/gate_mean"], recorded[3]["gate_mean"])
    assert heads[3]["step"] == recorded[3]["step"] and any("eval/tfds:sotu/loss" in v for v in first)


def test_offline(tmp_path, monkeypatch, capsys):
    """With the real package, kept on disk: the summary holds what the run ended with."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    shutil.copytree(RUN, tmp_path / "run")
    seen = {}
    monkeypatch.setattr(
        wandb.Run, "log", lambda self, values, *a, _log=wandb.Run.log, **k: (seen.update(values), _log(self, values))
    )
    assert main(["wandb", str(tmp_path / "run"), "--project=test"]) == 0
    last = json.loads((RUN / "heads.jsonl").read_text().splitlines()[-1])
    assert seen["heads/bos_share/max"] == pytest.approx(np.max(last["bos_share"]))
    assert isinstance(seen["heads/gate_mean/map"], wandb.Image)
    assert list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert main(["wandb", str(tmp_path)]) == 2 and "no config.json" in capsys.readouterr().err
