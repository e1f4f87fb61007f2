"""One rank of a torchrun group that runs the golden cases: `rank_goldens.py OUT MODEL ...`; rank 0 writes OUT.

Cases over 2,000 patches run on K3 only, to save time.
"""

import sys
from pathlib import Path

import torch
from goldens import DTYPES, run
from safetensors.torch import save_file

from tp.parallel import TPGroup


def main(out: Path, models: list[str]) -> None:
    with TPGroup.from_environment(torch.device("cpu"), timeout_s=60) as group:
        results = {
            f"{model}/{precision}/{name}": tokens
            for model in models
            for precision in DTYPES
            for name, tokens in run(model, precision, group, max_patches=10**9 if model == "tiny-k3" else 2000).items()
        }
    if group.rank == 0:
        save_file(results, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
