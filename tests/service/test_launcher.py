"""The launcher's devices, and its budget with a short program in torchrun's place."""

import asyncio
import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import until

from service.launcher import BudgetSpentError, GroupLauncher, devices_of_group, rank_environ
from tp.settings import ParallelSettings, Settings


@pytest.mark.parametrize(
    ("visible", "first", "second"),
    [(None, "01", "23"), ("4,5,6,7", "45", "67"), ("0,1", "01", "01"), ("", "", "")],
    ids=["all of the machine", "some, shared by the groups", "a container's own", "none, as someone wants"],
)
def test_a_group_has_its_devices(visible: str | None, first: str, second: str) -> None:
    parallel = ParallelSettings(tensor=2, groups=2)
    assert ["".join(devices_of_group(group, parallel, visible)) for group in (0, 1)] == [first, second]


def test_float32_is_not_cut_short_by_variables_of_a_base_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(variable, "1")
    environ = rank_environ(Settings(), group=0)
    assert "NVIDIA_TF32_OVERRIDE" not in environ  # read by libraries of CUDA
    ask = "import torch; print(torch.get_float32_matmul_precision())"
    answer = subprocess.run([sys.executable, "-c", ask], env=environ, check=True, capture_output=True, text=True)
    assert answer.stdout == "highest\n"


class Launcher(GroupLauncher):
    """Launches `python -c` with a program, and notes when."""

    def __init__(
        self,
        program: str,
        *,
        max_restarts: int = 2,
        window_s: float = 600,
        start_timeout_s: float = 60,
        is_ours: bool = True,
    ) -> None:
        limits = {"max_restarts": max_restarts, "restart_window_s": window_s, "start_timeout_s": start_timeout_s}
        settings = Settings.model_validate({"parallel": {"device": "cpu", "tensor": 2, **limits}})
        super().__init__(settings, group=0, socket_path=Path("unused"), is_ours=is_ours)
        self._program = program
        self.launched: list[float] = []

    def _command(self) -> list[str]:
        self.launched.append(time.monotonic())
        return [sys.executable, "-c", self._program, self._folder.name]

    async def lose(self, incarnation: str) -> None:
        """The next incarnation becomes ready and ends."""
        num_launched = len(self.launched)
        self.note_ready(incarnation)
        await self.kill("lost")
        await until(lambda: len(self.launched) > num_launched)


WAIT = "import time; time.sleep(60)"
READY = "import pathlib, sys; file = pathlib.Path(sys.argv[1]).joinpath; file"


@pytest.mark.parametrize("status", [0, 3])
def test_ranks_that_end_while_they_start_burn_the_budget(status: int) -> None:
    launcher = Launcher(f"raise SystemExit({status})")
    with pytest.raises(BudgetSpentError, match=f"lost 3 times .* torchrun ended with status {status}"):
        asyncio.run(asyncio.wait_for(launcher.run(), 30))
    _, second, third = launcher.launched
    assert third - second > 1  # a first loss is followed at once, others are not


@pytest.mark.parametrize(
    ("is_ours", "program"),
    [(True, WAIT), (False, WAIT), (False, f"{READY}('ready-0').touch(); {WAIT}")],
    ids=["ours", "of a front-end elsewhere", "where one of two ranks is ready"],
)
def test_starts_that_hang_burn_the_budget_however_long_each_may_take(is_ours: bool, program: str) -> None:
    launcher = Launcher(program, max_restarts=1, window_s=1, start_timeout_s=1.5, is_ours=is_ours)
    with pytest.raises(BudgetSpentError, match=r"lost 2 times .* it was not ready within 1.5 s"):
        asyncio.run(asyncio.wait_for(launcher.run(), 30))


def test_ranks_of_a_front_end_elsewhere_say_themselves_that_they_are_ready() -> None:
    async def run() -> None:
        first = (
            f"{READY}('once').exists() or [file(f'ready-{{rank}}').touch() for rank in (0, 1)]; file('once').touch()"
        )
        launcher = Launcher(f"{first}; {WAIT}", is_ours=False)
        running = asyncio.create_task(launcher.run())
        await until(launcher._is_ready.is_set, timeout_s=30)
        await asyncio.sleep(0)
        assert not any("_kill_unless_ready" in repr(task) for task in asyncio.all_tasks())
        await launcher.kill("lost")
        await until(lambda: len(launcher.launched) == 2)
        assert not launcher._is_ready.is_set() and not launcher._ready_files
        await launcher.stop(0)
        await running

    asyncio.run(run())


def test_a_start_that_the_machine_does_not_allow_burns_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    launcher = Launcher(WAIT, max_restarts=1)
    with pytest.raises(BudgetSpentError, match=r"lost 2 times .* cannot be started: Resource temporarily unavailable"):
        asyncio.run(asyncio.wait_for(launcher.run(), 30))


def test_a_budget_of_no_restart_is_spent_with_the_first_loss() -> None:
    with pytest.raises(BudgetSpentError, match="was lost once within"):
        asyncio.run(asyncio.wait_for(Launcher("raise SystemExit(3)", max_restarts=0).run(), 30))


def test_a_start_without_a_file_to_open_burns_the_budget() -> None:
    launcher, (soft, hard) = Launcher(WAIT, max_restarts=1), resource.getrlimit(resource.RLIMIT_NOFILE)

    async def run() -> None:
        with open(os.devnull) as spare:  # noqa: ASYNC230, PTH123 - the lowest number that is free
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare.fileno(), hard))
            try:
                await asyncio.wait_for(launcher.run(), 30)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with pytest.raises(BudgetSpentError, match=r"lost 2 times .* cannot be started: Too many open files"):
        asyncio.run(run())
    shutil.rmtree(launcher._folder.name)


def test_workers_of_a_front_end_elsewhere_pause_after_a_clean_end() -> None:
    async def run() -> None:
        launcher = Launcher("", is_ours=False, max_restarts=0)
        running = asyncio.create_task(launcher.run())
        await asyncio.sleep(2.5)
        assert 2 <= len(launcher.launched) <= 3
        await launcher.stop(0)
        await running

    asyncio.run(run())


def test_excused_losses_are_off_the_budget_whenever_that_is_known_and_no_others() -> None:
    async def run() -> None:
        launcher = Launcher(WAIT)
        running = asyncio.create_task(launcher.run())
        await until(lambda: launcher.launched != [])
        for number in range(4):
            await launcher.lose(f"first {number}")  # counted, as nobody knows why
            launcher.excuse([f"first {number}", "of another group"])  # lost that one too: poison
        launcher.note_ready("next")
        launcher.excuse(["of another group", "next"])
        await launcher.lose("next")
        assert not launcher._losses
        for number in range(2):
            await launcher.lose(f"real {number}")
        assert [incarnation for _, incarnation in launcher._losses] == ["real 0", "real 1"]
        launcher.note_ready("real 2")
        await launcher.kill("lost")
        with pytest.raises(BudgetSpentError, match="lost 3 times"):
            await asyncio.wait_for(running, 10)

    asyncio.run(run())
