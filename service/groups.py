"""The worker groups behind this front-end: launched where they are ours, listened to, buried when lost, stopped.

It knows processes and connections, not images: `service.dispatch` feeds batches to the groups that are ready here.
"""

import asyncio
import logging
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from service.launcher import BudgetSpentError, GroupLauncher, StartRefusedError
from service.transport import ControlServer, WorkerGroup
from service.waiting import first_of
from tp import wire
from tp.settings import Settings
from tp.slab import Slab
from tp.spec import EncoderSpec

log = logging.getLogger("tpvision.groups")

GroupState = Literal["starting", "ready", "lost", "given_up"]
GROUP_STATES: tuple[GroupState, ...] = get_args(GroupState)

_STOP_TIMEOUT_S = 10.0
_MAX_EXCUSED_IN_A_ROW = 5  # poison images without a single good batch between them


class WorkerGroups:
    """All groups. `failure` is set when they cannot, or may no longer, be started again."""

    def __init__(
        self,
        settings: Settings,
        spec: EncoderSpec,
        slab: Slab,
        *,
        on_ready: Callable[[WorkerGroup], None],
        on_lost: Callable[[WorkerGroup], None],
        on_progress: Callable[[int, int, wire.Progress], None],
    ) -> None:
        """`on_progress(group, rank, progress)` is called while ranks read weights."""
        self.failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._settings = settings
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._folder = tempfile.TemporaryDirectory(prefix="tpvision-", ignore_cleanup_errors=True)
        self._launchers: dict[int, GroupLauncher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._num_excused_in_a_row = 0
        self._given_up: set[int] = set()
        self._control = ControlServer(
            settings.parallel.socket or Path(self._folder.name) / "control.sock",
            contract=wire.contract_for(settings, spec, settings.parallel.tensor),
            num_groups=settings.parallel.groups,
            slab=slab,
            patch_capacities=settings.capacity.patch_capacities,
            on_ready=self._note_ready,
            on_lost=self._note_lost,
            on_progress=lambda group, rank, progress: on_progress(group.index, rank, progress),
        )

    @property
    def ready(self) -> list[WorkerGroup]:
        """The groups that take batches now."""
        return [group for group in self._control.groups.values() if group.ready.is_set() and not group.lost.is_set()]

    @property
    def weights_fingerprint(self) -> str | None:
        """Of the weights that all ranks hold, since the first of them said hello."""
        return self._control.weights_fingerprint

    @property
    def states(self) -> dict[int, GroupState]:
        """Of every group that there is to be."""
        return {index: self._state(index) for index in range(self._settings.parallel.groups)}

    @property
    def restarts(self) -> dict[int, int]:
        """Launches of every group after its first; of ranks that are not ours, those that got as far as a hello."""
        launches = self._control.num_incarnations | {
            index: launcher.num_launches for index, launcher in self._launchers.items()
        }
        return {index: max(0, launches.get(index, 0) - 1) for index in range(self._settings.parallel.groups)}

    @property
    def pids(self) -> list[int]:
        """Of the children that somebody here waits for."""
        return [launcher.pid for launcher in self._launchers.values() if launcher.pid is not None]

    async def start(self) -> None:
        """Listen, and launch the groups that are ours, on the main thread's loop. Raises ControlSocketError."""
        await self._control.start()
        parallel = self._settings.parallel
        for index in range(parallel.groups if parallel.workers == "managed" else 0):
            self._launchers[index] = GroupLauncher(self._settings, group=index, socket_path=self._control.path)
            self.spawn(self._supervise(index))

    async def stop(self, now: asyncio.Event) -> None:
        """End every group; once `now` is set, without waiting for the ranks to end by themselves."""
        self._is_stopping = True
        listening = {} if now.is_set() else {group.index: group for group in self.ready if group.idle.is_set()}
        for group in listening.values():
            group.stop()
        ends = asyncio.gather(*(group.wait_for_ends() for group in listening.values()))
        await first_of(ends, now.wait(), asyncio.sleep(_STOP_TIMEOUT_S))
        patient = (launcher.stop(_STOP_TIMEOUT_S) for index, launcher in self._launchers.items() if index in listening)
        await first_of(asyncio.gather(*patient), now.wait())
        for launcher in self._launchers.values():
            await launcher.stop(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._control.stop()
        self._folder.cleanup()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what serves a group until `stop`. If it ends by a fault of ours, the service fails: it must not hang."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def note_work(self) -> None:
        """A batch was encoded."""
        self._num_excused_in_a_row = 0

    def excuse(self, incarnations: Sequence[str]) -> None:
        """A poison image lost these: off the restart budget of each group, unless everything seems to be poison."""
        if self._num_excused_in_a_row < _MAX_EXCUSED_IN_A_ROW:
            self._num_excused_in_a_row += 1
            for launcher in self._launchers.values():
                launcher.excuse(incarnations)

    def _state(self, index: int) -> GroupState:
        if index in self._given_up:
            return "given_up"
        group = self._control.groups.get(index)
        if group is None:
            return "starting"
        if group.lost.is_set():
            return "lost"
        return "ready" if group.ready.is_set() else "starting"

    def _note_ready(self, group: WorkerGroup) -> None:
        if group.index in self._launchers:
            self._launchers[group.index].note_ready(group.incarnation)
        log.info("group %d is ready: %d ranks on %s", group.index, group.world_size, group.readiness[0].device)
        self._on_ready(group)

    def _note_lost(self, group: WorkerGroup) -> None:
        if self._is_stopping:
            return
        log.error("group %d is lost: %s", group.index, group.reason)
        self._on_lost(group)
        if group.is_fatal and group.index in self._launchers:
            self._fail(StartRefusedError(group.reason))
        self.spawn(self._bury(group))

    async def _bury(self, group: WorkerGroup) -> None:
        if group.index in self._launchers:
            await self._launchers[group.index].kill(group.reason)
        await group.wait_for_ends()

    async def _supervise(self, index: int) -> None:
        try:
            await self._launchers[index].run()
        except StartRefusedError as error:
            self._fail(error)
        except BudgetSpentError as error:
            self._given_up.add(index)
            if len(self._given_up) == len(self._launchers):
                self._fail(error)
            else:
                log.error("%s; the other groups serve on without it", error)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a fault in the service", exc_info=error)
            self._fail(RuntimeError(f"a fault in the service: {type(error).__name__}: {error}"))

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_result(error)
