"""`tpvision bench`: the flags of its parts, and how their reports are shown."""

import argparse
import contextlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from service.bench.contenders import Exchange
from service.bench.front_end import bench_front_end
from service.bench.http import FORMS, Size, Target, Traffic, bench_http
from service.bench.report import BenchError, Report
from service.bench.served import Served
from service.bench.start import bench_start
from service.bench.tower import bench_tower
from service.demo_model import write_demo_model
from tp.settings import Settings, SettingsError, load_settings
from tp.spec import ITEMSIZE

_COLUMNS = 200  # of a table that goes to no terminal
_EXIT_FAILED = 1
_SIZE = re.compile(r"(\d+)x(\d+)(?::([\d.]+))?")
_IMAGES = re.compile(r"(\d+)x(\d+)")

OnStep = Callable[[str], None]
Part = Callable[[argparse.Namespace, OnStep], Report]


def add_bench(commands: Any) -> None:
    """Add the command and its parts to the parser's commands."""
    summary = "measure how fast this machine runs it, and what stands in the way"
    parts = commands.add_parser("bench", help=summary, description=summary)
    parts = parts.add_subparsers(required=True, metavar="PART")
    _add_tower(parts)
    _add_http(parts)
    _add_front_end(parts)
    _add_start(parts)


def run_tower(arguments: argparse.Namespace, on_step: OnStep) -> Report:
    """`tpvision bench tower`: the encoder's speed, against matrix products and stock torch."""
    batches = [(patches,) for patches in arguments.patches] + arguments.images
    with _model(arguments, on_step) as settings:
        return bench_tower(
            settings,
            batches or [(1024,), (4096,)],
            arguments.tp,
            arguments.exchange,
            times_baseline=arguments.baseline,
            has_graphs=arguments.graphs,
            ablates=arguments.ablate,
            rounds=arguments.rounds,
            run_s=arguments.seconds,
            on_step=on_step,
        )


def run_http(arguments: argparse.Namespace, on_step: OnStep) -> Report:
    """`tpvision bench http`: a load over HTTP, open or closed loop, and what became of it."""
    one = Traffic(
        sizes=arguments.sizes,
        seconds=arguments.seconds,
        form=arguments.form,
        dtype=arguments.answer_dtype,
        headers=dict(arguments.header),
        seed=arguments.seed,
    )
    traffics = [replace(one, rate=rate) for rate in arguments.rate]
    traffics += [replace(one, connections=connections) for connections in arguments.connections]
    if not traffics:
        raise SettingsError("nothing to send: name --rate or --connections")
    if arguments.url is not None:
        return bench_http(Target(arguments.url.rstrip("/")), traffics, on_step=on_step)
    with _model(arguments, on_step) as settings:
        on_step("starting the service")
        with Served(settings) as served:
            return bench_http(Target.of(served), traffics, on_step=on_step)


def run_front_end(arguments: argparse.Namespace, on_step: OnStep) -> Report:
    """`tpvision bench front-end`: what lies around the encoder, and what it costs."""
    return bench_front_end(seconds=arguments.seconds, on_step=on_step)


def run_start(arguments: argparse.Namespace, on_step: OnStep) -> Report:
    """`tpvision bench start`: how long a start takes, and one after a lost rank, against the least it could take."""
    with _model(arguments, on_step) as settings:
        return bench_start(settings, rounds=arguments.rounds, on_step=on_step)


def _add_tower(parts: Any) -> None:
    parser = _add(parts, "tower", run_tower)
    _add_model(parser)
    parser.add_argument("--tp", type=_integers, default=[1, 2], metavar="N,N,…", help="world sizes (default 1,2)")
    parser.add_argument(
        "--patches",
        type=_sizes_in_patches,
        default=[],
        metavar="N,N,…",
        help="lone images of so many patches, multiples of 4 (without --images too: 1024,4096)",
    )
    parser.add_argument(
        "--images",
        type=_batches,
        default=[],
        metavar="CxN[+CxN…],…",
        help="batches of C images of N patches each, multiples of 4",
    )
    parser.add_argument(
        "--exchange",
        type=_exchanges,
        default=["auto", "gloo"],
        metavar="E,E,…",
        help="what carries sums between ranks on CPU: auto, gloo or shared_memory (default auto,gloo)",
    )
    parser.add_argument("--rounds", type=_at_least_one, default=3, help="runs of a contender on a batch (default 3)")
    parser.add_argument("--seconds", type=_over_zero, default=1, help="of a run, at least (default 1)")
    parser.add_argument("--no-baseline", dest="baseline", action="store_false", help="do not time stock torch")
    parser.add_argument("--graphs", action="store_true", help="on a GPU: ranks with CUDA graphs too")
    parser.add_argument(
        "--ablate", action="store_true", help="on CPU: one rank with one improvement left out too, for each of them"
    )


def _add_http(parts: Any) -> None:
    parser = _add(parts, "http", run_http)
    _add_model(parser)
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="ranks of the service (default 2)")
    parser.add_argument("--url", help="a running service, in place of one that is started for it")
    parser.add_argument("--header", type=_header, action="append", default=[], metavar="NAME:VALUE", help="to send")
    parser.add_argument("--rate", type=_numbers, default=[], metavar="R,R,…", help="requests a second, open loop")
    parser.add_argument(
        "--connections", type=_integers, default=[], metavar="N,N,…", help="closed loop over so many connections"
    )
    parser.add_argument("--seconds", type=_over_zero, default=10, help="of each load (default 10)")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=[Size(448, 448, 1)],
        metavar="WxH[:WEIGHT],…",
        help="pictures and how often each is sent, such as 448x448:8,896x896:2 (default 448x448)",
    )
    parser.add_argument("--form", choices=FORMS, default="safetensors", help="of the answers")
    parser.add_argument("--answer-dtype", choices=ITEMSIZE, help="of the answers (default: the form's)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and sizes (default 0)")


def _add_front_end(parts: Any) -> None:
    parser = _add(parts, "front-end", run_front_end)
    parser.add_argument("--seconds", type=_over_zero, default=6, help="of work for each figure (default 6)")


def _add_start(parts: Any) -> None:
    parser = _add(parts, "start", run_start)
    _add_model(parser)
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--rounds", type=_at_least_one, default=3, help="starts, and losses (default 3)")


def _add(parts: Any, name: str, part: Part) -> argparse.ArgumentParser:
    summary = (part.__doc__ or "").partition(": ")[2].rstrip(".")
    parser: argparse.ArgumentParser = parts.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=partial(_show, part))
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: a demo model, made for it)")
    parser.add_argument("--demo", choices=("tiny", "full"), default="full", help="its size (default full: K3's shape)")
    parser.add_argument("--config", type=Path, help="YAML settings file; see configs/")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where the ranks compute")
    parser.add_argument("--dtype", choices=("auto", *ITEMSIZE), help="compute dtype (default: the checkpoint's)")


def _show(part: Part, arguments: argparse.Namespace) -> int:
    """Run a part, saying on standard error how far it is, and print its report."""
    console = Console(stderr=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with console.status("") if console.is_terminal else contextlib.nullcontext() as status:
        try:
            report = part(arguments, say if status is None else status.update)
        except BenchError as error:
            say(f"tpvision: {error}")
            return _EXIT_FAILED
    if arguments.json:
        Console().print_json(data=report.as_dict())
    else:
        Console(width=max(_COLUMNS, Console().width)).print(report.render())
    return 0


@contextlib.contextmanager
def _model(arguments: argparse.Namespace, on_step: OnStep) -> Iterator[Settings]:
    """The settings, of the named checkpoint or of a demo model that is there for so long. Raises SettingsError."""
    with contextlib.ExitStack() as stack:
        folder = arguments.model
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tpvision-bench-")))
            on_step("making the demo model")
            write_demo_model(folder, size=arguments.demo)
        flags = {
            "model.path": folder,
            "model.dtype": arguments.dtype,
            "parallel.tensor": arguments.tp if isinstance(arguments.tp, int) else None,
            "parallel.device": arguments.device,
        }
        given = {name: value for name, value in flags.items() if value is not None}
        yield load_settings(arguments.config, environ=os.environ, flags=given).settings


def _patches(text: str) -> int:
    if int(text) < 4 or int(text) % 4:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 4 patches, which make a token")
    return int(text)


def _sizes_in_patches(text: str) -> list[int]:
    return [_patches(part) for part in text.split(",")]


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def _over_zero(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not over 0")
    return float(text)


def _integers(text: str) -> list[int]:
    return [_at_least_one(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [_over_zero(part) for part in text.split(",")]


def _batches(text: str) -> list[tuple[int, ...]]:
    """Patches of each image of each batch."""
    batches = [[_matched(_IMAGES, part) for part in batch.split("+")] for batch in text.split(",")]
    return [tuple(_patches(size) for count, size in batch for _ in range(_at_least_one(count))) for batch in batches]


def _sizes(text: str) -> list[Size]:
    found = [_matched(_SIZE, part) for part in text.split(",")]
    return [Size(int(width), int(height), float(weight or 1)) for width, height, weight in found]


def _exchanges(text: str) -> list[Exchange]:
    known = get_args(Exchange)
    for part in text.split(","):
        if part not in known:
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(known)}")
    return text.split(",")  # type: ignore[return-value]


def _header(text: str) -> tuple[str, str]:
    name, _, value = text.partition(":")
    return name.strip(), value.strip()


def _matched(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    found = pattern.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {pattern.pattern}")
    return found.groups()
