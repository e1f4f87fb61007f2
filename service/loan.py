"""An answer's tokens, lent out of the slab: sent from there while its client reads, instead of being copied out first.

A copy of a large result takes half as long as sending it. Nobody may hold rows by reading slowly, so a loan ends by
itself: what was not taken by then is copied out in a thread, and the rows are free. A piece is a copy too, since the
transport keeps it for as long as its client likes, but a small one, into memory that was just used. `service.engine`
lends; `service.routes` sends.
"""

import asyncio
import weakref

import numpy as np
from numpy.typing import NDArray

from service.admission import Rows

LOAN_BYTES = 2**22  # what is smaller is one piece
_PIECE_BYTES = 2**22  # what the kernel keeps of a connection by default (net.ipv4.tcp_wmem); 1, 2 and 8 MB are slower
_LOAN_S = 0.05  # 59 MB take 15 ms over loopback


class Loan:
    """The bytes of one image's tokens, taken once and from the front. Belongs to an event loop."""

    def __init__(self, values: NDArray[np.uint8], rows: Rows) -> None:
        """`values`: uint8 [num_tokens, token_bytes], in `rows`, which are held."""
        rows.hold()
        self._rows: Rows | None = rows
        self._rest = values.reshape(-1)
        self._num_bytes = values.nbytes
        self._free: list[NDArray[np.uint8]] = []
        self._copying: asyncio.Future[NDArray[np.uint8]] | None = None
        self._timer = asyncio.get_running_loop().call_later(_LOAN_S, self._copy_out)

    def __len__(self) -> int:
        """All bytes, taken or not."""
        return self._num_bytes

    def take(self) -> memoryview:
        """The next bytes, which stay as they are; none at the end."""
        view, self._rest = self._rest[:_PIECE_BYTES], self._rest[_PIECE_BYTES:]
        piece = view if self._rows is None else self._copy(view)
        if len(self._rest) == 0:
            self.release()
        return piece.data

    def release(self) -> None:
        """Nothing more is taken. Idempotent."""
        self._rest = self._rest[:0]
        self._timer.cancel()
        if self._copying is None or self._copying.done():
            self._give_back()

    def _copy(self, view: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Into the memory of an earlier piece that nobody has any more: fresh pages cost more than the copy."""
        buffer = self._free.pop() if self._free else np.empty(_PIECE_BYTES, np.uint8)
        piece = buffer[: len(view)]
        piece[:] = view
        weakref.finalize(piece, self._free.append, buffer)
        return piece

    def _copy_out(self) -> None:
        self._copying = asyncio.get_running_loop().run_in_executor(None, self._rest.copy)
        self._copying.add_done_callback(self._go_on_with)

    def _go_on_with(self, copying: "asyncio.Future[NDArray[np.uint8]]") -> None:
        own = copying.result()
        self._rest = own[len(own) - len(self._rest) :]
        self._give_back()

    def _give_back(self) -> None:
        if self._rows is not None:
            self._rows.release()
            self._rows = None
