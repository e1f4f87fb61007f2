"""Which of newly read settings a running service takes over, and which need a restart.

Pure: settings in, settings out. What may change is `tp.settings.RELOADABLE`; here are the bounds that the start
set, and that keys stay. A setting is taken over whole or not at all, each for itself. `service.server` reads and
applies.
"""

from dataclasses import dataclass

from tp.settings import RELOADABLE, Settings, known_names


@dataclass(frozen=True, slots=True)
class Reload:
    """Settings to be in force from now on, the names of those that changed, and a sentence for each that could not."""

    settings: Settings
    changed: tuple[str, ...]
    held_back: tuple[str, ...]


def reload(started: Settings, current: Settings, wanted: Settings) -> Reload:
    """What a service that was `started` with some settings, and has others now, makes of those that are wanted."""
    changes: dict[str, dict[str, object]] = {}
    changed, held_back = [], []
    for name, _ in known_names():
        section, key = name.split(".")
        old, new = (getattr(getattr(settings, section), key) for settings in (current, wanted))
        if old == new:
            continue
        reason = _obstacle(name, started, wanted)
        if reason is None:
            changes.setdefault(section, {})[key] = new
            changed.append(name)
        else:
            held_back.append(f"{name} stays {_shown(old)}: {_shown(new)} {reason}")
    sections = {name: getattr(current, name).model_copy(update=values) for name, values in changes.items()}
    return Reload(current.model_copy(update=sections), tuple(changed), tuple(held_back))


def _obstacle(name: str, started: Settings, wanted: Settings) -> str | None:
    """Why a running service cannot take over the new value; None where it can."""
    top, limit_s = started.capacity.max_patches_per_image, started.collective_timeout_s
    if name not in RELOADABLE:
        return "needs a restart"
    if name == "capacity.patch_capacities" and wanted.capacity.max_patches_per_image > top:
        return f"needs a restart, since slab and ranks were started for a top tier of {top}"
    if name == "limits.batch_timeout_s" and wanted.limits.batch_timeout_s >= limit_s:
        return f"needs a restart, since ranks were started to give up a collective after {limit_s:g} s"
    if name == "cache.max_bytes" and wanted.cache.max_bytes > started.cache.max_bytes:
        return f"needs a restart, since memory was checked for {started.cache.max_bytes} bytes of it at the start"
    if name == "server.api_keys_file" and wanted.server.api_keys_file is None:
        return "needs a restart, since anyone could call without keys"
    return None


def _shown(value: object) -> str:
    if value is None or value == ():
        return "unset"
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
