"""Loading opens each file of a checkpoint once, as the kernel counts it: libraries that open files are counted, too."""

import copy
import ctypes
import os
import pickle
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream import LLM, check_pair, load_model_pair, zoo
from slipstream.checkpoints.checkpoint import Checkpoint
from slipstream.cli.loading import check_arguments, describe_target
from slipstream.cli.options import ModelOptions
from slipstream.errors import CheckpointError
from slipstream.targets.describe import describe
from slipstream.targets.described import Described
from tests.checkpoints.gguf_files import tiny_model
from tests.checkpoints.tiny_hybrids import FILES

OPENED, CLOSED, IS_FOLDER = 0x20, 0x18, 0x40000000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify counts the opens")


@pytest.fixture
def opens() -> Iterator[Callable[[Path], Callable[[], Counter[str]]]]:
    """Watch the files of a folder; what is returned tells how often each was opened since. Closing is watched, too:
    the kernel joins equal events that follow one another."""
    libc, watched = ctypes.CDLL(None, use_errno=True), list[int]()

    def watch(folder: Path) -> Callable[[], Counter[str]]:
        queue = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(queue, os.fsencode(folder), OPENED | CLOSED) > 0
        watched.append(queue)

        def seen() -> Counter[str]:
            events, counts, at = os.read(queue, 2**20), Counter[str](), 0
            while at < len(events):
                _, mask, _, length = struct.unpack_from("iIII", events, at)
                if mask & OPENED and not mask & IS_FOLDER:
                    counts[events[at + 16 : at + 16 + length].rstrip(b"\0").decode()] += 1
                at += 16 + length
            return counts

        return seen

    yield watch
    for queue in watched:
        os.close(queue)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the embedded models that no other process opens."""
    shutil.copytree(zoo.HERE / "models", tmp_path / "models")
    monkeypatch.setattr(zoo, "HERE", tmp_path)
    return tmp_path / "models"


@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("draft", ["embedded", "eagle3", "medusa"])
def test_loading_a_pair_opens_each_of_its_files_once(draft: str, executor: str, models: Path, opens) -> None:
    of_target, of_draft = opens(models / "target"), opens(models / ("draft" if draft == "embedded" else draft))
    LLM("embedded", draft, executor=executor)
    for seen in (of_target(), of_draft()):
        assert {"config.json", "model.safetensors"} <= seen.keys()
        assert set(seen.values()) == {1}


def test_a_checkpoint_that_is_open_is_read_once_however_many_ask(models: Path, opens) -> None:
    seen = opens(models / "target")
    target = Checkpoint.open("embedded")
    check_pair(target, Checkpoint.open("embedded", "draft"))
    for _ in range(2):
        load_model_pair(target, "embedded")
    assert set(seen().values()) == {1}


def test_a_copy_or_pickle_of_a_checkpoint_is_opened_anew(models: Path) -> None:
    described = describe("embedded")
    assert described.stored
    for each in (pickle.loads(pickle.dumps(described)), copy.deepcopy(described)):
        assert each.checkpoint.place == described.checkpoint.place
        assert each.checkpoint.tensors.keys() == described.checkpoint.tensors.keys()


@pytest.mark.parametrize("mtp", [True, False])
def test_the_command_line_hands_on_the_target_that_it_opened_to_see_mtp_layers(
    mtp: bool, tmp_path: Path, opens
) -> None:
    shutil.copyfile(FILES / ("qwen35.gguf" if mtp else "lfm2.gguf"), tmp_path / "a.gguf")
    seen = opens(tmp_path)
    models = ModelOptions(target=str(tmp_path / "a.gguf"))
    assert models.names == (("suffix", "mtp") if mtp else ("suffix",))
    target, draft, _ = check_arguments(models)
    assert describe_target(models, target if isinstance(target, Described) else None).mtp_layers == mtp
    if not mtp:  # the weights of a decoder are unmapped before its MTP layer is read
        LLM(target, draft)
    assert seen() == {"a.gguf": 1}


def test_a_gguf_file_is_opened_once(tmp_path: Path, opens) -> None:
    (tmp_path / "a.gguf").write_bytes(tiny_model())
    seen = opens(tmp_path)
    LLM(tmp_path / "a.gguf", executor="torch")
    assert seen() == {"a.gguf": 1}


def test_a_file_that_changed_since_it_was_opened_is_refused(models: Path) -> None:
    target, file = describe("embedded"), models / "target" / "model.safetensors"
    assert target.stored
    file.write_bytes(file.read_bytes() + b"0")
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        target.load()
