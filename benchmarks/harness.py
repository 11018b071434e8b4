"""The lm-evaluation-harness over one model: our backend and lm_eval's own Hugging Face backend, taking turns.

python -m benchmarks.harness FOLDER --include_path=DIR --tasks=speeches_cloze,blimp_local --limit=20 [--repeats=2] [--out=FILE.json]

FOLDER is a Hugging Face folder (`python -m gatedattn convert from-gguf`, then `to-hf`). Both compute in float32 on the CPU. Prints the
seconds of each repeat, tasks' accuracies, and the largest difference between the log-likelihoods of an item.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from lm_eval.models.huggingface import HFLM

from gatedattn.evaluation import harness
from gatedattn.interop import models


def likelihoods(results: dict) -> dict[tuple, list[float]]:
    return {
        (task, sample["doc_id"]): [float(response[0][0]) for response in sample["resps"]]
        for task, samples in results["samples"].items()
        for sample in samples
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--include_path", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=16, help="of the Hugging Face backend")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    systems = {
        "gatedattn": harness.HarnessModel(*models.load_model(args.folder)),
        "transformers": HFLM(args.folder, dtype="float32", device="cpu", batch_size=args.batch_size),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    results = {}
    for _ in range(args.repeats):
        for name, system in systems.items():
            began = time.perf_counter()
            results[name] = harness.evaluate(
                system, args.tasks.split(","), include_path=args.include_path, limit=args.limit, log_samples=True
            )
            seconds[name].append(time.perf_counter() - began)
            print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
    ours, theirs = (likelihoods(results[name]) for name in systems)
    assert ours.keys() == theirs.keys()
    differences = {item: float(np.abs(np.subtract(ours[item], theirs[item])).max()) for item in ours}
    worst = max(differences, key=differences.get)
    difference = differences[worst]
    accuracy = {
        name: {task: found["acc,none"] for task, found in result["results"].items() if "acc,none" in found}
        for name, result in results.items()
    }
    same = accuracy["gatedattn"] == accuracy["transformers"]
    print(f"{len(ours)} items, largest difference of log-likelihoods {difference:.1e}, accuracies equal: {same}")
    over = sum(value > 1e-3 for value in differences.values())
    print(
        f"{over} items differ by more than 1e-3; the largest: {worst[0]}, item {worst[1]}: {ours[worst]} against {theirs[worst]}"
    )
    for task in ("speeches_cloze", "blimp_local"):
        if task in accuracy["gatedattn"]:
            print(f"{task}: {accuracy['gatedattn'][task]:.4f}")
    if args.out:
        about = {
            "items": len(ours),
            "limit": args.limit,
            "seconds": seconds,
            "largest_difference": difference,
            "over_1e-3": over,
            "accuracy": accuracy,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
