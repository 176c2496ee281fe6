"""Every way CoreLLM refuses or fails, one exception per cause.

A message is one line that names the field, the value, what is allowed and how to fix it. `code` is a stable
identifier: it travels in messages, in batch error rows and in HTTP error bodies.
"""

from __future__ import annotations

STOPPED = "the engine was stopped"  # what an engine says that leaves in order


class CoreLLMError(Exception):
    """Base of every error that CoreLLM raises on purpose."""

    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class OptionError(CoreLLMError):
    """An engine or command option is out of range, or two options contradict each other."""

    code = "invalid_option"


class ModelNotFoundError(CoreLLMError):
    """No local folder, hub id or demo source answers to the name."""

    code = "model_not_found"


class UnsupportedModelError(CoreLLMError):
    """The checkpoint is well formed, but of an architecture that CoreLLM does not run."""

    code = "model_unsupported"


class CheckpointError(CoreLLMError):
    """A checkpoint's files contradict themselves: torn, truncated, of the wrong shape, missing or left-over tensors."""

    code = "checkpoint_invalid"


class StartupError(CoreLLMError):
    """The engine could not start: what was needed, what was there, which option fixes it."""

    code = "startup_failed"


class OutOfMemoryError(StartupError):
    """Weights and the smallest useful KV cache do not fit the memory that there is."""

    code = "out_of_memory"


class InvalidRequestError(CoreLLMError):
    """A request is refused before it is queued. `param` names the offending field."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """Prompt and requested tokens can never fit the context or the KV cache."""

    code = "context_length_exceeded"


class RequestFailedError(CoreLLMError):
    """An admitted request ended in an error of its own; the engine and other requests go on."""

    code = "request_failed"


class NumericalError(RequestFailedError):
    """The model produced NaN or infinity for this request."""

    code = "nan_logits"


class RequestAbortedError(RequestFailedError):
    """The request was aborted before it finished."""

    code = "aborted"


class OverloadedError(RequestFailedError):
    """There was no room for the request in time; sent again later, it may be answered."""

    code = "over_capacity"


class EngineDeadError(CoreLLMError):
    """The engine or one of its workers died, hung or was stopped while requests were open."""

    code = "engine_dead"


class EngineTimeoutError(EngineDeadError):
    """A wait on the engine met its deadline."""

    code = "engine_timeout"


class ProtocolError(CoreLLMError):
    """A peer sent a message of another version, an unknown type or a damaged body."""

    code = "protocol_error"


class RunFolderError(CoreLLMError):
    """The private run folder cannot be made, is not private, or is in use by another engine."""

    code = "run_folder"


class BatchError(CoreLLMError):
    """A batch run cannot begin or go on: other settings, output in use, disk full."""

    code = "batch_failed"


class ServerError(CoreLLMError):
    """The HTTP server cannot begin or go on: its port is taken, an API worker has died."""

    code = "server_failed"


class ChatError(CoreLLMError):
    """A chat command cannot be followed, or a session cannot be read or written."""

    code = "chat_failed"


class UpstreamError(CoreLLMError):
    """The server that a chat talks to cannot be reached, refuses, or breaks off."""

    code = "upstream_failed"


class RecordingError(CoreLLMError):
    """A recording of `corellm top` cannot be written or read, is damaged, or is of another version."""

    code = "recording_invalid"


def _concrete(root: type[CoreLLMError]) -> dict[str, type[CoreLLMError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_concrete(child))
    return found


def from_code(code: str, message: str, param: str | None = None) -> CoreLLMError:
    """Rebuild an error that crossed a process boundary as (code, message, param)."""
    kind = _concrete(CoreLLMError).get(code, CoreLLMError)
    return kind(message, param) if issubclass(kind, InvalidRequestError) else kind(message)
