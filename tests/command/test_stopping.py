"""A signal ends the command at once, with one line and nothing left behind; and a child ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
SECONDS = 20
"""Long enough for a busy machine; everything that is waited for here takes less than one second or three."""

START = """
import ctypes, hashlib, os, signal, subprocess, sys, time
from pathlib import Path
from tf_memsaver.command.stopping import stopped_by_signals
from tf_memsaver.files.writing import scratch_folder, written
from tf_memsaver.files.targets import TargetKind, check_target

def ready():
    print("ready", flush=True)

here = Path(sys.argv[1])
with stopped_by_signals(restore=False), scratch_folder(here) as folder:
    (folder / "text").write_text("unfinished")
"""


def answer_signals() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, and what is ignored stays so."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def start(folder: Path, body: str, **options: object) -> subprocess.Popen[str]:
    """Run ``body`` under the handlers with an unfinished folder, up to where it says that it is ready."""
    options.setdefault("preexec_fn", answer_signals)
    code = START + "".join(f"    {line}\n" for line in body.splitlines())
    process = subprocess.Popen(
        # From Python 3.12 on, a fork beside a thread is a warning.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    process.send_signal(number)
    return process.communicate(timeout=SECONDS)[1]


def wait_for(reached: Callable[[], bool]) -> bool:
    stop = time.monotonic() + SECONDS
    while not reached() and time.monotonic() < stop:
        time.sleep(0.02)
    return reached()


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_process_with_one_line(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "ready()\ntime.sleep(60)")
    assert [path.name.startswith(".tf_memsaver.part-") for path in tmp_path.iterdir()] == [True]
    assert end(process, number) == f"tf-memsaver: stopped by {number.name}.\n"
    assert process.returncode == -number and not list(tmp_path.iterdir())


def test_code_that_swallows_exceptions(tmp_path: Path) -> None:
    process = start(
        tmp_path, "ready()\nwhile True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass"
    )
    assert end(process, signal.SIGTERM).count("\n") == 1
    assert process.returncode == -signal.SIGTERM and not list(tmp_path.iterdir())


def test_one_operation_that_takes_long(tmp_path: Path) -> None:
    process = start(tmp_path, "ready()\nhashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)")
    time.sleep(1)  # What the process says before the operation starts.
    assert end(process, signal.SIGINT).count("\n") == 1
    assert process.returncode == 128 + signal.SIGINT and not list(tmp_path.iterdir())


def test_what_is_being_replaced_is_put_back(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/plan.json").write_text('{"schema_version": 1}')
    process = start(
        tmp_path,
        "rename = Path.rename\n"
        "def slow(self, place):\n"
        "    if self.name == 'new':\n"
        "        ready()\n"
        "        time.sleep(60)\n"
        "    return rename(self, place)\n"
        "Path.rename = slow\n"
        "with written(check_target(here / 'out', TargetKind.FOLDER, overwrite=True)) as fresh:\n"
        "    (fresh / 'plan.json').write_text('new')",
    )
    assert not (tmp_path / "out").exists()
    end(process, signal.SIGTERM)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/plan.json").read_text() == '{"schema_version": 1}'


def test_signals_that_were_ignored_stay_ignored(tmp_path: Path) -> None:
    """As under ``nohup``."""
    process = start(
        tmp_path,
        "ready()\ntime.sleep(60)",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None
    assert "SIGTERM" in end(process, signal.SIGTERM)


def test_a_fork_of_the_users_ends_alone(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "child = os.fork()\n"
        "if not child:\n"
        "    time.sleep(60)\n"
        "    os._exit(1)\n"
        "time.sleep(0.5)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "assert os.waitpid(child, 0)[1] == signal.SIGTERM\n"
        "time.sleep(3)\n"
        "assert (folder / 'text').exists()\n"
        "ready()\n"
        "time.sleep(60)",
    )
    assert end(process, signal.SIGTERM).count("\n") == 1


def test_forks_are_told_once_however_often_a_process_does_this(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "os.register_at_fork = None\n"
        "for _ in range(2):\n"
        "    with stopped_by_signals(restore=True):\n"
        "        if not os.fork():\n"
        "            os._exit(int(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL))\n"
        "        assert os.wait()[1] == 0\n"
        "ready()",
    )
    assert process.communicate(timeout=SECONDS)[1] == "" and process.returncode == 0


def test_handlers_come_back(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "pass\n"
        "before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)\n"
        "signal.set_wakeup_fd(before[1])\n"
        "with stopped_by_signals(restore=True):\n"
        "    assert signal.getsignal(signal.SIGINT) != before[0]\n"
        "assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)) == before\n"
        "ready()",
    )
    assert process.communicate(timeout=SECONDS)[1] == "" and process.returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    """Without any handler in the parent, and while the child's main thread computes."""
    child = (
        "from tf_memsaver.check.tether import end_with_parent\n"
        "end_with_parent()\nprint('ready', flush=True)\nwhile True: 0"
    )
    parent = (
        "import subprocess, sys\n"
        "from tf_memsaver.check.tether import tether\n"
        "with tether() as stdin:\n"
        "    process = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=stdin, stdout=subprocess.PIPE)\n"
        "    process.stdout.readline()\n"
        "    print(process.pid, flush=True)\n"
        "    process.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True)
    identity = int(process.stdout.readline())
    assert is_running(identity)
    end(process, number)
    assert wait_for(lambda: not is_running(identity))


def test_a_command_that_measures(tmp_path: Path) -> None:
    """The measuring process and the temporary files of both go, TensorFlow's, too."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cli_models.py").write_text(
        "import keras\n"
        "def build():\n"
        "    return keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(4))])\n"
    )
    command = [sys.executable, "-m", "tf_memsaver", "measure", "cli_models:build", "--batch_size=8", "--steps=100000"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert wait_for(lambda: bool(children.read_text().split())), process.communicate()
    (child,) = map(int, children.read_text().split())
    # Inside the steps.
    time.sleep(3)
    err = end(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert err.splitlines()[-1] == "tf-memsaver: stopped by SIGTERM." and "Traceback" not in err
    assert wait_for(lambda: not is_running(child))
    assert not list((tmp_path / "tmp").iterdir())
