"""`tpvision worker`: one worker group for a front-end in another container, kept running until it is told to stop.

The front-end's socket lies in a folder that both containers see. The group is restarted with the launcher's back-off
and budget, also while the front-end itself restarts. On SIGTERM it serves until its front-end hangs up, at most for the
drain limit, because both may have been signalled together and the front-end drains; where no front-end listens any
more, as after a pod's drain, and at a second SIGTERM, it ends now.
"""

import asyncio
import logging
import signal
import socket
from pathlib import Path

from service import signals
from service.launcher import BudgetSpentError, GroupLauncher, StartRefusedError
from service.memory_check import check_host
from tp.settings import Settings, SettingsError
from tp.spec import EncoderSpec

log = logging.getLogger("tpvision.worker_host")


async def host_workers(settings: Settings, spec: EncoderSpec, group: int) -> int:
    """Run the group; the exit status.

    Raises SettingsError without a socket to connect to, and MemoryShortError where the tiers do not fit.
    """
    socket_path = settings.parallel.socket
    if socket_path is None:
        raise SettingsError("parallel.socket is not set: name the front-end's control socket with --socket")
    check_host(spec, settings, side="workers")
    launcher = GroupLauncher(settings, group=group, socket_path=socket_path, is_ours=False)
    loop = asyncio.get_running_loop()
    running = loop.create_task(launcher.run())
    stopping: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        is_needed = not stopping and _somebody_listens(socket_path)
        stopping.append(loop.create_task(launcher.stop(settings.limits.drain_timeout_s if is_needed else 0)))

    signals.watch(
        {
            signal.SIGTERM: on_signal,
            signal.SIGINT: on_signal,
            signal.SIGHUP: lambda: log.info("settings are read again at the next start only"),
        }
    )
    try:
        await running
        await asyncio.gather(*stopping)
    except (StartRefusedError, BudgetSpentError) as error:
        log.error("the worker group failed: %s", error)
        return 1
    finally:
        signals.ignore()
    return 0


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # and has no time for us
        except OSError:
            return False
        return True
