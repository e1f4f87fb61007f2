"""Pictures that keep a decode process busy for as long as a test wants."""

import io
import zlib

from PIL import Image


def with_scans(num_scans: int, width: int = 3000, height: int = 3000) -> bytes:
    """A progressive JPEG of one colour whose last scan comes so many times; each takes some milliseconds."""
    file = io.BytesIO()
    Image.new("L", (width, height), 90).save(file, "JPEG", progressive=True)
    picture = file.getvalue()
    last = picture.rindex(b"\xff\xda")
    return picture[:last] + picture[last:-2] * num_scans + picture[-2:]


def with_chunks(png: bytes, num_chunks: int) -> bytes:
    """The PNG with so many chunks before its pixels; each takes some microseconds, whenever the header is read."""
    chunk = bytes(4) + b"teXt" + zlib.crc32(b"teXt").to_bytes(4)
    return png[:33] + chunk * num_chunks + png[33:]  # after the signature and IHDR
