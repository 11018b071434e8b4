import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gatedattn.config import ConfigError
from gatedattn.training import workdir

HOLD = """
import sys, time
from pathlib import Path
from gatedattn.training import workdir
with workdir.opened(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_run_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path):
    folder = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by another run .process {other.pid} on ") as error:
            with workdir.opened(folder):
                pass
        assert len(str(error.value).splitlines()) == 1
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    with workdir.opened(folder):  # the lock file is still there, the lock is not
        assert str(other.pid) not in (folder / workdir.LOCK).read_text()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} "):
            with workdir.opened(folder):
                pass
    (folder / workdir.LOCK).write_bytes(b"\xff{")
    with workdir.opened(folder):
        pass


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path, small_disk):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file/run", Path("/proc/nowhere/run")):
        with pytest.raises(ConfigError, match="cannot be written .* give another"):
            with workdir.opened(path):
                pass
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(ConfigError, match="cannot be written .Read-only file system"):
            with workdir.opened(disk):
                pass
