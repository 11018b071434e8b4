"""Data at scale: how fast a corpus is prepared, and how fast its rows come back.

python -m benchmarks.data [--megabytes=24] [--json]

The State of the Union speeches, repeated to the size asked for, in CPU seconds of one process, which other work on the machine changes
least. Preparation: text read, tokenized, packed, compressed, written and read back, against the bare tokenizer (`encode_batch_fast` of
the same texts, results thrown away); to be at least 0.8 of it. Loading: training batches of random rows from the prepared files, in
tokens per CPU second, beside what a training step of the smoke model consumes; to be at least 20 times that.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax

from configs import tiny
from gatedattn.config import DataConfig, RunConfig, from_mapping
from gatedattn.data import load, tokenizers
from gatedattn.data.prepare import prepare
from gatedattn.data.sotu import speeches
from gatedattn.training import step as steps

SEQ_LEN, BATCH = 256, 8


def timed(action) -> tuple[float, object]:
    began = time.process_time()
    result = action()
    return time.process_time() - began, result


def measure(megabytes: float, folder: Path) -> dict:
    texts = [text for *_, text in speeches()]
    repeats = max(round(megabytes * 1e6 / sum(len(t) for t in texts)), 1)
    (folder / "text").mkdir()
    for number in range(repeats):
        for index, text in enumerate(texts):
            (folder / "text" / f"{number:03}-{index:03}.txt").write_text(text)
    size = repeats * sum(len(text.encode()) for text in texts)
    tokenizer = tokenizers.train_bpe(texts, 2048)
    tokenizer.save(folder)
    found = {"megabytes": size / 1e6}

    def bare():
        for _ in range(repeats):
            for start in range(0, len(texts), 32):
                tokenizer.backend.encode_batch_fast(texts[start : start + 32], add_special_tokens=False)

    seconds, _ = timed(bare)
    found["tokenizer_mb_per_cpu_second"] = size / 1e6 / seconds
    options = dict(tokenizer=str(folder / "tokenizer.json"), bos="row", cache_dir=str(folder / "cache"))
    seconds, about = timed(lambda: prepare(f"text:{folder}/text/*.txt", folder / "p", seq_len=SEQ_LEN, workers=1, **options))
    found["prepare_mb_per_cpu_second"] = size / 1e6 / seconds
    found["prepare_share"] = found["prepare_mb_per_cpu_second"] / found["tokenizer_mb_per_cpu_second"]
    found["tokens"] = sum(file["tokens"] for file in about["splits"]["train"]["files"])

    data = load(DataConfig(source=f"prepared:{folder}/p", **options), seq_len=SEQ_LEN, batch_size=BATCH, seed=0)
    data.train(0)
    seconds, _ = timed(lambda: [data.train(step) for step in range(1, 201)])
    found["loader_tokens_per_cpu_second"] = 200 * BATCH * SEQ_LEN / seconds

    config = from_mapping(RunConfig, tiny.get_config("smoke").to_dict())
    batch = {key: data.train(0)[key] % 256 if key in ("tokens", "targets") else data.train(0)[key] for key in data.train(0)}
    step = jax.jit(steps.make_train_step(config))
    state = steps.initialize(config)
    jax.block_until_ready(step(state, batch))
    seconds, _ = timed(lambda: jax.block_until_ready([step(state, batch) for _ in range(5)]))
    found["step_tokens_per_cpu_second"] = 5 * BATCH * SEQ_LEN / seconds
    found["loader_times_step"] = found["loader_tokens_per_cpu_second"] / found["step_tokens_per_cpu_second"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=24)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.megabytes, Path(folder))
    if args.json:
        print(json.dumps(found))
        return
    print(f"{found['megabytes']:.0f} MB of text, {found['tokens']:,} training tokens; per CPU second of one process:")
    print(f"  tokenizer alone  {found['tokenizer_mb_per_cpu_second']:.2f} MB")
    print(f"  preparation      {found['prepare_mb_per_cpu_second']:.2f} MB, {found['prepare_share']:.2f} of that (to be 0.8)")
    print(f"  loader           {found['loader_tokens_per_cpu_second']:,.0f} tokens, {found['loader_times_step']:.0f} times what the "
          f"smoke model's step consumes ({found['step_tokens_per_cpu_second']:,.0f}; to be 20)")  # fmt: skip


if __name__ == "__main__":
    main()
