"""A process of vLLM's ends with the process that started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from kvaudit.engines.vllm.worker.orphans import end_with_parent

PARENT = """
import multiprocessing, time

def child(pids):
    import os
    from kvaudit.engines.vllm.worker.orphans import end_with_parent
    end_with_parent()
    pids.put(os.getpid())
    time.sleep(120)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    pids = spawn.SimpleQueue()
    spawn.Process(target=child, args=(pids,)).start()
    print(pids.get(), flush=True)
    time.sleep(120)
"""


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert ends(child, patience=30)
    finally:
        parent.stdout.close()
        if not ends(child, patience=0):
            os.kill(child, signal.SIGKILL)


def test_a_process_that_nobody_started_so_is_left_alone():
    end_with_parent()


def ends(pid, patience):
    """Whether a process is gone, or a zombie that nobody collects, within so many seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
