"""What is known of one request, noted on its way. When it ends, `service.reporter` counts, traces and logs it.

It holds nothing of the client's but its request id and trace, which were checked: no bytes, keys, URLs or names.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from service.errors import ServiceError
from service.geometry import ImagePlan, Policy
from service.traceparent import TraceParent
from tp.modes import Mode

Stage = Literal[
    "receive",
    "header",
    "decode",
    "preprocess",
    "queue",
    "forward",
    "all_gather",
    "coalesce",
    "copy",
    "encode_response",
]
Interval = tuple[float, float]  # start and end, by time.monotonic

STAGES: tuple[Stage, ...] = get_args(Stage)  # in the order in which they happen
UNKNOWN_ROUTE = "other"  # no route of ours: whatever else clients may ask for
CLIENT_GONE = 499  # nginx's status for a client that left before its answer; nobody is there to read it
_MAX_SHOWN = 16  # images of a log line


@dataclass(slots=True)
class RequestRecord:
    """One request. Whoever does something for it notes it here."""

    request_id: str = ""
    trace: TraceParent | None = None  # its own span
    is_probe: bool = False  # not told of
    started: float = field(default_factory=time.monotonic)  # its first byte
    ended: float = 0.0  # its answer's last byte is sent, or with the kernel
    method: str = ""
    route: str = UNKNOWN_ROUTE  # the route's own path, never the client's text
    form: str = ""  # of the answer, where one was chosen
    status: int = 0
    code: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)  # of its error
    policy: Policy | None = None
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (width, height) of its images, from their headers
    plans: Sequence[ImagePlan] = ()  # what was made of them
    is_admitted: bool = False
    num_cached: int = 0  # of its images, those whose tokens the cache had,
    num_coalesced: int = 0  # and those that were encoded for another request at the same time
    client_gone: bool = False  # before it had its whole answer
    bytes_in: int = 0  # of its body
    bytes_out: int = 0  # of its answer's
    stages: dict[Stage, Interval] = field(default_factory=dict)
    rank_0_forward: Interval | None = None
    mode: Mode | None = None  # of the batch that was ready last, as are the times of its stages

    @property
    def seconds(self) -> float:
        """From its first byte to its answer's last."""
        return self.ended - self.started

    @property
    def is_refusal(self) -> bool:
        """Whether it was refused before any work, and not through a fault of ours."""
        return bool(self.code) and not self.is_admitted and (self.status < CLIENT_GONE or self.status == 503)

    @property
    def times_s(self) -> dict[str, float]:
        """Seconds of each stage that it came through, or into."""
        return {stage: end - start for stage, (start, end) in self.stages.items()}

    @property
    def outcome(self) -> Literal["fits", "downscaled", "refused"] | None:
        """What the capacity made of its images; None where it was not asked."""
        if self.code == "too_many_patches":
            return "refused"
        if any(plan.downscaled for plan in self.plans):
            return "downscaled"
        return "fits" if self.plans else None

    def note_error(self, error: ServiceError) -> None:
        """It is answered with this error."""
        self.status, self.code, self.numbers = error.status, error.code, error.numbers

    def note_gone(self) -> None:
        """Its client left before there was an answer, unless there was one."""
        if not self.status:
            self.status, self.code, self.client_gone = CLIENT_GONE, "client_gone", True

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Note how long the block takes, also where it raises; what the stage took before is added."""
        started = time.monotonic() - self.times_s.get(name, 0.0)
        try:
            yield
        finally:
            self.stages[name] = (started, time.monotonic())

    def end_with(self, name: Stage, seconds: float, *, of: Stage) -> None:
        """Make the last `seconds` of a stage one of their own."""
        start, end = self.stages[of]
        self.stages[of] = (start, end - seconds)
        self.stages[name] = (end - seconds, end)

    def fields(self) -> dict[str, Any]:
        """The log line. What does not apply is left out; at most 16 images are listed."""
        fields = {
            "id": self.request_id,
            "trace_id": self.trace.trace_id if self.trace else "",
            "span_id": self.trace.span_id if self.trace else "",
            "method": self.method,
            "route": self.route,
            "form": self.form,
            "status": self.status,
            "code": self.code,
            "error": dict(self.numbers),
            "ms": _milliseconds(self.seconds),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "client_gone": self.client_gone,
            "policy": self.policy,
            "outcome": self.outcome,
            "num_images": len(self.plans or self.sizes) or None,
            "patches": sum(plan.patches for plan in self.plans) or None,
            "cached": self.num_cached or None,
            "coalesced": self.num_coalesced or None,
            "images": self._images(),
            "mode": self.mode,
            "stages_ms": {stage: _milliseconds(seconds) for stage, seconds in self.times_s.items()},
        }
        return {name: value for name, value in fields.items() if value not in (None, "", [], {})}

    def _images(self) -> list[dict[str, Any]]:
        if not self.plans:
            return [{"size": list(size)} for size in self.sizes[:_MAX_SHOWN]]
        return [
            {
                "size": list(plan.original_size),
                "encoded": list(plan.encoded_size),
                "patches": plan.patches,
                "tier": plan.tier,
                "frames": plan.grid.t,
                "downscaled": plan.downscaled,
            }
            for plan in self.plans[:_MAX_SHOWN]
        ]


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
