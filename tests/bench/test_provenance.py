import subprocess
import sys

import pytest

from slipstream.bench.provenance import OtherProcesses, _others, public_values


def test_folders_of_this_machine_are_removed_from_values_at_any_depth():
    card = {"root": "/home/me/models/target", "id": "org/name", "parts": [{"of": "at /srv/data/x.json, 3"}, 1, None]}
    assert public_values(card) == {"root": "target", "id": "org/name", "parts": [{"of": "at x.json, 3"}, 1, None]}


@pytest.mark.skipif(_others() is None, reason="the system does not report it")
def test_own_child_processes_do_not_count_as_other_load():
    neighbours, before = OtherProcesses(), _others()
    code = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert neighbours.share() is not None
    assert 0 <= neighbours.share() <= 1.1
    assert _others() - before >= -0.1  # the child's half second was taken off again
