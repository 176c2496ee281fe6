"""CoreLLM: run Llama 3.1 yourself, from the terminal or from Python.

    from corellm import EngineNode, SamplingParams

Names are loaded when they are used: importing this package imports neither torch nor zmq.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corellm.engine_node import EngineNode
    from corellm.errors import CoreLLMError
    from corellm.sampling_params import JsonConstraint, SamplingParams
    from corellm.text_engine import Completion, Delta, PromptLogprob, TokenLogprob

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "CoreLLMError",
    "Delta",
    "EngineNode",
    "JsonConstraint",
    "PromptLogprob",
    "SamplingParams",
    "TokenLogprob",
    "__version__",
]

_HOMES = {
    "Completion": "corellm.text_engine",
    "CoreLLMError": "corellm.errors",
    "Delta": "corellm.text_engine",
    "EngineNode": "corellm.engine_node",
    "JsonConstraint": "corellm.sampling_params",
    "PromptLogprob": "corellm.text_engine",
    "SamplingParams": "corellm.sampling_params",
    "TokenLogprob": "corellm.text_engine",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'corellm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
