"""Collects the conditions of a measurement: machine, other processes, versions, commit, weights, prompts, command."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from slipstream import __version__
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.core.strict import JsonObject
from slipstream.drafters.draft_plan import DraftPlan
from slipstream.measure.configs import Contender

if TYPE_CHECKING:
    from slipstream.llm import LLM

ROOT = Path(__file__).resolve().parents[2]
"""The repository, if the package is in one."""
QUIET = 0.1
"""The report warns if other processes use more than this share of the machine's time."""
PACKAGES = ("torch", "transformers", "tokenizers", "numba", "numpy")


def digest(files: Iterable[Path]) -> str:
    """Return the first 16 hex digits of the SHA-256 over the contents of the files, in the given order."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


def text_digest(*texts: str) -> str:
    """Return the first 16 hex digits of the SHA-256 over texts and the places where each text ends."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def model(path: str | Path) -> dict[str, str | None]:
    """Return name and digest of a checkpoint. The name is the path within the repository, or, for other places, the
    name of the folder or file. For a hub id, the name is the id, and there is no digest."""
    file = Path(path).expanduser().resolve()
    if not file.exists():
        return {"name": str(path), "sha256": None}
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else file.name
    return {"name": name, "sha256": digest([file] if file.is_file() else sorted(file.glob("*.safetensors")))}


def machine() -> JsonObject:
    """Return CPU, accelerator, memory (bytes) and operating system."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "vector": [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags],
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None,
        "system": platform.platform(),
    }


class OtherProcesses:
    """Measures the load by other processes: the share of the machine's CPU time, 0 to 1, that neither this process nor
    its child processes used. None if the system does not report CPU times."""

    def __init__(self) -> None:
        self._start, self._used = monotonic(), _ticks_elsewhere()

    def share(self) -> float | None:
        now = _ticks_elsewhere()
        if not now or not self._used:
            return None
        # When a process ends, all its ticks are added to those of its parent, so only sums can be compared.
        seconds = max(0, sum(now.values()) - sum(self._used.values())) / os.sysconf("SC_CLK_TCK")
        return seconds / ((monotonic() - self._start) * (os.cpu_count() or 1))


def _ticks_elsewhere(proc: Path = Path("/proc")) -> dict[int, int]:
    """Return process id -> clock ticks used so far, for each other process, its ended children included (except for
    init, which inherits all orphans). Key 0: ticks that the host has taken from this virtual machine."""
    ticks, parents = dict[int, int](), dict[int, int]()
    for stat in proc.glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            fields = stat.read_text().rpartition(")")[2].split()  # a name may hold spaces
            parents[int(stat.parent.name)] = int(fields[1])
            ticks[int(stat.parent.name)] = sum(map(int, fields[11 : 13 if stat.parent.name == "1" else 15]))
    if not ticks:
        return {}
    started_here = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in started_here} - started_here:
        started_here |= more
    steal = int((proc / "stat").read_text().split("\n", 1)[0].split()[8])
    return {0: steal} | {process: used for process, used in ticks.items() if process not in started_here}


def commit() -> str | None:
    """Return the checked-out commit, with a note if files were changed; None outside the project's repository."""
    git = lambda *a: subprocess.run(["git", *a], cwd=ROOT, capture_output=True, text=True)  # noqa: E731
    try:
        if not (ROOT / ".git").exists():  # an installed package; a repository around it is not the project's
            return None
        head = git("rev-parse", "--short=12", "HEAD")
    except OSError:  # no git
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + (" and uncommitted changes" if git("status", "--porcelain").stdout.strip() else "")


def versions() -> dict[str, str]:
    """Return the versions of Slipstream, Python and the numerical libraries."""
    known = {"slipstream": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def command_line(arguments: Iterable[str] | None = None) -> str:
    """Return the running command, as typed in a shell."""
    words = list(sys.argv if arguments is None else arguments)
    program = Path(words[0]) if words else Path()
    name = program.parent.name if program.name == "__main__.py" else program.name.removesuffix(".py")
    return shlex.join([name, *words[1:]])


def public(text: str) -> str:
    """Return `text` without the folders of this machine: an absolute path keeps only its last name."""
    return re.sub(r"(?<![\w:/.-])~?(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)


def public_values(value: object) -> object:
    """Return JSON values with `public` applied to every string in them, except for keys."""
    if isinstance(value, dict):
        return {key: public_values(one) for key, one in value.items()}
    if isinstance(value, list):
        return [public_values(one) for one in value]
    return public(value) if isinstance(value, str) else value


def note_conditions(seed: int | None = None, **more: object) -> JsonObject:
    """Collect what every measurement records, as plain JSON values. more: other entries."""
    here = {"date": now(), "command": command_line(), "commit": commit(), "versions": versions(), "machine": machine()}
    return here | {"seed": seed, **more}


def note_provenance(llm: LLM, seed: int | None = None, **more: object) -> JsonObject:
    """Collect the conditions of a measurement with this engine, as plain JSON values."""
    return note_conditions(seed, **describe_engine(llm), **more)


def note_drafts(contenders: Iterable[Contender]) -> JsonObject:
    """Return path -> name and digest, for every checkpoint that these drafters load."""
    paths = [path for each in contenders for path in DraftPlan.of(each.drafter, each.options).checkpoints]
    return {str(path): model(Checkpoint.open(path, "draft").source) for path in paths}


def describe_engine(llm: LLM) -> JsonObject:
    """Return target, executor, dtype, device, rule, and a digest of the chat template."""
    import torch

    target, template = llm.target, getattr(llm.tokenizer, "chat_template", None)
    runtime, unnamed = target.capabilities.runtime, {"name": type(target).__name__, "sha256": None}
    on_gpu = target.device.type == "cuda"
    return {
        "target": model(runtime.checkpoint) if runtime and runtime.checkpoint else unnamed,
        "executor": runtime.backend if runtime else None,
        "dtype": str(runtime.dtype).removeprefix("torch.") if runtime else None,
        "quantize": runtime.quantize if runtime else None,
        "kv_dtype": runtime.kv_dtype if runtime else None,
        "device": f"{target.device} ({torch.cuda.get_device_name(target.device)})" if on_gpu else str(target.device),
        "torch_threads": torch.get_num_threads(),
        "rule": llm.rule.name,
        "template": None if template is None else text_digest(str(template)),
    }
