"""Two things Pillow does not tell about a PNG: EXIF that follows the pixels, and pixel data that ends too early.

Works on the bytes of the file by its chunks (PNG specification, third edition, 5.3); no pixels are kept. Called by
`service.header` and `service.image` on bytes that Pillow has already opened as a PNG.
"""

import struct
import zlib
from collections.abc import Iterator

_HEADER = struct.Struct(">I4s")
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)  # x, y, dx, dy
_STEP_BYTES = 1 << 20


def find_exif(data: bytes) -> bytes | None:
    """The first eXIf chunk, before or after the pixels."""
    return next((bytes(body) for kind, body in _chunks(data) if kind == b"eXIf"), None)


def has_all_pixels(data: bytes) -> bool:
    """Whether the compressed stream of the first frame is as long as the picture needs.

    A stream that ends early but cleanly gives black rows and no error in Pillow. Costs one more inflation.
    """
    needed = 0
    found = 0
    inflate = zlib.decompressobj()
    for kind, body in _chunks(data):
        if kind == b"IHDR":
            needed = _raw_bytes(body)
        elif kind == b"IDAT":
            rest: bytes | memoryview = body
            while rest and found < needed:
                found += len(inflate.decompress(rest, min(needed - found, _STEP_BYTES)))
                rest = inflate.unconsumed_tail
            if found >= needed or inflate.eof:
                break
    return found >= needed


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    view = memoryview(data)
    position = 8  # past the signature
    while position + _HEADER.size <= len(data):
        length, kind = _HEADER.unpack_from(data, position)
        position += _HEADER.size
        yield kind, view[position : position + length]
        position += length + 4  # and the checksum
        if kind == b"IEND":
            return


def _raw_bytes(header: memoryview) -> int:
    """Bytes before compression: each row of each pass is a filter byte and its samples, rounded up to whole bytes."""
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * _CHANNELS[colour]
    total = 0
    for x, y, step_x, step_y in _ADAM7 if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // step_x), -(-(height - y) // step_y)
        if columns > 0 and rows > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total
