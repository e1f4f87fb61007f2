"""Where the parts of a batch run on the device: on CUDA copies run beside the computation, on a CPU all in turn.

CUDA runs what it was told in the order of its stream, and the host goes on meanwhile. Computation stays in the stream
that is current; copies to the device and back have a stream each, and wait for, or are waited for by, no more than they
need. Called by tp/runner.py; what a forward itself takes to the device goes through `to_device`.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Moment(Protocol):
    """When the device got as far as it had been told to."""

    def is_past(self) -> bool:
        """Whether it did by now."""
        ...

    def wait(self) -> None:
        """Until it did."""
        ...

    def seconds_since(self, earlier: "Moment") -> float:
        """Between two that are past, by the device's clock."""
        ...


class Streams(Protocol):
    """What runs beside what."""

    def mark(self) -> Moment:
        """When all that the current stream was told until now is done."""
        ...

    def copy_in(self, copy: Callable[[], Tensor]) -> Tensor:
        """The tensor that `copy` makes on the device: beside all that was told before, and before what comes after."""
        ...

    def copy_out(self, x: Tensor, copy: Callable[[Tensor], Tensor]) -> tuple[Tensor, Moment]:
        """What `copy` makes of x, and when: after all that was told before, and beside what comes after."""
        ...


def streams_of(device: torch.device) -> Streams:
    """Of this kind of device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x [...] on the device, without a wait for what it is at: from memory that is not pinned, a copy would wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class HostMoment:
    """A CPU is done with what it was told when the call returns."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def is_past(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Not at all."""

    def seconds_since(self, earlier: Moment) -> float:
        """By the host's clock."""
        assert isinstance(earlier, HostMoment)
        return self._at_s - earlier._at_s


class HostStreams:
    """One thing after the other."""

    def mark(self) -> Moment:
        """Now."""
        return HostMoment()

    def copy_in(self, copy: Callable[[], Tensor]) -> Tensor:
        """Now."""
        return copy()

    def copy_out(self, x: Tensor, copy: Callable[[Tensor], Tensor]) -> tuple[Tensor, Moment]:
        """Now."""
        return copy(x), self.mark()


class CudaMoment:
    """An event in the stream that is current when it is made."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def is_past(self) -> bool:
        """Raises what went wrong on the device before."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Raises what went wrong on the device before."""
        self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """By the device's clock."""
        assert isinstance(earlier, CudaMoment)
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaStreams:
    """A stream each for copies to the device and back, beside the current one, which computes.

    The allocator knows a tensor's memory by the stream that it was made in, and would give it away there while another
    stream still uses it: `record_stream` tells of the other one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def mark(self) -> Moment:
        """An event in the current stream."""
        return CudaMoment()

    def copy_in(self, copy: Callable[[], Tensor]) -> Tensor:
        """In its own stream; the current one waits for it from here on."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._in):
            x = copy()
        computing.wait_stream(self._in)
        x.record_stream(computing)
        return x

    def copy_out(self, x: Tensor, copy: Callable[[Tensor], Tensor]) -> tuple[Tensor, Moment]:
        """In its own stream, which waits for the current one."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            result, done = copy(x), self.mark()
        x.record_stream(self._out)
        return result, done
