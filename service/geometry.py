"""Image size -> resized size, padding, grid and patches by the model's own rule; what a capacity makes of it.

Pure arithmetic: no pixels, no settings object, no state. The rules are those of the published Kimi K3 `media_utils.py`
(`navit`, also K2.5's) and of Kimi-VL's processor (`kimi_vl`), in the same float64 steps, because one ulp is one pixel.
The engine calls `plan_image` for every image before it is decoded; `service.bounds` asks for the extremes.

Sizes are (width, height) in pixels. Patches are 14 x 14 pixels, and merge 2 x 2 into tokens of 28 x 28. The frames of a
video chunk have one size, and the rule of images with a limit of its own for each frame (K2.5: 4,096 patches); all of
them count against the capacity.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from service.errors import ImageTooLarge, InvalidRequest, TooManyPatches
from tp.spec import Grid, ProcessorSpec

Policy = Literal["refuse", "downscale"]
Override = Literal["none", "stricter", "any"]


@dataclass(frozen=True, slots=True)
class Fit:
    """The size a picture, or frame, is encoded at, before and after zero padding on the right and at the bottom."""

    width: int
    height: int
    patch_size: int  # pixels a side

    @property
    def size(self) -> tuple[int, int]:
        """Encoded (width, height), without the padding."""
        return self.width, self.height

    @property
    def grid(self) -> Grid:
        """Patches as (1, rows, columns), both even."""
        token = 2 * self.patch_size
        return Grid(1, 2 * -(-self.height // token), 2 * -(-self.width // token))

    @property
    def padded_width(self) -> int:
        """A multiple of two patches."""
        return self.grid.w * self.patch_size

    @property
    def padded_height(self) -> int:
        """A multiple of two patches."""
        return self.grid.h * self.patch_size

    @property
    def patches(self) -> int:
        """Patches of the padded picture: what capacity, slab and cost count."""
        return self.grid.num_patches


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What will be done to one image or video chunk, fixed before it is decoded. Every answer reports it."""

    original_size: tuple[int, int]  # upright, where orientation is applied
    fit: Fit
    tier: int  # the smallest capacity that holds this image alone
    own_size: tuple[int, int]  # what the model's rule alone would encode it at
    num_frames: int | None = None  # of a video chunk; None: an image

    @property
    def downscaled(self) -> bool:
        """Whether the capacity made it smaller; the model's own resize shows in encoded_size only."""
        return self.encoded_size != self.own_size

    @property
    def scale(self) -> float:
        """The longer encoded side over what it would be by the model's rule alone; 1 unless downscaled."""
        return max(self.encoded_size) / max(self.own_size)

    @property
    def encoded_size(self) -> tuple[int, int]:
        """Width and height after the one resize."""
        return self.fit.size

    @property
    def padded_size(self) -> tuple[int, int]:
        """Width and height after padding."""
        return self.fit.padded_width, self.fit.padded_height

    @property
    def grid(self) -> Grid:
        """Patches as (frames, rows, columns)."""
        return self.fit.grid._replace(t=self.num_frames or 1)

    @property
    def patches(self) -> int:
        """Rows of the pixel arena that the image takes."""
        return self.grid.num_patches

    @property
    def pixels(self) -> int:
        """Pixels of all frames, after padding."""
        return math.prod(self.padded_size) * self.grid.t

    @property
    def padding_pixels(self) -> int:
        """Those of them that the padding added."""
        return self.pixels - math.prod(self.encoded_size) * self.grid.t


def plan_image(
    width: int,
    height: int,
    processor: ProcessorSpec,
    capacities: Sequence[int],
    policy: Policy,
    *,
    num_frames: int | None = None,
) -> ImagePlan:
    """The plan for an upright picture of `width` x `height`, or a video chunk of such frames, under ascending tiers.

    Raises TooManyPatches under policy `refuse`, naming the size that `downscale` would give; ImageTooLarge where the
    model itself refuses (Kimi-VL).
    """
    rule = processor if num_frames is None else frame_rule(processor, num_frames)
    frames, top = num_frames or 1, capacities[-1]
    own = fit(width, height, rule)
    chosen = own
    if frames * own.patches > top:
        chosen = extent(width, height, rule, max(4, top // frames))
        if policy == "refuse":
            fits = chosen if frames * chosen.patches <= top else None
            raise _too_many_patches(frames * own.patches, top, fits, is_chunk=num_frames is not None)
    tier = check_image_patches(frames * chosen.patches, capacities, is_chunk=num_frames is not None)
    return ImagePlan((width, height), chosen, tier, own.size, num_frames)


def frame_rule(processor: ProcessorSpec, num_frames: int) -> ProcessorSpec:
    """The rule for one frame of a video chunk: the image's, with the patch limit of a frame."""
    limit = processor.patch_limit if processor.frame_patch_limit is None else processor.frame_patch_limit
    if processor.chunk_patch_limit is not None:
        limit = min(limit, round(processor.chunk_patch_limit / num_frames))
    return replace(processor, patch_limit=limit)


def fit(width: int, height: int, processor: ProcessorSpec) -> Fit:
    """The model's own size for a picture; never larger than the picture.

    `navit`: the budget is checked before padding, so the patches can exceed it (`bounds.largest_patch_count`).
    `kimi_vl`: raises ImageTooLarge for a padded side of `side_limit` patches or more, as the reference does.
    """
    patch = processor.patch_size
    if processor.rule == "kimi_vl":
        return _fit_kimi_vl(width, height, processor)
    longest = processor.side_limit * patch
    area = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(processor.patch_limit / area), longest / width, longest / height)
    return Fit(_scaled(width, scale, longest), _scaled(height, scale, longest), patch)


def extent(width: int, height: int, processor: ProcessorSpec, max_patches: int) -> Fit:
    """The largest size, by one scale for both sides, of at most `max_patches` patches (4 or more).

    If `fit` alone has no more, its result. Else the sides are those just below s*, the smallest scale that exceeds
    `max_patches`. Token columns step up where width * s reaches 28 k + 1, rows where height * s does, so s* is one of
    these fractions; the count grows with s, so two bisections over k find it, in integers.
    """
    own = fit(width, height, processor)
    if own.patches <= max_patches:
        return own
    by_width = _first_excess(width, height, own.grid.w // 2, own.patch_size, max_patches)
    by_height = _first_excess(height, width, own.grid.h // 2, own.patch_size, max_patches)
    # s* is by_width / width or by_height / height, whichever is less; compared crosswise.
    if by_width * height < by_height * width:
        above, below = by_width, width
    else:
        above, below = by_height, height
    # The largest integer under side * s*; never over the model's own, which is rounded in float64.
    new_width = max(1, min(own.width, -(-width * above // below) - 1))
    new_height = max(1, min(own.height, -(-height * above // below) - 1))
    return Fit(new_width, new_height, own.patch_size)


def check_image_patches(patches: int, patch_capacities: Sequence[int], *, is_chunk: bool = False) -> int:
    """The smallest of the ascending tiers that holds `patches`. Raises TooManyPatches over the top one."""
    index = bisect_left(patch_capacities, patches)
    if index == len(patch_capacities):
        raise _too_many_patches(patches, patch_capacities[-1], is_chunk=is_chunk)
    return patch_capacities[index]


def effective_policy(configured: Policy, allow_override: Override, requested: Policy | None) -> Policy:
    """The policy for one request. Raises InvalidRequest where the operator does not allow what it asks for.

    Naming the policy in force anyway is always fine. `stricter` allows `refuse` where `downscale` is configured.
    """
    if requested is None or requested == configured:
        return configured
    if allow_override == "any" or (allow_override == "stricter" and requested == "refuse"):
        return requested
    raise InvalidRequest(f"oversize={requested} is not allowed here; the policy is {configured}", param="oversize")


def _fit_kimi_vl(width: int, height: int, processor: ProcessorSpec) -> Fit:
    patch = processor.patch_size
    area = (width // patch) * (height // patch)
    scale = math.sqrt(processor.patch_limit / area) if area > processor.patch_limit else 1.0
    result = Fit(_scaled(width, scale, width), _scaled(height, scale, height), patch)
    longest = max(result.grid.h, result.grid.w)
    if longest >= processor.side_limit:
        raise ImageTooLarge(
            f"{width} x {height} pixels make {longest} patches on a side; the model takes fewer than "
            f"{processor.side_limit}",
            numbers={"patches_on_one_side": longest, "limit": processor.side_limit - 1},
        )
    return result


def _scaled(side: int, scale: float, longest: int) -> int:
    return min(max(1, math.floor(side * scale)), longest)


def _first_excess(side: int, other: int, tokens: int, patch: int, max_patches: int) -> int:
    """The smallest 28 k + 1 that, as the length of `side`, gives over `max_patches`; k < `tokens`, else out of reach.

    `other` is scaled by the same factor, (28 k + 1) / side.
    """
    unit = 2 * patch

    def patches(k: int) -> int:
        other_tokens = max(1, -(-(other * (unit * k + 1) // side) // unit))
        return 4 * (k + 1) * other_tokens

    k = bisect_left(range(tokens), max_patches + 1, lo=1, key=patches)
    return unit * k + 1


def _too_many_patches(
    patches: int, limit: int, downscaled: Fit | None = None, *, is_chunk: bool = False
) -> TooManyPatches:
    what = "the frames of the chunk together have" if is_chunk else "the image has"
    message = f"{what} {patches} patches, the limit is {limit}"
    numbers: dict[str, object] = {"patches": patches, "limit": limit}
    if downscaled is not None:
        message += f"; {downscaled.width} x {downscaled.height} pixels{' each' if is_chunk else ''} would fit"
        numbers["downscaled_size"] = list(downscaled.size)
    return TooManyPatches(message, numbers=numbers)
