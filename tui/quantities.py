"""Numbers as people read them."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: float) -> str:
    """Bytes in decimal units, three digits or so: 269 MB, 1.54 GB."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1000
    digits = 0 if unit == "B" or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f} {unit}"


def duration(seconds: float) -> str:
    """Seconds as 0.4 s, 12 s, 3:07 or 2:03:07."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(per_second: float) -> str:
    """A rate without its unit: 0, 0.42, 7.3, 912, 12,345."""
    digits = 0 if per_second >= 100 or not per_second else 1 if per_second >= 1 else 2
    return f"{per_second:,.{digits}f}"


def counted(count: int, noun: str) -> str:
    """`1 page`, `1,024 pages`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def quantity(count: int, unit: str) -> str:
    """`count` in `unit`, where bytes (B) are scaled: 269 MB, 12 tensors, 1,024."""
    if unit == "B":
        return size(count)
    return f"{count:,} {unit}".rstrip()
