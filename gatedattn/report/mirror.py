"""A run's files to Weights & Biases: while it trains or afterwards, without the training process taking part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gatedattn.config import ConfigError
from gatedattn.report.runs import Run
from gatedattn.training.recorder import heat_map, read_lines

POLL = 10.0  # seconds between looks at a run that is followed


def events(folder: Path, sent: dict[str, int]) -> Iterator[dict]:
    """What the run's files hold beyond the `sent` lines of each, as names and values; "step" in every one. Counts them as sent.

    Named as in TensorBoard: train/..., eval/SET/..., heads/...; the heads' lists [L][N] come as arrays."""
    for name in ("metrics.jsonl", "eval.jsonl", "heads.jsonl"):
        lines = read_lines(folder / name)
        for line in lines[sent.get(name, 0) :]:
            group = {"metrics.jsonl": "train", "heads.jsonl": "heads"}.get(name) or f"eval/{line.get('set') or line['task']}"
            values: dict = {"step": line["step"]}
            for key, value in line.items():
                if isinstance(value, dict):  # several gates
                    values |= {f"{group}/{key}/{spec}": np.array(scores, float) for spec, scores in value.items()}
                elif isinstance(value, list):
                    values[f"{group}/{key}"] = np.array(value, float)
                elif isinstance(value, (int, float)) and key != "step":
                    values[f"{group}/{key}"] = value
            yield values
        sent[name] = len(lines)


def mirror(folder: str | Path, project: str, follow: bool = False) -> None:
    """Send a run to a project: scalars as they are, lists [L][N] as their mean and a heat map. With `follow`, go on until Ctrl-C.

    WANDB_MODE=offline keeps everything on disk. Raises ConfigError without the wandb package, or if the folder is not a run's.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError("this needs the wandb package: pip install wandb") from None
    folder = Path(folder)
    run = Run.read(folder, folder.name)
    with wandb.init(project=project, name=folder.name, config=run.config | run.about, dir=str(folder)) as board:
        board.define_metric("*", step_metric="step")
        sent: dict[str, int] = {}
        try:
            while True:
                for values in events(folder, sent):
                    board.log({k: v for name, value in values.items() for k, v in _shown(wandb, name, value).items()})
                if not follow:
                    return
                time.sleep(POLL)
        except KeyboardInterrupt:
            return


def _shown(wandb, name: str, value) -> dict:
    if not isinstance(value, np.ndarray):
        return {name: value}
    shown = {f"{name}/mean": float(np.nanmean(value)), f"{name}/max": float(np.nanmax(value))}
    return shown | ({f"{name}/map": wandb.Image(heat_map(value))} if value.ndim == 2 else {})
