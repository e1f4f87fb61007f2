"""How the ranks of a group share a batch: every image cut over all of them, or every image on one of them.

Tensor-parallel ("tp") gives one large image its least latency; data-parallel ("dp") needs no collectives, but all
weights on every rank (`parallel.resident: full`). No torch: the front-end predicts with the assignment ranks follow.
"""

from collections.abc import Sequence
from typing import Literal

Mode = Literal["tp", "dp"]


def timing_sizes(smallest_tier: int, world_size: int) -> tuple[int, int]:
    """Patches of each image in the two batches that ranks time in both modes before they are ready: a line needs two.

    A batch has an image for each rank, an eighth and a half of the tier together: the least for which data parallelism
    can be the quicker one. A lone image's time leaves out what tensor parallelism takes for each further image.
    """
    share = smallest_tier // world_size
    return max(4, share // 32 * 4), max(8, share // 8 * 4)


def assign_images(costs: Sequence[float], world_size: int) -> list[list[int]]:
    """Which images each rank encodes alone, as ascending indexes: the costliest first, each to the least loaded rank.

    (Longest processing time first: at most 4/3 of the best makespan; Graham 1969, doi:10.1137/0117039.)
    """
    loads = [0.0] * world_size
    assigned: list[list[int]] = [[] for _ in range(world_size)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = loads.index(min(loads))
        loads[rank] += costs[index]
        assigned[rank].append(index)
    return [sorted(indexes) for indexes in assigned]


def makespan(costs: Sequence[float], world_size: int) -> float:
    """Cost of the most loaded rank under `assign_images`."""
    return max(sum(costs[index] for index in indexes) for indexes in assign_images(costs, world_size))
