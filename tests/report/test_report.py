"""The page of `python -m gatedattn report`: what is on it, and how it behaves in a browser."""

import base64
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from gatedattn.__main__ import main
from gatedattn.config import ConfigError
from gatedattn.report import build
from gatedattn.report.runs import Run, differences, thin

ROOT = Path(__file__).parents[2]
RUNS = [ROOT / "experiments/tiny/runs/none-0", ROOT / "experiments/tiny/runs/g1-0"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The committed runs of the tiny recipe; the gated one with three spikes put in, and a name that HTML must not believe."""
    folder = tmp_path_factory.mktemp("report")
    gated = folder / "<i>g1"
    shutil.copytree(RUNS[1], gated)
    lines = [json.loads(line) for line in (gated / "metrics.jsonl").read_text().splitlines()]
    for at in (60, 61, 90, 120):
        lines[at]["loss"] += 3
    (gated / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return build([RUNS[0], gated], folder / "report.html"), lines


def test_what_is_on_the_page(page):
    path, lines = page
    text = path.read_text()
    assert not re.findall("https?:", text.replace(get_plotlyjs(), "")), "something from the network"
    assert "<i>g1" not in text and "&lt;i&gt;g1" in text
    body = text[text.index("<body>") :]
    assert f"{json.loads((RUNS[0] / 'eval.jsonl').read_text().splitlines()[-1])['loss']:.4g}" in body
    assert "model.gates" in body and "train.seed = 0" in body
    spikes = re.findall(r"<tr><td>&lt;i&gt;g1</td>(<td>.*?)</tr>", body[body.index("Loss spikes") :])
    assert len(spikes) >= 3 and f"<td>{lines[60]['step']:,}</td><td>{lines[61]['step']:,}</td><td>2</td>" in "".join(spikes)


def test_head_maps_hold_what_was_recorded(page):
    text = page[0].read_text()
    maps = json.loads(re.search(r"const heads = (\{.*\});", text)[1])
    recorded = [json.loads(line) for line in (RUNS[0] / "heads.jsonl").read_text().splitlines()]
    first = maps["bos_share"][0]
    assert first["steps"] == [line["step"] for line in recorded]
    np.testing.assert_allclose(first["z"], [line["bos_share"] for line in recorded], atol=5e-5)
    assert [entry["run"] for entry in maps["gate_mean: g1"]] == ["&lt;i&gt;g1"]


def test_command_and_its_refusals(tmp_path, capsys):
    shutil.copytree(RUNS[0], tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run/report.html")
    assert "Differences" not in (tmp_path / "run/report.html").read_text()
    (tmp_path / "empty").mkdir()
    for argv, words in (
        ([str(tmp_path / "empty")], "no config.json of a run"),
        ([str(tmp_path / "absent")], "is not a folder"),
    ):
        assert main(["report", *argv]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(ConfigError, match="twice"):
        build([tmp_path / "run", tmp_path / "run"])


def test_a_run_without_probes_or_evaluations(tmp_path):
    shutil.copytree(RUNS[0], tmp_path / "run")
    (tmp_path / "run/heads.jsonl").unlink()
    (tmp_path / "run/eval.jsonl").write_text("")
    assert "const heads = {}" in build([tmp_path / "run"]).read_text()


def test_differences():
    a, b = Run.read(RUNS[0], "a"), Run.read(RUNS[1], "b")
    found = differences([a.config, b.config])
    assert found["model.gates"] == ["none", "g1"] and "train.steps" not in found


def test_thinning_keeps_the_spikes():
    x, y = np.arange(100_000), np.random.default_rng(0).normal(size=100_000)
    y[[777, 50_001]] = 99, -99
    a, b = thin(x, y)
    assert len(a) <= 4002 and {777, 50_001} <= set(a) and np.all(np.diff(a) > 0) and b.max() == 99 and b.min() == -99


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium chromium-driver)")
@pytest.mark.parametrize(
    "scheme, width", [*(pytest.param(s, 1200, marks=pytest.mark.slow) for s in ("light", "dark")), ("dark", 390)]
)
def test_in_a_browser(page, scheme, width, tmp_path):
    """No console errors, nothing wider than the screen, the slider moves every heat map, colours follow the system."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.execute_cdp_cmd("Network.enable", {})
        browser.execute_cdp_cmd(
            "Network.emulateNetworkConditions", {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        )
        browser.get(page[0].as_uri())
        assert browser.execute_script("return document.querySelectorAll('.js-plotly-plot').length") >= 7
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        spill = "return [...document.querySelectorAll('.js-plotly-plot')].map(p => p._fullLayout.width - p.clientWidth)"
        assert max(browser.execute_script(spill)) <= 1  # none is drawn over its neighbour
        ink = "return [...document.querySelectorAll('.js-plotly-plot')].map(p => p._fullLayout.font.color)"
        assert set(browser.execute_script(ink)) == {"#dfe3ea" if scheme == "dark" else "#1d2430"}
        shown = "return ['map0', 'map1'].map(id => document.getElementById(id).data[0].z)"
        last = browser.execute_script(shown)
        move = "const s = document.getElementById('step'); s.value = 0; s.dispatchEvent(new Event('input'))"
        browser.execute_script(move)
        first = browser.execute_script(shown)
        recorded = [json.loads(line) for line in (RUNS[0] / "heads.jsonl").read_text().splitlines()]
        for got, line in ((first, recorded[0]), (last, recorded[-1])):
            np.testing.assert_allclose(got[0], line["bos_share"], atol=5e-5)
        assert first[1] != last[1]
        choose = (
            "const q = document.getElementById('quantity'); q.value = 'gate_mean: g1'; q.dispatchEvent(new Event('change'))"
        )
        browser.execute_script(choose)
        assert browser.execute_script("return document.querySelectorAll('#maps > div').length") == 1
        # Every chart has drawn its lines (an svg path), the loss its crosses.
        assert browser.execute_script("return document.querySelectorAll('#chart0 .scatterlayer path.point').length") >= 3
        errors = [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        assert not errors, errors
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        (tmp_path / f"{scheme}-{width}.png").write_bytes(base64.b64decode(shot["data"]))
    finally:
        browser.quit()
