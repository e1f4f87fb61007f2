"""What a piece of work allocates at most, by torch's own count."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most bytes that tensors made in `work` held at once on `device`; on a CPU the profiler slows it down."""
    if device.type == "cuda":
        before_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    with tempfile.TemporaryDirectory(prefix="tpvision-") as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_bytes())["traceEvents"] if event.get("name") == "[memory]"]
    changes = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    before_bytes = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return int(max(change["Total Allocated"] for change in changes) - before_bytes)
