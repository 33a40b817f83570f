"""Standard streams that are closed, full, cut off, or in another encoding."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CAFE = "café".encode("latin-1")


def in_shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`slipstream` is the command of this source, in bash."""
    script = f"slipstream() {{ '{sys.executable}' -m slipstream \"$@\"; }}; set -o pipefail; {command}"
    whole = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, env=whole)


def test_without_standard_input_there_is_no_prompt(refused) -> None:
    assert "no prompt was given" in refused("generate", stdin=None)


@pytest.mark.parametrize("given", [None, ""], ids=["closed", "empty"])
def test_without_standard_input_a_chat_ends_at_once(cli, pair, given) -> None:
    result = cli("chat", *pair, stdin=given, code=0)
    assert result.out == ""
    assert "chat template" in result.said
    assert "error" not in result.said


@pytest.mark.parametrize("given", [(), ("-",)])
def test_standard_input_that_is_not_utf8_is_refused_with_its_first_byte(refused, given) -> None:
    said = refused("generate", *given, "-m", "/nonexistent", stdin=CAFE)
    assert said.startswith("error: the prompt is not UTF-8 text: it has byte 0xe9 at character 3.")


def test_chats_go_on_after_lines_that_are_not_utf8_and_such_arguments_are_refused(cli, pair) -> None:
    result = cli("chat", *pair, "-n", 2, stdin=CAFE + b"\nfor\n", code=0)
    assert result.said.count("error: the conversation is not UTF-8 text") == 1
    assert "2 tokens" in result.said
    broken = os.fsdecode(CAFE)
    assert "the prompt is not UTF-8 text" in cli("generate", broken, "-m", "/nonexistent").said
    for option in ("stop", "regex", "choice"):
        said = cli("generate", "x", "-m", "/nonexistent", f"--{option}", broken).said
        assert f"{option} is not UTF-8 text: it has byte 0xe9 at character 3" in said
    for arguments in ("serve --host", "serve --api-key", "serve --served-model-name", "trace", "chat --system"):
        said = cli(*arguments.split(), broken, "-m", "/nonexistent", code=2).said
        assert re.search(r"error: the \w+ is not UTF-8 text: it has byte 0xe9 at character 3", said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_said_and_fails() -> None:
    done = in_shell("slipstream drafters > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device.")
    assert "Exception ignored" not in done.stderr


def test_output_that_is_closed_or_not_read_to_its_end_is_no_bug() -> None:
    done = in_shell("slipstream drafters | (exec <&-); slipstream drafters --json | (exec <&-)")
    assert done.stderr == ""
    assert in_shell("slipstream drafters >&-").stderr == ""
    done = in_shell("slipstream generate 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_log_records_go_to_their_usual_place_again_after_a_command(cli, refused) -> None:
    log = logging.getLogger("slipstream")
    before = (log.propagate, *log.handlers)
    cli("drafters", code=0)
    refused("info", "nothing here")
    assert (log.propagate, *log.handlers) == before


def test_characters_that_the_output_cannot_have_are_escaped() -> None:
    done = in_shell("slipstream drafters --json; slipstream simulate --help", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback() -> None:
    """The first import of the command sends the signal."""
    script = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "slipstream.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
sys.meta_path.insert(0, Interrupting())
from slipstream.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
