"""Worker threads, Python threads, forks and signals."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams, settings
from slipstream.backends.native import threads as native_threads
from slipstream.backends.native.packed_weights import Layout
from slipstream.backends.native.threads import ContentionMonitor, Workspace, available_threads, pool
from slipstream.host import machine as host_machine
from slipstream.targets.decoder import Decoder
from tests.backends.native.models import chain, executor, ids

WHOLE = ContentionMonitor.threads  # `undisturbed` replaces it in the other tests


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The time is for one that hangs: on a busy machine a process that compiles kernels may take minutes."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=900, env=os.environ | environment,
    )  # fmt: skip


MOST = native_threads.MOST_THREADS


@pytest.mark.parametrize(
    ("cpus", "quota", "per_core", "setting", "wanted"),
    [
        (range(8), None, 1, None, 8), ((2, 3, 6), None, 1, None, 3), (range(8), None, 2, None, 4),
        (range(1000), None, 1, None, MOST), ((1,), 8.0, 1, None, 1), (range(8), 2.0, 1, None, 2),
        (range(8), 2.9, 1, None, 2), (range(8), 0.5, 1, None, 1), (range(2), 64.0, 1, None, 2),
        (range(8), 2.0, 1, "5", 5), (range(8), None, 1, "3,2", 3), ((0,), None, 1, "100000", MOST),
        *((range(8), None, 1, nonsense, 8) for nonsense in ("", "0", "-1", "many")),
    ],
)  # fmt: skip
def test_threads_are_the_cores_and_the_quota_of_the_process_or_what_the_user_sets(
    cpus, quota, per_core, setting, wanted, monkeypatch
):
    """per_core: processors of a core with hyperthreads; setting: OMP_NUM_THREADS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus), raising=False)
    monkeypatch.setattr(host_machine, "container_quota", lambda: quota)
    monkeypatch.setattr(host_machine, "_cores", lambda given: {str(cpu // per_core) for cpu in given})
    assert available_threads() == wanted


def test_under_contention_passes_run_on_one_thread_and_later_on_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: passes of 10 ms, of which another process takes half the processor time."""
    monkeypatch.setattr(ContentionMonitor, "threads", WHOLE)
    contention, now = ContentionMonitor(), 100.0

    def passes(seconds: float, share: float) -> float:
        """Share of the time in which passes used all four threads."""
        nonlocal now
        end, together, total = now + seconds, 0.0, 0.0
        while now < end:
            threads = contention.threads(4, now)
            total += 0.01
            now += 0.01
            if threads > 1:
                together += 0.01
                contention.observe(0.01, 0.01 * threads * share, threads, now)
        return together / total

    assert passes(5, 1.0) == 1
    assert passes(5, 0.8) == 1
    contention.observe(0.03, 0.01, 4, now)  # a single pass that was delayed
    assert passes(1, 1.0) == 1
    first, later = passes(1.5, 0.5), passes(30, 0.5)
    assert later < 0.05 < first < 0.5
    assert contention.threads(4, now) in (1, 4)
    now += contention.longest
    assert passes(5, 1.0) == 1  # the cores are free again
    assert passes(1.5, 0.5) > 0.05  # the pauses are short again


def test_idle_workers_sleep() -> None:
    model = executor(threads=3)
    for n in range(20):
        model.forward(chain(0, n, [5]))
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03
    want = model.forward(chain(0, 20, [5])).logits.clone()  # and wake up
    model._workspace.most = 1
    assert torch.equal(model.forward(chain(0, 20, [5])).logits, want)


def test_a_pool_that_grows_stops_the_old_one() -> None:
    with native_threads.kernel_lock():
        size = pool().size
    model = executor(threads=size + 2)
    model.forward(chain(0, 0, ids(9)))
    with native_threads.kernel_lock():
        assert pool().size == size + 2
        assert pool(2) is pool()
    deadline = time.monotonic() + 10
    while True:
        alive = [t for t in threading.enumerate() if t.name.startswith("slipstream-kernel-")]
        if len(alive) <= size + 1:
            break
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


def test_a_small_model_uses_one_thread_for_few_rows() -> None:
    small, large = Workspace(4, 1 << 20), Workspace(4, 1 << 30)
    assert (small.threads(1), small.threads(32), small.threads(33)) == (1, 1, 4)
    assert (large.threads(1), large.threads(500)) == (4, 4)
    assert Workspace(10_000, 1).most == native_threads.MOST_THREADS == settings.MOST_THREADS


def test_memory_for_weights_starts_at_a_cache_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for size in (0, 1, 63, 1 << 21):
        memory = native_threads.allocate_aligned(size, 128)
        assert memory.ctypes.data % 64 == 0 or not size
        assert bytes(memory) == bytes([128]) * size
    rows = torch.arange(12.0).reshape(3, 4).numpy().T
    layout = Layout()
    layout.keep(rows)
    assert layout.arrays[0].view("float32").tolist() == rows.flatten().tolist()


def llm(shape: str, draft: Any = None, **options: Any) -> LLM:
    target = Decoder(executor(shape, threads=2), chunk=16)
    if draft == "model":
        draft = Decoder(executor("window", threads=2))
    return LLM(target, draft, **{"draft_tokens": 4} | options)


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_python_threads_generate_on_one_LLM_as_each_would_alone(draft: str | None, temperature: float) -> None:
    one = llm("llama", draft)
    prompts = [ids(n, n) for n in (40, 3, 21, 30)]
    how = {"max_tokens": 12, "temperature": temperature, "ignore_eos": True}
    params = [SamplingParams(seed=i, **how) for i in range(len(prompts))]
    want = [one.generate([p], params_of)[0].token_ids for p, params_of in zip(prompts, params, strict=True)]
    for _ in range(3):
        with ThreadPoolExecutor(3) as helpers:
            texts = list(helpers.map(lambda p, params_of: one.generate([p], params_of)[0].token_ids, prompts, params))
        assert texts == want


FORK = """
import os, signal, threading, time
from slipstream import LLM, SamplingParams
from slipstream.targets.decoder import Decoder
from tests.backends.native.models import executor, ids, config, weights
from slipstream.backends.torch.torch_executor import TorchExecutor

executors = executor(threads=2), TorchExecutor(config(), weights(config()))
models = [LLM(Decoder(each, chunk=16), "ngram", draft_tokens=4) for each in executors]
params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
want = [model.generate([ids(40)], params)[0].token_ids for model in models]
stop, go = False, threading.Event()

def work(model):
    while not stop:
        go.wait()
        model.generate([ids(60, 1)], params)

threads = [threading.Thread(target=work, args=(model,)) for model in models]
for thread in threads:
    thread.start()
for i in range(8):
    go.set()
    time.sleep(0.02 + 0.003 * i)
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        same = [model.generate([ids(40)], params)[0].token_ids for model in models] == want
        os._exit(0 if same else 3)
    go.clear()  # the threads were busy at the fork; now the child needs the cores
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
stop = True
go.set()
for thread in threads:
    thread.join()
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="no fork here")
def test_a_child_of_a_fork_generates_the_same_text_while_other_threads_generate_in_the_parent() -> None:
    process = run_python(FORK)
    assert (process.returncode, process.stdout.strip()) == (0, "fine"), process.stderr


INTERRUPT = """
import os, signal, threading, time
import torch
from slipstream.core.draft import Draft
from slipstream.core.sequence import Sequence
from slipstream.targets.decoder import Decoder
from tests.backends.native.models import VOCAB, chain, executor, ids

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore this signal
model = Decoder(executor(threads=2, layers=4, windows=(None,) * 4), chunk=64)
fresh = model.executor.forward(chain(0, 0, ids(50))).logits.clone()
prompt = ids(64 * 3000)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
began = time.monotonic()
try:
    model.run([Sequence(prompt)], Draft.empty(1))
    print("not interrupted")
except KeyboardInterrupt:
    assert time.monotonic() - began < 3, time.monotonic() - began
assert torch.equal(model.executor.forward(chain(1, 0, ids(50))).logits, fresh)
assert torch.equal(model.executor.decode_steps(chain(2, 0, ids(50)), 1).logits[0, 0], fresh[-1])
print("fine")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_control_C_ends_a_long_prompt_between_two_pieces_and_the_executor_keeps_working() -> None:
    process = run_python(INTERRUPT)
    assert (process.returncode, process.stdout.strip()) == (0, "fine"), process.stderr
