import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gatedattn.config import ConfigError, MeshConfig, to_mapping
from gatedattn.training import resume


def changed(config, **groups):
    for group, values in groups.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    return config


def test_what_may_change_may_and_what_may_not_is_named(config, tmp_path):
    saved = to_mapping(config)
    free = changed(
        config, train={"steps": 99, "log_every": 1}, eval={"every": 7}, checkpoint={"keep": 5}, model={"remat": "full"}
    )
    free = dataclasses.replace(free, mesh=MeshConfig(data=2), name="other")
    assert set(resume.check(free, saved, tmp_path, 5)) == {
        "name", "train.steps", "train.log_every", "eval.every", "checkpoint.keep", "model.remat", "mesh.data",
    }  # fmt: skip
    other = changed(config, train={"seed": 1}, optimizer={"learning_rate": 1.0}, model={"gates": "g2"})
    with pytest.raises(ConfigError) as error:
        resume.check(other, saved, tmp_path, 5)
    text = str(error.value)
    assert "model.gates was 'g1', is now 'g2'" in text and "train.seed was 0, is now 1" in text
    assert "may_change=model.gates,train.seed,optimizer.learning_rate" in text and len(text.splitlines()) <= 2
    allowed = changed(other, checkpoint={"may_change": "model.gates, optimizer.*,train.seed"})
    assert resume.check(allowed, saved, tmp_path, 5)["train.seed"] == (0, 1)
    with pytest.raises(ConfigError, match="no setting 'optimiser.lr'"):
        resume.check(changed(other, checkpoint={"may_change": "optimiser.lr"}), saved, tmp_path, 5)


def test_a_setting_that_did_not_exist_then_had_its_default(config, tmp_path):
    saved = to_mapping(config)
    del saved["guard"], saved["train"]["init_from"]
    saved["train"]["gone"] = 3
    assert resume.check(config, saved, tmp_path, 5) == {}


def test_another_tokenizer_or_text_is_refused(config, tmp_path):
    saved, now = {"tokenizer": "a", "data": "b"}, {"tokenizer": "a", "data": "c"}
    with pytest.raises(ConfigError, match="the text behind data.source has changed since step 5"):
        resume.check_data(config, saved, now, tmp_path, 5)
    resume.check_data(changed(config, checkpoint={"may_change": "data.source"}), saved, now, tmp_path, 5)
    resume.check_data(config, saved, saved, tmp_path, 5)
    resume.check_data(config, {}, now, tmp_path, 5)  # an older checkpoint says nothing


@given(st.sets(st.integers(0, 60)), st.integers(0, 80))
def test_steps_read_the_batches_that_are_not_passed_over(passed, steps):
    over = resume.PassedOver.__new__(resume.PassedOver)
    over.batches = sorted(passed)
    read = [over.batch_number(step) for step in range(steps)]
    assert read == [number for number in range(200) if number not in passed][:steps]


def test_passed_over_batches_are_kept_on_disk(tmp_path):
    over = resume.PassedOver(tmp_path)
    over.add([3, 4], {"rewound_to": 2})
    again = resume.PassedOver(tmp_path)
    assert again.batches == [3, 4] and len(again) == 1 and again.events[0]["rewound_to"] == 2
    (tmp_path / resume.PASSED_OVER).write_text('[{"batches": 3}]')
    with pytest.raises(ConfigError, match="cannot be read"):
        resume.PassedOver(tmp_path)
