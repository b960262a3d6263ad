"""Programs that break what `sigints` promises, each in its own way: by the number of the case.

Number 4 keeps the promise. It says what it has found and what it begins next in one piece.
"""

import os
import signal
import sys
import time

from .sigints import SIGNALS, say


def keep_the_promise() -> None:
    found = ""
    for _ in range(SIGNALS):
        try:
            say(f"{found}begin something")
            time.sleep(600)
        except KeyboardInterrupt:
            found = "right\n"
    say("right\nend")


def main(_folder: str, _seed: str, number: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if number == "4":
        keep_the_promise()
        return
    try:
        say("begin something")
        while True:
            time.sleep(0.001)
    except KeyboardInterrupt:
        if number == "0":
            os.abort()
        if number == "1":
            say("wrong after something: a bit")
        if number == "2":
            sys.exit(0)
        if number == "3":
            time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
