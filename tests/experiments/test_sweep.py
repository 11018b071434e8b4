"""The Bigram-Backcopy sweep: arms, records, table and figure, and what it leaves out when run again."""

import json

import pytest

from experiments.backcopy import sweep
from gatedattn.config import ConfigError, to_mapping


def test_arms_differ_from_the_baseline_as_their_names_say():
    configs = {arm: to_mapping(sweep.config_of(arm, 10)) for arm in sweep.ARMS}
    assert len({json.dumps({k: v for k, v in c.items() if k != "name"}) for c in configs.values()}) == len(configs)
    for gate in sweep.GATES:
        assert configs[gate]["model"] == configs["baseline"]["model"] | {"gates": gate}
    assert configs["rope, g1"]["model"]["position"] == "rope" and configs["muon, 4 heads"]["optimizer"]["name"] == "muon"


@pytest.mark.slow
def test_an_arm_from_training_to_table(tmp_path, capsys):
    argv = [f"--out={tmp_path}", "--arms=muon, 4 heads, g1", "--seeds=2", "--steps=2"]
    sweep.main(argv)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [p["step"] for p in record["probes"]] == [1, 2] and len(record["probes"][0]["loss"]) == 2
    first, second = record["probes"][0]["loss"]
    assert first != second  # the seeds differ, in parameters and in data
    assert record["probes"][1]["loss"][0] < first < 4.5
    row = (tmp_path / "table.md").read_text().splitlines()[2]
    assert row.startswith("| muon, 4 heads, g1 |") and row.count("±") == len(sweep.COLUMNS)
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    before = path.stat().st_mtime_ns
    capsys.readouterr()
    sweep.main(argv)
    assert path.stat().st_mtime_ns == before and "step 1" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds 2 steps of 2 seeds"):
        sweep.main([*argv[:-1], "--steps=3"])
    with pytest.raises(ConfigError, match="did you mean 'baseline'"):
        sweep.main([argv[0], "--arms=baselin"])
