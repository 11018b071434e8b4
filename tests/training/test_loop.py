import contextlib
import dataclasses
import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from gatedattn.config import ConfigError
from gatedattn.training import loop, recorder
from gatedattn.training.checkpoint import Checkpoints

ONE = jax.devices()[:1]
CLOCKED = ("tokens_per_second", "mfu")


def lines(path, without=CLOCKED):
    return [{key: value for key, value in line.items() if key not in without} for line in recorder.read_lines(path)]


def interrupt_after(step, metrics, signum):
    """Send this process a signal once the step is in metrics.jsonl."""

    def watch():
        while not any(line["step"] >= step for line in recorder.read_lines(metrics)):
            time.sleep(0.001)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_an_interrupted_run_ends_up_where_an_undisturbed_one_does(text_config, tmp_path, capsys, signum):
    config = dataclasses.replace(text_config, train=dataclasses.replace(text_config.train, steps=40, log_every=1))
    whole = loop.train(config, tmp_path / "whole", ONE)
    assert whole.step == 40 and whole.signum is None

    interrupt_after(3, tmp_path / "parts/metrics.jsonl", signum)
    part = loop.train(config, tmp_path / "parts", ONE)
    assert part.signum == signum and 3 <= part.step < 40
    assert "The same command goes on" in capsys.readouterr().out
    resumed = loop.train(config, tmp_path / "parts", ONE)
    assert f"from step {part.step}" in capsys.readouterr().out
    assert resumed.step == 40
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    for name in recorder.FILES:
        assert lines(tmp_path / "parts" / name) == lines(tmp_path / "whole" / name)

    again = loop.train(config, tmp_path / "parts", ONE)
    assert "nothing to do" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_checkpoint_and_each_step_stands_once(text_config, tmp_path):
    loop.train(text_config, tmp_path / "run", ONE)
    expected = {name: lines(tmp_path / "run" / name) for name in recorder.FILES}
    with Checkpoints(tmp_path / "run") as checkpoints:  # as if killed at step 20, before the last save
        assert checkpoints.steps() == [16, 20]
        checkpoints.delete_after(16)
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.write('{"step": 21, "lo')
    loop.train(text_config, tmp_path / "run", ONE)
    assert {name: lines(tmp_path / "run" / name) for name in recorder.FILES} == expected
    assert [line["step"] for line in expected["metrics.jsonl"]] == [1, 5, 10, 15, 20]
    assert [line["step"] for line in expected["heads.jsonl"]] == [10, 20]
    assert [line["step"] for line in expected["eval.jsonl"]] == [10, 20]


def test_the_files_of_a_run(text_config, tmp_path):
    loop.train(text_config, tmp_path / "run", ONE)
    about = json.loads((tmp_path / "run/config.json").read_text())
    assert recorder.read_config(tmp_path / "run") == text_config
    assert about["kernel"] == "chunked" and about["device_count"] == 1 and about["versions"]["jax"] == jax.__version__
    assert about["data_summary"]["unigram_entropy"] > 0

    last = lines(tmp_path / "run/metrics.jsonl", without=())[-1]
    assert {
        "step",
        "tokens",
        "loss",
        "ce",
        "z_loss",
        "perplexity",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "epoch",
    } <= last.keys()
    assert last["tokens"] == 20 * 8 * 16
    assert ("mfu" in last) == (jax.default_backend() != "cpu")

    heads = lines(tmp_path / "run/heads.jsonl")[-1]
    layers, n = text_config.model.num_layers, text_config.model.num_heads
    for name in ("gate_mean", "gate_below_0.1", "gate_above_0.9", "bos_share", "attention_self", "attention_previous"):
        assert np.shape(heads[name]) == (layers, n), name
    assert np.shape(heads["activation_max"]) == (layers,)
    assert heads["sink_rate"] == np.mean(np.array(heads["bos_share"]) > 0.3)

    (evaluation,) = loop.evaluate_checkpoint(text_config, tmp_path / "run", ONE)
    assert evaluation["step"] == 20 and 0 < evaluation["bits_per_byte"] < evaluation["loss"] / np.log(2) * 1.1
    assert list((tmp_path / "run/tensorboard").glob("events*"))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_and_is_written_as_null(text_config, tmp_path):
    wild = dataclasses.replace(text_config.optimizer, learning_rate=1e30, warmup_steps=1, clip_norm=0.0)
    config = dataclasses.replace(text_config, optimizer=wild)
    with pytest.raises(loop.Diverged, match="steps in a row were bad"):
        loop.train(config, tmp_path / "run", ONE)
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text and "null" in text


def test_what_cannot_run_is_refused_before_anything_is_compiled(text_config, tmp_path):
    def refused(match, **groups):
        config = text_config
        for group, values in groups.items():
            config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
        with pytest.raises(ConfigError, match=match):
            loop.train(config, tmp_path / "never", ONE)

    other = "tpu" if jax.default_backend() != "tpu" else "cpu"
    refused(f"train.platform={other}, but JAX found only", train={"platform": other})
    refused("must multiply to", mesh={"data": 64, "fsdp": 1})
    refused("absent.txt", data={"source": f"text:{tmp_path}/absent.txt"})
    refused("model.vocab_size=100", model={"vocab_size": 100})
    assert not (tmp_path / "never/config.json").exists()
    with pytest.raises(ConfigError, match="no checkpoint"):
        loop.evaluate_checkpoint(text_config, tmp_path / "never", ONE)


@pytest.mark.slow
def test_a_run_outlives_a_full_disk(text_config, tmp_path, small_disk, monkeypatch, capsys):
    from gatedattn import data

    config = dataclasses.replace(
        text_config,
        train=dataclasses.replace(text_config.train, steps=24, log_every=1),
        checkpoint=dataclasses.replace(text_config.checkpoint, every=4, keep=9),
    )
    real_load = data.load
    with small_disk(tmp_path / "disk", "6m") as disk:
        filler = disk / "filler"

        def load(*args, **kwargs):
            found = real_load(*args, **kwargs)

            def fetch(numbers):  # the disk fills up once the first checkpoint is there, at batch 18 there is room again
                batch = numbers[0] // found.train.batch_size
                if batch == 9:
                    while not (disk / "run/checkpoints/4").exists():
                        time.sleep(0.01)
                    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(512))
                if batch == 18:
                    filler.unlink()
                return found.train.fetch(numbers)

            return dataclasses.replace(found, train=dataclasses.replace(found.train, fetch=fetch))

        monkeypatch.setattr("gatedattn.data.load", load)
        result = loop.train(config, disk / "run", ONE)
        out = capsys.readouterr().out
        assert "could not be written" in out and "No space left on device" in out and "training goes on" in out
        assert [line["step"] for line in lines(disk / "run/metrics.jsonl")] == list(range(1, 25))
        with Checkpoints(disk / "run", read_only=True) as checkpoints:
            kept = checkpoints.steps()  # what the failed save leaves is taken away, which may make room for the next one
            assert kept[0] == 4 and kept[-1] == 24 and len(kept) < 6
            like = jax.eval_shape(lambda: result.params)
            jax.tree.map(np.testing.assert_array_equal, checkpoints.restore_params(like, 24), result.params)
            checkpoints.restore_params(like, 4)


@pytest.mark.slow
def test_an_evaluation_that_a_signal_cuts_short_is_made_up_for(text_config, tmp_path, monkeypatch):
    config = dataclasses.replace(text_config, train=dataclasses.replace(text_config.train, steps=10))
    whole = loop.train(config, tmp_path / "whole", ONE)
    real = loop.evaluate.evaluate

    def signalled(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(loop.evaluate, "evaluate", signalled)
    part = loop.train(config, tmp_path / "part", ONE)
    assert part.signum == signal.SIGTERM and part.step == 10 and not lines(tmp_path / "part/eval.jsonl")
    monkeypatch.undo()
    again = loop.train(config, tmp_path / "part", ONE)
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)
    for name in recorder.FILES:
        assert lines(tmp_path / "part" / name) == lines(tmp_path / "whole" / name)


def test_a_changed_setting_is_refused_and_a_clock_that_jumps_is_not_noticed(text_config, tmp_path, monkeypatch):
    config = dataclasses.replace(text_config, train=dataclasses.replace(text_config.train, steps=6, log_every=1))
    clock, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: clock() - 86400 * (next(calls) > 20))  # a day back, once
    loop.train(config, tmp_path / "run", ONE)
    assert all(line.get("tokens_per_second", 1) > 0 for line in lines(tmp_path / "run/metrics.jsonl", without=()))
    other = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, clip_norm=0.5))
    with pytest.raises(ConfigError, match="optimizer.clip_norm was 1.0, is now 0.5"):
        loop.train(other, tmp_path / "run", ONE)
    (tmp_path / "0.txt").write_text("other text " * 50)
    with pytest.raises(ConfigError, match="the text behind data.source has changed since step 6"):
        loop.train(config, tmp_path / "run", ONE)
