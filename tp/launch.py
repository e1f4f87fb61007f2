"""`torchrun` that dies with the process that started it: `python -m tp.launch PARENT_PID <torchrun arguments>`.

torchrun does not notice when its own parent is killed, and leaves its ranks behind (measured on torch 2.13). The
launcher of the service starts this module in torchrun's place; the ranks themselves die with torchrun (`tp.worker`).
"""

import gc
import os
import signal
import sys

from tp.process import PARENT_VARIABLE, die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent to a whole container, it is for the front-end; ranks inherit it
    gc.disable()  # collections find nothing while modules are imported, and take a tenth of the time
    from torch.distributed.run import main

    gc.freeze()
    gc.enable()
    main(["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT", *sys.argv[1:]])
