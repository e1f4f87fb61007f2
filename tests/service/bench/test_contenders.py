"""The ways to run the encoder that `tpvision bench tower` compares."""

from typing import get_args

import pytest
from running import GOLDEN

from service.bench.contenders import BASELINE, Contender, Exchange, contenders
from tp.bench.messages import KernelSet
from tp.settings import load_settings
from tp.spec import SpecError, read_spec

MODEL = GOLDEN / "tiny-k3-f32"
SPEC = read_spec(MODEL)


def entries(
    world_sizes: list[int], num_cores: int, *, has_many_images: bool = False, ablates: bool = False
) -> list[Contender]:
    settings = load_settings(flags={"model.path": MODEL}).settings
    exchanges: list[Exchange] = ["auto", "gloo"]
    return contenders(
        settings, SPEC, world_sizes, exchanges, num_cores, has_many_images=has_many_images, ablates=ablates
    )


def test_cores_are_shared_out_and_the_baseline_has_all_of_them() -> None:
    found = entries([1, 3], 6)
    assert (found[0].name, found[0].kernels) == (BASELINE, "stock")
    assert [(who.world_size, who.settings.parallel.threads) for who in found] == [(1, 6), (1, 6), (3, 2), (3, 2)]


def test_every_exchange_is_run() -> None:
    found = entries([1, 2], 2)
    assert [(who.name, who.settings.parallel.exchange) for who in found[2:]] == [
        ("2 ranks", "auto"),
        ("2 ranks, gloo", "gloo"),
    ]


def test_many_images_are_run_data_parallel_and_by_processes_on_their_own() -> None:
    parallel, apart = entries([1, 2], 2, has_many_images=True)[-2:]
    assert (parallel.mode, parallel.settings.parallel.resident, parallel.world_size) == ("dp", "full", 2)
    assert (apart.settings.parallel.tensor, apart.settings.parallel.groups) == (1, 2)  # a GPU each
    assert (apart.mode, apart.copies, apart.world_size, apart.settings.parallel.threads) == ("tp", 2, 1, 1)
    assert [parallel.takes([64] * count) for count in (1, 2, 3, 16)] == [False, True, True, True]
    assert [apart.takes([64] * count) for count in (1, 2, 3, 16)] == [False, True, False, True]
    assert (parallel.takes([64, 256]), apart.takes([64, 256])) == (True, False)


def test_each_improvement_is_left_out_once() -> None:
    alone = [who for who in entries([1, 2], 2, ablates=True) if who.name.startswith("1 rank")]
    assert [who.name for who in alone] == [
        "1 rank",
        "1 rank, stock linears",
        "1 rank, stock attention",
        "1 rank, runs of 128",
        "1 rank, unpacked keys",
    ]
    assert {who.kernels for who in alone} | {"stock"} == set(get_args(KernelSet))


def test_ranks_with_graphs_come_beside_those_without() -> None:
    settings = load_settings(flags={"model.path": MODEL, "parallel.cuda_graphs": "on"}).settings
    found = contenders(settings, SPEC, [1, 2], ["auto"], 2, has_many_images=False, has_graphs=True)
    assert [(who.name, who.settings.parallel.cuda_graphs) for who in found] == [
        (BASELINE, "off"),
        ("1 rank", "off"),
        ("1 rank, graphs", "on"),
        ("2 ranks", "off"),
        ("2 ranks, graphs", "on"),
    ]


def test_a_world_size_that_the_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(SpecError, match="12 attention heads"):
        entries([5], 2)
