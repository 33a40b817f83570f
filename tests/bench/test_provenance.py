import os
import signal
import subprocess
import sys

import pytest

from slipstream.bench.provenance import _others, public_values


def test_folders_of_this_machine_are_removed_from_values_at_any_depth():
    card = {"root": "/home/me/models/target", "id": "org/name", "parts": [{"of": "at /srv/data/x.json, 3"}, 1, None]}
    assert public_values(card) == {"root": "target", "id": "org/name", "parts": [{"of": "at x.json, 3"}, 1, None]}


@pytest.mark.skipif(not _others(), reason="the system does not report it")
def test_processes_that_this_one_started_are_not_other_work() -> None:
    """Also while they run, and those that they have started; a process whose parent has ended is another one."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        below = int(child.stdout.readline())
        try:
            assert not {child.pid, below} & set(_others())
            child.communicate()
            assert below in _others()
        finally:
            os.kill(below, signal.SIGKILL)
