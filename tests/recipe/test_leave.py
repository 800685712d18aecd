"""How a rank ends: everything that wants to end is let end, and the interpreter is not finalized."""

import subprocess
import sys

from tests.recipe.runs import ROOT

RANK = """
import atexit, sys, threading, time
from recipes.train import leave

class Late:
    def __del__(self):
        print("finalized", flush=True)

late = Late()
atexit.register(lambda: print("exit function"))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("unflushed", end=" ")
leave(3)
"""


def test_a_rank_ends_without_finalization():
    done = subprocess.run([sys.executable, "-c", RANK], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "unflushed thread\nexit function\n"
