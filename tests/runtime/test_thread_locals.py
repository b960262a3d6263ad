"""Objects that user code has left with the threads of the workers, when the threads end."""

import json

import pytest

from tests.runtime.test_exit import run_python

# Objects that a stage leaves with its thread, and the error that their end raises.
LEFT = {
    "a view": ("x.view(-1)", None),
    "a graph": ("(weight * x).sum()", None),
    "what frees a tensor": ("Leaves(lambda: torch.ones(3).add_(1).view(-1))", None),
    "what leaves more": ("Leaves(lambda: more(x))", None),
    "what is in a context": ("Leaves(lambda: in_a_context(x))", None),
    "what starts a thread": ("Leaves(lambda: in_a_thread(lambda: x.view(-1)))", None),
    "what raises": ("Leaves(lambda: 1 / 0)", "ZeroDivisionError"),
    "what runs the pipeline": ("Leaves(lambda: pipe(x))", "RuntimeError"),
    "what closes the pipeline": ("Leaves(lambda: pipe.close())", "RuntimeError"),
    "the pipeline": ("pipe", None),
}


# Leaves each of KINDS with the threads of a pipeline, which then meets its END.
PROGRAM = """
import collections, contextvars, json
weight = torch.ones(2, requires_grad=True)
told = collections.defaultdict(set)
interrupted = False

class Leaves:
    def __init__(self, last):
        self.last = last
    def __del__(self):
        told[kind].add(None)
        self.last()

def more(x, locals=[threading.local()]):
    locals[0].more = Leaves(lambda: x + 1)

# No variable that a first step would watch: it is set when the watch lets go of what it held.
def in_a_context(x, variable=contextvars.ContextVar("variable")):
    variable.set(x.view(-1))

def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = threading.local()
    def forward(self, x):
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000): time.sleep(0.01)
        self.local.left = left(x)
        return x * 2

def interrupt(pipe):
    global interrupted
    interrupted = True
    try: pipe(x)
    except KeyboardInterrupt: interrupted = False

sys.unraisablehook = lambda error: told[kind].add(error.exc_type.__name__)
x = torch.ones(6, 2)
for kind, left in {KINDS}.items():
    told[kind]
    pipe = pykern.Pipeline([Keeps() for _ in range(3)], devices="cpu:3", microbatches=3)
    for _ in range(2):
        pipe(x)
    told[kind].clear()
    END
    if pipe is not None: pipe.close()
print(json.dumps({kind: sorted(filter(None, said)) for kind, said in told.items()}))
"""


@pytest.mark.parametrize("end", ["pipe.close()", "pipe = None", "interrupt(pipe)"])
def test_threads_end_with_what_was_left_with_them(end: str) -> None:
    kinds = ", ".join(f"{name!r}: lambda x: {left}" for name, (left, _) in LEFT.items())
    result = run_python(PROGRAM.replace("KINDS", kinds).replace("END", end))
    assert (result.returncode, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert list(told) == list(LEFT)
    expected = {name: [] if error is None else [error] for name, (_, error) in LEFT.items()}
    if end != "pipe.close()":
        # If the pipeline was not closed, or is made anew, they may find it gone or running.
        del expected["what runs the pipeline"], expected["what closes the pipeline"]
    assert {kind: told[kind] for kind in expected} == expected
