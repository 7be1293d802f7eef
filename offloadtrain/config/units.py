"""Human-readable quantities: bytes, counts, seconds, rates."""

from __future__ import annotations

import math
import re
from datetime import datetime

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "B", "T")
_BYTES = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(?:([kmgtp])(i?))?b?\s*", re.IGNORECASE)


def format_bytes(count: float) -> str:
    """1536 → "1.5 KiB"; whole bytes below 1 KiB."""
    digits, unit = _scaled(count, 1024, _BINARY, ".1f")
    return f"{digits} {unit}"


def parse_bytes(text: str) -> int:
    """Sizes such as "32GiB", "1.5 MB" or "4096" → bytes; GiB is 2^30, GB is 10^9.

    Raises:
        ValueError: if the text is not a size or the size is above 64 bits.
    """
    match = _BYTES.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a size such as 32GiB, 500MB or 4096")
    number, prefix, binary = match.groups()
    power = " kmgtp".index(prefix.lower()) if prefix else 0
    factor: int = (1024 if binary else 1000) ** power
    if (size := float(number) * factor) >= 2**63:
        raise ValueError(f"'{text[:40]}' is more than any machine has")
    return round(size)


def parse_count(text: str) -> float:
    """Numbers such as "10B", "1.5M", "32k", "1e13" or "4096" → their value.

    Raises:
        ValueError: if the text is not a number.
    """
    match = re.fullmatch(
        r"\s*([0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)\s*([kmbt]?)\s*", text, re.IGNORECASE
    )
    if match is None:
        raise ValueError(f"'{text[:40]}' is not a number such as 10B, 350M or 4096")
    return float(match[1]) * 1000.0 ** " kmbt".index(match[2].lower() or " ")


def format_count(count: float) -> str:
    """1_340_000_000 → "1.34B"; whole numbers below a thousand."""
    return "".join(_scaled(count, 1000, _DECIMAL, ".3g"))


def format_rate(per_second: float, unit: str) -> str:
    """12_345.6, "tok" → "12.3k tok/s"."""
    return f"{format_count(per_second)} {unit}/s"


def format_duration(seconds: float) -> str:
    """75.2 → "1m15s", 4000 → "1h06m", 0.25 → "250ms"; "-" if unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if round(seconds * 1e3) < 1000:
        return f"{seconds * 1e3:.0f}ms"
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m{total_s % 60:02d}s"
    if total_s < 86_400:
        return f"{total_s // 3600}h{total_s % 3600 // 60:02d}m"
    return f"{total_s // 86_400}d{total_s % 86_400 // 3600:02d}h"


def format_seconds(seconds: float) -> str:
    """Three digits for tables: 164.7 → "165 s", 0.073 → "73 ms", 4.4e-5 → "44 µs"."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= size:
            scaled = seconds / size
            return f"{scaled:.0f} {unit}" if scaled >= 99.95 else f"{scaled:.3g} {unit}"
    return "0 s"


def format_clock(unix_s: float, now_s: float) -> str:
    """Local time: "03:48", "Sun 03:48" if more than twenty hours away, "Dec 24" if more than six
    days away; "-" if unknown."""
    ahead_s = unix_s - now_s
    try:
        moment = datetime.fromtimestamp(unix_s)
    except (OverflowError, OSError, ValueError):
        return "-"
    if ahead_s < 20 * 3600:
        return f"{moment:%H:%M}"
    return f"{moment:%a %H:%M}" if ahead_s < 6 * 86_400 else f"{moment:%b %d}"


def _scaled(count: float, base: int, units: tuple[str, ...], form: str) -> tuple[str, str]:
    """Return digits and unit; the printed digits stay below `base` if possible."""
    size, digits = float(count), f"{count:.0f}"
    for unit in units[:-1]:
        if not abs(float(digits)) >= base:
            return digits, unit
        size /= base
        digits = f"{size:{form}}"
    return digits, units[-1]
