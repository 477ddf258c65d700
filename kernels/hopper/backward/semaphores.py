"""Turns: the programs that add to a block of dq do it one after the other, so runs repeat.

A number in memory counts, for each block of 128 queries or each row tile, the key tiles that have
added to it. Two warps of a program carry the latency: one looks ahead for the turns that are
coming, the other tells the next program, behind those that add.

No program waits for ever. Key tiles are drawn from a counter, and a turn is only waited for from a
key tile that was drawn before. Of those not done, the one drawn first is in work in the program
that drew it, because a program works in the order in which it draws, and it waits for nobody.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..block_list import number_of
from ..gluon import thread_barrier
from ..pipeline import arrive, phase_of, wait_empty, wait_full
from ..scheduler import make_numbers, peek, post_number, read_number
from .tiles import (
    M,
    head_work,
    row_tile_at,
    take_work,
    turn,
    visit_at,
)


class Turns(NamedTuple):
    """The turns of a program that are coming, as many as it looks ahead.

    Barriers say that a turn has come, is over, is told.
    """

    # 1 if other key tiles add to the block before this one, 2 if others do so after it, and 4 times
    # the block; nobody writes it where groups work that out themselves
    place: gl.shared_memory_descriptor
    come: gl.shared_memory_descriptor
    over: gl.shared_memory_descriptor
    told: gl.shared_memory_descriptor


@gluon.jit
def make_turns(groups: gl.constexpr, plan: gl.constexpr):
    """Turns of a program in which one group adds to dq, or each of two to half of its columns."""
    AHEAD: gl.constexpr = plan.turns_ahead
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    place = make_numbers(AHEAD)
    come = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], layout)
    over = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], layout)
    told = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], layout)
    for i in gl.static_range(AHEAD):
        mbarrier.init(come.index(i), count=1)
        mbarrier.init(over.index(i), count=groups)
        mbarrier.init(told.index(i), count=1)
    return Turns(place, come, over, told)


@gluon.jit
def carry_turns(flags_ptr, shared, box, order, call, COMING: gl.constexpr, plan: gl.constexpr):
    """One of the two warps: go through the blocks of the program in their order, and wait until
    all earlier key tiles have added to a block if COMING, else tell that this one has."""
    TURNS: gl.constexpr = plan.block // plan.turn  # of a block
    turns = shared.turns
    n_blocks = gl.cdiv(call.seq_q, plan.block)
    i = 0  # key tiles so far
    t = 0  # turns so far
    ticket = peek(box, i)
    while ticket < order.n_tiles * order.n_heads:
        work = take_work(box, i, ticket, order, call, plan)
        batch = work.batch_kv // (call.n_head // call.group)
        for h in range(call.group):
            head_blocks = (work.batch_kv * call.group + h) * n_blocks
            head = work.batch_kv % (call.n_head // call.group) * call.group + h
            own = head_work(work, head, h, call, plan)
            next_visit = visit_at(0, own, call, plan)
            for step in range((own.end - own.first) * TURNS):
                listed, place = next_visit
                block = number_of(listed, plan)
                next_visit = visit_at((step + 1) // TURNS, own, call, plan)
                flag = flags_ptr + ((head_blocks + block) * TURNS + step % TURNS)
                rank, last = turn(block, place, own, batch, call, plan)
                slot = t % plan.turns_ahead
                phase = phase_of(t, plan.turns_ahead)
                if COMING:
                    mbarrier.wait(turns.over.index(slot), phase ^ 1)
                    if rank > 0:
                        _await_flag(flag, rank)
                    if plan.posts_places:
                        number = (rank > 0) + 2 * (rank < last) + 4 * block
                        post_number(turns.place.index(slot), number)
                    arrive(turns.come, t)
                else:
                    mbarrier.wait(turns.over.index(slot), phase)
                    gl.atomic_xchg(flag, rank + 1, sem="release", scope="gpu")
                    arrive(turns.told, t)
                t += 1
        i += 1
        ticket = peek(box, i)


@gluon.jit
def _await_flag(flag, rank):
    """Wait until `rank` key tiles have added to the block of this flag."""
    # An acquire empties the L1 cache, and with it what registers were spilled: it is not for
    # polling. An atomic addition of 0 is a load.
    while gl.atomic_add(flag, 0, sem="acquire", scope="gpu") < rank:
        while gl.atomic_add(flag, 0, sem="relaxed", scope="gpu") < rank:
            pass


@gluon.jit
def take_turn(turns, t, plan: gl.constexpr):
    """Wait until all earlier key tiles have added where the t-th turn of this program does."""
    wait_full(turns.come, t)


@gluon.jit
def place_in_turn(turns, t, step, work, batch, call, plan: gl.constexpr):
    """(row tile of a step of a walk, whether other key tiles add to it before this one, whether
    others do so after it), once the turn of this program has come, its t-th."""
    STEPS: gl.constexpr = plan.block // M
    if plan.posts_places:
        place = read_number(turns.place.index(t % plan.turns_ahead))
        if plan.listed:
            row_tile = place // 4 * STEPS + step % STEPS
        else:
            row_tile = row_tile_at(step, work, call, plan)
        return row_tile, place % 2 > 0, place % 4 > 1
    else:
        row_tile = row_tile_at(step, work, call, plan)
        rank, last = turn(row_tile // STEPS, 0, work, batch, call, plan)
        return row_tile, rank > 0, rank < last


@gluon.jit
def end_turn(turns, t, plan: gl.constexpr):
    """All threads of this group have added in the t-th turn."""
    wait_empty(turns.told, t)
    thread_barrier()  # one thread arrives for all
    arrive(turns.over, t)
