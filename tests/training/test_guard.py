import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatedattn.config import GuardConfig
from gatedattn.training import guard, loop, recorder
from gatedattn.training import step as steps
from gatedattn.training.resume import PASSED_OVER

ONE = jax.devices()[:1]
LENGTH = 80


def reference(config, values):
    """Reason and whether the update is applied for each (loss, gradient norm), in plain numpy."""
    kept, out = [], []
    for x in values:
        history = np.array(kept[-config.window :], np.float32).reshape(-1, 2)
        reason = 0 if np.isfinite(x).all() else guard.NONFINITE
        if not reason and len(history) >= min(config.window, guard.WARM_UP):
            m = np.median(history, axis=0)
            deviation = 1.4826 * np.median(np.abs(history - m), axis=0)
            rise = np.array([config.loss_rise, config.grad_rise * m[1]])
            high = x > m + np.maximum(rise, config.deviations * deviation)
            reason = int(guard.LOSS * high[0] + guard.GRADIENT * high[1])
        applied = reason == 0 or config.skip == "nonfinite" and reason != guard.NONFINITE
        out.append((reason, applied))
        if applied:
            kept.append(x)
    return out


@jax.jit
def judged_by_window_of_12(values, nonfinite_only):
    def both(config):
        def body(carry, x):
            state, step = carry
            apply, state = guard.judge(config, state, step, x[0], x[1])
            return (state, step + 1), (apply, state.bad)

        (state, _), out = jax.lax.scan(body, (guard.init(config), jnp.int32(0)), values)
        return state, out

    configs = [GuardConfig(skip=skip, window=12, deviations=3.0) for skip in ("nonfinite", "spikes")]
    return jax.tree.map(lambda a, b: jnp.where(nonfinite_only, a, b), *map(both, configs))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(("nonfinite", "spikes")), st.floats(0, 0.3))
def test_it_is_the_running_median_and_the_robust_deviation(seed, skip, share):
    random = np.random.default_rng(seed)
    values = random.normal([3, 1], [0.05, 0.1], (LENGTH, 2)).astype(np.float32)
    odd = random.random((LENGTH, 2)) < share
    values = np.where(odd, random.choice([4.0, 3.2, np.nan, np.inf, 0.0, 2.5], (LENGTH, 2)), values).astype(np.float32)
    config = GuardConfig(skip=skip, window=12, deviations=3.0)
    expected = reference(config, values)
    state, (applied, bad) = jax.device_get(judged_by_window_of_12(values, skip == "nonfinite"))
    # The two medians are computed alike, but for the last bit: a value on the very threshold may fall on either side.
    assert list(applied) == [a for _, a in expected]
    assert list(bad) == list(np.cumsum([reason > 0 for reason, _ in expected]))
    assert state.skipped == sum(not a for _, a in expected)
    streak = next((i for i, (_, a) in enumerate(reversed(expected)) if a), LENGTH)
    assert state.in_row == streak
    lines = guard.records(state, 0)
    found = [(step, reason) for step, (reason, _) in enumerate(expected, 1) if reason]
    assert [line["step"] for line in lines] == [step for step, _ in found][-guard.RECORDS :]
    for line, (_, reason) in zip(lines, found[-guard.RECORDS :], strict=True):
        assert line["reason"] == ", ".join(text for bit, text in guard.REASONS.items() if reason & bit)


def poisoned(batch):
    """An id outside the vocabulary: its embedding is not a number."""
    return batch | {"tokens": np.where(np.arange(batch["tokens"].shape[1]) == 3, 10**6, batch["tokens"]).astype(np.int32)}


def test_a_poisoned_batch_changes_nothing_but_the_step(config, batch):
    train_step = jax.jit(steps.make_train_step(config))
    state, _ = train_step(steps.initialize(config), batch)
    after, metrics = train_step(state, poisoned(batch))
    assert not np.isfinite(metrics["loss"])
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(state, name))
    assert (int(after.step), int(after.guard.skipped), int(after.guard.in_row)) == (2, 1, 1)
    # The next step is the one that would have been taken without it, at the learning rate of its own step.
    good, _ = train_step(after, batch)
    direct, _ = train_step(state._replace(step=after.step), batch)
    jax.tree.map(np.testing.assert_array_equal, good.params, direct.params)
    assert int(good.guard.in_row) == 0


@pytest.fixture
def run(text_config, tmp_path, monkeypatch):
    """Train with the given batches poisoned. Returns the folder."""

    def train(name, batches, **settings):
        config = dataclasses.replace(
            text_config,
            train=dataclasses.replace(text_config.train, steps=24, log_every=2),
            checkpoint=dataclasses.replace(text_config.checkpoint, every=4, keep=3),
            guard=GuardConfig(**settings),
        )
        load = loop_load

        def poisoning(*args, **kwargs):
            data = load(*args, **kwargs)
            fetch = data.train.fetch

            def rows(numbers):
                batch = fetch(numbers)
                return poisoned(batch) if numbers[0] // data.train.batch_size in batches else batch

            return dataclasses.replace(data, train=dataclasses.replace(data.train, fetch=rows))

        monkeypatch.setattr("gatedattn.data.load", poisoning)
        return loop.train(config, tmp_path / name, ONE)

    from gatedattn import data

    loop_load = data.load
    return train


@pytest.mark.slow
def test_a_bad_step_is_logged_with_its_rows_and_the_run_goes_on(run, tmp_path, capsys):
    run("run", {10})
    last = recorder.read_lines(tmp_path / "run/metrics.jsonl")[-1]
    assert (last["step"], last["skipped_steps"], last["bad_steps"]) == (24, 1, 1) and np.isfinite(last["loss"])
    (line,) = recorder.read_lines(tmp_path / "run/bad_steps.jsonl")
    assert (line["step"], line["batch"], line["reason"], line["update"]) == (11, 10, "not finite", "skipped")
    assert line["loss"] is None and len(next(iter(line["rows"].values()))) == 8
    assert "step 11: not finite" in capsys.readouterr().out


@pytest.mark.slow
def test_after_some_in_a_row_the_run_stops_and_says_what_to_do(run, tmp_path):
    with pytest.raises(loop.Diverged, match="5 steps in a row were bad.* optimizer.learning_rate"):
        run("run", set(range(9, 99)), patience=4)
    assert [line["step"] for line in recorder.read_lines(tmp_path / "run/bad_steps.jsonl")] == [10, 11, 12, 13, 14]
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()


@pytest.mark.slow
def test_or_it_is_rewound_and_passes_over_those_rows(run, tmp_path, capsys):
    bad = {9, 10, 11, 12}
    rewound = run("rewound", bad, patience=3, action="rewind")
    assert "rewinding to step 8" in capsys.readouterr().out
    (event,) = json.loads((tmp_path / "rewound" / PASSED_OVER).read_text())
    assert set(event["batches"]) < bad and event["rewound_to"] == 8 and event["bad_steps"][0] == 10
    metrics = recorder.read_lines(tmp_path / "rewound/metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, *range(2, 25, 2)]

    # As a run that had never been given those rows.
    (tmp_path / "spared").mkdir()
    (tmp_path / "spared" / PASSED_OVER).write_text((tmp_path / "rewound" / PASSED_OVER).read_text())
    spared = run("spared", bad, patience=3)
    jax.tree.map(np.testing.assert_array_equal, rewound.params, spared.params)


@pytest.mark.slow
def test_a_run_is_not_rewound_for_ever(run):
    with pytest.raises(loop.Diverged, match="rewound 2 times already"):
        run("run", set(range(9, 99)), patience=2, action="rewind", rewinds=2)
