"""The parts of a stats snapshot, read off the scheduler and the allocator. Nothing here changes them."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np

from corellm.comms.stats_messages import MAP_MAX, REQUESTS_MAX, BlockMap, RequestRow, RequestState, Wait
from corellm.engine.scheduler import Scheduler
from corellm.engine.sequence import Sequence, State


def block_map(states: bytearray) -> BlockMap:
    """Run-lengths of the states of all blocks; a unit of several blocks shows the state that most of them are in."""
    units = np.frombuffer(states, dtype=np.uint8)
    scale = -(-len(units) // MAP_MAX)
    if scale > 1:
        padded = np.pad(units, (0, -len(units) % scale), mode="edge").reshape(-1, scale)
        counts = np.stack([np.count_nonzero(padded == state, axis=1) for state in range(4)])
        units = counts.argmax(axis=0).astype(np.uint8)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(units)) + 1))
    lengths = np.diff(starts, append=len(units))
    return BlockMap(scale, np.stack((units[starts], lengths), axis=1).ravel().tolist())


def request_rows(scheduler: Scheduler, began: float) -> tuple[list[RequestRow], int]:
    """A row for each open request, and how many were left out. Times become seconds since `began`."""
    preempted, waiting = scheduler.preempted, scheduler.waiting
    rows = [_row(sequence, began, "", scheduler.kv.page_size) for sequence in scheduler.running[:REQUESTS_MAX]]
    queue = chain(((sequence, "fence") for sequence in preempted), _queue(scheduler))
    rows += (
        _row(sequence, began, wait, scheduler.kv.page_size)
        for sequence, wait in islice(queue, REQUESTS_MAX - len(rows))
    )
    return rows, len(scheduler.running) + len(preempted) + len(waiting) - len(rows)


def _queue(scheduler: Scheduler) -> list[tuple[Sequence, Wait]]:
    """The waiting, each with what it lacks. The first that could enter is the head; it never yields to those behind."""
    found: list[tuple[Sequence, Wait]] = []
    head = True
    for sequence in scheduler.waiting[:REQUESTS_MAX]:
        if sequence.awaits_mask:
            found.append((sequence, "mask"))
        elif head:
            found.append((sequence, scheduler.lack(sequence)))
            head = False
        else:
            found.append((sequence, "turn"))
    return found


def _row(sequence: Sequence, began: float, wait: Wait, page_size: int) -> RequestRow:
    first = sequence.first_token_at
    state: RequestState
    if sequence.state is State.RUNNING:
        state = "decode" if sequence.prefill is None else "prefill"
    else:
        state = "preempted" if sequence.state is State.PREEMPTED else "waiting"
    prompt = sequence.prompt_len
    return RequestRow(
        sequence.id,
        state,
        wait,
        prompt,
        len(sequence.tokens) - prompt,
        sequence.limit - prompt,
        sequence.cached_tokens,
        sequence.scheduled,
        sequence.capacity // page_size,
        sequence.order[0],
        sequence.preemptions,
        sequence.arrived_at - began,
        None if first is None else first - began,
    )
