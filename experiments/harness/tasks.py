"""Tasks for the lm-evaluation-harness that need no download.

python -m experiments.harness.tasks --out=DIR [--blimp=blimp.jsonl.gz]
python -m gatedattn harness MODEL --include_path=DIR --tasks=speeches_cloze,blimp_local

speeches_cloze   the last word of a paragraph of a held-out State of the Union speech, the paragraph before it given: accuracy (is the
                 greedy continuation the word?) and its log-likelihood, in the manner of LAMBADA
blimp_local      with --blimp: the Benchmark of Linguistic Minimal Pairs (Warstadt et al. 2020, CC-BY 4.0), one task for each of its 67
                 paradigms; the file has a JSON object a line with `uid`, `good` and `bad`
"""

import argparse
import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

from gatedattn.config import DataConfig
from gatedattn.data import sources

MIN_WORDS, MAX_WORDS = 40, 120  # of a paragraph


def write(out: Path, task: str, rows: list[dict], settings: dict) -> None:
    data = out / f"{task}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": task, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data.resolve())}}}
    (out / f"{data.stem}.yaml").write_text(
        json.dumps(task | {"test_split": "test"} | settings, indent=1) + "\n"
    )  # JSON is YAML


def cloze(speeches) -> list[dict]:
    rows = []
    for speech in speeches:
        for paragraph in re.split(r"\n\s*\n", speech):
            words = paragraph.split()
            last = re.fullmatch(r"([A-Za-z]{3,})[.!?]", words[-1]) if words else None
            if last and MIN_WORDS <= len(words) <= MAX_WORDS:
                rows.append({"context": " ".join(words[:-1]), "word": last[1]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blimp", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    metric = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]

    corpus = sources.open_corpus(sources.parse("tfds:sotu")[0], DataConfig())
    rows = cloze(corpus.documents("valid"))
    settings = dict(output_type="loglikelihood", doc_to_text="{{context}}", doc_to_target=" {{word}}", target_delimiter="")
    write(args.out, "speeches_cloze", rows, settings | {"metric_list": metric})
    print(f"speeches_cloze: {len(rows)} items")
    if not args.blimp:
        return
    pairs = defaultdict(list)
    with gzip.open(args.blimp, "rt") as file:
        for line in file:
            item = json.loads(line)
            pairs[item["uid"]].append({"good": item["good"], "bad": item["bad"]})
    settings = dict(output_type="multiple_choice", doc_to_text="", doc_to_target=0, doc_to_choice="{{[good, bad]}}")
    for uid, rows in pairs.items():
        write(args.out, f"blimp_local_{uid}", rows, settings | {"metric_list": metric})
    group = {"group": "blimp_local", "task": [f"blimp_local_{uid}" for uid in pairs]}
    group["aggregate_metric_list"] = [{"metric": "acc", "weight_by_size": True}]
    (args.out / "blimp_local.yaml").write_text(json.dumps(group, indent=1) + "\n")
    print(f"blimp_local: {len(pairs)} tasks, {sum(map(len, pairs.values()))} items")


if __name__ == "__main__":
    main()
