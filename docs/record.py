"""Makes the pictures in the README: runs the quickstart in a terminal, and opens its HTML report in a browser.

    python docs/record.py

Needs tmux, which is the terminal, Chromium, and the extra `report`. The run is real and takes as long as one, in a
workspace of its own that is removed. Its wall-clock time is printed: the README says how long the quickstart takes.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

ROOT: Final = Path(__file__).resolve().parent.parent
_COLUMNS: Final = 114
_ROWS: Final = 60
"""Enough for the live view and the report of the quickstart; what scrolls out is taken as well."""
_PAGE: Final = "1280,1250"
"""Width and height of the window, in pixels."""
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WEB_FONT: Final = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def screen(command: str, folder: Path) -> str:
    """What a terminal shows, with escape sequences for colors, when `command` has ended in `directory`."""
    tmux = ["tmux", "-u", "-f", os.devnull, "-S", str(folder / "tmux")]
    # The terminal outlives the command: with it what it shows would go.
    script = f"printf '\\033[1;32m$\\033[0m %s\\n' {shlex.quote(command)}; {command}; {shlex.join(tmux)} wait-for -S ended; sleep 60"
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, "PATH": path, "LC_ALL": "C.UTF-8"}
    start = ["new-session", "-d", "-x", str(_COLUMNS), "-y", str(_ROWS), "-c", str(folder), "sh", "-c", script]
    subprocess.run([*tmux, *start], check=True, env=environment)
    try:
        subprocess.run([*tmux, "wait-for", "ended"], check=True)
        shown = subprocess.run(
            [*tmux, "capture-pane", "-p", "-e", "-S", "-"], check=True, capture_output=True, text=True
        )
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    return shown.stdout


def page(folder: Path, output: Path) -> None:
    """A picture of the top of the HTML report of the latest run in `directory`."""
    report = folder / "report.html"
    write = [sys.executable, "-m", "trtllm_pipeline", "report", "--format", "html", "--output", str(report)]
    subprocess.run(write, check=True, cwd=folder)
    browser = next(path for name in _BROWSERS if (path := shutil.which(name)) is not None)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={_PAGE}")
    drawn = "--virtual-time-budget=20000"  # ms of the page's own clock: it draws plots after it has loaded
    profile = f"--user-data-dir={folder / 'browser'}"
    subprocess.run(
        [browser, *flags, drawn, profile, f"--screenshot={output}", report.as_uri()],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def picture(shown: str) -> str:
    """A terminal's text as SVG that fetches nothing."""
    lines = [line.rstrip() for line in shown.rstrip().splitlines()]
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
    svg = console.export_svg(title="trtllm-pipeline", unique_id="quickstart")
    return _WEB_FONT.sub("", svg)


def main() -> None:
    """Run, draw, write."""
    with tempfile.TemporaryDirectory(prefix="record-") as name:
        (Path(name) / "matrices").symlink_to(ROOT / "matrices")
        began = time.monotonic()
        shown = screen("pipeline run --matrix matrices/quickstart.yaml", Path(name))
        sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")
        page(Path(name), ROOT / "docs" / "report.png")
    (ROOT / "docs" / "quickstart.svg").write_text(picture(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
