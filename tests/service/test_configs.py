from pathlib import Path

import pytest

from tp.settings import Settings, load_settings
from tp.spec import PUBLISHED_K3, check_world_size

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
pytestmark = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def load(path: Path) -> Settings:
    return load_settings(path).settings


def test_loads_and_names_a_model(path: Path) -> None:
    assert load(path).model.path is not None


def test_world_size_is_legal_for_k3(path: Path) -> None:
    check_world_size(PUBLISHED_K3, load(path).parallel.tensor)


def test_device_count_is_the_one_in_the_name(path: Path) -> None:
    parallel = load(path).parallel
    hardware = path.stem.removeprefix("kimi-k3-")
    if parallel.device == "cuda":
        assert hardware.split("x")[0] == str(parallel.tensor * parallel.groups)


def test_slab_holds_a_full_batch_for_every_group(path: Path) -> None:
    settings = load(path)
    assert settings.slab_patches >= settings.parallel.groups * settings.capacity.max_patches_per_image


def test_opens_with_what_it_is_for(path: Path) -> None:
    assert path.read_text().startswith("# ")
