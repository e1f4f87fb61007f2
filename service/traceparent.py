"""The `traceparent` header (W3C Trace Context, level 1): which trace a request belongs to, and its own place there.

Pure but for random ids. `service.telemetry` has the spans themselves, where they are exported.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01  # the one flag of level 1; others are not passed on


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A span: of which trace, and whether somebody records it. Ids are lower-case hex, 32 and 16 digits."""

    trace_id: str
    span_id: str
    is_sampled: bool

    def __str__(self) -> str:
        """As the header holds it."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def read_traceparent(values: Sequence[str]) -> TraceParent | None:
    """The caller's span; None unless there is exactly one header and it is valid."""
    found = _PATTERN.fullmatch(values[0]) if len(values) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None  # later versions may append fields
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def child_of(parent: TraceParent | None) -> TraceParent:
    """A new span of the parent's trace, or of a new one that nobody records."""
    if parent is None:
        return TraceParent(secrets.token_hex(16), secrets.token_hex(8), is_sampled=False)
    return TraceParent(parent.trace_id, secrets.token_hex(8), parent.is_sampled)
