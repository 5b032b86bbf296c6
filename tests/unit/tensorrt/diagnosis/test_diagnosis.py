"""The first cause of failures that people have met, and of logs made to mislead."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.helpers.failure_logs import FOLDER, UNKNOWN, FailureLog, failure_logs
from trtllm_pipeline.base.errors import FailureClass
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix
from trtllm_pipeline.tensorrt.diagnosis import causes as diagnosis
from trtllm_pipeline.tensorrt.diagnosis.causes import Diagnosis, LogText, first_cause, first_error, telling_lines
from trtllm_pipeline.tensorrt.diagnosis.signatures import Weight, signatures

pytestmark = pytest.mark.timeout(300)  # reads 600 logs, more than a minute on a busy machine

DEVELOPMENT = tuple(failure_logs("development"))
HELD_OUT = tuple(failure_logs("held-out"))
_TITLED = re.split(r"^=== (.+): (\S+: \d+)\n", (FOLDER / "words.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
WORDS = {name: (said, text) for name, said, text in zip(_TITLED[1::3], _TITLED[2::3], _TITLED[3::3], strict=True)}
"""Name -> signature and line, and the log."""


def key_of(cause: Diagnosis) -> str:
    """Key of the signature. Words that any program may use name no known cause."""
    known = cause.signature is not None and cause.signature.weight is not Weight.WORDS
    return cause.signature.key if known else UNKNOWN


def diagnosed(failure: FailureLog, folder: Path, *, but: str = "") -> tuple[str, str, bool]:
    """Key of the signature, the line as the corpus names it, and whether it is certain; `but`: a key that is not known."""
    known = [each for each in signatures() if each.key != but]
    cause = first_cause([LogText(path) for path in failure.lay_out(folder)], known)
    if cause is None:
        return UNKNOWN, "", False
    return key_of(cause), f"{cause.line.path.relative_to(folder)}:{cause.line.number}", cause.certain


@pytest.mark.parametrize("failure", DEVELOPMENT, ids=lambda each: each.path.stem)
def test_the_first_cause_of_failures_that_the_signatures_were_written_by(failure: FailureLog, tmp_path: Path) -> None:
    key, line, _ = diagnosed(failure, tmp_path)
    assert key == failure.cause
    assert line in (failure.lines or {""})


def test_the_first_cause_of_failures_that_were_kept_aside(tmp_path: Path) -> None:
    found = {each: diagnosed(each, tmp_path / each.path.stem) for each in HELD_OUT}
    right = [each for each, (key, line, _) in found.items() if key == each.cause and line in each.lines]
    assert not {each.path.stem: key for each, (key, _, certain) in found.items() if certain and key != each.cause}
    assert len(right) >= 0.9 * len(found)


@pytest.mark.thorough
def test_the_line_is_found_also_of_what_no_signature_knows(tmp_path: Path) -> None:
    """Of every failure with a cause that can be told, with the signature left out that belongs to it."""
    every = [each for each in (*DEVELOPMENT, *HELD_OUT) if each.lines]
    found = {each: diagnosed(each, tmp_path / each.path.stem, but=each.cause) for each in every}
    wrong = {each.path.stem: (line, certain) for each, (_, line, certain) in found.items() if line not in each.lines}
    assert len(wrong) <= 0.03 * len(every), wrong
    assert not any(certain for _, certain in wrong.values())


def said_of(path: Path, *, before: int = 0) -> str:
    """Signature, `?` if it is not certain, and line, as in words.txt. `before`: lines above the log."""
    cause = first_cause([LogText(path)])
    if cause is None:
        return "none: 0"
    return f"{key_of(cause)}{'' if cause.certain else '?'}: {cause.line.number - before}"


@pytest.mark.parametrize("name", WORDS)
def test_words_in_the_form_of_their_logs(name: str, tmp_path: Path) -> None:
    """With contrary logs, in which the words of a cause appear beside the cause."""
    said, text = WORDS[name]
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")
    assert said_of(path) == said


BEFORE = (
    "2026-11-22 08:00:00.123456: E external/local_xla/x/cuda_fft.cc:479] Unable to register cuFFT factory: twice",
    "/usr/lib/python3/x.py:33: FutureWarning: `x` is deprecated and will be removed, expected in 1.0",
    "[11/22/2026-08:00:01] [TRT-LLM] [W] Failed to import y, falling back",
    "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
    "WARNING: could not find a config, the default is used",
    "Exception ignored in: <function A.__del__ at 0x7f>",
    "Traceback (most recent call last):",
    '  File "a.py", line 3, in __del__',
    "AttributeError: 'A' object has no attribute 'b'",
)
AFTER = (
    "Exception ignored in atexit callback: <function f at 0x7f>",
    "Traceback (most recent call last):",
    '  File "z.py", line 3, in f',
    "RuntimeError: cannot schedule new futures after shutdown",
    "x.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown",
)
WRITERS = (
    "{}",
    "[1,0]<stderr>:{}",
    "[rank0]: {}",
    "2026-11-18T09:33:30.123456789Z stdout F {}",
    "server-1  | {}",
    "(Worker pid=123, ip=10.0.0.1) {}",
    "Nov 22 08:11:02 gpu01 tritonserver[1234]: {}",
    "\x1b[31m{}\x1b[0m\r",
)


@cache
def found_plain() -> list[FailureLog]:
    """Logs whose line is found as they are."""
    with TemporaryDirectory() as folder:
        every = [each for each in (*DEVELOPMENT, *HELD_OUT) if each.lines]
        found = [each for each in every if diagnosed(each, Path(folder) / each.path.stem)[1] in each.lines]
    assert len(found) >= 0.98 * len(every)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("place", range(len(WRITERS)))
@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.nightly) for turn in range(1, len(WRITERS)))]
)
def test_neither_what_stands_around_a_failure_nor_before_its_lines_hides_it(
    turn: int, place: int, tmp_path: Path
) -> None:
    """Harmless lines before and after; what launchers and containers write before each; another rank between the lines."""
    own = WRITERS[(place + turn) % len(WRITERS)]
    other = "[rank1]: {}" if own.startswith("[rank0]") else ""
    for failure in found_plain()[place :: len(WRITERS)]:
        folder = tmp_path / failure.path.stem
        logs = failure.lay_out(folder)
        for path in logs:
            told = (*BEFORE, *path.read_text().rstrip("\n").split("\n"), *AFTER)
            lines = [each.format(line) for line in told for each in (own, other) if each]
            path.write_text("".join(f"{line}\n" for line in lines), newline="")
        cause = first_cause([LogText(path) for path in logs])
        assert cause is not None, failure.path
        number = (cause.line.number + 1) // 2 if other else cause.line.number
        said = f"{cause.line.path.relative_to(folder)}:{number - len(BEFORE)}"
        assert said in failure.lines, failure.path


@pytest.mark.parametrize("place", range(len(WRITERS)))
def test_words_are_found_below_prefixes_and_between_harmless_lines(place: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    for name, (said, text) in list(WORDS.items())[place :: len(WRITERS)]:
        lines = (*BEFORE, *text.rstrip("\n").split("\n"), *AFTER)
        path.write_text("".join(f"{WRITERS[place].format(line)}\n" for line in lines), newline="")
        found = said_of(path, before=len(BEFORE))
        assert found == said, name


def test_the_corpus_is_what_it_says() -> None:
    every = (*DEVELOPMENT, *HELD_OUT)
    assert len(every) >= 160
    assert len(HELD_OUT) >= 35
    assert all(each.source.startswith("https://") for each in every)
    known = {each.key: each.category for each in signatures()}
    assert {each.path.stem for each in every if each.cause not in {*known, UNKNOWN}} == set()
    assert {each.path.stem for each in every if known.get(each.cause, each.category) != each.category} == set()
    names = [each.path.stem for each in every]
    assert len(set(names)) == len(names)


def log(folder: Path, *lines: str, name: str = "log") -> LogText:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return LogText(path)


def test_what_follows_from_a_cause_is_none(tmp_path: Path) -> None:
    symptoms = log(
        tmp_path,
        "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD",
        "ensemble 'ensemble' depends on 'tensorrt_llm' which has no loaded version",
        "error: creating server: Internal - failed to load all models",
    )
    assert first_cause([symptoms]) is None
    assert 3 in [line.number for line in telling_lines([symptoms])]


TRACE = ("Traceback (most recent call last):", '  File "a.py", line 3, in f')
MOON = "ValueError: the moon is full"
FULL = "OSError: No space left on device"
TWICE = "Duplicate GPU detected"
SLOTS = "There are not enough slots available in the system"
DURING = ("", "During handling of the above exception, another exception occurred:", "")
BECAUSE = ("", "The above exception was the direct cause of the following exception:", "")
SYMBOL = "ImportError: /venv/x.so: undefined symbol: "
LIMIT = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-02T03:00:11 DUE TO TIME LIMIT ***"
WATCHDOG = (
    "[rank1]:[E304 08:31:44.120311 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600071 milliseconds"
)
KILLED = "mpirun noticed that process rank 0 with PID 7 on node n exited on signal 9 (Killed)."
MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
SAID = {
    # rule -> logs, each as: what `said_of` says of it, and its lines
    "certain only where the form agrees: what stands beside the first error, also in code, may be another matter": (
        ("engine-file?: 1", "[TensorRT-LLM][ERROR] Failed to deserialize cuda engine", TWICE),
        ("unknown?: 1", "[TensorRT-LLM][ERROR] the moon is full", f"error: {TWICE}"),
        ("unknown?: 2", f"FutureWarning: {TWICE}", MOON),
        ("unknown?: 2", SLOTS, MOON),
        ("mpi-slots: 2", "-" * 76, SLOTS, "ValueError: x"),
        ("mpi-slots: 1", SLOTS),
        ("unknown?: 3", "Traceback (most recent call last):", "  # CUDA out of memory", "ValueError: x"),
        ("gpu-memory?: 1", "E1122 x.cc:1] Stub process is unhealthy. CUDA out of memory"),
        ("unknown?: 1", "ValueError: no file or directory", "FileNotFoundError: x"),
    ),
    "of causes of two kinds none is certain, nor is one that no program calls an error": (
        ("gpu-twice: 1", f"ValueError: {TWICE}"),
        ("gpu-twice: 1", f"ValueError: {TWICE}", "ValueError: mpiSize == tp * pp"),
        ("gpu-twice?: 1", f"ValueError: {TWICE}", FULL),
        ("gpu-twice: 1", f"ValueError: {TWICE}", "FutureWarning: No space left on device"),
        ("gpu-memory: 1", "ValueError: CUDA out of memory"),
        ("gpu-memory?: 1", "it says: CUDA out of memory"),
    ),
    "of two causes the first counts": (
        ("ranks: 2", "loading", "[TensorRT-LLM][ERROR] Assertion failed: mpiSize == tp * pp (1 != 2)", "more", TWICE),
        (
            "gpu-twice: 2",
            "loading",
            f"[1] NCCL WARN {TWICE} : rank 0",
            "more",
            "[E] Assertion failed: mpiSize == tp * pp",
        ),
    ),
    "what stands above may be the cause: something of another kind if its words are known, or a crash": (
        ("disk-full: 1", FULL),
        ("disk-full: 2", "WARNING: the moon is full", FULL),
        ("disk-full?: 2", "FutureWarning: CUDA out of memory", FULL),
        ("disk-full?: 2", "it could not load the moon: No such file or directory", FULL),
        ("disk-full?: 2", "Ignored error: Permission denied: '/moon'", FULL),
        ("disk-full?: 2", "Floating point exception!", FULL),
        ("disk-full: 2", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", FULL),
    ),
    "not certain before an exception of another kind: the program went on after the line": (
        ("gpu-twice?: 1", f"[E] 2: {TWICE}", "loading", "loading", *TRACE, MOON),
        ("gpu-twice: 1", f"[E] 2: {TWICE}", "loading", "loading", *TRACE, "RuntimeError: mpiSize == tp * pp"),
    ),
    "not certain if no program calls it an error and the program went on": (
        ("mpi-slots?: 1", SLOTS, "[I] step 1 done", "[I] step 2 done"),
    ),
    "words that other causes have as well give a hint and are not certain": (
        ("weights-missing: 1", "RuntimeError: Required but not provided tensors:{'lm_head.weight'}"),
        ("weights-missing?: 1", "KeyError: 'model.layers.0.self_attn.q_proj.weight'"),
        ("permission: 1", "PermissionError: [Errno 13] Permission denied: '/engines/config.json'"),
        ("permission?: 1", "git@example.com: Permission denied"),
        ("python-module: 1", "ModuleNotFoundError: No module named 'tensorrt'"),
        ("python-module?: 1", "ModuleNotFoundError: No module named 'google.protobuf'"),
        ("python-module: 1", "ImportError: cannot import name 'f' from 'sea' (/venv/lib/site-packages/sea/a.py)"),
        ("python-module?: 1", "ImportError: cannot import name 'f' from 'sea' (/home/u/sea.py)"),
    ),
    "of a chain, the first exception counts, and none is certain if its start is cut off": (
        ("disk-full: 4", "loading", *TRACE, FULL),
        ("disk-full?: 7", "    raise x", *DURING, *TRACE, FULL),
        ("disk-full?: 3", *TRACE, MOON, *BECAUSE, *TRACE, FULL),
        ("disk-full: 3", *TRACE, FULL, *BECAUSE, *TRACE, MOON),
    ),
    "a time limit after a crash is its consequence": (
        ("job-time-limit?: 2", "step 9 done", LIMIT),
        ("crash?: 1", "Floating point exception!", LIMIT),
    ),
    # A library of the toolkit or of the system is the likely cause, and which one it is has to be found out.
    "the name of a missing symbol tells whose it is": (
        ("undefined-symbol: 1", f"{SYMBOL}_ZN3c105ErrorC2ENS_14SourceLocationE"),
        ("undefined-symbol: 1", f"{SYMBOL}_ZN2at4_ops9is_pinned4callERKNS_6TensorE"),
        ("undefined-symbol: 1", f"{SYMBOL}_ZN8nvinfer114IBuilderConfigE"),
        ("driver-symbol: 1", f"{SYMBOL}cuGreenCtxCreate, version libcuda.so.1"),
        ("driver-symbol: 1", f"{SYMBOL}cuMulticastCreate"),
        ("driver-symbol: 1", f"{SYMBOL}nvmlDeviceGetGpuFabricInfoV"),
        ("python-symbol: 1", f"{SYMBOL}PyUnicode_AsUTF8AndSize"),
        ("library-symbol?: 1", f"{SYMBOL}cuFileDriverOpen"),
        ("library-symbol?: 1", f"{SYMBOL}cudaGetDriverEntryPointByVersion, version libcudart.so.12"),
        ("library-symbol?: 1", f"{SYMBOL}cublasLtMatmul"),
        ("library-symbol?: 1", f"{SYMBOL}ncclCommWindowRegister"),
        ("library-symbol?: 1", f"{SYMBOL}_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev"),
        ("library-symbol?: 1", f"{SYMBOL}mlx5dv_devx_obj_create"),
    ),
    "a kill is not certain: only the kernel's count tells of memory; it comes before what the next program lacks": (
        ("killed?: 2", "loading weights", "Killed"),
        ("killed?: 2", "Received sigquit from a child process. It usually means the child failed.", "Killed"),
        ("killed?: 2", "Converting checkpoints...", "Killed", *TRACE, "FileNotFoundError: [Errno 2] No such file: 'x'"),
    ),
    "ranks wait in vain for one that failed, and a launcher kills those that waited in vain": (
        ("collective-timeout?: 1", WATCHDOG, KILLED),
        ("killed?: 1", KILLED, WATCHDOG),
        ("gpu-memory: 1", MEMORY, WATCHDOG, KILLED),
        ("gpu-memory: 2", WATCHDOG, MEMORY),
    ),
    "what names a consequence is never certain": (
        ("killed?: 1", "Killed"),
        ("gpu-fault?: 1", "RuntimeError: CUDA error: unspecified launch failure"),
        ("nccl?: 1", "RuntimeError: NCCL error: unhandled system error"),
        ("server-unreachable?: 1", "ConnectionRefusedError: [Errno 111] Connection refused"),
        ("none: 0", "RuntimeError: Engine core initialization failed. See root cause above."),
        (
            "collective-timeout?: 1",
            "[Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE)",
        ),
        ("engine-file?: 1", "[TensorRT-LLM][ERROR] Failed to deserialize cuda engine"),
        ("container-gpu?: 1", "nvidia-container-cli: device error: 3: unknown device"),
        ("mpi-daemon?: 1", "ORTE was unable to reliably start one or more daemons."),
        ("unknown-model?: 1", "Request for unknown model: 'm' is not found"),
        ("cpu-instructions?: 1", "Illegal instruction (core dumped)"),
        ("startup-timeout?: 1", "TimeoutError: Timed out waiting for engine core processes to start"),
        ("model-files?: 1", "OSError: Can't load tokenizer for '/models/m'."),
        ("none: 0", "http.client.RemoteDisconnected: Remote end closed connection without response"),
    ),
}


@pytest.mark.parametrize("rule", SAID)
def test_signature_certainty_and_line(rule: str, tmp_path: Path) -> None:
    for said, *lines in SAID[rule]:
        assert said_of(log(tmp_path, *lines).path) == said, lines


CONTRARY = {
    # the words of a cause, {}, in a log of something else
    "progress": ("INFO 11-22 08:00:00 [x.py:3] {}", "MOON"),
    "warning": ("WARNING 11-22 08:00:00 [x.py:3] {}", "MOON"),
    "code": (
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "    # {}",
        "ValueError: the moon is full",
    ),
    "survived": ("ERROR 11-22 08:00:00 [x.py:3] {}", *("INFO 11-22 08:00:09 [x.py:4] step done",) * 2, "MOON"),
    "later": ("MOON", "ERROR 11-22 08:00:09 [x.py:3] {}"),
    "chain": ("MOON", "", "During handling of the above exception, another exception occurred:", "", "ValueError: {}"),
}


@pytest.mark.parametrize("form", CONTRARY)
def test_words_of_a_cause_in_a_log_of_something_else_are_not_certain(form: str, tmp_path: Path) -> None:
    """The words of every signature."""
    severe = re.compile(r"\[?ERROR\b")
    for signature in signatures():
        words = next((each for each in signature.met if not severe.match(each)), "")
        lines = [
            each.replace("MOON", "Traceback (most recent call last):\nRuntimeError: the moon is full").replace(
                "{}", words
            )
            for each in CONTRARY[form]
        ]
        found = first_cause([log(tmp_path, *lines)])
        assert not found.certain, signature.key


def test_a_kind_of_trouble_has_a_hint_and_decides_nothing(tmp_path: Path) -> None:
    found = first_cause([log(tmp_path, "ValueError: the moon is not supported")])
    assert (found.signature.failure, found.failure) == (FailureClass.INFEASIBLE, FailureClass.BUG)
    assert (found.quote, found.setting("build", {})) == (
        "the first error in its log: ValueError: the moon is not supported",
        None,
    )
    assert found.hint


def test_the_known_words_of_a_long_line_are_quoted(tmp_path: Path) -> None:
    words = "which exceeds the memory usage threshold of 0.95. Ray killed this worker"
    found = first_cause(
        [log(tmp_path, f"Memory on the node (ID: {'a' * 300}) was 9GB / 9GB, {words} (ID: {'b' * 300}) users:")]
    )
    assert words[:65] in found.quote
    assert found.quote.startswith("its log says: Memory on the node")
    assert found.quote.endswith("b) users:")
    assert len(found.quote) <= 320
    fault = first_cause([log(tmp_path, f"RuntimeError: CUDA out of memory. {'a' * 300} end")])
    assert fault.quote == f"its log says: RuntimeError: CUDA out of memory. {'a' * 161} ... {'a' * 96} end"


def test_a_cause_in_another_rank_s_log_is_named_by_file_and_line(tmp_path: Path) -> None:
    lost = log(tmp_path, "NCCL error x.cpp:1 'remote process exited or there was a network error'", name="rank0")
    memory = log(tmp_path, "loading", "[1,1]<stderr>: CUDA out of memory. Tried to allocate 2 GiB", name="rank1")
    found = first_cause([lost, memory])
    assert (found.line.path.name, found.line.number) == ("rank1", 2)
    assert found.line.message == "CUDA out of memory. Tried to allocate 2 GiB"
    assert str(found.line) == "rank1:2: CUDA out of memory. Tried to allocate 2 GiB"


def test_lines_are_counted_also_where_the_middle_of_a_log_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "HEAD_BYTES", 1000)
    monkeypatch.setattr(diagnosis, "TAIL_BYTES", 2000)
    lines = [f"[I] line {number}" for number in range(1, 2001)]
    for wanted in (3, 1995):
        changed = [*lines]
        changed[wanted - 1] = "RuntimeError: here it is"
        text = log(tmp_path, *changed)
        assert len(text.lines) < 400
        error = first_error([text])
        assert (error.number, error.message) == (wanted, "RuntimeError: here it is")
    assert [line.number for line in text.last(2)] == [1999, 2000]


def test_what_was_written_before_belongs_to_something_else(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"CUDA out of memory\nmore\nValueError: x\r\n 10%\r 20%\r done\n")
    text = LogText(path, since=len(b"CUDA out of memory\nmore\n"))
    found = first_cause([text])
    assert (found.certain, found.line.number) == (False, 3)
    assert [(line.number, line.message) for line in text.last(2)] == [(3, "ValueError: x"), (4, "done")]
    assert first_cause([LogText(tmp_path / "missing")]) is None


def test_an_unknown_failure_is_told_by_ten_lines(tmp_path: Path) -> None:
    words = [f"it could not do without {chr(97 + number)}" for number in range(20)]
    frames = ['  File "x.py", line 3, in f', "1       0x7f error::f() + 1", "libx.so(+0x12) [0x7f]"]
    log_ = log(tmp_path, "fine", *frames, *words[:10], *frames, *words[10:], "SomeError: the cause itself", "bye")
    lines = telling_lines([log_])
    assert len(lines) == 10
    assert lines[-1].message == "SomeError: the cause itself"
    assert all("could not" in line.message or "SomeError" in line.message for line in lines)
    error = first_error([log_])
    assert error.message == "SomeError: the cause itself"
    assert [line.message for line in telling_lines([log(tmp_path, "one", "", "two")])] == ["one", "two"]
    assert telling_lines([log(tmp_path)]) == []


def test_settings_can_be_pasted(tmp_path: Path) -> None:
    """What a signature says to set is something that a matrix takes."""
    memory = first_cause([log(tmp_path, "RuntimeError: CUDA out of memory")])
    assert memory.setting("build", {"max_num_tokens": 3000}) == "settings.build.max_num_tokens=1500"
    assert memory.setting("build", {"max_num_tokens": None}) == "settings.build.max_num_tokens=4096"
    assert memory.setting("build", {"max_num_tokens": 1}) is None
    assert memory.setting("convert", {}) is None
    matrix = Path(__file__).parents[4] / "matrices" / "qwen2.yaml"
    for signature in signatures():
        for setting in signature.settings.values():
            load_matrix(matrix, (setting.replace("=half", "=8"),))


def test_numbers_of_the_words_are_in_the_hint(tmp_path: Path) -> None:
    found = first_cause(
        [log(tmp_path, "not compatible with this version of TensorRT, expecting library version 9.2.0.5 got 9.3.0.1")]
    )
    assert found.hint.startswith("the engine was built with TensorRT 9.3.0.1, the server has 9.2.0.5: ")
    assert found.failure is FailureClass.INFEASIBLE
    assert "{" not in found.hint
