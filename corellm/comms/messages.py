"""Every message between CoreLLM's processes: one tagged union a socket, decoded by type.

Who talks to whom:

    front end --ClientMessage--> engine --EngineMessage--> front end      (DEALER / ROUTER)
    engine --WorkerCommand--> worker --WorkerReport--> engine             (PAIR, one a rank)
    engine --StatsMessage--> anyone                                       (PUB / SUB)

Integer and float arrays (`I32`, `I64`, `F32`) travel as raw little-endian bytes.
"""

from __future__ import annotations

import msgspec
import numpy as np

from corellm.sampling_params import JsonConstraint

PROTOCOL_VERSION = 1

NO_TOKEN = -1


class I32(np.ndarray):
    """Annotation of a one-dimensional int32 array."""


class I64(np.ndarray):
    """Annotation of a one-dimensional int64 array."""


class F32(np.ndarray):
    """Annotation of a one-dimensional float32 array."""


_NO_INTEGERS = np.empty(0, dtype="<i4").view(I32)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of every message: its tag on the wire is the class name."""


# ---- what both sides of a request know ----------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of `Submit` and `SlotOpen`: how a request is sampled, resolved (no None left but for logprobs)."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()  # end the request, EOS among them unless it is ignored
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of `Submit`: one prompt. `tag` is the front end's own number for it, unique on its connection."""

    tag: int
    prompt: I32
    sampling: Sampling
    priority: int = 0  # 0 interactive, 1 batch; lower goes first
    cache_salt: str = ""  # prefixes are shared only under the same salt
    constraint: JsonConstraint | None = None  # what the answer must be; the workers only ever see masks


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `Ready`: what a front end must know of the engine it talks to."""

    name: str
    model: str  # as the user named it
    model_path: str
    dtype: str
    device: str
    tp: int
    kv_cache: str
    page_size: int
    kv_blocks: int
    max_model_len: int
    max_batch_tokens: int
    max_seqs: int
    vocab: int
    seed: int
    load_format: str
    max_request_tokens: int  # prompt + output of the longest request that fits
    startup_s: float


# ---- front end -> engine ------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """Front end to engine: opens a connection; answered by progress, then `Ready` or `StartupFailed`."""

    version: int
    front_end: str


class Submit(Message, frozen=True, kw_only=True):
    """Front end to engine: queue these requests. Each ends in exactly one `Finish`."""

    requests: list[Request]


class Abort(Message, frozen=True, kw_only=True):
    """Front end to engine: end these requests now. Unknown and finished tags are ignored. `satisfied`: the front end
    has what it wanted (a stop string came), so they end as "stop" and not as "abort"."""

    tags: I64
    satisfied: bool = False


class Ping(Message, frozen=True, kw_only=True):
    """Front end to engine: still here. A front end that falls silent is dropped and its requests are aborted."""


class QueryStats(Message, frozen=True, kw_only=True):
    """Front end to engine: answered by one `Stats` on the same connection."""


class Goodbye(Message, frozen=True, kw_only=True):
    """Front end to engine: closes the connection and aborts what is open on it."""


ClientMessage = Hello | Submit | Abort | Ping | QueryStats | Goodbye


# ---- engine -> front end ------------------------------------------------------------------------------------------


class Progress(Message, frozen=True, kw_only=True):
    """Engine to front end, worker to engine: a stage of the start-up. `total` 0 means unknown."""

    stage: str
    detail: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    rank: int = 0


class Ready(Message, frozen=True, kw_only=True):
    """Engine to front end: requests are welcome."""

    info: EngineInfo


class StartupFailed(Message, frozen=True, kw_only=True):
    """Engine to front end: it could not start. `code` names a class of `corellm.errors`."""

    code: str
    message: str


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `StepEvents`: log-probabilities of one sampled token and of the likeliest ones, natural log."""

    row: int  # index into the arrays of StepEvents
    logprob: float
    top_ids: I32
    top_logprobs: F32


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `StepResult` and `StepEvents`: of m prompt tokens in a row, from the one at position `first`, given the
    tokens before each. The likeliest are [m, k] arrays, row-major, natural log. Position 0 has none."""

    first: int
    logprobs: F32  # [m]
    ranks: I32  # [m] how many tokens are at least as likely, itself included
    k: int
    top_ids: I32  # [m * k], likeliest first
    top_logprobs: F32  # [m * k]


class Finish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of `StepEvents`: the one terminal event of a request. Times are seconds from its arrival."""

    tag: int
    reason: str  # stop, length, abort, error
    stop_id: int = NO_TOKEN  # the stop id that ended it; it is the last token sent
    code: str = ""
    message: str = ""
    param: str = ""  # the field that an error is about
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


class StepEvents(Message, frozen=True, kw_only=True):
    """Engine to front end: what one step brought for its requests. Row i: token `tokens[i]` is output number
    `indices[i]` (from 0) of request `tags[i]`."""

    step: int
    tags: I64
    tokens: I32
    indices: I32
    finished: list[Finish] = []
    logprobs: list[Logprobs] = []
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []  # with the request's tag, in order of position


class Dying(Message, frozen=True, kw_only=True):
    """Engine to front end: it stops now; every open request has failed with this reason."""

    code: str
    message: str


# ---- stats --------------------------------------------------------------------------------------------------------


class KVStats(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `Stats`: blocks by state. free + in_use + cached = total; shared counts those in use more than once."""

    total: int
    free: int
    in_use: int
    cached: int
    shared: int
    evictions: int  # since the start
    hit_tokens: int  # prompt tokens taken from the cache, since the start
    query_tokens: int  # prompt tokens looked up, since the start


class Stats(Message, frozen=True, kw_only=True):
    """Engine to stats readers: a snapshot. Counters run from the engine's start; drops do no harm."""

    version: int
    sequence: int
    uptime_s: float
    state: str  # starting, ready, draining
    model: str
    steps: int
    running: int
    waiting: int
    kv: KVStats
    prompt_tokens: int  # computed, the cached ones not counted
    output_tokens: int
    finished: int  # with "stop" or "length"
    aborted: int
    failed: int
    preemptions: int
    last_prefill_tokens: int  # of the last step
    last_decode_tokens: int
    last_step_s: float
    busy_s: float = 0.0  # of all steps together: how long the device worked


StatsMessage = Stats
EngineMessage = Progress | Ready | StartupFailed | StepEvents | Dying | Stats


# ---- engine -> worker ---------------------------------------------------------------------------------------------


class AllocateKV(Message, frozen=True, kw_only=True):
    """Engine to worker, once, after `WeightsLoaded`: make this many KV blocks, warm up. Answered by `WorkerReady`."""

    num_blocks: int
    max_batch_tokens: int
    max_seqs: int
    max_model_len: int


class SlotOpen(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `StepPlan`: a sequence enters a slot. The KV of its first `computed` tokens is in `blocks` already."""

    slot: int
    tokens: I32  # prompt, and after a preemption the outputs so far
    prompt_len: int
    computed: int
    blocks: I32  # block table so far: ids in order of position
    sampling: Sampling


class StepPlan(Message, frozen=True, kw_only=True):
    """Engine to every worker: one step. Apply closes, opens, appended blocks, in this order; then compute the rows.

    Row i feeds the next `row_tokens[i]` tokens of slot `row_slots[i]`; where `row_samples[i]` is 1 these reach the last
    known token and the row samples one more, which becomes the slot's next token on the device.

    Row j of `masks`, ceil(vocabulary / 32) words long, says which tokens the sampling row `mask_rows[j]` (an index into
    the rows that sample) may draw: bit `id % 32` of word `id // 32` is 1 where it may. All others draw freely.

    `score_rows` (indices into all rows) are those whose result brings log-probabilities of prompt tokens: row i, fed
    after the first `c` tokens of its slot, of those at positions `c + 1` to `c + row_tokens[i]`, as far as the prompt
    goes. Each is from the logits of the position before, which no sampling setting has changed.
    """

    step: int
    closes: I32
    opens: list[SlotOpen]
    append_slots: I32
    append_blocks: I32
    row_slots: I32
    row_tokens: I32
    row_samples: I32
    mask_rows: I32 = _NO_INTEGERS
    masks: I32 = _NO_INTEGERS
    score_rows: I32 = _NO_INTEGERS


class Shutdown(Message, frozen=True, kw_only=True):
    """Engine to worker: leave now."""


WorkerCommand = AllocateKV | StepPlan | Shutdown


# ---- worker -> engine ---------------------------------------------------------------------------------------------


class WeightsLoaded(Message, frozen=True, kw_only=True):
    """Worker to engine: weights are in the slab. `block_budget` KV blocks fit behind them, `max_seqs` is what it has
    tables for."""

    rank: int
    block_budget: int
    max_seqs: int
    device_name: str


class WorkerReady(Message, frozen=True, kw_only=True):
    """Worker to engine: KV allocated, warm, waiting for plans."""

    rank: int


class TopLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Part of `StepResult`: for the m rows that asked, [m] and row-major [m, k] arrays of natural-log probabilities."""

    rows: I32  # [m] index into the sampling rows
    sampled: F32  # [m]
    k: int
    ids: I32  # [m * k], likeliest first
    values: F32  # [m * k]


class StepResult(Message, frozen=True, kw_only=True):
    """Worker to engine (rank 0 alone): the sampled token of each sampling row of plan `step`, in row order."""

    step: int
    tokens: I32  # [sampling rows]
    failed: I32  # indices of sampling rows whose logits hold NaN or infinity
    seconds: float  # forward and sampling
    logprobs: TopLogprobs | None = None
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []  # for each of the plan's `score_rows`, with its number


class Heartbeat(Message, frozen=True, kw_only=True):
    """Worker to engine, every second from a thread of its own: alive, and at which step."""

    rank: int
    step: int
    busy_s: float  # how long the step has been running; 0 when idle


class WorkerFailed(Message, frozen=True, kw_only=True):
    """Worker to engine: it cannot go on and leaves."""

    rank: int
    code: str
    message: str


WorkerReport = Progress | WeightsLoaded | WorkerReady | StepResult | Heartbeat | WorkerFailed
