import contextlib
import json
import time

import pytest
from tensorboardX import summary

from gatedattn.training.journal import Journal


def test_lines_wait_for_room_on_a_full_disk(tmp_path, capsys, small_disk):
    with small_disk(tmp_path / "disk", "1m") as disk:
        journal = Journal(disk, ("a.jsonl", "b.jsonl"))
        journal.line("a.jsonl", '{"step": 0}')
        journal.sync()
        filler = disk / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(512))
        for step in range(1, 2000):
            journal.line("a.jsonl", json.dumps({"step": step, "text": "x" * 90}))
        journal.line("b.jsonl", '{"step": 5}')
        journal.events(5, lambda: [summary.scalar("x", 1.0)] * 1000)
        journal.sync()
        out = capsys.readouterr().out
        assert out.count("No space left on device") == 1 and "training goes on" in out
        filler.unlink()
        journal.line("b.jsonl", '{"step": 6}')
        journal.close()
        assert [json.loads(line)["step"] for line in (disk / "a.jsonl").read_text().splitlines()] == list(range(2000))
        assert (disk / "b.jsonl").read_text() == '{"step": 5}\n{"step": 6}\n'


def test_a_slow_file_system_does_not_hold_up_whoever_writes(tmp_path):
    journal = Journal(tmp_path, ("a.jsonl",))
    journal.sync()

    class Slow:
        def __init__(self, file):
            self.file, self.fileno, self.close = file, file.fileno, file.close

        def write(self, text):
            time.sleep(0.2)
            return self.file.write(text)

    journal.files["a.jsonl"] = Slow(journal.files["a.jsonl"])
    began = time.perf_counter()
    for step in range(5):
        journal.line("a.jsonl", str(step))
    assert time.perf_counter() - began < 0.5
    journal.sync()
    assert time.perf_counter() - began > 0.9 and (tmp_path / "a.jsonl").read_text() == "0\n1\n2\n3\n4\n"
    journal.close()


def test_a_fault_of_ours_is_not_lost_in_the_thread(tmp_path):
    journal = Journal(tmp_path, ("a.jsonl",))
    with pytest.raises(ZeroDivisionError):
        journal.events(1, lambda: 1 / 0)
        journal.sync()
