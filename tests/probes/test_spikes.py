"""Loss spikes against the definition written as a loop, and curves as people really log them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gatedattn import __main__ as cli
from gatedattn.config import ConfigError
from gatedattn.probes import spikes


def loop(values):
    """The definition, point by point: rises and limits."""
    rise, noise, limit = np.full((3, len(values)), np.nan)
    limit[:] = np.inf

    def median(x, t):
        known = x[max(0, t - 50) : t]
        known = known[~np.isnan(known)]
        return np.median(known) if len(known) >= 10 else np.nan

    for t in range(len(values)):
        rise[t] = values[t] - median(values, t)
        noise[t] = abs(rise[t] - median(rise, t))
        if not np.isnan(sigma := 1.4826 * median(noise, t)):
            limit[t] = max(0.1, 8 * sigma)
    return rise, limit


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200), st.integers(0, 1000), st.sampled_from([0.001, 0.03, 1.0]))
def test_equals_the_definition(length, seed, noise):
    rng = np.random.default_rng(seed)
    values = 2 + noise * rng.standard_normal(length) + 3 * (rng.random(length) < 0.05)
    for got, expected in zip(spikes.rises(values), loop(values)):
        np.testing.assert_allclose(got, expected, atol=1e-12)


def falling(points=400):
    """The loss of a quiet run."""
    steps = np.arange(1, points + 1) * 10
    return steps, 2 + 5 * np.exp(-steps / 300) + 0.01 * np.random.default_rng(0).standard_normal(points)


def test_planted_spikes_are_found_and_noise_is_not():
    steps, values = falling()
    assert spikes.detect(spikes.Curve.of("quiet", steps, values)) == []
    values[200:203] += [0.5, 1.5, 0.7]
    values[300] += 0.2
    first, second = spikes.detect(spikes.Curve.of("spiky", steps, values))
    assert (first.start, first.end, first.length) == (2010, 2030, 3)
    assert (second.start, second.end, second.length) == (3010, 3010, 1)
    assert first.height == pytest.approx(1.5, abs=0.05) and second.height == pytest.approx(0.2, abs=0.05)
    # What is large for a quiet run is noise in a noisy one: the limit follows the deviation.
    noisy = values + 0.1 * np.random.default_rng(1).standard_normal(len(values))
    assert [s.start for s in spikes.detect(spikes.Curve.of("noisy", steps, noisy))] == [2020]


def test_on_the_way_down():
    """A loss that falls steadily lies below its running median without being noisy."""
    values = 10 - 0.02 * np.arange(200) + 0.01 * np.random.default_rng(0).standard_normal(200)
    values[150] += 1
    (spike,) = spikes.detect(spikes.Curve.of("falling", np.arange(200), values))
    assert spike.start == spike.end == 150 and spike.height == pytest.approx(1 - 25.5 * 0.02, abs=0.05)


def test_order_duplicates_and_gaps():
    steps, values = falling()
    values[200] += 1
    clean = spikes.Curve.of("clean", steps, values)
    order = np.random.default_rng(0).permutation(len(steps))
    # Values overwritten later, shuffled, with NaN, infinities and points without a step between.
    messy = spikes.Curve.of(
        "messy",
        np.concatenate([steps[:7], steps[order], [5, 15, 25, np.nan]]),
        np.concatenate([np.full(7, 9.0), values[order], [np.nan, np.inf, -np.inf, 1.0]]),
    )
    np.testing.assert_array_equal(messy.steps, clean.steps)
    np.testing.assert_array_equal(messy.values, clean.values)
    assert (messy.missing, messy.nonfinite, messy.duplicates) == (1, 3, 7) and messy.unordered > 100
    assert spikes.detect(messy) == spikes.detect(clean) != []


def test_jsonl(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"step": 1, "loss": 3.0, "lr": 0.1}', '{"step": 2, "loss": null}', '{"step": 3, "lr": 0.2}', '{"step": 4, "loss": NaN}',
        '{"step": 5, "loss": -Infinity}', '{"step": 6, "loss": "2.5"}', '{"loss": 1}', "", '{"step": 7, "lo',
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    for block in (1 << 24, 1):  # all at once, and line by line
        monkeypatch.setattr(spikes, "BLOCK", block)
        if block == 1:  # the columns are those of the first block
            path.write_text("\n".join(lines[:1] + lines[2:]))
        (curve,) = spikes.read(path)
        assert curve.name == str(path) and curve.steps.tolist() == [1, 6] and curve.values.tolist() == [3.0, 2.5]
        assert (curve.missing, curve.nonfinite) == (2, 3 if block > 1 else 2)
    lr, loss = spikes.read(path, ["lr", "loss"])
    assert lr.values.tolist() == [0.1, 0.2] and lr.missing > 0 and loss.name == f"{path}:loss"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_of_several_runs(tmp_path, delimiter):
    path = tmp_path / "export.csv"
    rows = [
        ["Step", "a - train/loss", "a - train/loss__MIN", "b - train/loss", "Wall time"],
        ["2", "2.5", "2.5", "", "1"], ["1", "3", "3", "nan", "2"], ["3", "inf", "2", "1e-1", "3"],
    ]  # fmt: skip
    path.write_text("\n".join(delimiter.join(row) for row in rows) + "\n")
    a, b = spikes.read(path)
    assert (a.name, b.name) == (f"{path}:a - train/loss", f"{path}:b - train/loss")
    assert a.steps.tolist() == [1, 2] and a.values.tolist() == [3, 2.5] and (a.nonfinite, a.missing, a.unordered) == (1, 0, 1)
    assert b.values.tolist() == [0.1] and (b.nonfinite, b.missing) == (1, 1)


def test_what_cannot_be_read_is_told(tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text("step,loss\n1,2\n2,two\n")
    with pytest.raises(ConfigError, match="two"):
        spikes.read(path)
    with pytest.raises(ConfigError, match="no column 'los' .did you mean 'loss'"):
        spikes.read(path, ["los"])
    path.write_text("")
    with pytest.raises(ConfigError, match="empty"):
        spikes.read(path)
    with pytest.raises(ConfigError, match="No such file"):
        spikes.read(tmp_path / "absent.csv")


def test_command(tmp_path, capsys):
    steps, values = falling()
    quiet, spiky = values.tolist(), values.copy()
    spiky[200] += 1
    for name, curve in (("quiet", quiet), ("spiky", spiky.tolist())):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps({"step": int(s), "loss": v}) + "\n" for s, v in zip(steps, curve))
        (tmp_path / name / "metrics.jsonl").write_text(text)
    assert cli.main(["spikes", str(tmp_path / "spiky" / "metrics.jsonl"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (event,) = answer["events"]
    assert answer["curve"].endswith("metrics.jsonl") and event["start"] == event["end"] == 2010
    assert event["height"] == pytest.approx(1, abs=0.05)
    assert cli.main(["spikes", str(tmp_path / "quiet"), str(tmp_path / "spiky")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["curve", "points"] and len(table) == 5 and "steps 2010 to 2010, 1 points" in table[4]
    assert cli.main(["spikes", str(tmp_path / "nothing.csv")]) == 2
    assert "No such file" in capsys.readouterr().err
