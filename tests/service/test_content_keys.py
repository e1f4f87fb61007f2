"""What two requests must share to share a digest, and which If-None-Match headers list a tag."""

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.body import Body, ImageBytes, Item, VideoChunk
from service.content_keys import content_key, digest, entity_tag, is_known

CONTEXT = digest("a model", 1024)
TAG = entity_tag([CONTEXT], "application/json", "float32")
OPAQUE = TAG.removeprefix("W/")


def key_of(*files: bytes, is_chunk: bool = False, context: bytes = CONTEXT, before: bytes = b"") -> bytes:
    with Body() as body:
        body.write(before)
        images = []
        for file in files:
            images.append(ImageBytes(body.fd, body.num_bytes, len(file)))
            body.write(file)
        item: Item = VideoChunk(tuple(images)) if is_chunk else images[0]
        return content_key(item, context)


def test_the_same_bytes_have_the_same_key_wherever_they_lie() -> None:
    assert key_of(b"picture") == key_of(b"picture", before=b"another image of the same body")


def test_keys_differ_in_bytes_frames_their_borders_and_context() -> None:
    keys = [
        key_of(b"ab"),
        key_of(b"ba"),
        key_of(b"ab", context=digest("a model", 4096)),
        key_of(b"ab", is_chunk=True),
        key_of(b"a", b"b", is_chunk=True),
        key_of(b"b", b"a", is_chunk=True),
        key_of(b"a", b"b", b"", is_chunk=True),
        key_of(b"", b"ab", is_chunk=True),
        key_of(b""),
    ]
    assert len(set(keys)) == len(keys)


def test_every_byte_of_a_large_file_counts() -> None:
    size = 3 * 2**20 + 5
    keys = set()
    for position in (0, 2**20 - 1, 2**20, 2 * 2**20 + 7, size - 1):
        file = bytearray(size)
        file[position] = 1
        keys.add(key_of(bytes(file)))
    assert len(keys) == 5


def test_a_key_is_blake2b_of_its_context_kind_lengths_and_bytes() -> None:
    head = digest(CONTEXT.hex(), True, [1, 2])
    assert key_of(b"a", b"bc", is_chunk=True) == hashlib.blake2b(head + b"abc", digest_size=32).digest()


def test_tags_differ_in_images_their_order_and_everything_about_the_form() -> None:
    one, other = digest("one"), digest("other")
    tags = [
        entity_tag([one], "npy", "float32", True),
        entity_tag([one], "npy", "float32", False),
        entity_tag([one], "npy", "float16", True),
        *(entity_tag(keys, "npy", "float32", True) for keys in itertools.permutations([one, other])),
        entity_tag([one, one], "npy", "float32", True),
    ]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "header",
    [TAG, OPAQUE, f'"a", {TAG}', f'{TAG},"b"', f'W/"x",{OPAQUE} , "y"', f'"with, a comma" , {TAG}', f'"\xe9",{TAG}'],
)
def test_a_tag_is_known_in_any_list_and_either_strength(header: str) -> None:
    assert is_known(TAG, header)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "*",
        '"',
        '""',
        '"*"',
        OPAQUE[1:],
        OPAQUE[:-1],
        OPAQUE.strip('"'),
        OPAQUE.upper(),
        f'"{OPAQUE[1:-2]}"',
        f"'{OPAQUE[1:-1]}'",
        f'"x{OPAQUE[1:]}',
        f'"{OPAQUE[1:-1]} "',
        f'"{OPAQUE[1:-1]}\0"',
        '"' * 30_001,
        "W/" * 15_000,
        ',"a"' * 8_000,
    ],
)
def test_anything_else_is_not(header: str) -> None:
    assert not is_known(TAG, header)


@given(st.text(alphabet='W/"*, a0\\é', max_size=60))
def test_no_other_text_lists_it(header: str) -> None:
    assert not is_known(TAG, header)
