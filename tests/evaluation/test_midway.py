"""`eval.tasks`: the lines are those of the tools, nothing is compiled twice, and no evaluation ends a run."""

import dataclasses
import json
import re

import numpy as np
import pytest
from flax import nnx

from gatedattn.config import ConfigError, EvalConfig, RunConfig, TransformerConfig
from gatedattn.data.tokenizers import Bytes
from gatedattn.evaluation import midway, perplexity
from gatedattn.transformer import Transformer

MODEL = TransformerConfig(vocab_size=257, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, ffn_dim=16)
CONFIG = RunConfig(model=MODEL, train=dataclasses.replace(RunConfig().train, seq_len=16, batch_size=4))


def with_tasks(tasks: str, **settings) -> RunConfig:
    return dataclasses.replace(CONFIG, eval=EvalConfig(tasks=tasks, **settings))


@pytest.fixture
def texts(tmp_path):
    for name, text in (("a", "The state of the union is strong. " * 3), ("b", "My fellow citizens.")):
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def test_the_numbers_are_the_commands_and_programs_are_kept(texts):
    evaluators = midway.build(with_tasks(f"perplexity:all={texts}/*.txt ; perplexity:{texts}/b.txt"), Bytes())
    assert len(evaluators) == 2
    compiled = None
    for seed in (0, 1):
        model = Transformer(MODEL, rngs=nnx.Rngs(seed))
        for evaluate, name, files in zip(evaluators, ("all", f"{texts}/b.txt"), (["a", "b"], ["b"]), strict=True):
            (line,) = evaluate(model)
            expected = perplexity.measure(model, Bytes(), perplexity.texts([texts / f"{f}.txt" for f in files]), length=16)
            assert line["task"] == f"perplexity:{name}" and line.pop("seconds") > 0
            assert line["tokens"] == expected["tokens"] and line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert line["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-6)
        compiled = compiled or perplexity._batch_losses._cache_size()
    assert perplexity._batch_losses._cache_size() == compiled


def test_an_evaluation_that_fails_is_a_line():
    def fails(model):
        raise RuntimeError("out of memory\nand more")

    (line,) = midway._guarded("harness:x", fails)(None)
    assert line.pop("seconds") >= 0 and line == {"task": "harness:x", "error": "RuntimeError: out of memory"}


@pytest.mark.parametrize(
    "tasks,message",
    [
        ("perplexty:a=b", "must be perplexity:NAME=GLOB, harness:TASK or ruler:TASK@LENGTH"),
        ("perplexty:a=b", "did you mean 'perplexity'?"),
        ("perplexity:", "must be perplexity:"),
        ("perplexity:a=nowhere/*.txt", "eval.tasks: --text=a=nowhere/*.txt: no such file"),
    ],
)
def test_refused_before_the_run(tasks, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        midway.build(with_tasks(tasks), Bytes())


def test_how_often():
    with pytest.raises(ConfigError, match="eval.tasks_every=30: must be a multiple of eval.every=20"):
        EvalConfig(every=20, tasks_every=30)
    with pytest.raises(ConfigError, match="must be a multiple of eval.every=0"):
        EvalConfig(every=0, tasks_every=30)


def test_names_of_metrics():
    found = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": "N/A", "exact_match,strict": 0.1, "exact_match,flexible": 0.2}
    assert midway.metrics(found) == {"acc": 0.5, "exact_match,strict": 0.1, "exact_match,flexible": 0.2}


@pytest.mark.parametrize(
    "tasks,message",
    [
        ("ruler:vt", "must name tasks and a length: ruler:niah_single_1,vt@4096"),
        ("ruler:niah_singel_1@512", "did you mean 'niah_single_1'?"),
        ("ruler:qa_1@4096", "RULER has no 'qa_1' without a file"),
        ("ruler:vt@64", "vt takes at least"),
    ],
)
def test_ruler_refused_before_the_run(tasks, message):
    pytest.importorskip("wonderwords")
    with pytest.raises(ConfigError, match=re.escape(message)):
        midway.build(with_tasks(tasks), Bytes())


@pytest.mark.slow
def test_ruler_as_the_command_scores_it(tmp_path):
    pytest.importorskip("wonderwords")
    from gatedattn.evaluation import ruler

    (evaluate,) = midway.build(with_tasks("ruler:niah_single_1,fwe@900", limit=3), Bytes())
    model = Transformer(dataclasses.replace(MODEL, init_std=0.5), rngs=nnx.Rngs(0))
    lines = evaluate(model)
    book = ruler.Book(tmp_path, {})
    tasks = ["niah_single_1", "fwe"]
    ruler.evaluate(model, Bytes(), ruler.Material.read(), book, name="m", tasks=tasks, lengths=[900], samples=3)
    for line, task in zip(lines, tasks, strict=True):
        scores = [sample["score"] for sample in book.samples("m", task, 900)]
        assert (line["task"], line["samples"]) == (f"ruler:{task}@900", 3) and line["score"] == pytest.approx(
            100 * np.mean(scores)
        )


@pytest.mark.slow
def test_a_run_writes_them_every_so_many_steps(texts, tmp_path, monkeypatch, capsys):
    """Through the loop, on a mesh of eight devices: at the steps asked for and at the last, resumed as well; the report shows them."""
    from gatedattn.report.charts import charts
    from gatedattn.report.runs import Run
    from gatedattn.training import loop

    config = dataclasses.replace(
        with_tasks(f"perplexity:all={texts}/*.txt", every=2, tasks_every=4, batches=1),
        name="midway",
        data=dataclasses.replace(CONFIG.data, source="text:" + str(texts / "a.txt"), tokenizer="bytes", cache_dir=str(tmp_path / "cache")),
        train=dataclasses.replace(CONFIG.train, steps=6, batch_size=8),
        mesh=dataclasses.replace(CONFIG.mesh, tensor=1, fsdp=4, data=2),
    )  # fmt: skip
    (texts / "a.txt").write_text("The state of the union is strong. " * 60)
    with pytest.raises(ConfigError, match="needs its `evaluators`"):
        loop.train(config, tmp_path / "run")
    result = loop.train(config, tmp_path / "run", evaluators=midway.build)
    out = capsys.readouterr().out
    assert re.search(r"step 4/6  perplexity:all: loss \d", out) and re.search(r"  perplexity:all\s+loss \d", out)
    lines = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "task" in line] == [4, 6]
    assert [line["step"] for line in lines if "set" in line] == [2, 4, 6]
    model = nnx.merge(nnx.graphdef(Transformer(MODEL, rngs=nnx.Rngs(0))), result.params)
    expected = perplexity.measure(model, Bytes(), perplexity.texts(sorted(texts.glob("*.txt"))), length=16, batch=8)
    assert lines[-1]["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    run = Run.read(tmp_path / "run", "run")
    assert len(run.evals) == 3 and run.summary()["held-out loss"] == lines[-2]["loss"]
    (trace,) = charts([run])["Other evaluations"].data
    np.testing.assert_allclose(trace.y, [line["loss"] for line in lines if "task" in line])
