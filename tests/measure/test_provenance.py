import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.measure import provenance
from slipstream.measure.provenance import OtherProcesses, _ticks_elsewhere, public_values


def test_folders_of_this_machine_are_removed_from_values_at_any_depth():
    card = {"root": "/home/me/models/target", "id": "org/name", "parts": [{"of": "at /srv/data/x.json, 3"}, 1, None]}
    assert public_values(card) == {"root": "target", "id": "org/name", "parts": [{"of": "at x.json, 3"}, 1, None]}


@pytest.mark.skipif(not _ticks_elsewhere(), reason="the system does not report it")
def test_processes_that_this_one_started_are_not_other_work() -> None:
    """Also while they run, and those that they have started; a process whose parent has ended is another one."""
    script = (
        "import subprocess, sys; below = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL); "
        "print(below.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        below = int(child.stdout.readline())
        try:
            assert not {child.pid, below} & set(_ticks_elsewhere())
            child.communicate()
            assert below in _ticks_elsewhere()
        finally:
            os.kill(below, signal.SIGKILL)


def test_orphans_that_init_has_waited_for_are_not_other_work(tmp_path: Path) -> None:
    """Workers of a server that was started here end as children of init."""
    for process, parent in ((1, 0), (70, 1), (os.getpid(), 70)):
        (tmp_path / str(process)).mkdir()
        times = "5 6 700 800"  # user, system, and those of children that it has waited for
        (tmp_path / str(process) / "stat").write_text(f"{process} (a name) S {parent} {'0 ' * 9}{times} 20")
    (tmp_path / "stat").write_text("cpu 1 2 3 4 5 6 7 9\n")
    assert _ticks_elsewhere(tmp_path) == {0: 9, 1: 11, 70: 1511}


def test_what_a_process_used_before_the_start_is_not_counted_when_its_parent_waits_for_it(monkeypatch) -> None:
    ticks = iter([{70: 10, 71: 100_000}, {70: 100_025}])  # 71, a child of 70, has used 5 more and ended; 70 itself 10
    monkeypatch.setattr(provenance, "_ticks_elsewhere", lambda: next(ticks))
    seconds = iter([0.0, 1.0])
    monkeypatch.setattr(provenance, "monotonic", lambda: next(seconds))
    assert OtherProcesses().share() == pytest.approx(15 / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1))
