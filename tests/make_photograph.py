"""Makes the project's photograph, service/assets/photograph.jpg: a mountain lake that no camera has seen.

Made for this project from noise, a height field and a little optics; dedicated to the public domain (CC0 1.0). Run
`python tests/make_photograph.py` to make it again (about 35 s, 3 GB). Tests call `acceptance_picture`.

Units are kilometres; x to the right, y up, z away from the camera, which stands at the origin just above the lake.
Screens are [rows, columns], row 0 on top.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter, ImageOps

PHOTOGRAPH = Path(__file__).resolve().parents[1] / "service" / "assets" / "photograph.jpg"
WIDTH, HEIGHT = 1280, 960

_OVERSAMPLING = 2
_FIELD = 4096  # cells a side of the height field
_FIELD_KM = 24.0  # its width
_EYE_KM = 0.0021
_HORIZON = 0.56  # of the height, from the top
_FOCAL = 0.95  # of the width
_SUN = np.array([-0.74, 0.42, -0.30]) / np.linalg.norm([-0.74, 0.42, -0.30])
_HAZE = np.array([0.66, 0.75, 0.86])

Field = npt.NDArray[np.float32]


def acceptance_picture(width: int = 1792, height: int = 1792, *, quality: int = 90) -> bytes:
    """The photograph cropped and scaled to a size, as JPEG; 1,792 x 1,792 is the largest picture in 16,384 patches."""
    with Image.open(PHOTOGRAPH) as photograph:
        picture = ImageOps.fit(photograph.convert("RGB"), (width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return file.getvalue()


def make_photograph(seed: int = 7) -> Image.Image:
    """Draw the scene at twice the size, then do what a lens and a sensor do to it."""
    generator = np.random.default_rng(seed)
    width, height = WIDTH * _OVERSAMPLING, HEIGHT * _OVERSAMPLING
    sky = _sky(generator, width, height)
    land, distance = _land(generator, width, height)
    scene = np.where(distance[..., None] > 0, land, sky)
    scene = _lake(generator, scene, distance)
    return _expose(generator, scene)


def _noise(generator: np.random.Generator, size: int, cells: int) -> Field:
    """Smooth noise of about unit range, [size, size], with `cells` random values a side; its edges fit together."""
    coarse = np.pad(generator.standard_normal((cells, cells), dtype=np.float32), 2, mode="wrap")
    box = (2.0, 2.0, cells + 2.0, cells + 2.0)
    return np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC, box=box))


def _fractal(generator: np.random.Generator, size: int, cells: int, octaves: int, gain: float = 0.5) -> Field:
    total = np.zeros((size, size), np.float32)
    for octave in range(octaves):
        if cells << octave > size:
            break
        total += gain**octave * _noise(generator, size, cells << octave)
    return total


def _sample(field: Field, u: npt.NDArray[Any], v: npt.NDArray[Any]) -> Field:
    """Bilinear samples at columns u and rows v, wrapping round."""
    column, row = np.floor(u).astype(np.int64), np.floor(v).astype(np.int64)
    across, down = (u - column).astype(np.float32), (v - row).astype(np.float32)
    n = field.shape[0]
    c0, c1, r0, r1 = column % n, (column + 1) % n, row % n, (row + 1) % n
    top = field[r0, c0] * (1 - across) + field[r0, c1] * across
    bottom = field[r1, c0] * (1 - across) + field[r1, c1] * across
    return np.asarray(top * (1 - down) + bottom * down, np.float32)


def _smoothstep(low: float, high: float, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    t = np.clip((value - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def _mix(a: npt.NDArray[Any], b: npt.NDArray[Any], amount: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return a + (b - a) * amount[..., None]


def _rays(width: int, height: int) -> tuple[Field, Field]:
    """x/z of every column and y/z of every row."""
    across = (np.arange(width) + 0.5 - width / 2) / (_FOCAL * width)
    up = (_HORIZON * height - np.arange(height) - 0.5) / (_FOCAL * width)
    return across.astype(np.float32), up.astype(np.float32)


def _sky(generator: np.random.Generator, width: int, height: int) -> npt.NDArray[Any]:
    """A blue that pales towards the horizon, and two sheets of cloud seen from below."""
    across, up = _rays(width, height)
    up = np.maximum(up, 0.004)[:, None]
    toward_sun = np.exp(-((across[None, :] + 0.55) ** 2) / 0.35)
    elevation = up / np.sqrt(1 + up**2)
    zenith, low = np.array([0.10, 0.24, 0.52]), np.array([0.60, 0.74, 0.90])
    sky = _mix(low, zenith, np.broadcast_to(1 - np.exp(-3.6 * elevation), (height, width)))
    sky = sky + np.array([0.20, 0.14, 0.06]) * (toward_sun * np.exp(-7 * elevation))[..., None]
    density = _fractal(generator, 2048, 6, 9, 0.54)
    for base, scale, low_edge, strength in ((2.6, 46.0, 0.62, 0.95), (7.0, 21.0, 0.55, 0.35)):
        u, v = across[None, :] / up * base * scale + 300 * base, 1 / up * base * scale * np.ones((1, width))
        here = _sample(density, u, v)
        sunward = _sample(density, u - 26, v - 10)
        cover = _smoothstep(low_edge, low_edge + 1.15, here) * strength
        cover = cover * np.exp(-0.012 / elevation**1.5) * np.ones_like(cover)
        lit = 0.60 + 0.42 * _smoothstep(-0.7, 0.5, here * 0.15 - (sunward - here) * 1.0)
        thick = _smoothstep(low_edge + 0.5, low_edge + 2.2, here)
        cloud = np.array([1.0, 0.985, 0.96]) * (lit * (1 - 0.22 * thick))[..., None]
        sky = _mix(sky, cloud, cover)
    return sky


def _height_field(generator: np.random.Generator) -> Field:
    """Ridges on both sides of a valley that holds the lake, and a massif at its end; [z, x] in kilometres."""
    size = _FIELD
    warp_x, warp_z = (_fractal(generator, size, 8, 4) * 0.022 * size for _ in range(2))
    index = np.arange(size, dtype=np.float32)
    x, z = np.meshgrid((index / size - 0.5) * _FIELD_KM, index / size * _FIELD_KM)
    ridges, weight, amplitude = np.zeros((size, size), np.float32), np.ones((size, size), np.float32), 1.0
    for octave in range(9):
        layer = _noise(generator, size, min(7 << octave, size))
        if octave < 5:
            layer = _sample(layer, index[None, :] + warp_x / (1 + octave), index[:, None] + warp_z / (1 + octave))
        ridge = (1.08 - np.sqrt(np.tanh(layer) ** 2 + 0.012)) ** 2
        ridges += amplitude * ridge * weight
        weight = np.clip(ridge * 1.7, 0.15, 1).astype(np.float32)
        amplitude *= 0.47
    ridges /= 1.55
    middle = 0.35 * np.sin(z * 0.55 + 0.5)
    side = np.abs(x - middle)
    valley = _smoothstep(0.8, 4.4, side + 0.14 * warp_x / size * _FIELD_KM)
    massif = _smoothstep(5.2, 10.0, z + 0.25 * side)
    envelope = np.maximum(valley * _smoothstep(0.2, 3.0, z) * 0.62, massif * 1.0)
    ridges = sum(np.roll(ridges, shift, axis) for axis in (0, 1) for shift in (-1, 1)) / 8 + ridges / 2
    return np.asarray(-0.05 + envelope * (0.22 + 1.75 * ridges**1.15), np.float32)


def _land(generator: np.random.Generator, width: int, height: int) -> tuple[npt.NDArray[Any], Field]:
    """Colour of the land, and its distance for every pixel (0: sky or lake)."""
    field = _height_field(generator)
    cell = _FIELD_KM / _FIELD
    forest = _fractal(generator, 2048, 24, 7, 0.6)
    trees = _noise(generator, 2048, 1024)
    across, up = _rays(width, height)
    depth = np.geomspace(0.8, _FIELD_KM * 0.92, 2200).astype(np.float32)
    x, z = across[None, :] * depth[:, None], np.broadcast_to(depth[:, None], (len(depth), width))
    ground = _sample(field, x / cell + _FIELD / 2, z / cell)
    canopy = _canopy(ground, forest, trees, x, z)
    slope = (np.maximum(ground, 0) + canopy - _EYE_KM - depth[:, None] ** 2 / 16000) / depth[:, None]
    slope[ground <= 0] = -1
    skyline = np.maximum.accumulate(slope, axis=0)
    distance = np.zeros((height, width), np.float32)
    for column in range(width):
        first = np.searchsorted(skyline[:, column], up)
        hit = first < len(depth)
        distance[hit, column] = depth[np.minimum(first, len(depth) - 1)][hit]
    to_water = (_EYE_KM / np.maximum(-up, 1e-9))[:, None]
    distance[(up < 0)[:, None] & (distance > to_water)] = 0
    shaded = _shade(field=field, forest=forest, trees=trees, across=across, distance=distance)
    return shaded, distance


def _canopy(ground: Field, forest: Field, trees: Field, x: Field, z: Field) -> Field:
    """Height of the trees: up to 25 m below the tree line."""
    cover = _cover(ground, forest, x, z)
    crowns = _sample(trees, x * 190, z * 190)
    return np.asarray(cover * np.clip(0.016 + 0.008 * crowns, 0.004, 0.03), np.float32)


def _cover(ground: Field, forest: Field, x: Field, z: Field) -> Field:
    patchy = _sample(forest, x * 90 + 700, z * 90)
    return np.asarray(_smoothstep(0.0, 0.35, 0.62 + 0.16 * patchy - ground) * (ground > 0.001), np.float32)


def _shade(*, field: Field, forest: Field, trees: Field, across: Field, distance: Field) -> npt.NDArray[Any]:
    """Rock, snow and forest under the sun, with cast shadows and blue haze."""
    cell = _FIELD_KM / _FIELD
    x, z = across[None, :] * distance, distance
    u, v = x / cell + _FIELD / 2, z / cell
    ground = _sample(field, u, v)
    cover = _cover(ground, forest, x, z)
    step = np.maximum(1.0, distance / 6)
    slope_x = (_sample(field, u + step, v) - _sample(field, u - step, v)) / (2 * step * cell)
    slope_z = (_sample(field, u, v + step) - _sample(field, u, v - step)) / (2 * step * cell)
    rough = (_sample(trees, x * 260, z * 260), _sample(trees, x * 260 + 501, z * 260 + 77))
    bump = 0.30 + 0.25 * cover
    normal = np.stack([-slope_x + bump * rough[0], np.ones_like(ground), -slope_z + bump * rough[1]], axis=-1)
    normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
    light = np.clip(normal @ _SUN, 0, 1) * _shadow(field, ground, u, v)
    ambient = 0.34 + 0.22 * normal[..., 1]
    patchy = _sample(forest, x * 200, z * 200)
    strata = _sample(forest, x * 14 + 90, ground * 900 + x * 6)
    rock = np.array([0.25, 0.225, 0.205]) * (1 + 0.14 * strata + 0.08 * patchy)[..., None]
    grass = np.array([0.21, 0.24, 0.11]) * (1 + 0.16 * patchy)[..., None]
    steep = np.hypot(slope_x, slope_z)
    colour = _mix(rock, grass, _smoothstep(0.95, 0.45, steep) * _smoothstep(1.25, 0.75, ground + 0.1 * patchy))
    woods = np.array([0.055, 0.085, 0.045]) * (1 + 0.25 * rough[0] + 0.22 * patchy)[..., None]
    colour = _mix(colour, woods, cover)
    snow = _smoothstep(0.85, 1.25, ground + 0.10 * patchy - 0.25 * (steep - 0.7)) * _smoothstep(2.6, 1.5, steep)
    colour = _mix(colour, np.array([0.90, 0.92, 0.96]), snow)
    sunlight, skylight = np.array([1.30, 1.16, 0.96]), np.array([0.36, 0.46, 0.62])
    lit = colour * (light[..., None] * sunlight * 1.15 + ambient[..., None] * skylight)
    haze = 1 - np.exp(-distance / 34.0 * np.exp(-np.maximum(ground, 0) / 2.6))
    return _mix(lit, _HAZE, haze)


def _shadow(field: Field, ground: Field, u: npt.NDArray[Any], v: npt.NDArray[Any]) -> Field:
    """1 in the sun, 0 behind a ridge, in between at the edge."""
    cell = _FIELD_KM / _FIELD
    clear = np.full(ground.shape, 1.0, np.float32)
    for reach in np.geomspace(0.04, 4.0, 36):
        there = _sample(field, u + _SUN[0] * reach / cell, np.maximum(v + _SUN[2] * reach / cell, 0))
        margin = (ground + _SUN[1] * reach - there) / (0.02 + 0.05 * reach)
        clear = np.minimum(clear, np.clip(margin + 0.5, 0, 1).astype(np.float32))
    return clear


def _lake(generator: np.random.Generator, scene: npt.NDArray[Any], distance: Field) -> npt.NDArray[Any]:
    """Mirror what stands above the water line, broken by ripples that grow with the angle of view."""
    height, width, _ = scene.shape
    across, up = _rays(width, height)
    horizon = round(_HORIZON * height)
    water = (distance == 0) & (up[:, None] < 0)
    rows = np.arange(horizon, height)
    depth = _EYE_KM / np.maximum(-up[rows], 1e-5)
    x = across[None, :] * depth[:, None]
    ripples = _fractal(generator, 2048, 64, 5, 0.6)
    gusts = _fractal(generator, 2048, 5, 4)
    z = np.broadcast_to(depth[:, None], x.shape)
    wave = _sample(ripples, x * 9000, z * 24000) + 0.7 * _sample(ripples, x * 2600 + 40, z * 5000)
    windy = _smoothstep(-0.2, 1.3, _sample(gusts, x * 1100 + 900, z * 1100 + 350))
    below = rows - horizon
    sway = wave * (1.0 + 0.050 * below[:, None]) * (0.35 + 1.4 * windy)
    source = np.clip(horizon - below[:, None] * 1.02 - np.abs(sway) * 1.5 - 2, 0, horizon - 1)
    column = np.clip(np.arange(width)[None, :] + sway * 0.22, 0, width - 1).astype(np.int64)
    mirrored = scene[source.astype(np.int64), column]
    angle = np.clip(-up[rows][:, None] + 0.02 * wave, 0.0, 1.0)
    fresnel = 0.03 + 0.97 * (1 - angle / np.sqrt(1 + angle**2)) ** 4.2
    below_water = _bed(generator, x * 1000 + 0.02 * wave, z * 1000 + 0.05 * wave)
    surface = _mix(below_water, mirrored * 0.92, np.clip(fresnel, 0, 1))
    result = scene.copy()
    result[rows] = np.where(water[rows][..., None], surface, scene[rows])
    return result


def _bed(generator: np.random.Generator, x: npt.NDArray[Any], z: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What is seen through the water, x and z in metres: stones near the shore, then green depth."""
    deep = np.array([0.016, 0.068, 0.078])
    near = z < 40
    colour = np.broadcast_to(deep, (*x.shape, 3)).copy()
    stones = _stones(generator, x[near], z[near])
    water = np.exp(-np.clip(z[near] - 4.0, 0, None)[:, None] * np.array([0.155, 0.105, 0.115]))
    colour[near] = deep + (stones * 0.95 - deep) * water
    return colour


def _stones(generator: np.random.Generator, x: npt.NDArray[Any], z: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Gravel with larger stones on it: the nearest of scattered centres decides colour and roundness."""
    speckle = _fractal(generator, 1024, 32, 5, 0.8)
    colour = np.tile(np.array([0.20, 0.17, 0.13]), (*x.shape, 1))
    for spacing, filled in ((0.06, 1.0), (0.15, 0.6), (0.36, 0.2)):
        nearest, tone, there = _nearest_stone(generator, x / spacing, z / spacing)
        dome = np.sqrt(np.clip(1 - (nearest / 0.62) ** 2, 0, 1))
        tone = tone**1.5 + 0.10 * _sample(speckle, x * 160, z * 160)
        tint = np.stack([0.10 + 0.32 * tone, 0.10 + 0.27 * tone, 0.09 + 0.22 * tone], axis=-1)
        edge = _smoothstep(0.0, 0.25, dome) * (there < filled)
        colour = colour * (1 - 0.5 * _smoothstep(0.75, 0.6, nearest) * (there < filled))[..., None]
        colour = _mix(colour, tint * (0.35 + 0.75 * dome)[..., None], edge)
    return colour


def _nearest_stone(
    generator: np.random.Generator, x: npt.NDArray[Any], z: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Distance to the nearest of one jittered centre a cell, and that stone's two random numbers."""
    table = generator.random((512, 512, 5))
    cell_x, cell_z = np.floor(x).astype(np.int64), np.floor(z).astype(np.int64)
    nearest = np.full(x.shape, 9.0)
    tone, there = np.zeros(x.shape), np.zeros(x.shape)
    for step_x in (-1, 0, 1):
        for step_z in (-1, 0, 1):
            random = table[(cell_x + step_x) % 512, (cell_z + step_z) % 512]
            away_x = cell_x + step_x + 0.2 + 0.6 * random[..., 0] - x
            away_z = cell_z + step_z + 0.2 + 0.6 * random[..., 1] - z
            distance = np.hypot(away_x, away_z) / (0.7 + 0.45 * random[..., 2])
            closer = distance < nearest
            nearest = np.where(closer, distance, nearest)
            tone, there = np.where(closer, random[..., 3], tone), np.where(closer, random[..., 4], there)
    return nearest, tone, there


def _expose(generator: np.random.Generator, scene: npt.NDArray[Any]) -> Image.Image:
    """Tone curve, lens fall-off, a little glow, and sensor noise; then down to the final size."""
    height, width, _ = scene.shape
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    scene = scene * (1 - 0.16 * (x**2 + y**2) ** 1.2)[..., None]
    graded = 1 - np.exp(-1.3 * np.clip(scene, 0, None))
    graded = graded / (1 - np.exp(-1.3 * 1.35))
    graded = np.clip(graded, 0, 1) ** (1 / 1.3)
    graded = graded + 0.22 * (graded - 0.45) * (1 - (2 * np.clip(graded, 0, 1) - 1) ** 2)
    picture = Image.fromarray((np.clip(graded, 0, 1) * 255).astype(np.uint8)).resize(
        (WIDTH, HEIGHT), Image.Resampling.LANCZOS
    )
    glow = picture.filter(ImageFilter.GaussianBlur(14))
    picture = Image.blend(picture, glow, 0.08)
    grain = generator.normal(0, 1.6, (HEIGHT, WIDTH, 1)) + generator.normal(0, 0.8, (HEIGHT, WIDTH, 3))
    return Image.fromarray(np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8))


if __name__ == "__main__":
    PHOTOGRAPH.parent.mkdir(exist_ok=True)
    comment = "Made for the tpvision project by tests/make_photograph.py; public domain (CC0 1.0)"
    make_photograph().save(PHOTOGRAPH, "JPEG", quality=82, optimize=True, progressive=True, comment=comment)
