"""Flags between programs and between ranks, and waits that end in time.

A flag is an int32 that holds the epoch of the launch that last set it, and so only grows: a wait for an epoch is also
over when a fast peer has set a later one. A producer's threads store their data, meet at a
CTA barrier, and then `signal`; a consumer waits for its epoch and then reads. System scope for flags that cross the
link, device scope for the scoreboard of one rank. On the GPU these are PTX instructions, under the interpreter
atomics, which are what it offers in their place.

Watch: an int32 array of each rank. Word 0 is not zero once a wait of this rank has given up; from then on every wait
returns at once and no signal is sent to peers, so that a launch drains in moments, its peers run into their own bound,
and the host finds the reason. After it follow RECORD_WORDS words for each program: {valid, kernel, task, what, whom}.
Control flow never depends on a failure, because threads of one program may disagree about the time.
"""

import os
import time

import triton
import triton.language as tl

from uniep.kernels.memory import region_address
from uniep.kernels.numerics import INTERPRETED
from uniep.symmetric.watch import RECORD_WORDS

_RECORD_WORDS = tl.constexpr(RECORD_WORDS)


if triton.knobs.runtime.interpret:

    def now_ns() -> int:
        """Nanoseconds of a clock that goes on. It is read between two looks at a flag, so it also yields the core."""
        os.sched_yield()
        return time.monotonic_ns()

    @triton.jit
    def fence_system():
        """Nothing: each interpreted access is whole before the next."""

    @triton.jit
    def fence_async_proxy():
        """Nothing: there is one memory."""

else:

    @triton.jit
    def now_ns():
        """The GPU's nanosecond clock."""
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)

    @triton.jit
    def fence_system():
        """Orders this thread's stores, and those it has observed, before its later ones for all ranks."""
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def fence_async_proxy():
        """Stands between an acquire of data that ordinary stores wrote and the TMA loads that read it."""
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_acquire(ptr, mask, SYSTEM: tl.constexpr):
    """Acquires a flag, or a tensor of flags; -1 where mask is false."""
    if INTERPRETED:
        return tl.where(mask, tl.atomic_add(ptr, 0, mask=mask, sem="acquire", scope="sys"), -1)
    elif SYSTEM:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, -1; @p ld.acquire.sys.global.b32 $0, [$1]; }",
            "=&r,l,r",
            [ptr, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, -1; @p ld.acquire.gpu.global.b32 $0, [$1]; }",
            "=&r,l,r",
            [ptr, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_release(ptr, value, mask, SYSTEM: tl.constexpr):
    """Releases a flag, or a tensor of flags. The program's threads must have met at a barrier since their stores."""
    if INTERPRETED:
        tl.atomic_xchg(ptr, value, mask=mask, sem="release", scope="sys")
    elif SYSTEM:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [ptr, value, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.release.gpu.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [ptr, value, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def signal_tile(ptr, epoch):
    """Tells the other programs of this rank that a tile is complete."""
    tl.debug_barrier()
    store_release(ptr, epoch, epoch == epoch, False)


@triton.jit
def signal_ranks(ptr, mask, epoch, watch):
    """Tells peers, unless this rank has given up a wait: what it would announce may be garbage."""
    sound = tl.load(watch, volatile=True) == 0
    tl.debug_barrier()
    store_release(ptr, epoch, mask & sound, True)


@triton.jit
def _may_go_on(start_ns, timeout_us, watch):
    in_time = now_ns() - start_ns < timeout_us.to(tl.int64) * 1000
    return in_time & (tl.load(watch, volatile=True) == 0)


@triton.jit
def _put_word(ptr, value):
    # Not tl.store, which only one thread of the program carries out: the thread that gave up may be any.
    if INTERPRETED:
        tl.store(ptr, value)
    else:
        tl.inline_asm_elementwise(
            "st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [ptr, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def give_up(watch, KERNEL: tl.constexpr, task, WHAT: tl.constexpr, whom):
    """Records that this rank cannot go on, unless it has done so before."""
    record = watch + 1 + tl.program_id(0) * _RECORD_WORDS
    if tl.load(watch, volatile=True) == 0:
        _put_word(record + 1, tl.full((), KERNEL, tl.int32))
        _put_word(record + 2, task)
        _put_word(record + 3, tl.full((), WHAT, tl.int32))
        _put_word(record + 4, whom)
        _put_word(record, tl.full((), 1, tl.int32))
        _put_word(watch, tl.full((), 1, tl.int32))


@triton.jit
def wait_flag(
    ptr, epoch, watch, timeout_us, KERNEL: tl.constexpr, task, WHAT: tl.constexpr, whom, SYSTEM: tl.constexpr
):
    """Waits until one flag has reached the epoch. Each thread looks for itself, so no barrier is needed after it."""
    always = epoch == epoch
    flag = load_acquire(ptr, always, SYSTEM)
    if flag < epoch:
        start_ns = now_ns()
        while (flag < epoch) & _may_go_on(start_ns, timeout_us, watch):
            flag = load_acquire(ptr, always, SYSTEM)
        if flag < epoch:
            give_up(watch, KERNEL, task, WHAT, whom)


@triton.jit
def wait_flags(
    ptr, mask, epoch, watch, timeout_us, KERNEL: tl.constexpr, task, WHAT: tl.constexpr, whom, SYSTEM: tl.constexpr
):
    """Waits until all flags of a tensor have reached the epoch; whom is a tensor that names each flag's owner.

    Each lane looks at its own flag, so the barrier at the end hands what one thread has acquired to all.
    """
    missing = mask & (load_acquire(ptr, mask, SYSTEM) < epoch)
    num_missing = tl.max(missing.to(tl.int32), 0)
    if num_missing > 0:
        start_ns = now_ns()
        while num_missing > 0:
            missing = mask & (load_acquire(ptr, mask, SYSTEM) < epoch)
            # The clock joins the reduction: a thread that gave up alone would leave others in the loop.
            num_missing = tl.max((missing & _may_go_on(start_ns, timeout_us, watch)).to(tl.int32), 0)
        blamed = tl.max(tl.where(missing, whom, -1), 0)
        if blamed >= 0:
            give_up(watch, KERNEL, task, WHAT, blamed)
    tl.debug_barrier()


@triton.jit
def signal_all_ranks(peers_W, flags_offset_bytes, rank, epoch, watch, W: tl.constexpr, RANKS: tl.constexpr):
    """Sets this rank's flag at every rank, also at itself, in a region that has a flag for each rank."""
    peers = tl.arange(0, RANKS)
    address = region_address(peers_W, tl.where(peers < W, peers, 0), flags_offset_bytes)
    signal_ranks(address.to(tl.pointer_type(tl.int32)) + rank, peers < W, epoch, watch)


@triton.jit
def wait_all_ranks(
    peers_W,
    flags_offset_bytes,
    rank,
    epoch,
    watch,
    timeout_us,
    KERNEL: tl.constexpr,
    WHAT: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Waits until every rank, also this one, has set its flag here."""
    ranks = tl.arange(0, RANKS)
    flags = region_address(peers_W, rank, flags_offset_bytes).to(tl.pointer_type(tl.int32))
    wait_flags(flags + ranks, ranks < W, epoch, watch, timeout_us, KERNEL, 0, WHAT, ranks, SYSTEM=True)
