"""Commands that start servers, as text for a shell."""

from __future__ import annotations

import json
import subprocess
import sys

from trtllm_pipeline.tensorrt.servers.pasted import PastedCommand

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['WHO'], os.environ['PATHS'], os.environ['CARD']]))"


def test_a_shell_passes_every_word_and_variable_as_it_is() -> None:
    words = [
        "--name",
        'it\'s "$HOME"',
        "--path=a b",
        "two\nlines",
        "*",
        "--folder=$made",
        "--literal=$HOME",
        "--not=$(touch x)",
        ":",
        "-n",
        "1",
    ]
    command = PastedCommand(
        [sys.executable, "-c", SHOW, *words], {"WHO": "$(id) 'x'"}, {"PATHS": ["/a b", "/c"]}, before={"made": "'d e'"}
    )
    done = subprocess.run(
        ["sh", "-c", command.to_shell({"CARD": "GPU-1,GPU-2"})],
        env={"PATHS": "/own"},
        capture_output=True,
        check=True,
    )
    expected = [*words[:5], "--folder=d e", *words[6:]]
    assert json.loads(done.stdout) == [expected, "$(id) 'x'", "/a b:/c:/own", "GPU-1,GPU-2"]


def test_one_line_has_one_option() -> None:
    text = PastedCommand(["server", "serve", "model", "--port", "8000", "--host=::1", "--quick"]).to_shell()
    assert text.splitlines() == [
        "(",
        "umask 077",
        "exec server \\",
        "  serve \\",
        "  model \\",
        "  --port 8000 \\",
        "  --host=::1 \\",
        "  --quick",
        ")",
    ]
