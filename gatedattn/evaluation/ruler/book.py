"""A folder of RULER results, written as they come: what is in it is not computed again.

ruler.json                          settings; of each model its scores, their mean by length and its effective length
samples/MODEL/TASK-LENGTH.jsonl     a line a sample: index, tokens, score, references, prediction, prompt_end
table.md, ruler.png                 see `write`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gatedattn.config import ConfigError
from gatedattn.data.cache import write_atomically
from gatedattn.evaluation.ruler import write

EFFECTIVE = 85.6  # RULER's threshold: Llama-2-7B-chat at 4k


class Book:
    """Raises `ConfigError` if the folder holds results with other settings; settings that only one of both has may differ."""

    def __init__(self, folder: str | Path, settings: dict):
        self.folder = Path(folder)
        path = self.folder / "ruler.json"
        self.content = json.loads(path.read_text()) if path.exists() else {"settings": {}, "models": {}}
        known = self.content["settings"]
        for name, value in settings.items():
            if known.get(name, value) != value:
                raise ConfigError(f"{path} was made with another {name} ({known[name]}, not {value}): give another --out")
        known |= settings

    def model(self, name: str, weights: str) -> None:
        """Begin with a model, or go on. Raises `ConfigError` if another one has that name."""
        entry = self.content["models"].setdefault(name, {"weights": weights, "scores": {}})
        if entry["weights"] != weights:
            raise ConfigError(
                f"{self.folder}/ruler.json: {name} had other weights or settings then; give another --out, or another name by --names"
            )
        self.save()

    def samples(self, name: str, task: str, length: int) -> list[dict]:
        path = self._path(name, task, length)
        if not path.exists():
            return []
        whole, _, cut = path.read_text(encoding="utf-8").rpartition("\n")
        if cut:  # killed while it wrote
            write_atomically(path, f"{whole}\n".encode() if whole else b"")
        return [json.loads(line) for line in whole.split("\n") if line]

    def add(self, name: str, task: str, length: int, records: Sequence[dict]) -> None:
        path = self._path(name, task, length)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))

    def finish(self, name: str, task: str, length: int, scores: Sequence[float]) -> None:
        """Enter the score of a task at a length: x 100, two decimals; `stderr` is that of the mean over samples."""
        percent = 100 * np.array(scores)
        cell = {"score": round(float(percent.mean()), 2), "samples": len(scores)}
        if len(scores) > 1:
            cell["stderr"] = round(float(percent.std(ddof=1) / len(scores) ** 0.5), 2)
        entry = self.content["models"][name]
        entry["scores"].setdefault(task, {})[str(length)] = cell
        lengths = sorted({int(length) for cells in entry["scores"].values() for length in cells})
        entry["mean"] = {str(length): mean(entry["scores"], length) for length in lengths}
        good = [length for length in write.complete(entry) if entry["mean"][str(length)] >= EFFECTIVE]
        entry["effective_length"] = max(good, default=None)
        self.save()

    def save(self) -> None:
        write_atomically(self.folder / "ruler.json", (json.dumps(self.content, indent=1) + "\n").encode())

    def write(self) -> str:
        """The table, which is also written, with the figure."""
        table = write.table(self.content["models"])
        write_atomically(self.folder / "table.md", table.encode())
        write.figure(self.content["models"]).savefig(self.folder / "ruler.png", dpi=130)
        return table

    def _path(self, name: str, task: str, length: int) -> Path:
        return self.folder / "samples" / name.replace("/", "_") / f"{task}-{length}.jsonl"


def mean(scores: dict, length: int) -> float:
    """Over the tasks that were done at a length."""
    return round(float(np.mean([cells[str(length)]["score"] for cells in scores.values() if str(length) in cells])), 2)
