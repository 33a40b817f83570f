import subprocess
import sys

import pytest

from slipstream.lab.provenance import OtherProcesses, _others

pytestmark = pytest.mark.skipif(_others() is None, reason="the system does not report it")


def test_own_child_processes_do_not_count_as_other_load():
    neighbours, before = OtherProcesses(), _others()
    code = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert neighbours.share() is not None
    assert 0 <= neighbours.share() <= 1.1
    assert _others() - before >= -0.1  # the child's half second was taken off again
