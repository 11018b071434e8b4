"""lm_eval's own Hugging Face backend and ours, on the same weights, tokenizer and local tasks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("torch")
pytest.importorskip("lm_eval")
pytestmark = pytest.mark.hf

from gatedattn import Transformer, TransformerConfig  # noqa: E402
from gatedattn.__main__ import main  # noqa: E402
from gatedattn.config import ConfigError  # noqa: E402
from gatedattn.data import tokenizers  # noqa: E402
from gatedattn.evaluation import harness  # noqa: E402
from gatedattn.interop import huggingface  # noqa: E402

PAIRS = [
    ("The people of the union are strong.", "The people of the union is strong."),
    ("We thank the Congress.", "We thanks the Congress."),
]
CLOZE = [("The state of the", " union"), ("My fellow", " citizens"), ("The state of the ", "union is strong " * 8)]
TEXTS = ["The state of the union is strong. " * 12, "My fellow citizens of the union."]
CHOICE = dict(output_type="multiple_choice", doc_to_text="", doc_to_target=0, doc_to_choice="{{[good, bad]}}")
WORD = dict(output_type="loglikelihood", doc_to_text="{{context}}", doc_to_target="{{word}}", target_delimiter="")
ROLLING = dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
UNTIL = {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False}
WRITING = dict(output_type="generate_until", doc_to_text="{{context}}", doc_to_target="{{word}}", generation_kwargs=UNTIL)
TASKS = {
    "pairs": CHOICE | {"metric_list": [{"metric": "acc"}]},
    "cloze": WORD | {"metric_list": [{"metric": "acc"}]},
    "rolling": ROLLING | {"metric_list": [{"metric": "bits_per_byte"}]},
    "writing": WRITING | {"metric_list": [{"metric": "exact_match"}]},
}
DATA = {
    "pairs": [{"good": good, "bad": bad} for good, bad in PAIRS],
    "cloze": [{"context": context, "word": word} for context, word in CLOZE],
    "rolling": [{"text": text} for text in TEXTS],
    "writing": [{"context": context, "word": word} for context, word in CLOZE],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with a trained BPE, as a Hugging Face folder, and local tasks."""
    folder = tmp_path_factory.mktemp("harness")
    tokenizer = tokenizers.train_bpe([*TEXTS, *(text for pair in PAIRS for text in pair)] * 3, 320)
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=48, gates="none",
        qk_norm=False, max_seq_len=48,
    )  # fmt: skip
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    model = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes))
    huggingface.save(model, config, folder / "model", tokenizer)
    (folder / "tasks").mkdir()
    for name, task in TASKS.items():
        (folder / "tasks" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA[name]))
        files = {"test": str(folder / "tasks" / f"{name}.jsonl")}
        task = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "test_split": "test",
        } | task
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def items(results, task):
    return [(sample["doc_id"], sample["resps"]) for sample in results["samples"][task]]


def test_item_by_item_as_the_hugging_face_backend(folder, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = huggingface.tokenizer(folder / "model")
    ours = harness.HarnessModel(huggingface.load(folder / "model"), tokenizer, batch_tokens=512, batch_size=2)
    theirs = HFLM(str(folder / "model"), dtype="float32", batch_size=2, device="cpu", max_length=48)
    names = [f"local_{name}" for name in TASKS]
    a, b = (harness.evaluate(lm, names, include_path=str(folder / "tasks"), log_samples=True) for lm in (ours, theirs))
    for name in names:
        assert len(items(a, name)) == len(items(b, name)) > 1
        for (i, mine), (j, other) in zip(items(a, name), items(b, name), strict=True):
            assert i == j
            if name == "local_writing":
                assert mine == other
                continue
            for x, y in zip(np.ravel(mine), np.ravel(other), strict=True):
                assert str(x) == str(y) or float(x) == pytest.approx(float(y), abs=1e-3)
    for name, metric in (("pairs", "acc,none"), ("cloze", "acc,none"), ("rolling", "bits_per_byte,none")):
        assert a["results"][f"local_{name}"][metric] == pytest.approx(b["results"][f"local_{name}"][metric], rel=1e-5)


def test_the_command(folder, tmp_path, capsys):
    common = ["harness", str(folder / "model"), f"--include_path={folder / 'tasks'}"]
    assert main([*common, "--tasks=local_pairs,local_cloze", f"--out={tmp_path / 'out.json'}"]) == 0
    out = capsys.readouterr().out
    assert "local_pairs" in out and "acc" in out
    assert len(json.loads((tmp_path / "out.json").read_text())["samples"]["local_cloze"]) == 3
    assert main([*common, "--tasks=local_pears"]) == 2
    assert "lm_eval knows no local_pears" in capsys.readouterr().err


def test_long_contexts_are_cut_from_the_left(folder):
    tokenizer = huggingface.tokenizer(folder / "model")
    lm = harness.HarnessModel(huggingface.load(folder / "model"), tokenizer, batch_tokens=512)
    long, word = list(range(1, 200)), [7, 8]
    (full,), (cut,) = (lm._loglikelihood_tokens([(None, context, word)]) for context in (long, long[-47:]))
    assert full[0] == pytest.approx(cut[0], abs=1e-5)


def test_without_lm_eval_a_line_says_what_to_install(monkeypatch):
    import builtins
    import importlib

    real = builtins.__import__
    monkeypatch.setattr(
        builtins,
        "__import__",
        lambda name, *a, **k: (_ for _ in ()).throw(ImportError(name)) if name == "lm_eval" else real(name, *a, **k),
    )
    with pytest.raises(ConfigError, match="pip install"):
        importlib.reload(harness)


def test_while_a_run_trains(folder):
    """The numbers of the command, and other parameters of the same model compile nothing."""
    from gatedattn.config import EvalConfig, RunConfig
    from gatedattn.evaluation import midway

    tokenizer, tasks = huggingface.tokenizer(folder / "model"), ["local_pairs", "local_rolling", "local_writing"]
    path = str(folder / "tasks")
    config = RunConfig(eval=EvalConfig(tasks=f"harness:{','.join(tasks)}", include_path=path, limit=0))
    (evaluate,) = midway.build(config, tokenizer)
    model = huggingface.load(folder / "model")
    lines = evaluate(model)
    expected = harness.evaluate(harness.HarnessModel(model, tokenizer), tasks, include_path=path)["results"]
    assert [line["task"] for line in lines] == [f"harness:{name}" for name in tasks]
    for line, (metric, name) in zip(lines, zip(("acc", "bits_per_byte", "exact_match"), tasks, strict=True), strict=True):
        (key,) = (key for key in expected[name] if key.startswith(f"{metric},"))
        assert line[metric] == pytest.approx(expected[name][key], rel=1e-6) and line["seconds"] > 0
    compiled = harness._score._cache_size()
    graphdef, params = nnx.split(model)
    again = evaluate(nnx.merge(graphdef, jax.tree.map(lambda x: 1.5 * x, params)))
    assert again[1]["bits_per_byte"] != lines[1]["bits_per_byte"] and harness._score._cache_size() == compiled
    with pytest.raises(ConfigError, match="lm_eval knows no nonsense"):
        midway.build(RunConfig(eval=EvalConfig(tasks="harness:nonsense")), tokenizer)
