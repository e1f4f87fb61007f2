"""The `tpvision` command: one short function a subcommand, each calling the module that does it."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.logging import RichHandler

from service.demo import run_demo
from service.demo_model import DemoModelError
from service.keys import KeysError
from service.plan import plan_capacity, render
from service.server import ServeError, serve
from service.transport import SocketInUseError
from service.worker_host import host_workers
from tp.settings import LoadedSettings, Settings, SettingsError, known_names, load_settings
from tp.slab import SlabError
from tp.spec import PUBLISHED_K3, EncoderSpec, SpecError, check_world_size, read_spec

EXIT_USAGE = 2
_PLAN_COLUMNS = 132
_FLAGS = {  # flag -> setting
    "model": "model.path",
    "dtype": "model.dtype",
    "tp": "parallel.tensor",
    "groups": "parallel.groups",
    "device": "parallel.device",
    "workers": "parallel.workers",
    "socket": "parallel.socket",
    "host": "server.host",
    "port": "server.port",
    "capacities": "capacity.patch_capacities",
    "policy": "capacity.policy",
}
_USER_ERRORS = (SettingsError, SpecError, SlabError, ServeError, SocketInUseError, KeysError, DemoModelError)


def main() -> None:
    """Entry point of the `tpvision` command."""
    arguments = _parser().parse_args()
    try:
        sys.exit(arguments.run(arguments))
    except _USER_ERRORS as error:
        print(f"tpvision: {error}", file=sys.stderr)  # noqa: T201 - the command's own voice
        sys.exit(EXIT_USAGE)


def run_serve(arguments: argparse.Namespace) -> int:
    """`tpvision serve`: the front-end, and its workers unless they are external."""
    settings = _load(arguments).settings
    _start_logging(settings)
    return _run(serve(settings, read_checked_spec(settings)))


def run_worker(arguments: argparse.Namespace) -> int:
    """`tpvision worker`: one worker group for a front-end that runs with `--workers external`."""
    settings = _load(arguments).settings
    _start_logging(settings)
    read_checked_spec(settings)
    return _run(host_workers(settings, arguments.group))


def run_demo_command(arguments: argparse.Namespace) -> int:
    """`tpvision demo`: make a model, serve it, send it a photograph."""
    return _run(run_demo(arguments.size, arguments.out, port=arguments.port, once=arguments.once, tp=arguments.tp))


def run_plan(arguments: argparse.Namespace) -> int:
    """`tpvision plan`: what the tiers cost in bytes, before anything is started."""
    settings = _load(arguments).settings
    spec = PUBLISHED_K3 if settings.model.path is None else read_checked_spec(settings)
    plan = plan_capacity(spec, settings, threads=settings.rank_threads(len(os.sched_getaffinity(0))))
    if arguments.json:
        Console().print_json(data=plan.as_dict())
    else:
        Console(width=max(_PLAN_COLUMNS, Console().width)).print(
            render(plan)
        )  # a number cut short is worse than a wrap
    return 0


def run_config_show(arguments: argparse.Namespace) -> int:
    """`tpvision config show`: every setting, its value, and where it came from."""
    loaded = _load(arguments)
    values = loaded.settings.model_dump(mode="json")
    console = Console(soft_wrap=True, highlight=False)
    for name, _ in known_names():
        section, key = name.split(".")
        console.print(f"{name}: {values[section][key]}  [dim]# {loaded.sources.get(name, 'default')}[/dim]")
    return 0


def read_checked_spec(settings: Settings) -> EncoderSpec:
    """The spec of the configured checkpoint. Raises SettingsError or SpecError before anything is started."""
    if settings.model.path is None:
        raise SettingsError("model.path is not set: name a checkpoint folder with --model")
    spec = read_spec(settings.model.path)
    check_world_size(spec, settings.parallel.tensor, settings.parallel.tensor * settings.parallel.groups)
    return spec


def _run(work: Any) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return int(runner.run(work))


def _load(arguments: argparse.Namespace) -> LoadedSettings:
    flags = {setting: getattr(arguments, flag, None) for flag, setting in _FLAGS.items()}
    given = {setting: value for setting, value in flags.items() if value is not None}
    return load_settings(arguments.config, environ=os.environ, flags=given)


def _start_logging(settings: Settings) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=settings.server.log_level.upper(), handlers=[handler])
    logging.getLogger("httpcore").setLevel(logging.WARNING)  # its debug lines hold what servers of URLs sent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpvision", description="Images to the merged vision tokens of MoonViT encoders, over HTTP."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared = _settings_flags()
    _add(commands, "serve", run_serve, shared)
    worker = _add(commands, "worker", run_worker, shared)
    worker.add_argument("--group", type=int, default=0, help="which of the front-end's groups this is (default 0)")
    _add_demo(commands)
    planner = _add(commands, "plan", run_plan, shared)
    planner.add_argument("--json", action="store_true", help="machine-readable")
    config = commands.add_parser("config", help="the settings in force").add_subparsers(
        required=True, metavar="COMMAND"
    )
    _add(config, "show", run_config_show, shared)
    return parser


def _add_demo(commands: Any) -> None:
    demo_parser = _add(commands, "demo", run_demo_command)
    demo_parser.add_argument("--size", choices=("tiny", "full"), default="tiny", help="full: K3's true shape, 0.9 GB")
    demo_parser.add_argument("--out", type=Path, help="keep the checkpoint here instead of a temporary folder")
    demo_parser.add_argument("--tp", type=int, default=2, help="ranks (default 2)")
    demo_parser.add_argument("--port", type=int, default=8000, help="TCP port; 0 picks a free one (default 8000)")
    demo_parser.add_argument("--once", action="store_true", help="exit after the photograph's embeddings")


def _settings_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", type=Path, help="YAML settings file; see configs/")
    parser.add_argument("--model", type=Path, help="checkpoint folder")
    parser.add_argument("--tp", type=int, metavar="N", help="ranks per group; must divide the attention heads")
    parser.add_argument("--groups", type=int, metavar="N", help="tensor-parallel groups")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="compute dtype")
    parser.add_argument("--host", help="address to bind")
    parser.add_argument("--port", type=int, help="TCP port; 0 picks a free one")
    parser.add_argument("--capacities", metavar="N,N,…", help="capacity tiers in patches, ascending, multiples of 4")
    parser.add_argument("--policy", choices=("refuse", "downscale"), help="what happens to an image over the top tier")
    parser.add_argument("--workers", choices=("managed", "external"), help="who starts the ranks")
    parser.add_argument("--socket", type=Path, help="control socket, for external workers")
    return parser


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *parents: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    summary = (run.__doc__ or "").partition(": ")[2]
    parser: argparse.ArgumentParser = commands.add_parser(name, parents=parents, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    main()
