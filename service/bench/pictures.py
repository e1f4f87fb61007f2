"""Pictures to send: JPEGs of any size, cut from the photograph that ships with the project, or tiled with it."""

import io
from functools import cache

from PIL import Image, ImageOps

from service.demo import PHOTOGRAPH

_QUALITY = 90


@cache
def jpeg(width: int, height: int) -> bytes:
    """A JPEG of that size. A larger one than the photograph repeats it, because an enlarged one decodes too fast."""
    with Image.open(PHOTOGRAPH) as file:
        photograph = file.convert("RGB")
    if width <= photograph.width and height <= photograph.height:
        picture = ImageOps.fit(photograph, (width, height), Image.Resampling.BICUBIC)
    else:
        picture = Image.new("RGB", (width, height))
        for top in range(0, height, photograph.height):
            for left in range(0, width, photograph.width):
                picture.paste(photograph, (left, top))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()
