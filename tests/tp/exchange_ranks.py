"""One rank of a torchrun group that tries the shared-memory exchange beside gloo: `exchange_ranks.py`; says "alike"."""

import torch

from tp.parallel import ProcessGroupCollectives, TPGroup


def main() -> None:
    with TPGroup.from_environment(torch.device("cpu"), timeout_s=60, exchange="shared_memory") as group:
        assert group.describe_collectives() == "shared memory"
        gloo = ProcessGroupCollectives()
        for step in range(20):
            generator = torch.Generator().manual_seed(100 * step + group.rank)
            x = torch.randn(3 * group.world_size, 1 + 7 * step, generator=generator)
            torch.testing.assert_close(group.all_reduce_(x.clone()), gloo.all_reduce_(x.clone()))
            parts = x.view(group.world_size, 3, -1)
            torch.testing.assert_close(group.reduce_scatter(parts), gloo.reduce_scatter(parts))
            assert torch.equal(group.all_gather(x), gloo.all_gather(x))
    print("alike", flush=True)


if __name__ == "__main__":
    main()
