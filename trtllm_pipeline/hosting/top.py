"""`pipeline serve top`: what the kept servers of a workspace do now, or any servers by the URLs of their metrics."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO
from urllib.parse import urlsplit

from trtllm_pipeline import terminal
from trtllm_pipeline.bench import counters
from trtllm_pipeline.client.transport.http import HttpError, fetch
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.hosting import readings, servers
from trtllm_pipeline.hosting.readings import GpuReading, Rates, RateWindow, Reading
from trtllm_pipeline.machine.gpus import Nvml, nvml
from trtllm_pipeline.planning.names import shorten
from trtllm_pipeline.records import dataclass

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

SCHEMA: Final = 1
INTERVAL_S: Final = 1.0
WINDOW_S: Final = 10.0
TIMEOUT_S: Final = 1.0
"""For a page: one server that hangs must not hold up the others."""
METRICS: Final = "/metrics"
UP: Final = "up"
NO_ANSWER: Final = "no answer"
_STYLES: Final = {
    "ready": "green",
    UP: "green",
    "failed": "red",
    "unresponsive": "red",
    NO_ANSWER: "red",
    "stopped": "dim",
}
_QUIT: Final = frozenset("qQ")


@dataclass(frozen=True, slots=True)
class Watched:
    """A server to look at."""

    name: str
    state: str
    reason: str | None
    urls: tuple[str, ...]
    """Of its metrics pages: that of the gateway before that of the server."""
    restarts: int | None = None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerRow:
    """What one model of one server does."""

    server: str
    model: str | None
    state: str
    reason: str | None
    restarts: int | None
    gpus: tuple[str, ...]
    reading: Reading
    rates: Rates

    def to_json(self) -> dict[str, Any]:
        """As docs/formats.md has it."""
        rates = self.rates

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * 1e3, 3)

        return {
            **{name: getattr(self, name) for name in ("server", "model", "state", "reason", "restarts")},
            "gpus": list(self.gpus),
            "window_s": round(rates.seconds, 3),
            **{
                name: _rounded(getattr(rates, name))
                for name in ("requests_per_s", "errors_per_s", "input_tokens_per_s", "output_tokens_per_s")
            },
            **{name: _rounded(getattr(self.reading, name)) for name in ("in_flight", "queued", "kv_cache_use")},
            "ttft_ms": {"n": rates.ttft_requests, "p50": ms(rates.ttft_p50_s), "p99": ms(rates.ttft_p99_s)},
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclass(frozen=True, slots=True)
class Sample:
    """All servers and GPUs at one time."""

    time_s: float
    rows: tuple[ServerRow, ...]
    gpus: Mapping[str, GpuReading]

    def to_json(self) -> dict[str, Any]:
        """As docs/formats.md has it."""
        return {
            "schema": SCHEMA,
            "time_s": self.time_s,
            "servers": [row.to_json() for row in self.rows],
            "gpus": [{"gpu": gpu, **asdict(reading)} for gpu, reading in self.gpus.items()],
        }


def kept(workspace: Path) -> list[Watched]:
    """The kept servers of a workspace."""
    return [
        Watched(
            server.name,
            server.state.value,
            server.reason,
            tuple(servers.metrics_urls(server.folder).values()) if server.state.alive else (),
            server.record.restarts if server.record else None,
            server.record.gpus if server.record else (),
        )
        for server in servers.find(workspace)
    ]


def typed(urls: Sequence[str]) -> list[Watched]:
    """Servers by the URLs of their metrics; the path is /metrics unless it is given. Raises UsageError."""
    sources = []
    for url in dict.fromkeys(urls):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise UsageError(f"--url {url}: expected HOST:PORT or http(s)://HOST:PORT[/PATH]")
        path = parts.path if parts.path not in {"", "/"} else METRICS
        name = parts.netloc if path == METRICS else f"{parts.netloc}{path}"
        sources.append(Watched(name, UP, None, (f"{parts.scheme}://{parts.netloc}{path}",)))
    return sources


class ServerWatch:
    """Looks at servers again and again, and remembers what they said before."""

    def __init__(self, workspace: Path, urls: Sequence[str], ask: Nvml | None, *, window_s: float = WINDOW_S) -> None:
        self._workspace = workspace
        self._typed = typed(urls)
        self._window_s = window_s
        self._windows: dict[tuple[str, str], RateWindow] = {}
        self._ask = ask
        self._handles = [] if ask is None else ask.handles()

    async def look(self) -> Sample:
        """A sample. What does not answer within a second is shown as such."""
        sources = self._typed or await asyncio.to_thread(kept, self._workspace)
        pages = await asyncio.gather(*(asyncio.gather(*map(_page, source.urls)) for source in sources))
        now_s = time.monotonic()
        rows = [row for source, texts in zip(sources, pages, strict=True) for row in self._rows(source, texts, now_s)]
        seen = {(row.server, row.model or "") for row in rows}
        self._windows = {key: window for key, window in self._windows.items() if key in seen}
        gpus = {
            gpu: reading for texts in pages for text in texts if text for gpu, reading in readings.gpus(text).items()
        }
        return Sample(time.time(), tuple(rows), {**gpus, **self._gpus()})

    def _rows(self, source: Watched, texts: Sequence[str | None], now_s: float) -> Iterator[ServerRow]:
        said = [readings.read(text) for text in texts if text is not None]
        silent = bool(source.urls) and not any(said)
        models = next((each for each in said if "" not in each and each), None) or {"": Reading()}
        others = [each[""] for each in said if "" in each]
        for model, reading in models.items():
            for other in others:
                reading = reading.completed(other)
            rates = Rates()
            if not silent and source.urls:
                window = self._windows.setdefault((source.name, model), RateWindow(self._window_s))
                rates = window.add(now_s, reading)
            state = NO_ANSWER if silent else source.state
            yield ServerRow(
                source.name, model or None, state, source.reason, source.restarts, source.gpus, reading, rates
            )

    def _gpus(self) -> dict[str, GpuReading]:
        """The GPUs of this machine, by UUID."""
        found = {}
        for handle in self._handles:
            assert self._ask is not None
            _, power_w, used, _, busy, _ = counters.sample(self._ask, handle)
            memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
            name = self._ask("nvmlDeviceGetName", handle) or "GPU"
            found[self._ask("nvmlDeviceGetUUID", handle) or name] = GpuReading(
                name, None if busy is None else busy / 100, used, float(memory.total) if memory else None, power_w
            )
        return found


async def _page(url: str) -> str | None:
    """Text of a metrics page; None when there is none."""
    parts = urlsplit(url)
    try:
        status, body = await fetch(f"{parts.scheme}://{parts.netloc}", parts.path, timeout_s=TIMEOUT_S)
    except (OSError, HttpError, ValueError):
        return None
    return body.decode(errors="replace") if status == 200 else None


def once(workspace: Path, urls: Sequence[str], *, interval_s: float = INTERVAL_S) -> Sample:
    """One sample, its rates over the time between two looks."""

    async def two() -> Sample:
        await watch.look()
        await asyncio.sleep(interval_s)
        return await watch.look()

    with nvml() as ask:
        watch = ServerWatch(workspace, urls, ask)
        return asyncio.run(two())


def live(workspace: Path, urls: Sequence[str], *, interval_s: float = INTERVAL_S, stream: TextIO | None = None) -> None:
    """Draw a sample after the other on a terminal, until q or Ctrl-C; the last one stays there."""
    with nvml() as ask, suppress(KeyboardInterrupt):
        asyncio.run(_live(ServerWatch(workspace, urls, ask), interval_s, stream or sys.stdout))


async def _live(watch: ServerWatch, interval_s: float, stream: TextIO) -> None:
    from rich.live import Live

    console = terminal.console(stream)
    loop, resized, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, ended.set)
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    sample = await watch.look()
    with (
        ExitStack() as keys,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as drawn,
    ):
        keys.enter_context(_keys(loop, ended))

        def suspend() -> None:
            """Give the shell the screen and keys that it had, and take others when it continues this."""
            keys.close()
            drawn.stop()
            terminal.suspend()
            drawn.start(refresh=True)
            keys.enter_context(_keys(loop, ended))

        if terminal.heeds_suspend():
            loop.add_signal_handler(signal.SIGTSTP, suspend)
        end = asyncio.ensure_future(ended.wait())
        while not ended.is_set():
            drawn.update(TopPicture(sample, live=True), refresh=True)
            due_s = loop.time() + interval_s
            while not ended.is_set() and (left_s := due_s - loop.time()) > 0:
                woken = asyncio.ensure_future(resized.wait())
                await asyncio.wait({end, woken}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                if resized.is_set():
                    resized.clear()
                    drawn.refresh()
            looking = asyncio.ensure_future(watch.look())
            await asyncio.wait({end, looking}, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                sample = looking.result()
            else:
                looking.cancel()
    loop.remove_signal_handler(signal.SIGTSTP)
    console.print(TopPicture(sample))


@contextmanager
def _keys(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> Iterator[None]:
    """Let `q` end it, where a terminal has a keyboard."""
    import termios
    import tty

    if not sys.stdin.isatty() or os.getpgrp() != os.tcgetpgrp(sys.stdin.fileno()):
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed() -> None:
        typed = os.read(fd, 64).decode(errors="replace")
        if not typed or _QUIT & set(typed):
            ended.set()

    tty.setcbreak(fd)
    loop.add_reader(fd, pressed)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@dataclass(frozen=True, slots=True)
class TopPicture:
    """A sample as rich draws it: in the width that there is, and while it is live in the height as well."""

    sample: Sample
    live: bool = False

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Its lines."""
        from rich.text import Text

        lines = list(self.lines(options.max_width))
        if self.live and len(lines) > options.max_height:
            hidden = len(lines) - options.max_height + 1
            lines = [*lines[:-hidden], Text(f"and {hidden} lines more", "dim")]
        for line in lines:
            line.truncate(options.max_width, overflow="crop" if options.ascii_only else "ellipsis")
            yield line

    def lines(self, width: int) -> Iterator[Text]:
        """As many as it takes. A server's name is shortened to fit, reasons may be longer than `width`."""
        from rich.text import Text

        rows, gpus = self.sample.rows, self.sample.gpus
        window_s = max((row.rates.seconds for row in rows), default=0.0)
        at = time.strftime("%H:%M:%S", time.localtime(self.sample.time_s))
        yield Text(f"{at}  rates of the last {window_s:.0f} s{'  q quits' if self.live else ''}", "dim")
        if rows:
            yield from _server_lines(rows, width)
        else:
            yield Text("no servers are kept in this workspace: pipeline serve start CELL")
        yield from (Text(f"{row.server}: {row.reason}", "red") for row in rows if row.reason and row.state != "stopped")
        if gpus:
            yield Text("")
            yield from _gpu_lines(gpus, width)


_COLUMNS: Final = ("req/s", "run", "wait", "in tok/s", "out tok/s", "TTFT p50", "p99", "KV", "restarts")
_NARROW: Final = ("req/s", "run", "wait", "in/s", "out/s", "TTFT p50", "p99", "KV", "rst")
_WIDE: Final = 100
_UUID: Final = 12
"""Characters of a GPU's UUID that tell it from others."""


def _server_lines(rows: Sequence[ServerRow], width: int) -> list[Text]:
    models = Counter(row.server for row in rows)
    names = [f"{row.server} {row.model}" if models[row.server] > 1 else row.server for row in rows]
    table = [[*_values(row)] for row in rows]
    return _aligned(
        ("server", "state", *(_COLUMNS if width >= _WIDE else _NARROW)),
        [[name, row.state, *values] for name, row, values in zip(names, rows, table, strict=True)],
        width,
        [_STYLES.get(row.state, "yellow") for row in rows],
    )


def _values(row: ServerRow) -> Iterator[str]:
    rates, reading = row.rates, row.reading
    yield short(rates.requests_per_s)
    yield short(reading.in_flight, whole=True)
    yield short(reading.queued, whole=True)
    yield short(rates.input_tokens_per_s)
    yield short(rates.output_tokens_per_s)
    yield latency(rates.ttft_p50_s)
    yield latency(rates.ttft_p99_s)
    yield share(reading.kv_cache_use)
    yield short(row.restarts, whole=True)


def _gpu_lines(gpus: Mapping[str, GpuReading], width: int) -> list[Text]:
    def gib(value: float | None) -> str:
        return "-" if value is None else f"{value / 2**30:.1f}"

    rows = [
        [
            reading.name if reading.name != uuid else "GPU",
            uuid[:_UUID],
            share(reading.utilization),
            f"{gib(reading.memory_used_bytes)}/{gib(reading.memory_total_bytes)} GiB",
            "-" if reading.power_w is None else f"{reading.power_w:.0f} W",
        ]
        for uuid, reading in gpus.items()
    ]
    return _aligned(("GPU", "", "busy", "memory", "power"), rows, width, [""] * len(rows))


def _aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, styles: Sequence[str]) -> list[Text]:
    """A table: two columns to the left, of which the first gives way where there is no room, the others to the right."""
    from rich.text import Text

    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= width else 1
    widths[0] = max(6, min(widths[0], width - sum(widths[1:]) - gap * (len(widths) - 1)))
    lines = []
    for number, row in enumerate([heads, *rows]):
        line = Text(no_wrap=True)
        for at, (text, room) in enumerate(zip(row, widths, strict=True)):
            text = shorten(text, room) if at == 0 else text
            styled = "bold" if number == 0 else styles[number - 1] if at == 1 else ""
            line.append(f"{text:<{room}}" if at < 2 else f"{text:>{room}}", styled)
            line.append(" " * gap if at < len(widths) - 1 else "")
        lines.append(line)
    return lines


def short(value: float | None, *, whole: bool = False) -> str:
    """At most five characters: 0, 3.1, 45.2, 1234, 45.2k."""
    if value is None:
        return "-"
    if value >= 9999.5:
        return f"{value / 1e3:.1f}k" if value < 999_950 else f"{value / 1e6:.1f}M"
    return f"{value:.0f}" if whole or value >= 99.95 or not value else f"{value:.1f}"


def latency(seconds: float | None) -> str:
    """`37 ms`, `1.24 s`."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def share(value: float | None) -> str:
    """`37%`."""
    return "-" if value is None else f"{value:.0%}"
