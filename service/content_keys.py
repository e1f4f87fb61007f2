"""What an answer depends on, as digests: the bytes of its images, what is made of them, and the form it is given in.

Two requests with the same digests get the same embeddings, or the same refusal. `service.cache` keeps tokens by them,
and `ETag` tells them to clients. BLAKE2b with 256 bits, so that nobody can make two images of one digest.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence

from service.body import Item, VideoChunk

Key = bytes  # of one image or video chunk

_BLOCK_BYTES = 1 << 20
_TAGS = re.compile(r'"[\x21\x23-\x7e\x80-\xff]*"')  # opaque-tag of RFC 9110 section 8.8.3, as latin-1


def digest(*values: object) -> Key:
    """Of JSON values, in order; tuples are lists there."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=32).digest()


def content_key(item: Item, context: Key) -> Key:
    """Of an image's bytes, or of a video chunk's frames, and of the context that they are encoded in. For a thread."""
    is_chunk = isinstance(item, VideoChunk)
    files = item.frames if isinstance(item, VideoChunk) else (item,)
    lengths = [file.length for file in files]
    total = hashlib.blake2b(digest(context.hex(), is_chunk, lengths), digest_size=32)
    for file in files:
        for start in range(0, file.length, _BLOCK_BYTES):
            total.update(os.pread(file.fd, min(_BLOCK_BYTES, file.length - start), file.offset + start))
    return total.digest()


def entity_tag(keys: Sequence[Key], *form: object) -> str:
    """The ETag of an answer made of these images in this form.

    A weak one (RFC 9110 section 8.8.1): it promises the same embeddings, while an answer also names its request, and
    the last bits depend on which images were in one batch.
    """
    return f'W/"{digest([key.hex() for key in keys], *form).hex()}"'


def is_known(tag: str, if_none_match: str) -> bool:
    """Whether an If-None-Match header lists the tag, in either strength. `*` lists none: nothing is kept for good."""
    return tag.removeprefix("W/") in _TAGS.findall(if_none_match)
