"""Needles in speeches: what a document states it repeats, what a question asks can be found, and the table that comes of it."""

import json
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.longcontext import config, measure, needles
from gatedattn.data.tokenizers import Bytes

FILLER = np.frombuffer(b"and the people of this country know it. " * 60, np.uint8).astype(np.int32)


@given(st.integers(0, 10_000))
def test_a_document_states_a_word_and_ends_with_it(seed):
    passage = [f"w{i}" for i in range(needles.WORDS)]
    text = needles.document(Random(seed), passage)
    words = [piece.split(".")[0].strip() for piece in text.split(needles.STATED)[1:]]
    assert (
        len(words) == needles.TIMES + 1
        and len(set(words)) == 1
        and words[0] in needles.VALUES
        and text.endswith(f"{needles.STATED} {words[0]}.")
    )
    assert [word for word in text.split() if word[0] == "w" and word[1:].isdecimal()] == passage


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([128, 200, 512]))
def test_a_question_is_as_long_as_asked_and_answered_by_its_text(seed, length):
    ids, answer = needles.question(Random(seed), Bytes(), FILLER, length)
    assert len(ids) == length + 1 and ids[0] == 256
    text = bytes(ids[1:].tolist()).decode()
    value, before = text[-answer:], text[:-answer]
    assert before.endswith(needles.STATED) and before.count(needles.STATED) == 2
    assert before.count(f"{needles.STATED}{value}.") == 1 and value.strip() in needles.VALUES


def test_needles_lie_at_every_depth():
    depths = []
    for seed in range(300):
        ids, _ = needles.question(Random(seed), Bytes(), FILLER, 512)
        depths.append(bytes(ids[1:].tolist()).decode().index(needles.STATED) / 512)
    assert np.percentile(depths, 5) < 0.1 and np.percentile(depths, 95) > 0.8


@pytest.mark.slow
def test_from_text_to_table(tmp_path, capsys):
    from gatedattn.config import RunConfig, from_mapping
    from gatedattn.training import loop

    needles.main([f"--out={tmp_path}/text", "--documents=40"])
    recipe = config.get_config("smoke,gate=g1").to_dict()
    recipe["data"] |= {"source": f"text:{tmp_path}/text/*.txt", "cache_dir": str(tmp_path / "cache")}
    recipe["train"] |= {"steps": 2}
    loop.train(from_mapping(RunConfig, recipe), tmp_path / "run")
    argv = [str(tmp_path / "run"), f"--out={tmp_path}/out", "--questions=4", "--speeches=1"]
    measure.main(argv)
    (run,) = json.loads((tmp_path / "out/results.json").read_text())["runs"]
    assert {"plain 1", "plain 8", "yarn 2", "yarn 8"} <= set(run) and "yarn 1" not in run
    assert run["plain 8"]["loss"] != run["yarn 8"]["loss"] and 0 <= run["plain 1"]["found"] <= 1
    lines = (tmp_path / "out/table.md").read_text().splitlines()
    assert len(lines) == 2 + 4 and len({line.count("|") for line in lines}) == 1
    assert (tmp_path / "out/longcontext.png").stat().st_size > 10_000
    capsys.readouterr()
    measure.main(argv)
    assert "found" not in capsys.readouterr().out.split("| model")[0]
