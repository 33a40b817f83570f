"""What a container leaves to a process."""

from pathlib import Path

import pytest
import torch

from slipstream.host import machine
from slipstream.host.machine import container_memory

USED = "anon 300\nfile 500\nshmem 50\ninactive_file 150\nactive_file 250\n"


def group(folder: Path, limit: str, current: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(current + "\n")
    (folder / "memory.stat").write_text(USED)


def test_the_memory_of_a_container_is_its_limit_without_what_is_in_use(tmp_path: Path) -> None:
    """Pages of files are not in use: they are given up when memory is needed."""
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/container\n")
    assert container_memory(tmp_path, own) is None
    group(tmp_path / "pod" / "container", "max", "800")
    assert container_memory(tmp_path, own) is None
    group(tmp_path / "pod", "5000", "900")
    assert container_memory(tmp_path, own) == 5000 - (900 - 400)
    group(tmp_path / "pod" / "container", "2000", "800")
    assert container_memory(tmp_path, own) == 2000 - (800 - 400)
    group(tmp_path / "pod" / "container", "2000", "3000")
    assert container_memory(tmp_path, own) == 0


def test_the_memory_of_older_control_groups_is_read(tmp_path: Path) -> None:
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("1000\n")
    (old / "memory.usage_in_bytes").write_text("700\n")
    (old / "memory.stat").write_text("cache 500\ninactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n")
    assert container_memory(tmp_path, tmp_path / "nothing") == 1000 - (700 - 300)


def test_a_plan_has_no_more_memory_than_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((2**21, 2**21), (2**60, 2**50)):
        monkeypatch.setattr(machine, "container_memory", lambda limit=limit: limit)
        assert machine.available_bytes(torch.device("cpu")) <= most
