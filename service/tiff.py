"""Two things Pillow does not check of a TIFF: that its tables are of sane length, and that its pixels are all there.

Pillow turns the tables of strips, bits and colours into Python objects when it opens a file, some 70 bytes for each 4:
a body within its limit would cost gigabytes. And strips that a file leaves out come out black, without an error. Called
by `service.header` before a file is opened, and by `service.image` before it is decoded.
"""

import struct

from PIL.TiffImagePlugin import TiffImageFile

MAX_TABLE = 1 << 18  # entries: a strip for every row of the tallest scans, a palette of 16 bits
_PLANAR_TAG, _SAMPLES_TAG, _SEPARATE_PLANES = 284, 277, 2
# BitsPerSample, StripOffsets, StripByteCounts, ColorMap, TileOffsets, TileByteCounts, ExtraSamples, SampleFormat
_TABLE_TAGS = frozenset({258, 273, 279, 320, 324, 325, 338, 339})


def longest_table(data: bytes) -> int:
    """Entries of the longest table that Pillow unpacks to open the first picture; raises struct.error if it is cut."""
    order = "<" if data.startswith(b"II") else ">"
    if b"+" in data[2:4]:  # BigTIFF
        (start,) = struct.unpack_from(f"{order}Q", data, 8)
        count, entry = struct.unpack_from(f"{order}Q", data, start)[0], struct.Struct(f"{order}HHQ8s")
        start += 8
    else:
        (start,) = struct.unpack_from(f"{order}I", data, 4)
        count, entry = struct.unpack_from(f"{order}H", data, start)[0], struct.Struct(f"{order}HHI4s")
        start += 2
    count = min(count, (len(data) - start) // entry.size)  # Pillow, too, goes by what is there
    directory = memoryview(data)[start : start + count * entry.size]
    return max((length for tag, _, length, _ in entry.iter_unpack(directory) if tag in _TABLE_TAGS), default=0)


def has_all_pixels(image: TiffImageFile) -> bool:
    """Whether the strips or tiles of an opened but not yet loaded TIFF cover it, in every plane.

    Libtiff checks for itself, and is given the picture as one tile.
    """
    separate = image.tag_v2.get(_PLANAR_TAG) == _SEPARATE_PLANES and len(image.tile) > 1
    planes = image.tag_v2.get(_SAMPLES_TAG, 1) if separate else 1
    covered = 0
    for tile in image.tile:
        left, top, right, bottom = tile.extents or (0, 0, *image.size)
        covered += (right - left) * (bottom - top)
    return covered >= image.width * image.height * int(planes)
