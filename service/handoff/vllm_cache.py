"""vLLM's encoder cache, as files: `<folder>/<id>/encoder_cache.safetensors` with one tensor, `ec_cache`.

What `ECExampleConnector` of vLLM 0.33.0 reads in its consumer role; its folder is `shared_storage_path`, and the id is
the `uuid` of the image's part in the chat request. vLLM looks whether the file exists and then loads it, so a file
appears whole. Files are never deleted here: the folder's size is the operator's matter. `service.handoff.routes` calls
this.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from service.errors import StoreFailed
from service.safetensors_header import DTYPE_NAMES, Item, file_start
from service.tokens import Embeddings
from service.waiting import DaemonThread
from service.whole_file import whole_file

# One component of a path, and not a hidden one. The colon is vLLM's, between a LoRA adapter and the uuid.
ID_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._:-]{0,127}$"

log = logging.getLogger("tpvision.handoff")


class EncoderCache:
    """Writes into one folder, one request at a time. One per process."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        self._folder = folder
        self._thread = DaemonThread(timeout_s)  # the folder is often a network's

    async def write(self, ids: Sequence[str], embeddings: Embeddings, *, tag: str) -> None:
        """Write the tokens of each image under its id, in place of what is there.

        The ids must match ID_PATTERN, and no other write may have the same `tag`. Raises StoreFailed.
        """
        try:
            await self._thread.run(lambda: self._write(ids, embeddings, tag))
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError; no more threads, a RuntimeError
            log.error("the encoder cache %s cannot be written: %s", self._folder, error)
            raise StoreFailed(
                "the embeddings could not be written to the encoder cache; the log has the reason"
            ) from error

    def _write(self, ids: Sequence[str], embeddings: Embeddings, tag: str) -> None:
        for index, name in enumerate(ids):
            tokens = embeddings.of_image(index)
            start = file_start([Item("ec_cache", DTYPE_NAMES[embeddings.dtype], tokens.shape, tokens.nbytes)])
            folder = self._folder / name
            folder.mkdir(exist_ok=True)
            with whole_file(folder / "encoder_cache.safetensors", tag=f".{tag}") as partial, partial.open("wb") as file:
                file.write(start)
                file.write(tokens.data.cast("B"))
