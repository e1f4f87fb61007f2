"""Loads this rank's shard of the weights: checkpoint names -> our names -> slices of each tensor.

Reads only the rank's own slices, through safetensors. What the checkpoint holds is found and checked by
tp/checkpoint.py; how a parameter is split is known to its layer in tp/parallel.py. Called by tp/runner.py.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tp.checkpoint import TOWER_PREFIX, CheckpointError, TensorEntry, projector_linears
from tp.model import MoonViT
from tp.parallel import ColumnParallelLinear, RowParallelLinear, Shard
from tp.spec import Dtype, EncoderSpec

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
Progress = Callable[[int, int], None]  # (bytes loaded, bytes in all) of this rank


def parameter_names(spec: EncoderSpec) -> dict[str, str]:
    """Checkpoint module -> our module, without the trailing `.weight` or `.bias`.

    `wqkv` is q, k and v stacked; `patch_embed.proj` is a convolution whose stride is its size, so one product a patch;
    the learned position table is called a weight of `pos_emb`.
    """
    first, second = projector_linears(spec)
    names = {
        f"{TOWER_PREFIX}patch_embed.proj": "patch_embed",
        f"{TOWER_PREFIX}patch_embed.pos_emb.weight": "pos_emb",
        f"{TOWER_PREFIX}encoder.final_layernorm": "final_norm",
        f"{spec.projector_prefix}.{spec.projector}": "projector.norm",
        f"{spec.projector_prefix}.{first}": "projector.fc0",
        f"{spec.projector_prefix}.{second}": "projector.fc1",
    }
    for index in range(spec.num_layers):
        theirs, ours = f"{TOWER_PREFIX}encoder.blocks.{index}", f"blocks.{index}"
        names |= {f"{theirs}.{name}": f"{ours}.{name}" for name in ("norm0", "norm1", "wo")}
        names |= {f"{theirs}.mlp.{name}": f"{ours}.{name}" for name in ("fc0", "fc1")}
        names[f"{theirs}.wqkv"] = f"{ours}.qkv"
    return names


def load_weights(
    model: MoonViT, table: Mapping[str, TensorEntry], *, dtype: torch.dtype, on_progress: Progress | None = None
) -> None:
    """Give every parameter of `model` this rank's slices of the checked `table`, on the group's device, as `dtype`.

    Raises CheckpointError if a file changed since it was checked, or a parameter is left without a value.
    """
    names = parameter_names(model.spec)
    state: dict[str, Tensor] = {}
    loads = [(entry, _our_name(entry.name, names)) for entry in sorted(table.values(), key=lambda entry: entry.file)]
    total = sum(_shard_bytes(entry, model.get_parameter(ours)) for entry, ours in loads)
    loaded = 0
    for entry, ours, parts in _read(model, loads):
        parameter = model.get_parameter(ours)
        state[ours] = _assemble(parts, _shard_of(model, ours), parameter.shape, dtype, model.group.device)
        loaded += _shard_bytes(entry, parameter)
        if on_progress:
            on_progress(loaded, total)
    _give(model, state)


def share_weights(whole: MoonViT, sharded: MoonViT) -> None:
    """Give every parameter of `sharded` its part of the loaded, unsharded `whole`.

    What every rank holds, and fc0, whose part is one run, are the same memory; slices of the others are copied.
    """
    state = {}
    for name, parameter in whole.named_parameters():
        shard = _shard_of(sharded, name)
        if shard is None:
            state[name] = parameter.data
        elif shard.dim == 0 and len(shard.ranges) == 1:
            state[name] = parameter.data[slice(*shard.ranges[0])]
        else:
            parts = _slices(parameter.data, shard)
            state[name] = _assemble(parts, shard, sharded.get_parameter(name).shape, parameter.dtype, parameter.device)
    _give(sharded, state)


def _our_name(name: str, names: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    module, _, leaf = name.rpartition(".")
    return f"{names[module]}.{leaf}"


def _shard_of(model: nn.Module, name: str) -> Shard | None:
    module, _, leaf = name.rpartition(".")
    layer = model.get_submodule(module)
    return layer.shard(leaf) if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)) else None


def _shard_bytes(entry: TensorEntry, parameter: nn.Parameter) -> int:
    """Bytes of the rank's part as stored."""
    return (entry.stop - entry.start) // math.prod(entry.shape) * parameter.numel()


def _read(model: MoonViT, loads: list[tuple[TensorEntry, str]]) -> Iterator[tuple[TensorEntry, str, list[Tensor]]]:
    """Each tensor's slices for this rank, views of the mapped file, one file open at a time."""
    for path, group in groupby(loads, key=lambda load: load[0].file):
        try:
            with safe_open(path, framework="pt") as file:
                for entry, ours in group:
                    yield entry, ours, _slices(file.get_slice(entry.stored_as), _shard_of(model, ours))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _slices(source: Any, shard: Shard | None) -> list[Tensor]:
    if shard is None:
        return [source[:]]
    if shard.dim == 0:
        return [source[start:stop] for start, stop in shard.ranges]
    return [source[:, start:stop] for start, stop in shard.ranges]


def _assemble(
    parts: list[Tensor], shard: Shard | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy the parts, one after the other, into memory of our own."""
    if shard is None:
        return parts[0].to(device, dtype, copy=True).reshape(shape)
    out = torch.empty(shape, dtype=dtype, device=device)
    first = 0
    for part in parts:
        out.narrow(shard.dim, first, part.shape[shard.dim]).copy_(part)
        first += part.shape[shard.dim]
    return out


def _give(model: MoonViT, state: Mapping[str, Tensor]) -> None:
    missing = [name for name, _ in model.named_parameters() if name not in state]
    if missing:
        raise CheckpointError(f"no value for {', '.join(missing)}")
    model.load_state_dict(state, strict=True, assign=True)
