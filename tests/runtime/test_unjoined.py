"""Workers of a pipeline that was given up end by themselves, and the interpreter waits for that."""

import subprocess
import sys

# The destructors of thread-local objects run in the order of their keys: one tells that the thread
# ends, one takes a while, and one says so. torch's ask for the interpreter lock.
CODE = """
import ctypes, sys, threading
import torch
from torch import nn
import pykern

libc = ctypes.CDLL(None)
libc.pthread_setspecific.argtypes = [ctypes.c_uint, ctypes.c_void_p]
ends = ctypes.create_string_buffer(64)
libc.sem_init(ends, 0, 0)
said = ctypes.create_string_buffer(b"the thread is gone")
values = {"sem_post": ctypes.addressof(ends), "usleep": 300_000, "puts": ctypes.addressof(said)}
keys = {name: ctypes.c_uint() for name in values}
for name, key in keys.items():
    libc.pthread_key_create(ctypes.byref(key), ctypes.cast(getattr(libc, name), ctypes.c_void_p))

class Marks(nn.Linear):
    def forward(self, x):
        for name, key in keys.items():
            libc.pthread_setspecific(key, values[name])
        return super().forward(x)

class Hangs(nn.Module):
    def forward(self, x):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

class GoesDown:
    def __del__(self, puts=libc.puts):
        puts(b"Python goes down")

# Python frees this name before all others.
sys.ps1 = GoesDown()
options = dict(microbatches=1, loss_fn=nn.functional.mse_loss, timeout=0.2)
pipe = pykern.Pipeline([Marks(2, 2), Hangs()], devices="cpu:2", **options)
x = torch.ones(4, 2)
try:
    pipe.step(x, target=x)
except pykern.PipelineStalled:
    libc.sem_wait(ends)
"""


def test_python_goes_down_when_destructors_of_threads_have_run() -> None:
    command = [sys.executable, "-c", CODE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the thread is gone\nPython goes down\n"
