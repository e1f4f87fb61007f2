"""A torchrun group that does nothing but join and sum once: the least that any group needs to start.

`service.bench.start` runs it, and reads the line that rank 0 writes when the first all-reduce is done.
"""

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        print("joined", flush=True)  # noqa: T201 - read by the benchmark
    dist.destroy_process_group()
