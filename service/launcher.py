"""Starts torchrun for one worker group, watches it, and starts it again with back-off and a budget.

torchrun runs in a session of its own, so that a terminal's Ctrl-C reaches the front-end first, and with
`--max-restarts 0`: it has no back-off, and it exits 1 whatever the ranks' codes were. Used by `tpvision serve` for its
own groups and by `tpvision worker` for a front-end elsewhere.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tp.settings import ENV_PREFIX, ParallelSettings, Settings, as_environ

log = logging.getLogger("tpvision.launcher")

_BACK_OFF_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0)  # by losses within the window, this one included; the last one repeats
_PAUSE_S = 1.0  # before a start after a clean end
_SHUTDOWN_GRACE_S = 5
_NOT_STARTED = -1
_LOOK_EVERY_S = 0.5  # whether ranks have said that they are ready
_TF32_VARIABLES = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")  # of images: float32 with 10 bits
_ROOT = Path(__file__).parents[1]  # where `tp` can be imported from, installed or not


class StartRefusedError(RuntimeError):
    """The ranks cannot start as configured, and would end the same way again."""


class BudgetSpentError(RuntimeError):
    """The group was lost too often within the window; the text ends with the root cause."""


@dataclass(frozen=True, slots=True)
class RootCause:
    """What torchrun reports as the first failure."""

    text: str
    is_fatal: bool


class GroupLauncher:
    """One worker group's torchrun, over its incarnations. `run` is its life; the other methods end one or all."""

    def __init__(self, settings: Settings, *, group: int, socket_path: Path, is_ours: bool = True) -> None:
        """`is_ours`: our front-end's, which calls `note_ready`. One elsewhere tells us nothing, and may stop the ranks.

        An incarnation that is not ready within `parallel.start_timeout_s` is lost.
        """
        self._settings = settings
        self._is_ours = is_ours
        self._group = group
        self._socket_path = socket_path
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._losses: list[tuple[float, str | None]] = []  # when, and which incarnation if it was ever ready
        self._failed_starts_s = 0.0  # spent on them, while no loss grows old: a start may hang for all of the window
        self._incarnation: str | None = None
        self._is_excused = False
        self._kill_reason: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="tpvision-", ignore_cleanup_errors=True)
        self._is_ready = asyncio.Event()
        self.num_launches = 0

    @property
    def pid(self) -> int | None:
        """Of this incarnation's torchrun, or the last one's."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Launch and relaunch until `stop`. Raises StartRefusedError or BudgetSpentError.

        Must be awaited on the main thread: the children die with the thread that started them.
        """
        try:
            while not self._stopping.is_set():
                code = await self._launch_once()
                if self._stopping.is_set():
                    return
                if code == 0 and not self._is_ours:
                    log.info("group %d was told to stop by its front-end; starting it again", self._group)
                    await self._pause(_PAUSE_S)
                    continue
                cause = self._read_root_cause(code)
                if cause.is_fatal:
                    raise StartRefusedError(cause.text)
                await self._back_off(cause)
        finally:
            await self.kill()
            self._folder.cleanup()

    def note_ready(self, incarnation: str) -> None:
        """What was launched last calls itself that and is ready: its start can no longer time out."""
        self._incarnation = incarnation
        self._is_ready.set()

    def excuse(self, incarnations: Sequence[str]) -> None:
        """Take the losses of these off the budget, also the one that is under way: they are a poison image's."""
        self._is_excused |= self._incarnation in incarnations
        self._losses = [loss for loss in self._losses if loss[1] not in incarnations]

    async def stop(self, timeout_s: float) -> None:
        """Wait for torchrun to end by itself, if its ranks are ready and so can be told to; then, or late, end it."""
        self._stopping.set()
        if self._process is not None and (self._is_ready.is_set() or not self._is_ours):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        await self.kill()

    async def kill(self, reason: str | None = None) -> None:
        """End this incarnation at once, stopped ranks included, and wait until torchrun is reaped.

        `reason` is the root cause where torchrun left none.
        """
        process = self._process
        if process is None:
            return
        self._kill_reason = self._kill_reason or reason
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)  # the ranks get theirs from the kernel: tp.process.die_with_parent
        await process.wait()

    async def _launch_once(self) -> int:
        self._kill_reason = None
        self._incarnation = None
        self._is_excused = False
        self._is_ready.clear()
        self.num_launches += 1
        try:
            for file in (self._error_file, *self._ready_files):
                file.unlink(missing_ok=True)
            self._process = await asyncio.create_subprocess_exec(
                *self._command(), env=self._environ(), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:  # no memory, processes or files for another one, which may pass
            self._kill_reason = f"torchrun cannot be started: {error.strerror}"
            return _NOT_STARTED
        if self._stopping.is_set():
            await self.kill()
        started = time.monotonic()
        guard = asyncio.create_task(self._kill_unless_ready())
        try:
            return await self._process.wait()
        finally:
            guard.cancel()
            if not self._is_ready.is_set():
                self._failed_starts_s += time.monotonic() - started

    async def _kill_unless_ready(self) -> None:
        limit_s = self._settings.parallel.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await (self._is_ready.wait() if self._is_ours else self._see_ready())
        except TimeoutError:
            await self.kill(f"it was not ready within {limit_s:g} s")

    async def _see_ready(self) -> None:
        while len(self._ready_files) < self._settings.parallel.tensor:  # noqa: ASYNC110 - other processes' files
            await asyncio.sleep(_LOOK_EVERY_S)
        self._is_ready.set()

    async def _back_off(self, cause: RootCause) -> None:
        limits = self._settings.parallel
        now = time.monotonic() - self._failed_starts_s
        if not self._is_excused:
            self._losses.append((now, self._incarnation))
        self._losses = [loss for loss in self._losses if now - loss[0] <= limits.restart_window_s]
        if len(self._losses) > limits.max_restarts:
            times = "once" if len(self._losses) == 1 else f"{len(self._losses)} times"
            raise BudgetSpentError(
                f"group {self._group} was lost {times} within {limits.restart_window_s:g} s; root cause: {cause.text}"
            )
        delay_s = _BACK_OFF_S[min(len(self._losses), len(_BACK_OFF_S) - 1)]
        log.warning("group %d was lost (%s); starting it again in %g s", self._group, cause.text, delay_s)
        await self._pause(delay_s)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _command(self) -> list[str]:
        folder = self._folder.name
        arguments = ("--socket", str(self._socket_path), "--group", str(self._group), "--ready-folder", folder)
        return torchrun_command(self._settings, Path(folder), "tp.worker", *arguments)

    def _environ(self) -> dict[str, str]:
        return {**rank_environ(self._settings, self._group), "TORCHELASTIC_ERROR_FILE": str(self._error_file)}

    @property
    def _error_file(self) -> Path:
        return Path(self._folder.name) / "error.json"

    @property
    def _ready_files(self) -> list[Path]:
        """One for each rank that is ready."""
        return list(Path(self._folder.name).glob("ready-*"))

    def _read_root_cause(self, code: int) -> RootCause:
        try:
            message = json.loads(self._error_file.read_bytes())["message"]
            text = message if isinstance(message, str) else str(message["message"])
        except (OSError, ValueError, KeyError, TypeError):
            return RootCause(self._kill_reason or f"torchrun ended with status {code}", is_fatal=False)
        name, _, reason = text.partition(": ")
        if name == "FatalStartError":
            return RootCause(reason, is_fatal=True)
        return RootCause(self._kill_reason or text, is_fatal=False)


def torchrun_command(settings: Settings, log_dir: Path, module: str, *arguments: str) -> list[str]:
    """The command that runs `module` as every rank of one group, and ends with this process."""
    return [
        *(sys.executable, "-m", "tp.launch", str(os.getpid())),
        *("--standalone", "--nproc-per-node", str(settings.parallel.tensor), "--max-restarts", "0"),
        *("--shutdown-timeout", str(_SHUTDOWN_GRACE_S), "--log-dir", str(log_dir)),
        *("-m", module, *arguments),
    ]


def settings_environ(settings: Settings) -> dict[str, str]:
    """Our environment with these settings in place of any others, for a Python that finds our modules anywhere."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environ |= as_environ(settings)
    environ["PYTHONSAFEPATH"] = "1"  # a file of the working folder must not stand in for a module
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environ.get("PYTHONPATH")]))
    return environ


def rank_environ(settings: Settings, group: int) -> dict[str, str]:
    """The environment of that command."""
    environ = settings_environ(settings)
    environ["OMP_NUM_THREADS"] = str(
        settings.rank_threads(len(os.sched_getaffinity(0)))
    )  # torchrun would set 1 and warn
    environ["GLOO_SOCKET_IFNAME"] = environ.get("GLOO_SOCKET_IFNAME", "lo")
    for variable in _TF32_VARIABLES:
        environ.pop(variable, None)
    if settings.parallel.device != "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            devices_of_group(group, settings.parallel, environ.get("CUDA_VISIBLE_DEVICES"))
        )
    return environ


def devices_of_group(group: int, parallel: ParallelSettings, visible: str | None) -> list[str]:
    """A group's share of the devices in CUDA_VISIBLE_DEVICES, or of the machine's where that is not set.

    All of them, where there are no more than it needs: then they are its own, as in a container beside other groups'.
    None, where CUDA_VISIBLE_DEVICES is set and empty: that hides them.
    """
    size = parallel.tensor
    names = [str(index) for index in range(size * parallel.groups)] if visible is None else visible.split(",")
    return names if len(names) == size else names[group * size : (group + 1) * size]
