"""What servers, models, files and names say never commands the terminal: one test for each way that text can take."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.helpers import fabricated
from tests.unit.conftest import Pipeline
from trtllm_pipeline.base import terminal
from trtllm_pipeline.base.domain import StageStatus
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.base.terminal import clean, console
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.show.progress import observer

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x1b]8;;http://x/\x1b\\d\x9b31me\u202ef\x08\x7fg\x1b(0h\udce9"
SHOWN = "abcd\\u009b31me\\u202ef\\u0008\\u007fgh\\udce9"
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_OURS = re.compile(r"\x1b\[[0-9;]*m")
DONE, FAILED = fabricated.cell("fp16"), fabricated.cell("int8_wo")
NEVER = fabricated.cell("fp8", reason=f"precision fp8: {HOSTILE}")
PLAN = fabricated.plan(DONE, FAILED, NEVER)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "ws")
    fabricated.publish_all(store, PLAN, DONE)
    # An index holds text: what has no characters, like the last of HOSTILE, cannot come from there.
    error = StageError(f"=1+1 {HOSTILE[:-1]}", hint=HOSTILE[:-1])
    fabricated.fail(store, fabricated.stage_run(PLAN, FAILED, "convert"), error)
    log = next(store.work_dir.glob("*.1/log"))
    log.write_bytes(f"{HOSTILE[:-1]}\r\nsecond\r".encode())
    store.index.begin_run("20260101-000000-aa", f"/m/{HOSTILE[:-1]}.yaml", ("pipeline", "run"))
    folder = store.runs_dir / "20260101-000000-aa"
    folder.mkdir()
    lines = plan_lines(
        PLAN, present=(), to_run=(), reasons={}, times=lambda _run: None, commands=lambda _run: [], run_id="r"
    )
    (folder / "plan.json").write_bytes("\n".join(lines).encode("utf-8", "replace"))
    yield store
    store.close()


@pytest.fixture
def pipeline(pipeline: Pipeline, store: Store, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.setenv("PIPELINE_WORKSPACE", str(store.workspace))
    return pipeline


def test_sequences_go_and_what_is_left_shows() -> None:
    assert clean(HOSTILE) == SHOWN
    assert clean("ünï\t→\n") == "ünï\t→\n"
    assert clean("50%\r100%\r\ndone\n") == "50%\n100%\ndone\n", "a bar that redraws itself is lines"
    assert clean("\x1b]never ended, \x1b[3") == "never ended, \\u001b[3", "nothing is swallowed with it"


@given(st.text())
def test_whatever_the_text_nothing_commands(text: str) -> None:
    shown = clean(text)
    assert not _COMMANDS.search(shown)
    shown.encode("utf-8")
    assert clean(shown) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_json_stays_the_same_json(text: str) -> None:
    assert json.loads(clean(json.dumps({"a": text}, ensure_ascii=False))) == {"a": text}


@pytest.mark.parametrize(
    "argv",
    [
        ("status",),
        ("logs", "int8_wo"),
        ("logs", "fp8"),
        ("explain", "int8_wo", "convert"),
        ("report",),
        ("report", "--format", "markdown"),
        ("report", "--format", "html", "-o", "-"),
        ("report", "--format", "junit"),
        ("report", "--format", "csv"),
        ("report", "--format", "json"),
        ("status", "--format", "json"),
        ("logs", "int8_wo", "--format", "json"),
        ("recommend",),
        ("compare", HOSTILE, "latest"),
        ("plan", "-m", HOSTILE),
        ("matrix", HOSTILE),
        ("status", f"--{HOSTILE}"),
    ],
)
def test_no_command_lets_it_through(pipeline: Pipeline, argv: tuple[str, ...]) -> None:
    try:
        _, out, err = pipeline(*argv)
    except SystemExit:  # argparse's own complaint; what it said is read by the next
        _, out, err = pipeline("status")
    assert not _COMMANDS.search(out + err)


def test_what_they_show_of_it(pipeline: Pipeline, store: Store) -> None:
    assert pipeline("logs", "int8_wo")[1] == f"{SHOWN[:-6]}\nsecond\n"
    assert f"=1+1 {SHOWN[:-6]}" in pipeline("status")[1]
    failed = json.loads(pipeline("status", "--format", "json")[1])["cells"][1]["stages"][1]
    assert failed["message"] == f"=1+1 {HOSTILE[:-1]}", "to programs it is what was said"
    suite = Xml.fromstring(pipeline("report", "--format", "junit")[1].encode())[0]
    reasons = [case.get("message", "") for case in suite.findall("testcase/skipped")]
    assert any(SHOWN[:-6] in reason for reason in reasons)
    rows = list(csv.DictReader(io.StringIO(pipeline("report", "--format", "csv")[1])))
    assert [row["reason"][:5] for row in rows if row["status"] == "failed"] == ["'=1+1"], "no spreadsheet runs it"


@pytest.mark.parametrize("argv", [("status",), ("report",), ("doctor",)])
def test_colours_of_our_own_get_through(store: Store, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    main([*argv, *([] if argv == ("doctor",) else ["--workspace", str(store.workspace)])])
    text = terminal.getvalue()
    assert _OURS.search(text)
    assert not _COMMANDS.search(_OURS.sub("", text))


@pytest.mark.parametrize("mode", ["plain", "quiet", "json", "live"])
def test_progress(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    run = fabricated.stage_run(PLAN, FAILED, "convert")
    seen = observer(stream := Terminal(), mode=mode)  # type: ignore[arg-type]
    seen.begin(PLAN, dict.fromkeys(PLAN.stage_runs, StageStatus.PENDING), {})
    seen.waiting(run, HOSTILE)
    seen.tick({run.id: {"done": 1.0, "total": 2.0, "unit": HOSTILE}})
    seen.changed(run, StageStatus.FAILED, StageError(HOSTILE, hint=HOSTILE, log=Path(f"/{HOSTILE}")), 1.0)
    seen.end()
    text = (
        re.sub(r"\x1b\[(?:\?25[hl]|[0-9;]*[mAKGH]|2K|1A)|\r", "", stream.getvalue())
        if mode == "live"
        else stream.getvalue()
    )
    assert not _COMMANDS.search(text)
    if mode == "json":
        assert json.loads(text.splitlines()[-2])["message"] == HOSTILE


def test_rich_text_is_cleaned_inside_its_colours() -> None:
    from rich.text import Text

    stream = Terminal()
    console(stream, force_terminal=True, color_system="standard").print(Text(HOSTILE, "red"))
    assert stream.getvalue().startswith("\x1b[31ma")
    assert not _COMMANDS.search(_OURS.sub("", stream.getvalue()))


def test_a_traceback_of_ours_is_cleaned_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trtllm_pipeline.show.cli.options.known_store", lambda _workspace: 1 / len(""))
    with pytest.raises(ZeroDivisionError):
        main(["store", "list"])
    print(HOSTILE, file=sys.stderr)
    assert capsys.readouterr().err == f"{SHOWN}\n"


def test_two_streams_end_in_the_same_place_or_not(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as one, (tmp_path / "a").open("a") as again, (tmp_path / "b").open("w") as other:
        assert terminal.same_place(one, again)
        assert not terminal.same_place(one, other)
        assert not terminal.same_place(one, io.StringIO()), "none of the system's"


def test_ctrl_z_gives_the_shell_its_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, stopped = io.StringIO(), list[str]()
    monkeypatch.setattr("trtllm_pipeline.base.terminal.os.kill", lambda *_: stopped.append(stream.getvalue()))
    monkeypatch.setattr(terminal, "console", lambda stream: Console(file=stream, force_terminal=True))
    with terminal.screen(stream) as live:
        live.update("seen", refresh=True)
        signal.raise_signal(signal.SIGTSTP)
        before, after = stopped[0], stream.getvalue().removeprefix(stopped[0])
    assert before.rindex("\x1b[?1049l") > before.rindex("seen")
    assert before.rindex("\x1b[?25h") > before.rindex("\x1b[?25l"), "the cursor is visible"
    assert after.rindex("seen") > after.rindex("\x1b[?1049h"), "it continues"
    assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
