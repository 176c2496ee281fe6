"""Try a JSON schema out in a process that can be killed, before the engine compiles it.

llguidance bounds its own work, but not all of it: a few `multipleOf` together take minutes and gigabytes. So a schema
is first compiled by `python -m corellm.engine.schema_check`, whose processor time and memory the kernel bounds, over a
vocabulary of single bytes.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import msgspec
from llguidance import LLExecutor

from corellm.engine.grammar import compile_grammar, make_vocabulary, next_masks, refused
from corellm.errors import InvalidRequestError, OverloadedError
from corellm.sampling_params import JsonConstraint

CPU_S = 1  # of which Python's own start takes a tenth
WALL_S = 5.0  # in which a machine that is busy with other things may not give it that second
MEMORY = 1 << 30
_REFUSED = 3  # exit code; the reason is on standard output
_BYTES = 256
_ONE_THREAD = dict.fromkeys(("RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")


def check_schema(constraint: JsonConstraint) -> None:
    """Wait until the schema is known to compile in bounded time and memory.

    Raises `InvalidRequestError`, `OverloadedError` when the machine is too busy to tell.
    """
    command = [sys.executable, "-m", "corellm.engine.schema_check"]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(constraint), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=WALL_S, check=False, env={**os.environ, **_ONE_THREAD},
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        raise OverloadedError(
            f"the JSON schema of {constraint.param} could not be tried out: the machine is busy; try again later"
        ) from None
    if done.returncode == _REFUSED:
        raise InvalidRequestError(done.stdout.decode("utf-8", "replace"), constraint.param)
    if done.returncode:
        raise refused(
            constraint, f"it needs more than {CPU_S} s or {MEMORY >> 20} MiB to compile; make it simpler, or split it"
        )


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    room = _mapped_bytes() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    constraint = msgspec.json.decode(sys.stdin.buffer.read(), type=JsonConstraint)
    tokens = [*(bytes([value]) for value in range(_BYTES)), b""]
    vocabulary = make_vocabulary(tokens, list, special_ids=[_BYTES], eos_ids=[_BYTES])
    try:
        matcher = compile_grammar(vocabulary, constraint)
        next_masks(LLExecutor(1), [matcher], _BYTES + 1)
        if matcher.is_error():
            raise refused(constraint, matcher.get_error())
    except InvalidRequestError as error:
        sys.stdout.write(error.message)
        return _REFUSED
    return 0


def _mapped_bytes() -> int:
    """Address space in use, of which libraries take much without touching it."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
