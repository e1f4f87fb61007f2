import pytest

from service.launcher import devices_of_group
from tp.settings import ParallelSettings


@pytest.mark.parametrize(
    ("visible", "first", "second"),
    [(None, "01", "23"), ("4,5,6,7", "45", "67"), ("0,1", "01", "01")],
    ids=["all of the machine", "some, shared by the groups", "a container's own"],
)
def test_a_group_has_its_devices(visible: str | None, first: str, second: str) -> None:
    parallel = ParallelSettings(tensor=2, groups=2)
    assert ["".join(devices_of_group(group, parallel, visible)) for group in (0, 1)] == [first, second]
