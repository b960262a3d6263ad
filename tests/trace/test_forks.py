"""Locks that the child of a fork can take."""

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
    import os, sys, threading
    from pykern.forks import fork_safe_lock
    lock = fork_safe_lock()
    def fork(way):
        child = os.fork()
        if child == 0:
            os._exit(way())
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    def taken():
        return 0 if lock.acquire(timeout=5) else 7
"""


def run(code: str) -> None:
    program = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    quiet = "ignore:This process:DeprecationWarning"
    command = [sys.executable, "-W", quiet, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.forks
def test_a_lock_of_another_thread_is_free_in_the_child() -> None:
    run(
        """
        held, done = threading.Event(), threading.Event()
        def hold():
            with lock:
                held.set()
                done.wait()
        other = threading.Thread(target=hold)
        other.start()
        held.wait()
        code = fork(taken)
        done.set()
        other.join()
        sys.exit(code)
        """
    )


@pytest.mark.forks
def test_a_lock_of_the_forking_thread_stays_its_own_in_the_child() -> None:
    run(
        """
        def released():
            lock.release()
            lock.release()
            other = []
            thread = threading.Thread(target=lambda: other.append(taken()))
            thread.start()
            thread.join()
            return other[0]
        with lock, lock:
            code = fork(released)
        sys.exit(code)
        """
    )


@pytest.mark.forks
def test_a_signal_handler_forks_while_the_states_of_generators_are_held() -> None:
    run(
        """
        import signal
        from pykern.runtime.random.seed import generators_lent
        children = []
        signal.signal(signal.SIGALRM, lambda *_: children.append(os.fork()))
        with generators_lent:
            os.kill(os.getpid(), signal.SIGALRM)
        if children == [0]:
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
        """
    )


def test_a_signal_handler_takes_the_lock_that_its_thread_holds() -> None:
    run(
        """
        import signal
        def take(*_):
            with lock:
                pass
        signal.signal(signal.SIGALRM, take)
        with lock:
            os.kill(os.getpid(), signal.SIGALRM)
        """
    )
