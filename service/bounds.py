"""The extremes of the image rule: the most patches it can give, and the largest pictures a tier leaves untouched.

Pure arithmetic over `service.geometry`. The start log and `tpvision plan` call it, so that an operator can pick a top
tier that never refuses, and is told when a tier is larger than any image.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import ImageTooLarge
from service.geometry import fit, frame_rule
from tp.spec import EncoderSpec, ProcessorSpec

_Ints = NDArray[np.int64]


@lru_cache(maxsize=16)
def largest_patch_count(processor: ProcessorSpec) -> tuple[int, int, int]:
    """The most patches that `fit` gives for any picture, and the narrowest portrait that has them: (patches, w, h).

    The rule checks its budget L before padding and in whole patches (a, b) of the picture, then scales the true size:
    up to 13 of 14 pixels a side, and the padding, come on top. The search goes over the result, C x R tokens, whose
    sides before padding are at least m = 28 (C - 1) + 1 and n = 28 (R - 1) + 1. With scale s <= sqrt(L / (a b)):

        m n <= (w s) (h s) <= (w / a) (h / b) L,   where w / a <= 14 + 13 / a  and  m // 14 <= a   (h, b, n likewise)

    Of the pairs that this allows, the largest C R that some picture reaches wins. It also bounds the pictures to try:
    were a and b both over K, with 14 + 13 / K = sqrt(m n / L), they could not reach m n. So one of them is K or less,
    and each side in turn is taken for it (the rule is symmetric). Every width in that range is tried with the tallest
    heights for which w s still is m, by budget and by side limit, since h s grows with h but inside a row of patches.
    The proof leaves rounding aside; the tests compare with brute force.
    """
    for tokens, pairs in _token_pairs(processor):
        sizes = {size for columns, rows in pairs for size in _pictures(columns, rows, processor)}
        if sizes:
            width, tall = min(sizes)
            heights = np.arange(width, tall + 1)
            reached = _patches(np.full_like(heights, width), heights, processor) >= 4 * tokens
            return 4 * tokens, width, int(heights[reached.argmax()])
    raise AssertionError("a 1 x 1 picture makes one token")


def largest_chunk(spec: EncoderSpec) -> int | None:
    """The most patches that a video chunk can have, all frames together; None where the tower takes none."""
    if not spec.takes_video:
        return None
    return max(
        num_frames * largest_patch_count(frame_rule(spec.processor, num_frames))[0]
        for num_frames in range(1, spec.pos_emb_time + 1)
    )


def largest_picture(max_patches: int, processor: ProcessorSpec, *, aspect: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """The largest (width, height) of an aspect ratio, say (16, 9), encoded at its own size in `max_patches` or less.

    The height is rounded down. A picture one pixel wider is downscaled, by the model's own rule or by the tier.
    """

    def spoils(width: int) -> bool:
        size = width, max(1, width * aspect[1] // aspect[0])
        try:
            own = fit(*size, processor)
        except ImageTooLarge:
            return True
        return own.size != size or own.patches > max_patches

    longest = processor.side_limit * processor.patch_size
    width = bisect_left(range(2, longest + 2), True, key=spoils) + 1
    return width, max(1, width * aspect[1] // aspect[0])


def largest_square(max_patches: int, processor: ProcessorSpec) -> int:
    """The side in pixels of the largest square encoded at its own size in `max_patches` or less."""
    return largest_picture(max_patches, processor)[0]


def _token_pairs(processor: ProcessorSpec) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """C <= R that the bound allows, grouped by their product, largest first. One column is always allowed."""
    patch = processor.patch_size
    counts = np.arange(1, _most_tokens(processor) + 1)
    low = _least(counts, patch)
    per_patch = patch + (patch - 1) / np.maximum(1, low // patch)
    bound = np.multiply.outer(per_patch, per_patch) * processor.patch_limit
    allowed = (np.multiply.outer(low, low) <= bound * (1 + 1e-9)) | (counts == 1)[:, None]
    columns, rows = (counts[index] for index in np.nonzero(np.triu(allowed)))
    order = np.argsort(-columns * rows, kind="stable")
    pairs = zip(columns[order].tolist(), rows[order].tolist(), strict=True)
    for tokens, group in groupby(pairs, key=lambda pair: pair[0] * pair[1]):
        yield tokens, list(group)


def _pictures(columns: int, rows: int, processor: ProcessorSpec) -> Iterator[tuple[int, int]]:
    """Portraits among the ones worth trying that make at least columns x rows tokens."""
    for across, down in {(columns, rows), (rows, columns)}:
        width, height = np.broadcast_arrays(*_candidates(across, down, processor))
        reached = _patches(width, height, processor) >= 4 * across * down
        for size in zip(width[reached].tolist(), height[reached].tolist(), strict=True):
            yield min(size), max(size)


def _candidates(columns: int, rows: int, processor: ProcessorSpec) -> tuple[_Ints, _Ints]:
    """Widths [W, 1] and heights [W, H]."""
    patch, limit, longest = processor.patch_size, processor.patch_limit, _longest(processor)
    if columns == 1:  # a sliver is never narrower than a pixel, however long: the width does not bound the scale
        return np.array([[1]]), np.array([[longest, longest * processor.side_limit]])
    least = _least(columns, patch)
    excess = math.sqrt(least * _least(rows, patch) / limit) - patch
    most_patches = max(least // patch, math.ceil((patch - 1) / excess) if excess > 0 else 0)
    width = np.arange(least, patch * (most_patches + 1))
    across = np.maximum(1, width // patch)
    by_budget = limit * (width / least) ** 2 / across  # b for which w s = m
    if processor.rule == "navit":
        by_side = processor.side_limit * width / least  # h = 14 b is scaled to the side limit by just that
    else:
        by_side = np.maximum(longest / patch, (longest / patch) ** 2 * across / limit)  # h s reaches the side limit
    down = np.stack([by_budget, by_side], axis=1).astype(np.int64)
    near = np.arange(-patch, 2 * patch)  # the row of patches before, this one and the one after
    height = (down[:, :, None] * patch + near).reshape(len(width), -1)
    return width[:, None], np.maximum(1, height)


def _patches(width: _Ints, height: _Ints, processor: ProcessorSpec) -> _Ints:
    """`fit(...).patches` of many pictures at once; 0 where it raises."""
    patch, longest = processor.patch_size, _longest(processor)
    if processor.rule == "navit":
        area = np.maximum(1, width // patch) * np.maximum(1, height // patch)
        scale = np.minimum(longest / width, longest / height)
    else:
        area = np.maximum(1, (width // patch) * (height // patch))
        scale = np.ones(())
    scale = np.minimum(1.0, np.minimum(scale, np.sqrt(processor.patch_limit / area)))
    tokens = [np.ceil(np.maximum(1, np.floor(side * scale)) / (2 * patch)) for side in (width, height)]
    counts = (4 * tokens[0] * tokens[1]).astype(np.int64)
    return np.where(np.maximum(*tokens) <= _most_tokens(processor), counts, 0)


def _longest(processor: ProcessorSpec) -> int:
    """Pixels a side before padding. Kimi-VL refuses the side limit itself, counted after padding."""
    if processor.rule == "navit":
        return processor.side_limit * processor.patch_size
    return (processor.side_limit - 1) // 2 * 2 * processor.patch_size


def _most_tokens(processor: ProcessorSpec) -> int:
    """Tokens a side."""
    return -(-_longest(processor) // (2 * processor.patch_size))


def _least(tokens: Any, patch: int) -> Any:
    """The fewest pixels that make so many tokens."""
    return 2 * patch * (tokens - 1) + 1
