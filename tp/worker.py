"""torchrun's entry to a rank: `torchrun … -m tp.worker --socket PATH --group G`.

Before anything slow is imported, it makes sure that the rank dies with its torchrun; then it becomes `tp.rank`.
"""

import os

from tp.process import PARENT_VARIABLE, die_with_parent, without_collections

if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    with without_collections():
        from tp.rank import main
    main()
