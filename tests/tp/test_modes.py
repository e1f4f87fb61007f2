import pytest

from tp.modes import assign_images, makespan


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("costs", [[1.0], [5, 5, 5, 5], [9, 1, 1, 1, 1, 1, 1, 1, 1], [3, 8, 2, 7, 7]])
def test_every_image_is_on_one_rank(costs: list[float], world_size: int) -> None:
    assigned = assign_images(costs, world_size)
    assert len(assigned) == world_size
    assert sorted(index for indexes in assigned for index in indexes) == list(range(len(costs)))
    assert all(indexes == sorted(indexes) for indexes in assigned)


def test_the_large_image_has_a_rank_of_its_own() -> None:
    assert assign_images([1, 1, 9, 1], 2) == [[2], [0, 1, 3]]
    assert makespan([1, 1, 9, 1], 2) == 9


def test_no_images_are_nobodys() -> None:
    assert assign_images([], 2) == [[], []]
