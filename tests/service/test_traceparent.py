"""The traceparent header, by the examples and rules of W3C Trace Context."""

import re

import pytest

from service.traceparent import TraceParent, child_of, read_traceparent

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
GOOD = f"00-{TRACE_ID}-{SPAN_ID}-01"


def test_a_valid_header_is_read() -> None:
    assert read_traceparent([GOOD]) == TraceParent(TRACE_ID, SPAN_ID, is_sampled=True)
    assert read_traceparent([GOOD[:-2] + "00"]) == TraceParent(TRACE_ID, SPAN_ID, is_sampled=False)


def test_unknown_flags_are_not_passed_on() -> None:
    assert str(read_traceparent([GOOD[:-2] + "ff"])) == GOOD
    assert str(read_traceparent([GOOD[:-2] + "fe"])) == GOOD[:-2] + "00"


@pytest.mark.parametrize("value", [f"01{GOOD[2:]}", f"cc{GOOD[2:]}-what-comes-later"])
def test_later_versions_are_read_as_far_as_they_are_known(value: str) -> None:
    assert str(read_traceparent([value])) == GOOD


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        [GOOD, GOOD],
        [GOOD.upper()],
        [f"ff{GOOD[2:]}"],
        [f"{GOOD}-more"],
        [f"cc{GOOD[2:]}more"],
        [f" {GOOD}"],
        [GOOD[:-1]],
        [GOOD.replace(TRACE_ID, "0" * 32)],
        [GOOD.replace(SPAN_ID, "0" * 16)],
        [GOOD.replace("4bf9", "4bg9")],
        [GOOD.replace("-", "_")],
        [GOOD.replace("00f0", "٠٠f0")],
        ["0" * 100_000],
    ],
)
def test_anything_else_is_ignored(values: list[str]) -> None:
    assert read_traceparent(values) is None


def test_a_child_stays_in_its_trace() -> None:
    child = child_of(read_traceparent([GOOD]))
    assert (child.trace_id, child.is_sampled) == (TRACE_ID, True)
    assert child.span_id != SPAN_ID
    assert read_traceparent([str(child)]) == child


def test_without_a_parent_there_is_a_new_trace_that_nobody_records() -> None:
    one, other = child_of(None), child_of(None)
    assert one.trace_id != other.trace_id
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", str(one))
