"""The `tpvision` command: one short function a subcommand, each calling the module that does it."""

import argparse
import asyncio
import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console

from service import signals
from service.app import create_routes
from service.bench.command import add_bench
from service.check import check_model
from service.check import render as render_check
from service.decoders import DecoderStartError
from service.demo import demo_settings, made_model, run_demo
from service.demo_model import DemoModelError, write_demo_model
from service.embed import EmbedError, EmbedStopped, Job, Tally, embed, embed_with_own_service
from service.embed_journal import JournalError
from service.embed_sources import SourceError, find_sources
from service.extract import ExtractError, Slim, extract
from service.file_progress import shown
from service.handoff.routes import HandoffError
from service.host_memory import available
from service.keys import KeysError
from service.logs import start_logging
from service.openapi import openapi_document
from service.plan import plan_capacity, render
from service.reference import ReferenceFileError
from service.server import EXIT_FAILED, ServeError, serve
from service.transport import ControlSocketError
from service.version import installed_version
from service.waiting import within
from service.worker_host import host_workers
from tp.checkpoint import CheckpointError, check_dtype, check_tensors, read_vision_tensors
from tp.memory import MemoryShortError
from tp.settings import LoadedSettings, Settings, SettingsError, known_names, load_settings, near_misses
from tp.slab import SlabError
from tp.spec import ITEMSIZE, PUBLISHED_K3, EncoderSpec, SpecError, check_world_size, model_note, read_spec

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_PLAN_COLUMNS = 132
_SHOWN_ERRORS = 5
_FEWEST_FILES = 64  # open at a time; a start takes half of them
_KEY_VARIABLE = "TPVISION_API_KEY"  # an argument would show in the list of processes
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
    "log_level": "server.log_level",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_USER_ERRORS = (
    SettingsError,
    SpecError,
    CheckpointError,
    SlabError,
    MemoryShortError,
    DecoderStartError,
    ServeError,
    ControlSocketError,
    KeysError,
    HandoffError,
    DemoModelError,
    ExtractError,
    ReferenceFileError,
    EmbedError,
    JournalError,
    SourceError,
)

Result = TypeVar("Result")

log = logging.getLogger("tpvision")


def main() -> None:
    """Parse the command line and run the subcommand; ends the process with its status."""
    arguments = _parser().parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be anything
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if arguments.run not in (run_serve, run_worker):  # they wait until they have handlers
            signals.like_ctrl_c()
        sys.exit(arguments.run(arguments))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except EmbedStopped as error:
        print(f"tpvision: {error}\nwhat is finished is kept: the same line goes on from here", file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_FAILED)
    except _USER_ERRORS as error:
        if getattr(arguments, "json", False):
            _print_json({"error": str(error)})
        print(f"tpvision: {error}", file=sys.stderr)  # noqa: T201 - the command's own voice
        sys.exit(EXIT_USAGE)


def run_serve(arguments: argparse.Namespace) -> int:
    """`tpvision serve`: the front-end, and its workers unless they are external."""
    settings = _load(arguments).settings
    start_logging(settings)
    _need_files()
    has_ranks = settings.parallel.workers == "managed"  # else the weights may be in the workers' container alone
    if has_ranks:
        _need_torch()
    spec = _read_model(settings, with_weights=has_ranks)

    def read_again() -> Settings:
        wanted = _load(arguments).settings
        read_checked_spec(wanted)
        return wanted

    return _run(serve(settings, spec, read_again=read_again))


def run_worker(arguments: argparse.Namespace) -> int:
    """`tpvision worker`: one worker group for a front-end that runs with `--workers external`."""
    settings = _load(arguments).settings
    start_logging(settings)
    _need_files()
    _need_torch()
    return _run(host_workers(settings, _read_model(settings, with_weights=True), arguments.group))


def run_demo_command(arguments: argparse.Namespace) -> int:
    """`tpvision demo`: make a model, serve it, send it a photograph."""
    _need_files()
    _need_torch()
    with made_model(arguments.size, arguments.out) as folder:
        return _run(run_demo(folder, arguments.size, port=arguments.port, once=arguments.once, tp=arguments.tp))


def run_embed(arguments: argparse.Namespace) -> int:
    """`tpvision embed`: every image of a folder, a glob or a Parquet file, into a safetensors or Parquet file."""
    job = Job(
        tuple(arguments.places),
        arguments.out,
        column=arguments.column,
        pooled=arguments.output == "pooled",
        normalize=arguments.normalize,
        oversize=arguments.oversize,
        concurrency=arguments.concurrency,
        deadline_s=arguments.deadline_s,
        shard_bytes=arguments.shard_mib << 20,
    )
    if arguments.url is not None and (arguments.demo or arguments.model is not None):
        raise EmbedError("--url names a service that runs; --model and --demo start one")
    sources = find_sources(job.places, column=job.column)
    with _told_to_stop(), contextlib.ExitStack() as stack:
        if arguments.url is not None:
            logging.basicConfig(level="INFO", format="%(message)s")
            logging.getLogger("httpx").setLevel(logging.WARNING)
            tally: Tally | None = _run(embed(job, sources, arguments.url, api_key=os.environ.get(_KEY_VARIABLE)))
        else:
            settings = _own_settings(arguments, stack)
            start_logging(settings)
            _need_files()
            _need_torch()
            spec = _read_model(settings, with_weights=True)
            tally = _run(embed_with_own_service(job, sources, settings, spec))
        if tally is None:
            raise KeyboardInterrupt
    _show_tally(tally)
    return 0


def run_fetch(arguments: argparse.Namespace) -> int:
    """`tpvision fetch`: the vision part of a checkpoint on a hub, without the rest, into a folder of its own."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # the library would tell the hub which agent runs it
    try:
        from service.fetch_model import fetch_model  # noqa: PLC0415 - an extra, which nothing else needs
    except ModuleNotFoundError as error:
        raise ExtractError(
            f"fetch needs the package {error.name}, of the extra `fetch`: pip install -c constraints.txt -e '.[fetch]'"
        ) from error
    except ValueError as error:  # the library reads its variables when it is imported
        raise ExtractError(f"a variable of the hub library (HF_…) is malformed: {error}") from error
    logging.basicConfig(level="INFO", format="%(message)s")
    with _told_to_stop():
        fetched = fetch_model(arguments.name, arguments.out, revision=arguments.revision)
    of_all = "" if fetched.repo_bytes is None else f", of {fetched.repo_bytes:,} in the repository"
    source = f"{fetched.repo} at {fetched.commit}"
    _show_slim(source, fetched.slim, ("downloaded", f"{fetched.downloaded_bytes:,} bytes{of_all}"))
    return 0


def run_extract(arguments: argparse.Namespace) -> int:
    """`tpvision extract`: the vision part of a checkpoint folder, without the rest, into a folder of its own."""
    logging.basicConfig(level="INFO", format="%(message)s")
    with _told_to_stop(), shown("writing") as report:
        slim = extract(arguments.source, arguments.out, report=report)
    source_bytes = sum(file.num_bytes for file in slim.provenance.source_files)
    _show_slim(str(arguments.source), slim, ("read", f"{source_bytes:,} bytes of files that hold vision tensors"))
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """`tpvision check`: whether this checkpoint works on this machine; the exit status tells."""
    arguments.log_level = "warning"
    settings = _load(arguments).settings
    start_logging(settings)
    find_model(settings)
    _need_files()
    console = Console(stderr=True)
    with console.status("") if console.is_terminal else contextlib.nullcontext() as status:
        work = check_model(
            settings,
            reference=arguments.write_reference,
            against=arguments.against,
            on_step=lambda step: status.update(step) if status is not None else None,
        )
        try:
            checked = _run(work)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    if arguments.json:
        _print_json(checked.as_dict())
    else:
        Console(width=max(_PLAN_COLUMNS, Console().width)).print(render_check(checked))
    return 0 if checked.passed else 1


def run_plan(arguments: argparse.Namespace) -> int:
    """`tpvision plan`: what the tiers cost in bytes, before anything is started."""
    settings = _load(arguments).settings
    path = settings.model.path
    if path is not None and path.is_dir():
        spec = read_checked_spec(settings)
    else:
        spec = PUBLISHED_K3
        reason = "no model is named" if path is None else f"there is no folder {path}"
        print(f"{reason}: planned for published Kimi K3", file=sys.stderr)  # noqa: T201
    plan = plan_capacity(spec, settings, num_cores=len(os.sched_getaffinity(0)))
    if arguments.json:
        _print_json(plan.as_dict())
    else:
        width = max(_PLAN_COLUMNS, Console().width)  # a number cut short is worse than a wrap
        room = available()
        Console(width=width).print(render(plan), f"There are {room.num_bytes:,} bytes here now: {room.bound}.")
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


def run_openapi(arguments: argparse.Namespace) -> int:
    """`tpvision openapi`: the OpenAPI document on stdout, as a service under these settings has it."""
    settings = _load(arguments).settings
    _print_json(openapi_document(create_routes(settings.handoff), needs_keys=settings.server.api_keys_file is not None))
    return 0


def read_checked_spec(settings: Settings) -> EncoderSpec:
    """The spec of the configured checkpoint. Raises SettingsError or SpecError before anything is started."""
    spec = read_spec(find_model(settings))
    if (note := model_note(spec)) is not None:
        log.warning("%s", note)
    check_world_size(spec, settings.parallel.tensor, settings.parallel.tensor * settings.parallel.groups)
    settings.compute_dtype(spec)
    return spec


def find_model(settings: Settings) -> Path:
    """The configured checkpoint folder. Raises SettingsError where there is none."""
    path = settings.model.path
    if path is None:
        raise SettingsError("model.path is not set: name a checkpoint folder with --model")
    if path.is_dir():
        return path
    hint = ""
    if not path.exists() and _HUB_NAME.fullmatch(str(path)):
        folder = f"models/{path.name}"
        hint = f"; if that is a name on a hub: `tpvision fetch {path} --out {folder}`, then --model {folder}"
    raise SettingsError(f"there is no folder {path}{hint}")


def check_weights(settings: Settings, spec: EncoderSpec) -> None:
    """Stop before anything is started unless every vision tensor is there and as expected; say where it is cast.

    Reads headers alone. Raises CheckpointError.
    """
    assert settings.model.path is not None, "read_checked_spec was here"
    table = read_vision_tensors(settings.model.path, spec)
    check_tensors(spec, table)
    stored, dtype = check_dtype(spec, table, settings.model.dtype), settings.compute_dtype(spec)
    if stored != dtype:
        log.info("model.dtype casts the checkpoint's weights from %s to %s", stored, dtype)


def _read_model(settings: Settings, *, with_weights: bool) -> EncoderSpec:
    """The spec of the configured checkpoint, checked; `with_weights`: and them too.

    Raises what these checks do, or CheckpointError where the files give no answer for as long as a start may take.
    """

    def read() -> EncoderSpec:
        spec = read_checked_spec(settings)
        if with_weights:
            check_weights(settings, spec)
        return spec

    try:
        return within(settings.parallel.start_timeout_s, read)
    except TimeoutError as error:
        raise CheckpointError(f"{settings.model.path} cannot be read: {error}; is its mount alive?") from error


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise SettingsError(
            "the workers need torch, which is not installed here: in a checkout, "
            "pip install -c constraints.txt -e '.[worker]'"
        )


def _need_files() -> None:
    """What every process needs that starts others: a folder for temporary files, and open files."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:  # a container's read-only root without a tmpfs
        raise SettingsError(f"no folder for temporary files can be written to: {error.strerror}") from error
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FEWEST_FILES:
        raise SettingsError(f"{hard} open files are allowed here (ulimit -n), and at least {_FEWEST_FILES} are needed")
    if 0 <= soft < _FEWEST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FEWEST_FILES, hard))


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@contextlib.contextmanager
def _told_to_stop() -> Iterator[None]:
    """What is half written is removed, what was downloaded is kept, and one line says so."""
    try:
        yield
    except KeyboardInterrupt:
        print("tpvision: interrupted; the same line goes on from here", file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_INTERRUPTED)


def _print_json(values: Any) -> None:
    """For a program: no colours, whatever the terminal or FORCE_COLOR says. Ends quietly where nobody reads on."""
    try:
        print(json.dumps(values, indent=2, allow_nan=False), flush=True)  # noqa: T201
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        sys.exit(EXIT_FAILED)


def _own_settings(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Settings:
    """Those of the service that `embed` starts: a demo model lives as long as the stack."""
    arguments.log_level = "warning"
    if not arguments.demo:
        settings = _load(arguments).settings
        if settings.model.path is None:
            raise EmbedError("name a service with --url, a checkpoint folder with --model, or --demo")
        return settings
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpvision-demo-")))
    write_demo_model(folder, size="tiny")
    return demo_settings(folder, port=0, tp=2)


def _show_tally(tally: Tally) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    num_new = tally.num_images - tally.num_before
    before = f", {tally.num_before:,} by an earlier run" if tally.num_before else ""
    rate = f"{num_new:,} in {tally.seconds:.1f} s, {num_new / tally.seconds:.1f} images/s{before}"
    console.print(f"{tally.num_images:,} images ({rate}) -> {', '.join(map(str, tally.paths))}")
    for entry in tally.errors[:_SHOWN_ERRORS]:
        console.print(f"  {entry.name}: {entry.about['code']}: {entry.about['message']}")
    if tally.errors:
        console.print(f"  {len(tally.errors):,} have no embedding; the output says which and why")


def _show_slim(source: str, slim: Slim, amount: tuple[str, str]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    rows = [
        amount,
        (
            "wrote" if slim.is_new else "was there",
            f"{slim.num_tensors} tensors, {slim.num_bytes:,} bytes, {slim.dtype}",
        ),
        ("fingerprint", slim.provenance.fingerprint),
        ("next", f"tpvision serve --model {slim.folder}{' --dtype bfloat16' if slim.dtype == 'float16' else ''}"),
    ]
    console.print(f"{source} -> {slim.folder}")
    for name, value in rows:
        console.print(f"  {name:<12}{value}")


def _load(arguments: argparse.Namespace) -> LoadedSettings:
    flags = {setting: getattr(arguments, flag, None) for flag, setting in _FLAGS.items()}
    given = {setting: value for setting, value in flags.items() if value is not None}
    for sentence in near_misses(os.environ):
        print(f"tpvision: {sentence}", file=sys.stderr)  # noqa: T201 - before there is a log
    spellings = {setting: f"--{flag}" for flag, setting in _FLAGS.items()}
    return load_settings(arguments.config, environ=os.environ, flags=given, spellings=spellings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpvision", description="images to the merged vision tokens of MoonViT encoders, over HTTP"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    of_ranks = _rank_flags()
    shared = _settings_flags(of_ranks)
    _add(commands, "serve", run_serve, shared)
    worker = _add(commands, "worker", run_worker, shared)
    worker.add_argument("--group", type=int, default=0, help="which of the front-end's groups this is (default 0)")
    _add_demo(commands)
    fetcher = _add(commands, "fetch", run_fetch)
    fetcher.add_argument("name", metavar="HUB_NAME", help="repository on the hub, such as moonshotai/Kimi-K3")
    fetcher.add_argument("--revision", help="commit, branch or tag (default: the main branch, as it is now)")
    extractor = _add(commands, "extract", run_extract)
    extractor.add_argument("source", type=Path, metavar="SRC_DIR", help="checkpoint folder")
    for command in (fetcher, extractor):
        command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    _add_embed(commands, shared)
    _add_check(commands, of_ranks)
    add_bench(commands)
    planner = _add(commands, "plan", run_plan, shared)
    planner.add_argument("--json", action="store_true", help="machine-readable")
    summary = "the settings in force"
    config = commands.add_parser("config", help=summary, description=summary)
    _add(config.add_subparsers(required=True, metavar="COMMAND"), "show", run_config_show, shared)
    _add(commands, "openapi", run_openapi, shared)
    return parser


def _add_demo(commands: Any) -> None:
    demo_parser = _add(commands, "demo", run_demo_command)
    demo_parser.add_argument("--size", choices=("tiny", "full"), default="tiny", help="full: K3's true shape, 0.9 GB")
    demo_parser.add_argument("--out", type=Path, help="keep the checkpoint here instead of a temporary folder")
    demo_parser.add_argument("--tp", type=int, default=2, help="ranks (default 2)")
    demo_parser.add_argument("--port", type=int, default=8000, help="TCP port; 0 picks a free one (default 8000)")
    demo_parser.add_argument("--once", action="store_true", help="exit after the photograph's embeddings")


def _add_embed(commands: Any, shared: argparse.ArgumentParser) -> None:
    embedder = _add(commands, "embed", run_embed, shared)
    embedder.add_argument(
        "places", nargs="+", metavar="FOLDER|GLOB|PARQUET", help="folders with the folders in them, globs, files"
    )
    embedder.add_argument("--out", type=Path, required=True, metavar="FILE", help="FILE.safetensors or FILE.parquet")
    embedder.add_argument("--url", help=f"a service that runs; its key is in {_KEY_VARIABLE}")
    embedder.add_argument("--demo", action="store_true", help="start one on the demo model: numbers without meaning")
    embedder.add_argument(
        "--output",
        choices=("pooled", "tokens"),
        default="pooled",
        help="a mean vector an image (default), or its tokens",
    )
    embedder.add_argument("--normalize", action="store_true", help="to unit length")
    embedder.add_argument("--oversize", choices=("refuse", "downscale"), help="images over the service's top tier")
    embedder.add_argument("--column", default="image", help="of a Parquet file: bytes, paths or both (default image)")
    embedder.add_argument("--concurrency", type=int, default=8, metavar="N", help="images under way (default 8)")
    embedder.add_argument(
        "--deadline-s", type=float, default=300, metavar="S", help="for an image, retries included (default 300)"
    )
    embedder.add_argument(
        "--shard-mib", type=int, default=4096, metavar="N", help="more becomes FILE-00001-of-00002 … (default 4096)"
    )


def _add_check(commands: Any, of_ranks: argparse.ArgumentParser) -> None:
    checker = _add(commands, "check", run_check, of_ranks)
    checker.add_argument("model", type=Path, metavar="MODEL_DIR", help="checkpoint folder")
    checker.add_argument("--json", action="store_true", help="machine-readable")
    checker.add_argument("--write-reference", type=Path, metavar="FILE", help="store the embeddings in this file")
    checker.add_argument("--against", type=Path, metavar="FILE", help="compare with another installation's embeddings")


def _rank_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", type=Path, help="YAML settings file; see configs/")
    parser.add_argument("--tp", type=int, metavar="N", help="ranks per group; must divide the attention heads")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where the ranks compute")
    parser.add_argument("--dtype", choices=("auto", *ITEMSIZE), help="compute dtype")
    return parser


def _settings_flags(of_ranks: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, parents=[of_ranks])
    parser.add_argument("--model", type=Path, help="checkpoint folder")
    parser.add_argument("--groups", type=int, metavar="N", help="tensor-parallel groups")
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
    summary = (run.__doc__ or "").partition(": ")[2].rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(name, parents=parents, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser
