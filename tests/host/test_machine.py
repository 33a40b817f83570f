"""What a container leaves to a process."""

from pathlib import Path

import pytest
import torch

from slipstream.host import machine
from slipstream.host.machine import container_memory, container_quota

USED = "anon 300\nfile 500\nshmem 50\ninactive_file 150\nactive_file 250\n"


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def memory(folder: Path, limit: str, current: str) -> None:
    group(folder, memory__max=limit + "\n", memory__current=current + "\n", memory__stat=USED)


def test_the_memory_of_a_container_is_its_limit_without_what_is_in_use(tmp_path: Path) -> None:
    """Pages of files are not in use: they are given up when memory is needed."""
    groups = tmp_path / "cgroup"
    groups.write_text("0::/pod/container\n")
    assert container_memory(tmp_path, groups) is None
    memory(tmp_path / "pod" / "container", "max", "800")
    assert container_memory(tmp_path, groups) is None
    memory(tmp_path / "pod", "5000", "900")
    assert container_memory(tmp_path, groups) == 5000 - (900 - 400)
    memory(tmp_path / "pod" / "container", "2000", "800")
    assert container_memory(tmp_path, groups) == 2000 - (800 - 400)
    memory(tmp_path / "pod" / "container", "2000", "3000")
    assert container_memory(tmp_path, groups) == 0


def test_the_memory_of_older_control_groups_is_read(tmp_path: Path) -> None:
    stat = "cache 500\ninactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n"
    limits = {"memory__limit_in_bytes": "1000\n", "memory__usage_in_bytes": "700\n", "memory__stat": stat}
    group(tmp_path / "memory", **limits)
    assert container_memory(tmp_path, tmp_path / "nothing") == 1000 - (700 - 300)


def test_a_plan_has_no_more_memory_than_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((2**21, 2**21), (2**60, 2**50)):
        monkeypatch.setattr(machine, "container_memory", lambda limit=limit: limit)
        assert machine.available_bytes(torch.device("cpu")) <= most


def test_quotas_of_control_groups_version_2(tmp_path: Path) -> None:
    """The lowest quota of the own group and its parents."""
    root, groups = group(tmp_path / "cgroup"), tmp_path / "self"
    groups.write_text("0::/kube/pod\n")
    assert container_quota(root, groups) is None
    group(root / "kube" / "pod", cpu__max="max 100000\n")
    assert container_quota(root, groups) is None
    group(root / "kube" / "pod", cpu__max="350000 100000\n")
    assert container_quota(root, groups) == 3.5
    group(root / "kube", cpu__max="150000 100000\n")
    assert container_quota(root, groups) == 1.5
    group(root, cpu__max="50000 100000\n")  # as seen inside a container
    assert container_quota(root, groups) == 0.5
    group(root / "other", cpu__max="1000 100000\n")
    assert container_quota(root, groups) == 0.5


def test_quotas_of_control_groups_version_1(tmp_path: Path) -> None:
    root, groups = tmp_path / "cgroup", tmp_path / "self"
    groups.write_text("4:cpu,cpuacct:/docker/x\n1:name=systemd:/docker/x\n")
    group(root / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert container_quota(root, groups) is None
    group(root / "cpu", cpu__cfs_quota_us="250000\n")
    assert container_quota(root, groups) == 2.5


@pytest.mark.parametrize("content", ["", "max", "many 100000", "100000", "\x00"])
def test_what_cannot_be_read_is_no_limit(content: str, tmp_path: Path) -> None:
    root, groups = group(tmp_path / "cgroup", cpu__max=content), tmp_path / "self"
    assert container_quota(root, groups) is None
    groups.write_text("nonsense\n0::\n0::/../..\n::::\n")
    assert container_quota(root, groups) is None
    assert container_quota(tmp_path / "nowhere", tmp_path / "nothing") is None
