"""How a batch is to be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corellm.errors import OptionError

ORDERS = ("completion", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How to run. `defaults` are OpenAI fields that hold where a row does not say.

    Raises `OptionError` when an option is out of range.
    """

    order: str = "completion"
    limit: int | None = None  # rows; None: all
    strict: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_in_flight: int | None = None  # rows; None: twice what the engine runs at once, so that it never starves
    grace_s: float = 5.0  # for rows in flight after a stop is requested

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise OptionError(f"--order is {self.order!r}; choose one of {', '.join(ORDERS)}")
        for name, value in (("--limit", self.limit), ("max_in_flight", self.max_in_flight)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}; it must be an integer of at least 1")

    def settings(self) -> dict[str, Any]:
        """What of this shapes the rows of an output, for its fingerprint."""
        return {name: value for name, value in self.defaults.items() if value is not None}
