"""What the compilers say, read."""

import pytest

from gatedattn.aot.compile import _notes_on_tpus, _too_large
from gatedattn.aot.topologies import parse


@pytest.mark.parametrize(
    "said,needed,limit",
    [
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 23.45G of 15.75G hbm. "
         "Exceeded hbm capacity by 7.70G.", 23.45, 15.75),
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries "
         "(16.58G) exceeds available HBM (15.75G). HLO module: jit_train_step.", 16.58, 15.75),
    ],
    ids=["libtpu 0.0.42", "libtpu 0.0.52"],
)  # fmt: skip
def test_out_of_memory_in_numbers(said, needed, limit):
    error = _too_large(RuntimeError(said))
    assert (error.needed, error.limit) == (round(needed * 2**30), round(limit * 2**30))


def test_another_error_is_not_taken_for_it():
    assert _too_large(RuntimeError("INVALID_ARGUMENT: No such compile option")) is None


def test_what_a_report_cannot_tell_is_said(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.52")
    assert _notes_on_tpus(parse("v5p-128")) == []
    assert "SparseCores" in _notes_on_tpus(parse("tpu7x-128"))[0]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.42")
    assert "twice" in _notes_on_tpus(parse("v5p-128"))[0]
