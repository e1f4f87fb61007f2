from pathlib import Path

import pytest

from service.launcher import GroupLauncher
from tp.settings import load_settings


def devices_of(group: int, visible: str | None, monkeypatch: pytest.MonkeyPatch) -> str:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    flags = {"parallel.tensor": 2, "parallel.groups": 2, "parallel.device": "cuda"}
    launcher = GroupLauncher(
        load_settings(flags=flags).settings, group=group, socket_path=Path("control.sock"), start_timeout_s=None
    )
    return launcher._environ()["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    ("visible", "first", "second"),
    [(None, "0,1", "2,3"), ("4,5,6,7", "4,5", "6,7"), ("0,1", "0,1", "0,1")],
    ids=["all of the machine", "some, shared by the groups", "a container's own"],
)
def test_a_group_has_its_devices(visible: str | None, first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [devices_of(group, visible, monkeypatch) for group in (0, 1)] == [first, second]
