"""Task counters: who takes which role and which task, decided as programs arrive.

Every counter is zero when a launch begins. The heap's are set to zero again by the last program to leave, so that no
launch needs a reset before it. Triton carries a scalar atomic out once a program and hands its result to all threads,
so that what is decided by it is the same for all of them.
"""

import triton
import triton.language as tl

from uniep.symmetric.heap import NUM_COUNTERS

ARRIVALS = tl.constexpr(0)
DEPARTURES = tl.constexpr(1)
FIRST_ROLE = tl.constexpr(2)
SECOND_ROLE = tl.constexpr(3)
THIRD_ROLE = tl.constexpr(4)
FINISHED = tl.constexpr(5)

_NUM_COUNTERS = tl.constexpr(NUM_COUNTERS)


@triton.jit
def take(counters, COUNTER: tl.constexpr):
    """The next task (or ticket) of a counter."""
    return tl.atomic_add(counters + COUNTER, 1, sem="relaxed")


@triton.jit
def claim(counters, COUNTER: tl.constexpr, LANES: tl.constexpr):
    """`take` in two parts, with work between them that hides the atomic's way to memory and back (about 1 us).

    LANES is the number of threads, so that just one of them holds the task that `claimed` then hands to all.
    """
    lanes = tl.arange(0, LANES)
    return tl.atomic_add(counters + COUNTER + tl.zeros((LANES,), tl.int32), 1, mask=lanes == 0, sem="relaxed")


@triton.jit
def claimed(claim_of_lane, LANES: tl.constexpr):
    """The task of a claim."""
    return tl.max(tl.where(tl.arange(0, LANES) == 0, claim_of_lane, -1), 0)


@triton.jit
def is_last(counters, COUNTER: tl.constexpr, total):
    """Counts what this program has stored as done. True for the one that completes the total: it sees all of it."""
    tl.debug_barrier()
    return tl.atomic_add(counters + COUNTER, 1, sem="acq_rel") == total - 1


@triton.jit
def leave(counters):
    """The last call of a kernel."""
    if is_last(counters, DEPARTURES, tl.num_programs(0)):
        words = tl.arange(0, _NUM_COUNTERS)
        tl.store(counters + words, tl.zeros((_NUM_COUNTERS,), tl.int32))
