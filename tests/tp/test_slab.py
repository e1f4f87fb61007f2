import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from tp.slab import Run, Slab, SlabError, SlabLayout
from tp.spec import PUBLISHED_K3

LAYOUT = SlabLayout(num_patches=64, patch_bytes=588, token_bytes=256)


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab.create(LAYOUT)
    yield made
    made.close()


def test_layout_of_k3_in_bfloat16() -> None:
    layout = SlabLayout.of(PUBLISHED_K3, num_patches=16_384, itemsize=2)
    assert layout.pixel_bytes == 9_633_792
    assert layout.token_arena_bytes == 58_720_256
    assert layout.token_offset % mmap.PAGESIZE == 0
    assert 0 <= layout.token_offset - layout.pixel_bytes < mmap.PAGESIZE
    assert layout.total_bytes == layout.token_offset + layout.token_arena_bytes


def test_a_new_slab_is_zero_and_exactly_as_large_as_its_layout(slab: Slab) -> None:
    assert os.fstat(slab.fd).st_size == LAYOUT.total_bytes
    assert os.fstat(slab.fd).st_blocks * 512 >= LAYOUT.total_bytes
    assert not slab.pixels(Run(0, 64)).any()


def test_views_have_the_runs_shape(slab: Slab) -> None:
    run = Run(8, 16)
    assert slab.pixels(run).shape == (16, 588)
    assert slab.tokens(run, 4).shape == (4, 256)
    assert slab.tokens(run, 1).shape == (1, 256)


def test_what_one_mapping_writes_another_reads(slab: Slab) -> None:
    other = Slab.map(os.dup(slab.fd), LAYOUT)
    run = Run(4, 8)
    slab.pixels(run)[:] = 7
    other.tokens(run, 2)[:] = 9
    assert (other.pixels(run) == 7).all()
    assert (slab.tokens(run, 2) == 9).all()
    other.close()


def test_neighbouring_runs_touch_and_do_not_overlap(slab: Slab) -> None:
    for number, run in enumerate((Run(0, 8), Run(8, 4), Run(12, 52)), start=1):
        slab.pixels(run)[:] = number
        slab.tokens(run, run.num_patches // 4)[:] = 100 + number
    rows, tokens = slab.pixels(Run(0, 64))[:, 0], slab.tokens(Run(0, 64), 16)[:, -1]
    assert rows.tolist() == [1] * 8 + [2] * 4 + [3] * 52
    assert tokens.tolist() == [101] * 2 + [102] + [103] * 13


def test_a_runs_tokens_lie_at_a_quarter_of_its_place(slab: Slab) -> None:
    slab.tokens(Run(0, 64), 16)[:] = np.arange(16, dtype=np.uint8)[:, None]
    assert slab.tokens(Run(20, 12), 3)[:, 0].tolist() == [5, 6, 7]


def test_the_two_arenas_do_not_touch(slab: Slab) -> None:
    slab.pixels(Run(0, 64))[:] = 255
    assert not slab.tokens(Run(0, 64), 16).any()


@pytest.mark.parametrize("start", [64, 60, 1 << 40])
def test_a_run_outside_is_refused(slab: Slab, start: int) -> None:
    with pytest.raises(SlabError, match="outside the slab's 64 rows"):
        slab.pixels(Run(start, 8))
    with pytest.raises(SlabError, match="outside the slab's 64 rows"):
        slab.tokens(Run(start, 8), 1)


@pytest.mark.parametrize("num_tokens", [-1, 0, 3])
def test_tokens_beyond_the_run_are_refused(slab: Slab, num_tokens: int) -> None:
    with pytest.raises(SlabError, match="do not fit a run of 8 patches"):
        slab.tokens(Run(0, 8), num_tokens)


@pytest.mark.parametrize(("start", "num_patches"), [(-4, 4), (2, 4), (0, 0), (0, -4), (0, 6)])
def test_a_run_is_whole_tokens(start: int, num_patches: int) -> None:
    with pytest.raises(ValueError, match="multiples of 4"):
        Run(start, num_patches)


@pytest.mark.parametrize("size", [0, LAYOUT.total_bytes - 1, LAYOUT.total_bytes + 1, LAYOUT.total_bytes - 4096])
def test_a_slab_can_neither_shrink_nor_grow(slab: Slab, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, size)
    with pytest.raises(PermissionError):
        os.posix_fallocate(slab.fd, LAYOUT.total_bytes, 1)


def test_a_descriptor_of_another_size_is_refused_with_both(slab: Slab) -> None:
    wrong = SlabLayout(num_patches=68, patch_bytes=588, token_bytes=256)
    with pytest.raises(SlabError, match=rf"{LAYOUT.total_bytes} bytes, but its layout needs {wrong.total_bytes}"):
        Slab.map(slab.fd, wrong)


def test_views_outlive_the_descriptor() -> None:
    slab = Slab.create(LAYOUT)
    view = slab.pixels(Run(0, 4))
    slab.close()
    view[:] = 3
    assert view.sum() == 3 * 4 * 588
