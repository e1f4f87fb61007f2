"""The slab: one anonymous memory file that holds the pixels and the merged tokens of every image in flight.

    [ pixels: num_patches rows of patch_bytes uint8 | padding to a page | tokens: num_patches / 4 rows of token_bytes ]

A run is a range of patch rows, a multiple of 4 long; its merged tokens are the token rows at a quarter of its place, so
one reservation covers both arenas. The front-end creates the file, touches every page once (a fresh page costs 15 times
the copy into it) and hands the descriptor to each rank and decode process; nobody but the front-end reserves runs.
No torch here, and no policy: `service.admission` decides who gets rows.
"""

import fcntl
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tp.spec import EncoderSpec

PATCHES_PER_TOKEN = 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SlabError(ValueError):
    """A slab that cannot be made, or a descriptor that is not the slab it is said to be."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of the pixel arena: where they start and how many, both multiples of 4."""

    start: int
    num_patches: int

    def __post_init__(self) -> None:
        if (
            self.start < 0
            or self.num_patches < 1
            or self.start % PATCHES_PER_TOKEN
            or self.num_patches % PATCHES_PER_TOKEN
        ):
            raise ValueError(f"a run starts and ends at multiples of {PATCHES_PER_TOKEN}: {self}")

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.start + self.num_patches


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Sizes of the two arenas, in rows and bytes; the same on both sides or the handshake fails."""

    num_patches: int
    patch_bytes: int  # one row of uint8 pixels
    token_bytes: int  # one merged token in the compute dtype

    @classmethod
    def of(cls, spec: EncoderSpec, *, num_patches: int, itemsize: int) -> "SlabLayout":
        """The layout for an encoder whose tokens have `itemsize` bytes an element."""
        return cls(num_patches, spec.patch_bytes, spec.text_hidden_size * itemsize)

    @property
    def num_tokens(self) -> int:
        """Rows of the token arena."""
        return self.num_patches // PATCHES_PER_TOKEN

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the pixel arena."""
        return self.num_patches * self.patch_bytes

    @property
    def token_arena_bytes(self) -> int:
        """Bytes of the token arena."""
        return self.num_tokens * self.token_bytes

    @property
    def token_offset(self) -> int:
        """Where the token arena starts: the next page."""
        return -(-self.pixel_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def total_bytes(self) -> int:
        """Bytes of the memory file."""
        return self.token_offset + self.token_arena_bytes


class Slab:
    """A mapped slab and typed views of its rows. The creator and every mapper hold their own descriptor."""

    def __init__(self, fd: int, layout: SlabLayout) -> None:
        self.fd = fd
        self.layout = layout
        self._map = mmap.mmap(fd, layout.total_bytes)
        self.buffer = np.frombuffer(self._map, dtype=np.uint8)  # all of it
        pixels, tokens = self.buffer[: layout.pixel_bytes], self.buffer[layout.token_offset :]
        self._pixels = pixels.reshape(layout.num_patches, layout.patch_bytes)
        self._tokens = tokens.reshape(layout.num_tokens, layout.token_bytes)

    @classmethod
    def create(cls, layout: SlabLayout) -> "Slab":
        """Allocate, touch and seal a new slab. Raises SlabError with the bytes wanted when the kernel says no.

        Where memory is short it may kill somebody instead: `service.memory_check` compares first.
        """
        fd = os.memfd_create("tpvision-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, layout.total_bytes)  # allocates and zeroes every page now, or fails now
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, layout)
        except OSError as error:
            os.close(fd)
            raise SlabError(f"no memory for a slab of {layout.total_bytes} bytes: {error}") from error

    @classmethod
    def map(cls, fd: int, layout: SlabLayout) -> "Slab":
        """Map a slab that another process made. Raises SlabError unless it has exactly this layout's size."""
        size = os.fstat(fd).st_size
        if size != layout.total_bytes:
            raise SlabError(f"the slab has {size} bytes, but its layout needs {layout.total_bytes}")
        return cls(fd, layout)

    def pixels(self, run: Run) -> npt.NDArray[np.uint8]:
        """View of the run's pixel rows, uint8 [num_patches, patch_bytes]."""
        self._check(run)
        return self._pixels[run.start : run.end]

    def tokens(self, run: Run, num_tokens: int) -> npt.NDArray[np.uint8]:
        """View of the run's first merged tokens as bytes, uint8 [num_tokens, token_bytes]."""
        self._check(run)
        if not 0 < num_tokens <= run.num_patches // PATCHES_PER_TOKEN:
            raise SlabError(f"{num_tokens} tokens do not fit a run of {run.num_patches} patches")
        first = run.start // PATCHES_PER_TOKEN
        return self._tokens[first : first + num_tokens]

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last view of it."""
        os.close(self.fd)

    def _check(self, run: Run) -> None:
        if run.end > self.layout.num_patches:
            raise SlabError(f"run {run.start}..{run.end} is outside the slab's {self.layout.num_patches} rows")
