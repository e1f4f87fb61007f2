"""How the front-end's log lines look: JSON, one object a line, or text for a person. Ranks write text of their own."""

import logging
import sys

from rich.console import Console
from rich.logging import RichHandler
from structlog import dev, processors, stdlib

from tp.settings import Settings

_PLAIN = "%(asctime)s %(levelname)s %(name)s %(message)s"


def start_logging(settings: Settings) -> None:
    """Send all log lines of this process to stderr, in the format that the settings or the terminal ask for."""
    is_terminal = sys.stderr.isatty()
    wanted = settings.server.log_format
    handler: logging.Handler = logging.StreamHandler()
    if wanted == "json" or (wanted == "auto" and not is_terminal):
        handler.setFormatter(_json_formatter())
    elif is_terminal:
        handler = RichHandler(console=Console(stderr=True), show_path=False, rich_tracebacks=False)
        handler.setFormatter(_text_formatter("%(message)s"))
    else:
        handler.setFormatter(_text_formatter(_PLAIN))
    logging.basicConfig(level=settings.server.log_level.upper(), handlers=[handler])
    logging.getLogger("httpcore").setLevel(logging.WARNING)  # its debug lines hold what servers of URLs sent


def _json_formatter() -> logging.Formatter:
    return stdlib.ProcessorFormatter(
        processors=[
            stdlib.add_log_level,
            stdlib.add_logger_name,
            processors.TimeStamper(fmt="iso", utc=True),
            stdlib.ProcessorFormatter.remove_processors_meta,
            processors.format_exc_info,
            processors.JSONRenderer(),
        ]
    )


def _text_formatter(layout: str) -> logging.Formatter:
    renderer = dev.ConsoleRenderer(
        colors=False, pad_event_to=0, sort_keys=False, exception_formatter=dev.plain_traceback
    )
    return stdlib.ProcessorFormatter(
        fmt=layout, processors=[stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    )
