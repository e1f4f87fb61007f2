import numpy as np
import pytest
import torch
from goldens import GOLDEN, MODELS, Distance, encode, expected_of, image_item, row_order, spec_of

from tp.checkpoint import read_vision_tensors
from tp.model import MoonViT, Norm, by_rows, merge, normalise, pixel_table
from tp.parallel import TPGroup
from tp.runner import Runner
from tp.spec import Grid
from tp.weights import load_weights


def load_model(name: str) -> MoonViT:
    spec, folder = spec_of(name), GOLDEN / f"{name}-f32"
    model = MoonViT(spec, TPGroup.single())
    load_weights(model, read_vision_tensors(folder, spec), dtype=torch.float32)
    return model


def test_pixel_table_by_hand() -> None:
    table = pixel_table(spec_of("tiny-k3").processor, torch.float32).view(3, 256)
    assert table[:, 0].tolist() == [-1, -1, -1]
    assert table[:, 255].tolist() == [1, 1, 1]
    assert table[1, 128] == np.float32(np.float32(np.float32(128 / 255) - 0.5) * 2)


def test_pixel_table_rounds_after_each_step() -> None:
    table = pixel_table(spec_of("tiny-k3").processor, torch.float32).view(3, 256)
    in_one_step = ((torch.arange(256, dtype=torch.float64) / 255 - 0.5) * 2).float()
    assert not torch.equal(table[0], in_one_step)


def test_normalise_looks_up_each_channel() -> None:
    table = torch.arange(3 * 256, dtype=torch.float32)
    pixels = torch.full((2, 588), 7, dtype=torch.uint8)
    values = normalise(pixels, table).view(2, 3, 196)
    assert values.amin((0, 2)).tolist() == values.amax((0, 2)).tolist() == [7, 263, 519]


def test_merge_puts_the_four_patches_side_by_side() -> None:
    x = torch.arange(8.0).view(8, 1)  # two tokens
    assert merge(x, [(2, 1)]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert merge(x, [(2, 1)]).data_ptr() == x.data_ptr()


def test_merge_means_over_frames() -> None:
    x = torch.arange(12.0).view(12, 1)  # one token of two frames, one of an image
    assert merge(x, [(1, 2), (1, 1)]).tolist() == [[2, 3, 4, 5], [8, 9, 10, 11]]


def test_merge_of_padding_only_is_empty() -> None:
    assert merge(torch.empty(0, 3), []).shape == (0, 12)


def test_by_rows_calls_with_bounded_runs() -> None:
    lengths = []

    def double(rows: torch.Tensor) -> torch.Tensor:
        lengths.append(len(rows))
        return 2 * rows

    x = torch.arange(5.0)
    assert by_rows(double, x, out=torch.empty(5), rows=2).tolist() == [0, 2, 4, 6, 8]
    assert lengths == [2, 2, 1]


def test_one_run_is_not_copied_but_keeps_the_dtype() -> None:
    x = torch.arange(5.0)
    assert by_rows(lambda rows: rows, x, rows=5) is x
    assert by_rows(lambda rows: 2 * rows.double(), x, rows=5).dtype == torch.float32


def test_rms_norm_by_hand() -> None:
    norm = Norm(spec_of("tiny-k3"), 2, eps=0.5)
    norm.weight = torch.nn.Parameter(torch.tensor([1.0, 10.0]))
    # mean square of (1, 2) is 2.5, plus 0.5 under the root
    torch.testing.assert_close(norm(torch.tensor([[1.0, 2.0]])), torch.tensor([[1.0, 20.0]]) / 3**0.5)


@pytest.mark.parametrize("name", MODELS)
def test_every_stage_matches_the_goldens(name: str) -> None:
    model, stored = load_model(name), expected_of(name)
    grid, pixels = image_item("gray_70x45")
    order, prefix = row_order(grid), "stages/gray_70x45"
    packing = model.pack([grid])
    with torch.inference_mode():
        x = model.embed(torch.from_numpy(pixels), [grid])
        found = {"patch_embed": x.clone()}
        for index, block in enumerate(model.blocks):
            block(x, packing)
            found[f"block_{index}"] = x.clone()
        found["final_layernorm"] = model.final_norm(x)
        merged = merge(found["final_layernorm"], [(grid.num_tokens, 1)]).unflatten(1, (4, -1))
    for stage, value in found.items():
        assert Distance.of(value, stored[f"{prefix}/{stage}"][order]).passes_f32, stage
    assert Distance.of(merged.flatten(0, 1), stored[f"{prefix}/merged"].flatten(0, 1)).passes_f32


def test_more_patches_than_a_run_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, pixels = image_item("prog_150x110")
    runner = Runner.load(GOLDEN / "tiny-k3-f32", spec_of("tiny-k3"), dtype="float32", group=TPGroup.single())
    whole = encode(runner, [grid], [pixels])[0]
    monkeypatch.setitem(by_rows.__kwdefaults__, "rows", 40)
    assert Distance.of(encode(runner, [grid], [pixels])[0], whole).passes_f32


def test_forward_gives_all_tokens() -> None:
    model = load_model("tiny-k25")
    grids = [Grid(1, 2, 4), Grid(3, 4, 4)]
    tokens = model(torch.zeros(8 + 48, 588, dtype=torch.uint8), grids)
    assert tokens.shape == (2 + 4, model.spec.text_hidden_size)
