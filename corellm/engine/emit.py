"""From the outcome of a step to the messages that front ends get."""

from __future__ import annotations

from collections.abc import Iterator

from corellm.comms.codec import f32, i32, i64
from corellm.comms.messages import NO_TOKEN, Finish, Logprobs, Request, StepEvents
from corellm.engine.sequence import Sequence
from corellm.engine.steps import Outcome
from corellm.errors import CoreLLMError


def step_events(outcome: Outcome) -> Iterator[tuple[bytes, StepEvents]]:
    """One message for each front end that the step has something for."""
    clients = {sequence.client for sequence in outcome.sequences}
    clients.update(sequence.client for sequence in outcome.ended)
    clients.update(sequence.client for sequence, _ in outcome.prompt_logprobs)
    for client in clients:
        mine = [i for i, sequence in enumerate(outcome.sequences) if sequence.client == client]
        everything = len(mine) == len(outcome.sequences)
        tokens = outcome.tokens if everything else [outcome.tokens[i] for i in mine]
        indices = outcome.indices if everything else [outcome.indices[i] for i in mine]
        yield (
            client,
            StepEvents(
                step=outcome.step,
                tags=i64([outcome.sequences[i].tag for i in mine]),
                tokens=i32(tokens),
                indices=i32(indices),
                finished=[finish_message(sequence) for sequence in outcome.ended if sequence.client == client],
                logprobs=_logprobs(outcome, mine),
                prompt_logprobs=[(s.tag, found) for s, found in outcome.prompt_logprobs if s.client == client],
            ),
        )


def only_finished(finished: list[Finish]) -> StepEvents:
    """Terminal events that no step brought: refusals and aborts."""
    return StepEvents(step=0, tags=i64([]), tokens=i32([]), indices=i32([]), finished=finished)


def refusal(request: Request, error: CoreLLMError) -> Finish:
    """The terminal event of a request that is not let in."""
    return Finish(
        tag=request.tag,
        reason="error",
        code=error.code,
        message=error.message,
        param=getattr(error, "param", None) or "",
        prompt_tokens=len(request.prompt),
    )


def finish_message(sequence: Sequence) -> Finish:
    """The terminal event of a sequence that has ended."""
    end = sequence.end
    if end is None or sequence.ended_at is None:
        raise ValueError(f"sequence {sequence.id} has not ended")
    arrived = sequence.arrived_at
    return Finish(
        tag=sequence.tag,
        reason=end.reason,
        stop_id=NO_TOKEN if end.stop_id is None else end.stop_id,
        code=end.code,
        message=end.message,
        param=end.param,
        prompt_tokens=sequence.prompt_len,
        cached_tokens=sequence.cached_tokens,
        output_tokens=sequence.output_tokens,
        preemptions=sequence.preemptions,
        queued_s=(sequence.admitted_at or sequence.ended_at) - arrived,
        first_token_s=(sequence.first_token_at or sequence.ended_at) - arrived,
        total_s=sequence.ended_at - arrived,
    )


def _logprobs(outcome: Outcome, mine: list[int]) -> list[Logprobs]:
    found = outcome.logprobs
    if found is None:
        return []
    place = {outcome.rows[i]: row for row, i in enumerate(mine)}
    return [
        Logprobs(
            row=place[asked],
            logprob=float(found.sampled[i]),
            top_ids=i32(found.ids[i * found.k : (i + 1) * found.k]),
            top_logprobs=f32(found.values[i * found.k : (i + 1) * found.k]),
        )
        for i, asked in enumerate(found.rows.tolist())
        if asked in place
    ]
