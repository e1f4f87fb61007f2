"""What an encoder is: its shape and its image rule, read from a checkpoint folder's two config files.

Pure values and arithmetic, no torch and no weights. Both sides import it: the front-end to size images and memory,
the workers to build the model. Field meanings follow the published `config.json` and `preprocessor_config.json` of
Kimi K3 (moonshotai/Kimi-K3, `vision_config` and `media_proc_cfg`). K2.5, K2.6 and K2.7 share a layout; Kimi-VL has its
own. Which one a checkpoint has is told by the keys of its `vision_config`, not by the name of the model: a later one on
a tower that we know (K3.1) is taken, and `model_note` says so.
"""

import json
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROPE_THETA = 10000.0
ROPE_SIDE = 512  # patches a side that the published towers' rotary table has
CHANNELS = 3
MAX_JSON_BYTES = 100_000_000  # of a file that is read as a whole; safetensors' own limit of a header

Dtype = Literal["float32", "bfloat16", "float16"]
ITEMSIZE: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

Family = Literal["Kimi K3", "Kimi K2.5", "Kimi-VL"]
MODEL_TYPES: dict[str, Family] = {"kimi_k3": "Kimi K3", "kimi_k25": "Kimi K2.5", "kimi_vl": "Kimi-VL"}  # published


class FolderError(ValueError):
    """A folder cannot be used. What its message quotes from files is escaped where it cannot be printed."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in message))


class SpecError(FolderError):
    """The checkpoint's configuration is missing, malformed, or describes an encoder we do not have."""


class Grid(NamedTuple):
    """Patches of one item: frames, rows and columns. h and w are even; t is 1 for an image."""

    t: int
    h: int
    w: int

    @classmethod
    def squarest(cls, num_patches: int) -> "Grid":
        """The grid of an image of `num_patches` (a multiple of 4) that is as near to a square as they allow."""
        tokens = num_patches // 4
        height = max(size for size in range(1, math.isqrt(tokens) + 1) if tokens % size == 0)
        return cls(1, 2 * height, 2 * (tokens // height))

    @property
    def num_patches(self) -> int:
        """Rows of the pixel arena that the item takes."""
        return self.t * self.h * self.w

    @property
    def num_tokens(self) -> int:
        """Merged tokens after the 2 x 2 spatial merge and the mean over frames."""
        return self.h // 2 * (self.w // 2)


@dataclass(frozen=True, slots=True)
class Background:
    """What shows through transparent pixels."""

    pattern: Literal["black", "white", "gray", "chessboard"] = "black"
    square_size: int = 16  # pixels a chessboard cell
    white_top_left: bool = True
    white_value: int = 255
    gray_value: int = 200


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """The checkpoint's image rule.

    `navit` is the rule of K3 and K2.5 (a patch budget and a side limit, never enlarging); `kimi_vl` that of Kimi-VL.
    RGB is made before the resize, or after a resize in the image's own mode (`fill_stage`).
    """

    rule: Literal["navit", "kimi_vl"]
    patch_size: int  # pixels a side
    patch_limit: int  # patches an image, checked before padding: see service.bounds.largest_patch_count
    side_limit: int  # patches a side
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    background: Background | None  # None: alpha is dropped
    fill_stage: Literal["before_resize", "after_resize"]
    frame_patch_limit: int | None = None  # patches a frame of a video chunk, in place of patch_limit; None: the same
    chunk_patch_limit: int | None = None  # patches of all frames of a chunk, checked likewise; None: no limit


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Shape of a MoonViT tower with its projector, and the image rule that feeds it."""

    model_type: str
    num_layers: int
    hidden_size: int
    qkv_size: int  # num_heads * head_dim; K3's differs from hidden_size
    num_heads: int
    mlp_size: int
    text_hidden_size: int  # width of a merged token
    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int  # frames an item may have
    pos_emb_interpolation: Literal["bilinear", "bicubic"]
    norm: Literal["rmsnorm", "layernorm"]
    has_bias: bool  # on every linear and on the patch embedding
    projector: Literal["post_norm", "pre_norm"]  # patchmergerv2 (K3) or patchmerger (K2.5, Kimi-VL)
    projector_prefix: Literal["mm_projector", "multi_modal_projector"]
    projector_norm_eps: float
    dtype: Dtype  # what the checkpoint says its weights are
    processor: ProcessorSpec

    @property
    def family(self) -> Family:
        """Whose tower this is, by its shape; `model_type` may be a later model's."""
        if self.processor.rule == "kimi_vl":
            return "Kimi-VL"
        return "Kimi K3" if self.projector == "post_norm" else "Kimi K2.5"

    @property
    def takes_video(self) -> bool:
        """Whether the tower has a time embedding, and so takes chunks of up to `pos_emb_time` frames."""
        return self.pos_emb_time > 1

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.qkv_size // self.num_heads

    @property
    def patch_bytes(self) -> int:
        """Bytes of one row of uint8 pixels."""
        return CHANNELS * self.patch_size**2

    @property
    def legal_world_sizes(self) -> tuple[int, ...]:
        """World sizes that give every rank the same number of whole heads."""
        return tuple(size for size in range(1, self.num_heads + 1) if self.num_heads % size == 0)

    @property
    def linear_flops(self) -> int:
        """FLOPs a patch that do not depend on the image (model_facts section 8; multiply-add counts two)."""
        block = 2 * self.hidden_size * (3 * self.qkv_size + self.qkv_size + 2 * self.mlp_size)
        merged = 4 * self.hidden_size
        projector = 2 * merged * (merged + self.text_hidden_size) // 4
        return 2 * self.patch_bytes * self.hidden_size + self.num_layers * block + projector

    @property
    def attention_flops(self) -> int:
        """FLOPs a pair of patches of the same image."""
        return 4 * self.qkv_size * self.num_layers

    def flops(self, num_patches: int) -> int:
        """FLOPs of one image: its matrix products, patch embedding and projector included, and nothing else.

        For K3, 2 n (588 x 1024) + 27 x 2 n (1024 x 4608 + 1536 x 1024 + 2 x 1024 x 4096) + 27 x 4 x 1536 n^2 +
        2 (n / 4) (4096^2 + 4096 x 7168): 1.01 TFLOP at 1,024 patches, 6.13 at 4,096, 57.9 at 16,384. Several images
        add up; the frames of a video chunk count as one image (but project fewer tokens).
        """
        return num_patches * self.linear_flops + num_patches**2 * self.attention_flops

    def cost(self, num_patches: int) -> float:
        """Work of one image in patch equivalents: n + n^2 / k, with k the ratio of the two rates above.

        All that is linear in n counts, patch embedding and projector too: k is 4,925 for K3 and 6,837 for K2.5 (6,608
        if only the blocks' linears did). The frames of a video chunk attend to each other, so n counts all of them.
        """
        return num_patches + num_patches**2 * self.attention_flops / self.linear_flops

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the handshake's comparison."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def check_world_size(spec: EncoderSpec, world_size: int, num_devices: int | None = None) -> None:
    """Raise SpecError, naming heads, legal sizes and a layout for all devices, unless every rank gets whole heads."""
    legal = spec.legal_world_sizes
    if world_size in legal:
        return
    devices = num_devices or world_size
    size = max(size for size in legal if devices % size == 0)
    raise SpecError(
        f"world size {world_size} does not divide the {spec.num_heads} attention heads; legal sizes are "
        f"{', '.join(map(str, legal))}. To use {devices} devices: {devices // size} group(s) of {size} "
        f"(parallel.groups={devices // size}, parallel.tensor={size})"
    )


def model_note(spec: EncoderSpec) -> str | None:
    """What to log of a checkpoint whose `model_type` is not the published one of its tower; None where it is."""
    if MODEL_TYPES.get(spec.model_type) == spec.family:
        return None
    return (
        f"model_type {spec.model_type!r} is not known for this tower: the vision_config is that of {spec.family}, "
        "and it is served as such, without prompt texts"
    )


def read_spec(model_dir: Path) -> EncoderSpec:
    """The spec of the checkpoint in `model_dir`. Raises SpecError naming the file and the key at fault."""
    return parse_spec(read_json(model_dir / "config.json"), read_json(model_dir / "preprocessor_config.json"))


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file. Raises SpecError, naming the file, for anything else."""
    try:
        if not path.is_file() and path.exists():  # opening a named pipe would wait for ever
            raise SpecError(f"{path} is not a regular file")
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise SpecError(f"{path} has {size:,} bytes, more than the {MAX_JSON_BYTES:,} that are read")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SpecError(f"{path} does not exist") from None
    except SpecError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{path} does not hold a JSON object")
    return value


def parse_spec(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> EncoderSpec:
    """The spec from the two parsed files. Raises SpecError naming the key at fault.

    The families differ in key names and in what an absent key means: absent norm, bias and interpolation keys are the
    older defaults (LayerNorm, biases, bicubic) of K2.5 and Kimi-VL.
    """
    top = _Keys(config, "config.json")
    vision = top.section("vision_config")
    is_kimi_vl = _is_kimi_vl(vision)
    hidden = vision.integer("vt_hidden_size", "hidden_size")
    has_bias = vision.flag("linear_bias", default=True)
    for other in ("attn_bias", "patch_embed_proj_bias"):
        if vision.flag(other, default=has_bias) != has_bias:
            raise SpecError(f"config.json: vision_config.{other} differs from linear_bias; no known tower mixes them")
    for key, known in _ONLY_KNOWN.items():
        vision.choice(key, known, default=known[0])
    if vision.pair("merge_kernel_size", default=(2, 2)) != (2, 2):
        raise SpecError("config.json: vision_config.merge_kernel_size must be [2, 2]")
    projector = vision.choice("mm_projector_type", ("patchmerger", "patchmergerv2"), default="patchmerger")
    text_hidden = vision.integer(
        "text_hidden_size", default=top.section("text_config").integer("hidden_size", default=0)
    )
    num_frames = vision.integer("init_pos_emb_time", "pos_emb_time", default=4, most=_MOST_FRAMES)
    spec = EncoderSpec(
        model_type=top.text("model_type"),
        num_layers=vision.integer("vt_num_hidden_layers", "num_hidden_layers", most=_MOST_LAYERS),
        hidden_size=hidden,
        qkv_size=vision.integer("qkv_hidden_size", default=hidden),
        num_heads=vision.integer("vt_num_attention_heads", "num_attention_heads", most=_MOST_HEADS),
        mlp_size=vision.integer("vt_intermediate_size", "intermediate_size"),
        text_hidden_size=text_hidden,
        patch_size=_patch_size(vision),
        pos_emb_height=vision.integer("init_pos_emb_height", "pos_emb_height"),
        pos_emb_width=vision.integer("init_pos_emb_width", "pos_emb_width"),
        pos_emb_time=1 if is_kimi_vl else num_frames,
        pos_emb_interpolation=vision.choice("pos_emb_interpolation_mode", ("bicubic", "bilinear"), default="bicubic"),
        norm=vision.choice("norm_type", ("layernorm", "rmsnorm"), default="layernorm"),
        has_bias=has_bias,
        projector="post_norm" if projector == "patchmergerv2" else "pre_norm",
        projector_prefix="multi_modal_projector" if is_kimi_vl else "mm_projector",
        projector_norm_eps=vision.number("projector_ln_eps", default=1e-5),
        dtype=_dtype(top),
        processor=parse_processor(preprocessor, is_kimi_vl),
    )
    _check_shape(spec)
    return spec


def _is_kimi_vl(vision: "_Keys") -> bool:
    """By name, or where that was lost by what only the other family writes: vt_ names, frames, a projector's type."""
    theirs = ("vt_hidden_size", "init_pos_emb_time", "pos_emb_time", "mm_projector_type")
    return vision.text("model_type", default="") == "moonvit" or not any(key in vision.values for key in theirs)


# Keys for which one value is supported.
_ONLY_KNOWN: dict[str, tuple[str, ...]] = {
    "activation_func": ("gelu_pytorch_tanh",),
    "mlp_type": ("mlp2",),
    "merge_type": ("sd2_tpool",),
    "pos_emb_type": ("divided_fixed",),
    "projector_hidden_act": ("gelu",),
    "video_attn_type": ("spatial_temporal",),
}


def _check_shape(spec: EncoderSpec) -> None:
    if spec.text_hidden_size < 1:
        raise SpecError("config.json: neither vision_config.text_hidden_size nor text_config.hidden_size is there")
    if spec.qkv_size % spec.num_heads:
        raise SpecError(f"config.json: qkv size {spec.qkv_size} is not a multiple of {spec.num_heads} heads")
    if spec.head_dim % 4:
        raise SpecError(f"config.json: head size {spec.head_dim} is not a multiple of 4, as the 2-D rotation needs")
    if not all(value > 0 for value in spec.processor.std):
        raise SpecError(f"preprocessor_config.json: image_std must be positive, not {list(spec.processor.std)}")
    if spec.patch_size != spec.processor.patch_size:
        raise SpecError(
            f"patch_size: {spec.patch_size} in config.json, {spec.processor.patch_size} in preprocessor_config.json"
        )


def parse_processor(preprocessor: Mapping[str, Any], is_kimi_vl: bool) -> ProcessorSpec:
    """The image rule from a parsed preprocessor_config.json. Raises SpecError naming the key at fault."""
    top = _Keys(preprocessor, "preprocessor_config.json")
    keys = top if is_kimi_vl else top.section("media_proc_cfg")
    background = keys.values.get("transparent_bg_config")
    merge = keys.values.get("merge_kernel_size", 2)
    if merge not in (2, [2, 2]):
        raise SpecError(f"preprocessor_config.json: merge_kernel_size must be 2, not {_shown(merge)}")
    if keys.values.get("fixed_output_tokens") is not None:
        raise SpecError("preprocessor_config.json: fixed_output_tokens is not supported")
    return ProcessorSpec(
        rule="kimi_vl" if is_kimi_vl else "navit",
        patch_size=_patch_size(keys),
        patch_limit=keys.integer("in_token_limit" if is_kimi_vl else "in_patch_limit", least=4),
        frame_patch_limit=keys.optional_integer("in_patch_limit_each_frame", least=4),
        chunk_patch_limit=keys.optional_integer("in_patch_limit_video", least=4 * _MOST_FRAMES),
        side_limit=keys.integer("patch_limit_on_one_side", default=ROPE_SIDE, least=4, most=ROPE_SIDE),
        mean=keys.triple("image_mean", default=(0.5, 0.5, 0.5)),
        std=keys.triple("image_std", default=(0.5, 0.5, 0.5)),
        background=None if background is None else _parse_background(keys.section("transparent_bg_config")),
        fill_stage=keys.choice(
            "transparent_bg_fill_stage",
            ("before_resize", "after_resize"),
            default="after_resize" if is_kimi_vl else "before_resize",
        ),
    )


def _parse_background(keys: "_Keys") -> Background:
    return Background(
        pattern=keys.choice("pattern", ("black", "white", "gray", "chessboard"), default="black"),
        square_size=keys.integer("chessboard_square_size", default=16),
        white_top_left=keys.flag("chessboard_square_on_top_left", default=True),
        white_value=keys.byte("chessboard_white_value", default=255),
        gray_value=keys.byte("chessboard_gray_value", default=200),
    )


def _patch_size(keys: "_Keys") -> int:
    return keys.integer("patch_size", default=14, least=4, most=32)


def _dtype(top: "_Keys") -> Dtype:
    name = top.text("dtype", default=top.text("torch_dtype", default="bfloat16"))
    for dtype in ITEMSIZE:
        if name == dtype:
            return dtype
    raise SpecError(f"config.json: dtype {name!r} is not one of {', '.join(ITEMSIZE)}")


_REQUIRED: Any = object()
# Far beyond any published tower, and small enough for what loops over them.
_MOST_LAYERS, _MOST_HEADS, _MOST_FRAMES, _MOST_CHARS = 1024, 1024, 16, 256
_MOST = 2**31 - 1  # of any other integer


def _shown(value: Any) -> str:
    """A value in a message, cut short."""
    return reprlib.repr(value)[:100]


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold: JSON has longer ones, and Python reads NaN and Infinity."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class _Keys:
    """One object of a config file, read key by key with the type each must have; errors name file and key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self._where = where

    def section(self, name: str) -> "_Keys":
        value = self.values.get(name, {} if name == "text_config" else None)
        if not isinstance(value, dict):
            raise SpecError(f"{self._where}: {name} is missing or not an object")
        return _Keys(value, f"{self._where}: {name}")

    def integer(self, *names: str, default: int = _REQUIRED, least: int = 1, most: int = _MOST) -> int:
        value = self._find(names, default)
        if value is not default and (type(value) is not int or not least <= value <= most):
            raise SpecError(f"{self._where}: {names[0]} must be an integer in {least}..{most}, not {_shown(value)}")
        return int(value)

    def optional_integer(self, name: str, *, least: int) -> int | None:
        return None if self.values.get(name) is None else self.integer(name, least=least)

    def byte(self, name: str, *, default: int) -> int:
        value = self._find((name,), default)
        if type(value) is not int or not 0 <= value <= 255:
            raise SpecError(f"{self._where}: {name} must be an integer in 0..255, not {_shown(value)}")
        return value

    def number(self, name: str, *, default: float) -> float:
        value = self._find((name,), default)
        if not _is_finite(value) or value <= 0:
            raise SpecError(f"{self._where}: {name} must be a positive, finite number, not {_shown(value)}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._find((name,), default)
        if type(value) is not bool:
            raise SpecError(f"{self._where}: {name} must be true or false, not {_shown(value)}")
        return value

    def text(self, name: str, *, default: str = _REQUIRED) -> str:
        value = self._find((name,), default)
        if not isinstance(value, str) or not value.isprintable() or len(value) > _MOST_CHARS:
            raise SpecError(f"{self._where}: {name} must be a short printable string, not {_shown(value)}")
        return value

    def choice(self, name: str, known: tuple[str, ...], *, default: str) -> Any:
        value = self._find((name,), default)
        if value not in known:
            raise SpecError(
                f"{self._where}: {name} is {_shown(value)}; this tower is not supported (known: {', '.join(known)})"
            )
        return value

    def pair(self, name: str, *, default: tuple[int, int]) -> tuple[int, ...]:
        value = self._find((name,), default)
        return tuple(value) if isinstance(value, (list, tuple)) else (value, value)

    def triple(self, name: str, *, default: tuple[float, float, float]) -> tuple[float, float, float]:
        value = self._find((name,), default)
        if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(map(_is_finite, value)):
            raise SpecError(f"{self._where}: {name} must hold three finite numbers, not {_shown(value)}")
        return (float(value[0]), float(value[1]), float(value[2]))

    def _find(self, names: tuple[str, ...], default: Any) -> Any:
        for name in names:
            if name in self.values:
                return self.values[name]
        if default is _REQUIRED:
            raise SpecError(f"{self._where}: {names[0]} is missing")
        return default


# The published Kimi K3: what `tpvision plan` shows where no checkpoint is named.
PUBLISHED_K3 = EncoderSpec(
    model_type="kimi_k3",
    num_layers=27,
    hidden_size=1024,
    qkv_size=1536,
    num_heads=12,
    mlp_size=4096,
    text_hidden_size=7168,
    patch_size=14,
    pos_emb_height=64,
    pos_emb_width=64,
    pos_emb_time=4,
    pos_emb_interpolation="bilinear",
    norm="rmsnorm",
    has_bias=False,
    projector="post_norm",
    projector_prefix="mm_projector",
    projector_norm_eps=1e-5,
    dtype="bfloat16",
    processor=ProcessorSpec(
        rule="navit",
        patch_size=14,
        patch_limit=65_536,
        side_limit=512,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        background=Background(pattern="chessboard", square_size=8, gray_value=180),
        fill_stage="after_resize",
        frame_patch_limit=16_384,
    ),
)
