"""A rank that computes nothing: it says that every batch is done, and leaves in the slab what lies there.

A front-end cannot tell it from a worker group of one, so that what it and its decode processes take can be measured
alone. It needs the two config files of a checkpoint, and neither weights nor torch. `service.bench.front_end` runs it.
"""

import argparse
import os
from pathlib import Path

from tp import wire
from tp.control import ControlClient
from tp.process import die_with_parent, resident_bytes
from tp.settings import load_settings
from tp.slab import SlabLayout
from tp.spec import ITEMSIZE, read_spec

_CONNECT_TIMEOUT_S = 60.0


def main() -> None:
    """Greet, then answer batches until told to stop."""
    parser = argparse.ArgumentParser(description="A worker that computes nothing, for measuring a front-end.")
    parser.add_argument("--parent", type=int, required=True, help="pid of the process that starts this one")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    settings = load_settings(environ=os.environ).settings
    assert settings.model.path is not None and settings.parallel.socket is not None
    spec = read_spec(settings.model.path)
    control = ControlClient.connect(Path(settings.parallel.socket), timeout_s=_CONNECT_TIMEOUT_S)
    hello = wire.Hello(
        group=0,
        incarnation="null",
        rank=0,
        pid=os.getpid(),
        contract=wire.contract_for(settings, spec, 1),
        weights_fingerprint="none",
    )
    control.greet(hello)
    layout = SlabLayout.of(spec, num_patches=settings.slab_patches, itemsize=ITEMSIZE[settings.compute_dtype(spec)])
    ready = wire.Ready(
        device="cpu",
        weights_bytes=0,
        slab_bytes=layout.total_bytes,
        resident_bytes=resident_bytes(),
        warm_up_patches=4,
        warm_up_s=0.0,
    )
    control.send(ready)
    while isinstance(message := control.receive(), wire.Batch):
        control.send(wire.Done(batch_id=message.batch_id, non_finite=[], forward_s=0.0, all_gather_s=0.0))


if __name__ == "__main__":
    main()
