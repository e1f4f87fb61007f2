"""Writes the demo model: seeded random weights in the layout of the published Kimi K3 checkpoint.

File names, tensor names, shapes and config keys are the published ones; the numbers are noise, scaled so that
activations keep a sane size through the tower. So it exercises everything but the meaning of an embedding. Called by
`tpvision demo` and by the tests.

Tensors are drawn and written one at a time: the full size needs memory for its largest tensor a few times over. The
safetensors container is written by hand (8-byte header length, JSON header, bytes), because the library's writer wants
all tensors of a file in memory at once and numpy has no bfloat16. The same seed gives the same bytes under the same
numpy release.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from service.safetensors_header import Item, file_start
from service.tokens import to_bfloat16_bits
from tp.spec import ITEMSIZE, Dtype

Size = Literal["tiny", "full"]
Progress = Callable[[int, int], None]  # bytes written, bytes in all

_MARKER = "tpvision_demo_model.json"
_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16"}


class DemoModelError(ValueError):
    """The folder holds something that is not a demo model, so we do not write into it."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor to write: `offset` + `scale` times a normal number in every element."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    scale: float
    offset: float = 0.0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def write_demo_model(out: Path, *, size: Size, seed: int = 0, progress: Progress | None = None) -> None:
    """Write the checkpoint into folder `out`, made if missing; an earlier demo model there is replaced.

    `tiny` is 2.5 MB in float32, `full` K3's true shape, 894,717,952 bytes of vision weights in bfloat16. `progress`
    is called after every tensor. Raises DemoModelError when `out` holds anything else, OSError when the disk is full.
    """
    _claim(out, size=size, seed=seed)
    config = demo_config(size)
    _write_json(out / "config.json", config)
    _write_json(out / "preprocessor_config.json", demo_preprocessor_config())
    shards = _shards(config)
    _write_json(out / _INDEX, _index(shards))
    report = _Reporter(sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors), progress)
    for position, (file_name, tensors) in enumerate(shards.items()):
        _write_shard(out / file_name, tensors, seed=(seed, position), report=report)


def demo_config(size: Size) -> dict[str, Any]:
    """config.json: the published K3 values, or the same with the tiny shape."""
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "pad_token_id": 163839,
    }
    vision = {
        "_attn_implementation": "flash_attention_2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": 1024,
        "mm_projector_type": "patchmergerv2",
        "model_type": "",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "qkv_hidden_size": 1536,
        "text_hidden_size": 7168,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": 27,
    }
    if size == "tiny":
        config["dtype"] = "float32"
        vision |= {
            "mm_hidden_size": 64,
            "qkv_hidden_size": 96,
            "text_hidden_size": 128,
            "vt_hidden_size": 64,
            "vt_intermediate_size": 256,
            "vt_num_hidden_layers": 4,
        }
    text = {"model_type": "kimi_linear", "hidden_size": vision["text_hidden_size"], "dtype": config["dtype"]}
    return {**config, "text_config": text, "vision_config": vision}


def demo_preprocessor_config() -> dict[str, Any]:
    """preprocessor_config.json: the published K3 values, for both sizes."""
    return {
        "image_processor_type": "KimiK3VisionProcessor",
        "media_proc_cfg": {
            "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "in_patch_limit": 65536,
            "in_patch_limit_each_frame": 16384,
            "merge_kernel_size": 2,
            "patch_limit_on_one_side": 512,
            "patch_size": 14,
            "sample_fps": 8.0,
            "temporal_merge_kernel_size": 4,
            "transparent_bg_config": {
                "pattern": "chessboard",
                "chessboard_square_size": 8,
                "chessboard_square_on_top_left": True,
                "chessboard_white_value": 255,
                "chessboard_gray_value": 180,
            },
            "transparent_bg_fill_stage": "after_resize",
        },
    }


def _claim(out: Path, *, size: Size, seed: int) -> None:
    """Make the folder ours. The marker comes first, so that a write cut short can be repeated."""
    if out.exists() and not out.is_dir():
        raise DemoModelError(f"{out} is not a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / _MARKER).exists():
        raise DemoModelError(f"{out} is not empty and not a demo model; name an empty or a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoModelError(f"{out} cannot be made: {error.strerror}") from error
    _write_json(out / _MARKER, {"what": "random weights, made by `tpvision demo`", "size": size, "seed": seed})


def _shards(config: dict[str, Any]) -> dict[str, list[_Tensor]]:
    """Shard file -> its tensors. Tower last, projector before it, and as many digits as in the published names."""
    dtype: Dtype = config["dtype"]
    groups = (
        list(_decoys(config["vision_config"]["text_hidden_size"], dtype)),
        list(_projector(config["vision_config"], dtype)),
        list(_tower(config["vision_config"], dtype)),
    )
    return {
        f"model-{number:05d}-of-{len(groups):06d}.safetensors": group for number, group in enumerate(groups, start=1)
    }


def _decoys(text_hidden: int, dtype: Dtype) -> Iterator[_Tensor]:
    """A few tensors of the language model, for a loader to leave alone."""
    yield _Tensor("language_model.model.embed_tokens.weight", (48, text_hidden), dtype, 0.02)
    yield _Tensor("language_model.model.layers.0.input_layernorm.weight", (text_hidden,), dtype, 0.0, 1.0)
    yield _Tensor("language_model.model.layers.0.self_attn.A_log", (8,), "float32", 1.0)
    yield _Tensor("language_model.lm_head.weight", (48, text_hidden), dtype, 0.02)


def _projector(vision: dict[str, Any], dtype: Dtype) -> Iterator[_Tensor]:
    merged, text_hidden = 4 * vision["vt_hidden_size"], vision["text_hidden_size"]
    yield _linear("mm_projector.proj.0.weight", merged, merged, dtype)
    yield _linear("mm_projector.proj.2.weight", text_hidden, merged, dtype)
    yield _norm("mm_projector.post_norm.weight", text_hidden, dtype)


def _tower(vision: dict[str, Any], dtype: Dtype) -> Iterator[_Tensor]:
    """The residual stream starts near 1 in size, and stays there: each branch of a block adds little."""
    hidden, qkv, mlp = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["vt_intermediate_size"]
    patch, num_layers = vision["patch_size"], vision["vt_num_hidden_layers"]
    table = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden)
    branch = 1 / math.sqrt(2 * num_layers)
    yield _Tensor("vision_tower.patch_embed.proj.weight", (hidden, 3, patch, patch), dtype, 2 / math.sqrt(3 * patch**2))
    yield _Tensor("vision_tower.patch_embed.pos_emb.weight", table, dtype, 0.2)
    for layer in range(num_layers):
        block = f"vision_tower.encoder.blocks.{layer}"
        yield _norm(f"{block}.norm0.weight", hidden, dtype)
        yield _norm(f"{block}.norm1.weight", hidden, dtype)
        yield _linear(f"{block}.wqkv.weight", 3 * qkv, hidden, dtype)
        yield _linear(f"{block}.wo.weight", hidden, qkv, dtype, gain=branch)
        yield _linear(f"{block}.mlp.fc0.weight", mlp, hidden, dtype)
        yield _linear(f"{block}.mlp.fc1.weight", hidden, mlp, dtype, gain=branch)
    yield _norm("vision_tower.encoder.final_layernorm.weight", hidden, dtype)


def _linear(name: str, rows: int, columns: int, dtype: Dtype, *, gain: float = 1.0) -> _Tensor:
    """Unit inputs give outputs of size `gain`."""
    return _Tensor(name, (rows, columns), dtype, gain / math.sqrt(columns))


def _norm(name: str, width: int, dtype: Dtype) -> _Tensor:
    return _Tensor(name, (width,), dtype, 0.1, 1.0)


def _index(shards: dict[str, list[_Tensor]]) -> dict[str, Any]:
    total = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
    places = {tensor.name: file_name for file_name, tensors in shards.items() for tensor in tensors}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


class _Reporter:
    """Counts the bytes written and tells whoever watches."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._written_bytes = 0
        self._total_bytes = total_bytes
        self._progress = progress

    def add(self, num_bytes: int) -> None:
        self._written_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._written_bytes, self._total_bytes)


def _write_shard(path: Path, tensors: list[_Tensor], *, seed: tuple[int, int], report: _Reporter) -> None:
    """One safetensors file. An old one is unlinked, not cut short: a running server may have it mapped."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(
            file_start(
                Item(tensor.name, _DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.num_bytes) for tensor in tensors
            )
        )
        for position, tensor in enumerate(tensors):
            file.write(_draw(tensor, np.random.default_rng((*seed, position))).data)
            report.add(tensor.num_bytes)


def _draw(tensor: _Tensor, generator: np.random.Generator) -> npt.NDArray[Any]:
    """The tensor's values, flat: float32, or the bits of bfloat16 as uint16."""
    values = generator.standard_normal(math.prod(tensor.shape), dtype=np.float32)
    values *= np.float32(tensor.scale)
    values += np.float32(tensor.offset)
    return values if tensor.dtype == "float32" else to_bfloat16_bits(values)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
