"""`torchrun` that dies with the process that started it: `python -m tp.launch PARENT_PID <torchrun arguments>`.

torchrun does not notice when its own parent is killed, and leaves its ranks behind (measured on torch 2.13). The
launcher of the service starts this module in torchrun's place; the ranks themselves die with torchrun (`tp.worker`).
"""

import os
import signal
import sys

from tp.process import PARENT_VARIABLE, die_with_parent, without_collections

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent to a whole container, it is for the front-end; ranks inherit it
    with without_collections():
        from torch.distributed.run import main
    main(["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT", *sys.argv[1:]])
