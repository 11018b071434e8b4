"""Wrong configurations and inputs: each is told in one or two lines, with exit code 2, before anything is compiled.

The cases run in forks of one process that has imported everything; a handful run as a user runs them.
"""

import subprocess
import sys

import pytest

from tests.command_line import ROOT, environment, run, told, write_recipe

# Arguments after the recipe -> what the message says, among other things. FOLDER: the test's own; it holds four texts, an empty
# file, latin1.txt (not UTF-8), broken.json, and `file`, which is no folder.
MISTAKES = {
    # unknown keys and values of the wrong type
    "--config.train.stepz=3": "unknown config key 'train.stepz' (did you mean 'steps'?)",
    "--config.trian.steps=3": "unknown config key 'trian.steps' (did you mean 'train'?)",
    "--config.train.steps.more=3": "goes deeper than the config does",
    "--config.train.steps=many": "many",
    "--config.train.steps=1.5": "1.5",
    "--config.train.steps=nan": "nan",
    "--config.model.qk_norm=perhaps": "perhaps",
    "--config.optimizer.learning_rate=fast": "fast",
    # ranges
    "--config.train.steps=-1": "TrainConfig.steps=-1: must be positive",
    "--config.train.steps=3000000000": "must be below 2^31",
    "--config.train.batch_size=0": "TrainConfig.batch_size=0: must be positive",
    "--config.train.seq_len=0": "TrainConfig.seq_len=0",
    "--config.train.seq_len=1000000000": "must be below 2^31",
    "--config.train.seed=-1": "TrainConfig.seed=-1: must not be negative",
    "--config.train.seed=99999999999": "train.seed=99999999999: must be below 2^31",
    "--config.train.log_every=0": "TrainConfig.log_every=0",
    "--config.train.z_loss=-1": "TrainConfig.z_loss=-1",
    "--config.optimizer.learning_rate=0": "OptimizerConfig.learning_rate=0",
    "--config.optimizer.learning_rate=nan": "must be a finite number",
    "--config.optimizer.learning_rate=inf": "must be a finite number",
    "--config.optimizer.b2=1": "optimizer.b2=1.0: must be in [0, 1)",
    "--config.optimizer.clip_norm=-1": "OptimizerConfig.clip_norm=-1",
    "--config.optimizer.decay_fraction=0": "optimizer.decay_fraction=0.0: must be in (0, 1]",
    "--config.optimizer.end_learning_rate=1": "exceeds learning_rate",
    "--config.optimizer.no_decay=(": "not a regular expression",
    "--config.model.rope.fraction=2": "RopeConfig.fraction=2.0: must be in (0, 1]",
    "--config.model.window=-5": "TransformerConfig.window=-5",
    "--config.data.valid_fraction=1": "data.valid_fraction=1.0: must be in (0, 1)",
    "--config.guard.window=1": "guard.window=1: must be at least 4",
    "--config.guard.patience=0": "GuardConfig.patience=0",
    "--config.checkpoint.keep=0": "CheckpointConfig.keep=0",
    "--config.probe.rows=0": "ProbeConfig.rows=0",
    "--config.mesh.data=0": "mesh.data=0: must be a positive number or -1",
    # names
    "--config.optimizer.name=adam": "must be one of adamw, muon (did you mean 'adamw'?)",
    "--config.optimizer.schedule=linear": "must be one of cosine, wsd, constant",
    "--config.model.gates=g7": "gates='g7'",
    "--config.model.gates=g5:headwise:shared": "gates='g5:headwise:shared'",
    "--config.model.position=alibi": "must be one of rope, learned, none",
    "--config.model.dtype=fp8": "must be one of float32, bfloat16",
    "--config.model.kernel=flash": "kernel='flash'",
    "--config.model.remat=everything": "remat='everything'",
    "--config.data.bos=never": "must be one of document, row",
    "--config.guard.skip=all": "must be one of nonfinite, spikes",
    "--config.guard.action=retry": "must be one of stop, rewind",
    "--config.name=../elsewhere": "the run's folder is named after it",
    # divisibility and combinations without sense
    "--config.model.num_kv_heads=3": "num_kv_heads may be 1, 2, 4",
    "--config.model.head_dim=7": "must be a whole even number",
    "--config.model.rope.factor=2": "has no effect with scaling='none'",
    "--config.train.microbatches=3": "not a multiple of train.microbatches=3",
    "--config.model.moe.num_experts=4": "top_k=8 exceeds num_experts=4",
    "--config.model.gates=g1:in_dim=64": "in_dim=64 exceeds d_model=32",
    "--config.model.position=learned --config.model.max_seq_len=8": "set model.max_seq_len=16",
    "--config.data.bos=row --config.train.seq_len=1": "at least 2",
    "--config.guard.action=rewind --config.checkpoint.every=0": "no checkpoint to go back to",
    "--config.mesh.data=-1": "only one axis may take what is left",
    "--config.mesh.tensor=3": "does not fit 1 device",
    "--config.train.platform=tpu": "JAX found only cpu",
    # data
    "--config.data.source=sotu": "must be kind:name",
    "--config.data.source=": "data.source is empty",
    "--config.data.source=tfsd:sotu": "did you mean 'tfds'",
    "--config.data.source=tfds:sotus": "did you mean 'sotu'",
    "--config.data.source=tfds:sotu@0": "weight 0 must be positive",
    "--config.data.source=tfds:sotu@0,text:FOLDER/0.txt@0": "must be positive",
    "--config.data.source=tfds:sotu@1,text:FOLDER/0.txt": "has no @weight",
    "--config.data.source=synthetic:copy": "the only synthetic source is synthetic:backcopy",
    "--config.data.source=text:FOLDER/nothing/*.txt": "matches no file",
    "--config.data.source=text:FOLDER": "write text:FOLDER/*.txt",
    "--config.data.source=text:FOLDER/empty": "all 1 files are empty",
    "--config.data.source=text:FOLDER/latin1": "not UTF-8 at byte 3 (0xe9)",
    "--config.data.source=prepared:FOLDER/nothing": "holds no prepared corpus",
    "--config.data.tokenizer=words": "data.tokenizer='words'",
    "--config.data.tokenizer=bpe:many": "SIZE must be a number",
    "--config.data.tokenizer=bpe:12": "SIZE must be a number from 257",
    "--config.data.tokenizer=FOLDER/none.json": "cannot be read (No such file",
    "--config.data.tokenizer=FOLDER/broken.json": "not a tokenizer.json",
    "--config.model.vocab_size=100": "set model.vocab_size=257",
    # folders
    "--workdir=FOLDER/file": "cannot be written",
    "--workdir=/proc/nowhere/run": "cannot be written",
    "--mode=eval --workdir=FOLDER/nowhere": "no checkpoint",
    "--config.train.init_from=FOLDER/nothing": "does not exist",
    "--config.train.init_from=FOLDER/file": "not a GGUF file",
    # the command line itself
    "--mode=trian": "mode",
    "--wrokdir=x": "Unknown command line flag 'wrokdir'",
    "extra": "unexpected argument 'extra'",
}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin1").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "broken.json").write_text('{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}')
    (tmp_path / "file").write_text("not a folder")
    return write_recipe(tmp_path)


def test_every_mistake_is_told_in_a_line_and_exits_with_2(recipe, tmp_path):
    assert len(MISTAKES) >= 50
    texts = [key.replace("FOLDER", str(tmp_path)).split(" ") for key in MISTAKES]
    cases = [[recipe, f"--workdir={tmp_path}/run{number}", *text] for number, text in enumerate(texts)]
    wrong = []
    for key, (code, out, err, seconds) in zip(MISTAKES, run(tmp_path, *cases), strict=True):
        said = MISTAKES[key].replace("FOLDER", str(tmp_path))
        lines = told(err)
        fine = code == 2 and said in err and len(lines) <= 2 and lines[0].startswith("error: ")
        fine = fine and "Traceback" not in out + err and "compil" not in out and seconds < 10
        if not fine:
            wrong.append(f"{key}\n  exit code {code}, {seconds} s; must say {said!r}\n  {err[-600:]}\n  {out[-200:]}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(MISTAKES)}", *wrong])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["run.py"], "which recipe?"),
        (["run.py", "--config=configs/tniy.py"], "no such recipe: configs/tniy.py (did you mean 'configs/tiny.py'?)"),
        (["run.py", "--config=configs/tiny.py:gtae=g1"], "unknown recipe argument 'gtae' (did you mean 'gate'?)"),
        (["-m", "gatedattn", "prepaer"], "unknown command 'prepaer' (did you mean 'prepare'?)"),
        (["-m", "gatedattn", "prepare", "tfds:sotus", "/tmp/never", "--seq_len=8"], "did you mean 'sotu'"),
    ],
)
def test_as_a_user_types_it(command, said):
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 2 and said in done.stderr and len(told(done.stderr)) <= 2, done.stderr
