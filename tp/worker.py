"""torchrun's entry to a rank: `torchrun … -m tp.worker --socket PATH --group G`.

Before anything slow is imported, it makes sure that the rank dies with its torchrun; then it becomes `tp.rank`.
"""

import gc
import os

from tp.process import PARENT_VARIABLE, die_with_parent

if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    gc.disable()  # collections find nothing while modules are imported, and take a tenth of the time
    from tp.rank import main

    gc.freeze()
    gc.enable()
    main()
