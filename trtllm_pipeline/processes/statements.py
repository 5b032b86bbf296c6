"""What a log says went wrong, by its form alone: which lines are statements of a failure, and which of them came first.

No word of a particular failure is known here, only how programs speak of failures: Python's tracebacks and their chains,
C++ exceptions and assertions, severities of loggers, errors of command lines, the wrappers that Triton, executors and
clients put around the words of others, and what merely follows when another process has failed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from typing import Final


class Grade(IntEnum):
    """How much a statement says of the cause; the lightest that are there count."""

    OWN = 0
    """Says in words of its own what is wrong."""
    PASSED_ON = 1
    """The same, as a client passes on what its server said, or a script prints it and may go on."""
    BARE = 2
    """Says that something is wrong, hardly what: a crash, `'NoneType' object has no attribute`."""
    FAINT = 3
    """Speaks of something that did not work, but not as an error."""
    WARNED = 4
    """The same, as a warning."""
    FOLLOWS = 5
    """Says that something else has failed."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A place of a log that speaks of a failure."""

    grade: Grade
    index: int
    """The line that says it, counted from 0."""
    first: int
    """The first line that belongs to it, such as the head of its traceback ..."""
    last: int
    """... and the last one."""
    text: str
    """What it says, without what others put around it."""
    when: tuple[str, ...] = ()
    """Who wrote the time, month, day and time, as far as its line, or one before, tells."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line without what loggers, launchers and containers write before it."""

    index: int
    stream: str
    """Who wrote it, as far as the line tells: its rank or process."""
    severity: str
    """E, W, I, or nothing."""
    body: str
    """With its indentation."""
    when: tuple[str, ...]
    shouted: bool
    """It begins with `ERROR:`, as what scripts and installers print."""

    @property
    def indent(self) -> int:
        """Spaces before its text."""
        return len(self.body) - len(self.body.lstrip())


@dataclass(slots=True)
class _Traceback:
    """A traceback that is being read."""

    first: int
    indent: int
    harmless: bool
    """What stands above says that nothing hangs on it."""
    strangers: int = 0


@dataclass(slots=True)
class _Raised:
    """What a chain of tracebacks raised: the index of each line and its text, and how it came from the one before."""

    first: int
    harmless: bool
    said: list[tuple[int, str]] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    """How the message of the last one goes on."""
    last: int = 0
    linked: bool = False
    """The next one comes from it."""
    open: bool = True
    """Lines that follow may go on with its message."""
    when: tuple[str, ...] = ()

    def add(self, index: int, text: str) -> None:
        """What was raised next."""
        self.said.append((index, text))
        self.more.clear()
        self.last, self.linked, self.open = index, False, True


_PARAGRAPH: Final = 10
"""Lines that a statement has at most."""
_LONGEST: Final = 4000
"""Characters of a line that are read."""
_PATTERNS: Final = {
    # what stands before the text of a line: launchers, containers, loggers
    "prefix": r"""(?x)
        (?P<tag>\[\d+,\d+\]<std(?:err|out)>:[ ]?)
        |(?P<rank>\[?[Rr](?:ank|ANK)[ _:]?\d+\]?:?[ ]?(?=\S|[ ]))
        |(?P<actor>\((?:[\w./-]+(?:[ ]\w+)*[ ])?pid=\d+[^)]*\)[ ]?)
        |(?P<pod>[a-z][\w.-]*-\d+[ ]+\|[ ])
        |(?:std(?:out|err)[ ][FP][ ])|\#\d+[ ]\d+\.\d+[ ]|[ ]{2,}[|+](?:-*[ ])?
        |\[?(?P<iso>\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,:]\d+)?)?)(?:Z|[+-]\d\d:?\d\d)?\]?(?:[ ]-)?[ ]?
        |\[(?P<torch>[EFIW]\d{4}[ ][\d:.]+[ ][\w./-]+:\d+\])[ ]?|[A-Z][a-z]{2}[ ]+\d+[ ]\d\d:\d\d:\d\d[ ]\S+[ ][\w.@-]+\[\d+\]:[ ]?
        |\[(?P<us>\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d)\][ ]?
        |(?P<glog>[EFIW]\d+[ ](?:(?P<clocked>[\d:.]+)[ ]+\d+[ ]+)?[\w./-]+:\d+\][ ]*)
        |(?P<syslog>(?P<level1>ERROR|WARNING|INFO|DEBUG)[ ](?P<day>\d\d-\d\d)[ ](?P<clock>\d\d:\d\d:\d\d)[ ](?:\[[^\]]*\][ ])?)
        |\[(?:TensorRT-LLM|TRT-LLM|TRT|TensorRT-LLm[ ]Error|modelopt|tritonserver)\][ ]?
        |\[(?P<level2>ERROR|WARNING|WARN|INFO|DEBUG|TRACE|FATAL|E|W|I|V|F|D)\][ ]?
        |(?P<level3>ERROR|WARNING|INFO|DEBUG|CRITICAL|FATAL)(?::[\w.]+:|[ ]+[-|][ ]|[ ]+\[|:[ ]+)
        |(?:[\w.]+[ ]-[ ](?=ERROR|WARNING|INFO|DEBUG))
        |:[ ](?P<tf>[EWIF])[ ](?=\w+/\S)|[\w./-]+\.(?:py|cc|cpp):\d+\][ ]?
        |\|[ ](?P<loguru>ERROR|WARNING|INFO|DEBUG|CRITICAL)[ ]+\|[ ](?:[\w.]+:[\w<>]+:\d+[ ]-[ ])?
        """,
    "head": r"(?:Exception Group )?Traceback \(most recent call last\):?\s*$",
    "exception": r"^(?:[A-Za-z_][\w]*\.)*(?:[A-Z]\w*|[a-z_]\w*(?:[eE]rror|exception|timeout))"
    r"(?:\([\w, .]+\))?(?::(?:\s|$)|\s*$)",
    "named": r"\b(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?:\(\w+\))?: ?\S",
    "link": r"The above exception was the direct cause of the following exception|During handling of the above exception",
    "frame": r"^\s*(?:\d+\s+0x|File \"|at |#\d|\d+# |\^+$|~+|\[?0x[0-9a-f]{6,}|\S+\.so(?:\.\d+)*\(|\[\S+\] \[ ?\d+\]|[-=*#]{5,}\s*$)",
    # what others put around the words of a cause; taken off again and again
    "wrapper": r"""(?x)^(?:["'\s]+
        |(?:ERROR|Error|error|FATAL|Fatal|fatal|Exception|Failed|Failure|Internal|Unknown|Unavailable|Invalid[ ]argument|Not[ ]found)(?::|,|[ ]-)[ ]*(?=\S)
        |\[(?:TensorRT-LLM|TRT-LLM|TRT|TensorRT-LLm[ ]Error)\]|\[(?:ERROR|E)\]
        |terminate[ ]called[ ]after[ ]throwing[ ]an[ ]instance[ ]of[ ]\S+
        |what\(\):|[\w:]*::TllmException:|tensorrt_llm::\w+::\w+:
        |[Ff]ailed[ ]to[ ]load[ ]'[^']*'[ ]version[ ]\d+:|[Ff]ailed[ ]to[ ]load[ ]'[^']*'[\s,]*(?=$)
        |Failed[ ]to[ ]create[ ]instance:|[Uu]nexpected[ ]error[ ]when[ ]creating[ ]\w+:?
        |creating[ ]server:|in[ ]ensemble[ ]'[^']*',|\[StatusCode\.\w+\]
        |[Ff]ailed[ ]to[ ]process[ ]the[ ]request\(s\)[ ]for[ ]model[ ](?:instance[ ])?'[^']*',[ ]message:
        |Executor[ ]failed[ ]process[ ]requestId[ ]\d+[ ]due[ ]to[ ]the[ ]following[ ]error:
        |Encountered[ ](?:an[ ])?error(?:[ ]for[ ]requestId[ ]\d+|[ ]in[ ][\w ]+|[ ]when[ ][\w ]+)?(?::|$)
        |Cannot[ ]process[ ]new[ ]request:
        |Failed[ ]to[ ]initialize[ ](?:Python[ ]stub(?:[ ]for[ ]auto-complete)?|executor[ ]on[ ]rank[ ]\d+|worker)(?:[^:]{0,40}):
        |(?:Executor[ ])?[Ww]orker[ ](?:initialization[ ])?(?:returned[ ])?error:?
        |Thread[ ]\[\d+\][ ]had[ ]error:|Uncaught[ ]exception[^:]{0,60}:|Unhandled[ ]exception[^:]{0,60}:
        |(?:[\w.]+\.)?(?:RuntimeError|TritonModelException|InferenceServerException|RayTaskError\(\w+\)|RequestError|Exception)(?:\(\w+\))?:
            (?=[ ]*(?:\[|Executor|Encountered|Failed[ ]to[ ]init|[\w.]+(?:Error|Exception):))
        |ensemble[ ]'[^']*'[ ]depends[ ]on[ ]'[^']*'[ ]which[ ]has[ ]no[ ]loaded[ ]version\.[ ]Model[ ]'[^']*'[ ]loading[ ]failed[ ]with[ ]error:[ ]version[ ]\d+[ ]is[ ]at[ ]UNAVAILABLE[ ]state:?
        |UNAVAILABLE:
    )\s*""",
    "place": r"\s*\(/?[\w./+-]+\.(?:cpp|cu|cuh|h|hpp|cc|py):\d+\)",
    # what only says that something else has failed
    "follows": r"""(?xi)
        ^(?:\S+[ ]){0,12}(?:check|see)[ ](?:the[ ])?(?:error[ ]|root[ ]|previous[ ]|stack[ ])?(?:log|cause|trace|above|below)s?\b.{0,20}$
        |^(?:see[ ]above|see[ ].{0,30}(?:log|above|below)|unknown(?:[ ]error)?|failed|error|none|null|\W*)[.!]?$
        |failed[ ]to[ ]load[ ]all[ ]models|has[ ]no[ ]loaded[ ]version|is[ ]at[ ]UNAVAILABLE[ ]state
        |MPI_ABORT|mpi(?:run|exec)[ ](?:noticed|detected|has[ ]exited|was[ ]unable[ ]to[ ]cleanly)|(?:Primary|Child)[ ]job|peer[ ]process[ ]has|PMIX?[ ]ERROR:[ ](?:UNREACHABLE|LOST)
        |remote[ ]process[ ](?:exited|has[ ]terminated)|connection[ ](?:closed|reset)[ ]by[ ](?:remote[ ])?peer|broken[ ]pipe|\bEOFError\b|ConnectionResetError|BrokenPipeError
        |(?:worker|executor|process|engine|server|task|actor|child|rank|node|stub|raylet|job)[\w\s'"\[\](),.-]{0,40}[ ](?:died|(?:was|been|is)[ ]terminated|terminated[ ]abruptly|has[ ]terminated|exited|is[ ](?:dead|shut|unhealthy|not[ ](?:healthy|ready|alive))|(?:is|has[ ]been|was)[ ](?:shut|aborted|stopped|cancel)|(?:initialization[ ])?failed[.!]?$)
        |(?:worker|executor|engine)[\w\s]{0,30}[ ](?:returned[ ]error|failed[ ]to[ ](?:start|init\w*))[.!]?$|BrokenProcessPool|BrokenExecutor|ChildFailedError|ProcessExitedException|ProcessRaisedException[:]?$|RayActorError|ActorDiedError|EngineDeadError
        |(?:engine|model)[ ]?(?:building|build|loading|creation|initialization)[ ]failed[ ,.]*(?:please|see|check|$)
        |non-?graceful[ ]termination|non-zero[ ](?:exit|status)|exited?[ ]with[ ](?:exit[ ])?(?:code|status)|return(?:ed|[ ]code)[ ](?:code[ ])?[1-9]\d*[.]?$|^exit[ ](?:code|status)
        |shutting[ ]down|shutdown|all[ ]models[ ]are[ ]stopped|cancel+ed|KeyboardInterrupt|SystemExit|aborted[ ]\(core|^aborted$|aborting|^waiting[ ]for|tearing[ ]down
        |CalledProcessError|subcommand[ ]failed|ninja:[ ]build[ ]stopped|make(?:\[\d+\])?:[ ]\*\*\*|configuring[ ]incomplete|gmake|failed[ ]building[ ]wheel|could[ ]not[ ]build[ ]wheels|ld[ ]returned|compilation[ ]terminated
        |requests?[ ]failed|^(?:\S+[ ])*Internal[ ]Server[ ]Error$|back-off[ ]restarting|step[ ]function[ ]failed|forward[ ]function[.]?$|will[ ](?:be[ ])?(?:retr|terminat|abort|continu)|\bignor(?:ing|ed)\b|\bskipping\b|\bfall(?:ing|s)?[ ]back\b|exitcode|did[ ]not[ ]complete[ ]successfully|exception[ ]was[ ]never[ ]retrieved|exception[ ]in[ ](?:thread|ASGI|callback)|exception[ ]ignored|rank[ ]\d+[ ]failed$|not[ ](?:become[ ])?ready[ ](?:with)?in|not[ ]ready[ ]after
        |Process[ ]received[ ]signal|End[ ]of[ ]error[ ]message|Failing[ ]at[ ]address|core[ ]dumped|Signal[ ]code:|\(\d+[ ]sub-exceptions?\)|leaked[ ](?:semaphore|shared)|resource_tracker|destroy_process_group
        |^executing[ ]trt[ ]engine[ ]failed|^an?[ ](?:unknown[ ]|unexpected[ ])?(?:error|exception)[ ](?:occurred|was)[^:]*$|^(?:assertion[ ]failed|failed[ ]to[ ](?:load|create|start|run|build)(?:[ ](?:the|a))?[ ]?(?:model|engine|server|instance|executor)s?)[.:]?$
        """,
    # what says hardly more than that something is wrong
    "bare": r"""(?x)'NoneType'[ ]object|^AssertionError:?$
        |Signal:|[Ss]ignal[ ]\(?\d+\)?|Segmentation[ ]fault|Floating[ ]point[ ]exception|exited[ ]on[ ]signal|^\s*(?:\S+[ ]line[ ]\d+:[ ]+\d+[ ])?Killed\b|Illegal[ ]instruction|Bus[ ]error|OOMKilled|^\w+\(\):[ ]\w+|double[ ]free|\b5\d\d[ ](?:Server|Internal)[ ]|SIG(?:SEGV|KILL|ABRT|BUS|ILL|TERM)
        |Failed[ ]to[ ]deserialize[ ]cuda[ ]engine|subprocess-exited-with-error|metadata-generation-failed|terminate[ ]called|TimeoutError$|[Ss]erver[ ]disconnected|[Dd]eadline[ ]exceeded|[Tt]imed[ ]out[ ]waiting|RemoteDisconnected|[Cc]onnection[ ]refused|failed[ ]to[ ]connect[ ]to[ ]all|unhandled[ ](?:cuda|system)[ ]error|^std::exception$|[Uu]nknown[ ]error|unspecified[ ]launch|an[ ]illegal[ ]memory[ ]access
        """,
    "killed": r"OOMKilled|Bus error|exited on signal|\bKilled\b|SIGKILL|Signal: \w|[Ss]ignal \(\d+\) received|Segmentation fault|Floating point exception|Illegal instruction",
    # what is often caught and told better: preferred to nothing in a chain
    "terse": r"^(?:KeyError: \S+|(?:IndexError|StopIteration|StopAsyncIteration|AttributeError)\b.*)$",
    # how programs speak of an error
    "own": r"""(?x)Assertion[ ](?:.{0,80}[ ])?failed|Assertion[ ]`|what\(\):|\bterminate[ ]called
        |(?:^|:[ ]|\)[ ])(?:fatal[ ])?error(?:[ ]?[A-Z]+\d+)?:[ ]\S|^E:[ ]\S|^Error[ ]\w+ing\b|^Warning[ ]{2,}Failed|\bUCX[ ]+ERROR|OOMKilled|Bus[ ]error
        |^(?:free|malloc|realloc|munmap_chunk)\(\)|double[ ]free|corrupted[ ](?:size|double)|stack[ ]smashing
        |^Error:[ ]\S|^ERROR:?[ ]\S|^(?:fatal|FATAL|panic|Fatal[ ]\w+[ ]error):|\bpanicked[ ]at
        |[Ff]ailed[ ]to[ ]load[ ]'|Failed[ ]to[ ]create[ ]instance|Poll[ ]failed[ ]for[ ]model|libprotobuf[ ]ERROR|UNAVAILABLE:
        |CUDA[ ](?:runtime[ ]|driver[ ])?error|Cuda[ ]failure|NCCL[ ]WARN|NCCL[ ]error|\bCU(?:DA_ERROR|BLAS_STATUS|DNN_STATUS)_\w+|Error[ ]Code[ ]\d+|NVRM:[ ]Xid
        |(?:PRTE|ORTE|PMIX|OPAL)[ ]ERROR|An[ ]error[ ]occurred[ ]in[ ]MPI_|\[StatusCode\.\w+\]|^\{?"?(?:error|detail)"?:[ ]?["{\[]|"object":[ ]?"error"|CMake[ ]Error|nvcc[ ]fatal|^\S*\bld:[ ]\S|undefined[ ](?:reference|symbol)
        |:[ ]command[ ]not[ ]found$|error[ ]while[ ]loading[ ]shared[ ]libraries|symbol[ ]lookup[ ]error|Error[ ]response[ ]from[ ]daemon|executable[ ]file[ ]not[ ]found
        |^(?:[\w./-]*sh|\S+\.sh|python3?|mpirun|tritonserver|ls|cp|mkdir):.*(?:No[ ]such[ ]file|Permission[ ]denied|cannot[ ]|not[ ]found)|can't[ ]open[ ]file|GGML_ASSERT|error[ ]loading[ ]model
        |Out[ ]of[ ]memory:[ ]Kill|oom-kill|^(?:\S+[ ]line[ ]\d+:[ ]+\d+[ ])?Killed\b|Signal:[ ]\w|Signal[ ]\(\d+\)[ ]received|[Cc]aught[ ]signal|Segmentation[ ]fault|Floating[ ]point[ ]exception|Illegal[ ]instruction|exited[ ]on[ ]signal|Unhandled[ ]exception[ ]caught
        """,
    "faint": r"(?i)\b(?:cannot|could not|can't|couldn't|unable to|failed|failure|not (?:yet )?supported|unsupported|not found|no such"
    r"|mismatch|must (?:be|not|have|match)|expected|invalid|exceed\w*|denied|refused|not enough|insufficient|missing|incompatible|already (?:filled|in use|taken)"
    r"|does(?: not|n't) (?:match|exist|support|have|satisfy)|too (?:large|long|many|small|old|few)|out of memory|no space|error)\b",
    "titled": r"^CMake Error.*:$",
    "said": r"Error Code|Assertion|: \S|\d{2}",
    "warning": r"^(?:\S+:\d+: )?\w*Warning: |^WARNING|^warning: |^Warning\b(?!  )",
    "passed on": r"^\||^ERROR:?\s|\{\"(?:error|detail|object)\": ?[\"{\[]|^\[StatusCode|Error code: \d{3}|\b(?:BadRequest|InternalServer|APIStatus|APIConnection)Error\b|InferenceServerException: ",
    "harmless": r"(?i)exception ignored|falling back|skipping|optional",
    "calm": r"(?i)\b(?:0|no) (?:errors?|failures?|failed)\b|\bretry(?:ing)?\b|\berrors?=0|failed: 0|error rate|if .{0,40}(?:fails?|error)",
    "network": r"^(?:urllib3|requests|http\.client|httpcore|httpx|socket|ConnectionRefusedError|ConnectionError|OSError: \[Errno 1\d\d\]|TimeoutError)",
}


@cache
def _compiled(name: str) -> re.Pattern[str]:
    return re.compile(_PATTERNS[name])


def statements(lines: Sequence[str], noise: Container[int] = ()) -> list[Statement]:
    """All statements of a log, in their order. Of `noise` nothing but the time is read."""
    parsed = list(_parsed(lines, noise))
    chains, inside = _tracebacks(parsed)
    found = [_of_chain(chain) for chain in chains]
    heads = {chain.first: chain for chain in chains}
    ruled = False
    for line in parsed:
        each = None if line.index in inside else _of_line(line, parsed[line.index + 1 : line.index + 3], ruled=ruled)
        ruled = line.body.startswith("--------------------")
        if each is not None and (each.grade is Grade.BARE or not _announces(line, heads)):
            found.append(replace(each, last=max(each.last, _end(parsed, line.index, inside))))
    return sorted(found, key=lambda each: each.index)


def _end(lines: Sequence[_Line], index: int, inside: set[int]) -> int:
    """The last line of what begins at `index`: indented lines below it go on with it."""
    last = index
    for line in lines[index + 1 : index + _PARAGRAPH]:
        deeper = line.indent > lines[index].indent and not line.severity and line.index not in inside
        if not deeper or not line.body.strip() or _compiled("frame").search(line.body):
            break
        last = line.index
    return last


def _announces(line: _Line, heads: Mapping[int, _Raised]) -> bool:
    """Whether a line says no more than that the traceback below it follows."""
    below = next((heads[line.index + n] for n in (0, 1, 2) if line.index + n in heads), None)
    if below is None or below.harmless or line.index >= below.said[0][0]:
        return False
    said = _compiled("head").sub("", unwrapped(line.body)).strip()
    if any(said and said in text for _, text in below.said):
        return True
    return _compiled("said").search(said) is None and len(said.split()) <= 12


def first_statement(found: Sequence[tuple[int, Statement]]) -> tuple[int, Statement] | None:
    """The one that says the first cause, of (log, statement) pairs: the most particular, then the earliest."""
    told = [(log, each) for log, each in found if each.grade < Grade.WARNED]
    if not told:
        return None
    best = min(each.grade for _, each in told)
    told = [(log, each) for log, each in told if each.grade is best]
    if best is Grade.FAINT:
        told = _last_together(told)
    firsts: dict[int, Statement] = {}
    for log, each in told:
        if log not in firsts or each.index < firsts[log].index:
            firsts[log] = each
    timed = len({each.when[:1] for each in firsts.values()}) == 1
    return min(firsts.items(), key=lambda pair: (pair[1].when if timed else (), pair[0], pair[1].index))


def _last_together(told: Sequence[tuple[int, Statement]]) -> list[tuple[int, Statement]]:
    """Of what may be harmless, what was said last and at once: a program that ends says why at its end."""
    together = [told[-1]]
    for log, each in reversed(told[:-1]):
        if log != together[-1][0] or together[-1][1].index - each.last > 2:
            break
        together.append((log, each))
    return together


def _parsed(lines: Sequence[str], noise: Container[int]) -> Iterator[_Line]:
    when: tuple[str, ...] = ()
    prefix = _compiled("prefix")
    for index, text in enumerate(lines):
        stream = severity = ""
        place = 0
        shouted = False
        while (found := prefix.match(text, place)) and found.end() > place:
            place = found.end()
            kind = found.lastgroup
            if kind in {"tag", "rank", "actor", "pod"}:
                stream += found[0].strip()
            elif kind in {"torch", "tf"}:
                severity = found[kind][0]
            elif kind == "glog":
                severity = found[0][0]
                when = (kind, found[0][1:3], found[0][3:5], found["clocked"]) if found["clocked"] else when
            elif kind == "iso":
                when = (kind, found["iso"][5:7], found["iso"][8:10], found["iso"][11:].replace(",", "."))
            elif kind == "us":
                when = (kind, found["us"][:2], found["us"][3:5], found["us"][11:])
            elif kind is not None:
                shouted = found["level3"] == "ERROR" and found.start() == 0
                level = found["level1"] or found["level2"] or found["level3"] or found["loguru"] or ""
                severity = "E" if level[:1] in {"E", "F", "C"} else level[:1]
                if found["day"]:
                    when = (kind, found["day"][:2], found["day"][3:], found["clock"])
        body = "" if index in noise else flattened(text[place : place + _LONGEST].rstrip())
        yield _Line(index, stream, "E" if severity == "F" else severity, body, when, shouted)


def flattened(text: str) -> str:
    """Of several lines that were written as one, with escaped line ends, the one that says something."""
    if r"\n" not in text:
        return text
    parts = [part for part in text.split(r"\n") if part.strip()]
    if any(_compiled("head").search(part) for part in parts):
        raised = [part for part in parts if _compiled("exception").match(part.strip())]
        return raised[0].strip() if raised else ""
    return parts[0]


def _tracebacks(lines: Sequence[_Line]) -> tuple[list[_Raised], set[int]]:
    """Chains of tracebacks, and the lines that belong to any."""
    done: list[_Raised] = []
    inside: set[int] = set()
    reading: dict[str, _Traceback] = {}
    chains: dict[str, _Raised] = {}
    headed: _Line | None = None
    above: dict[str, _Line] = {}
    for line in lines:
        body = line.body.strip().strip('"')
        if headed is not None and line.index == headed.index + 1 and headed.stream and not line.stream:
            # Only the head was written by a logger.
            reading[line.stream] = reading.pop(headed.stream)
        before, chain = reading.get(line.stream), chains.get(line.stream)
        if _compiled("head").search(line.body):
            alone = line.body.lstrip().startswith(("Traceback", "Exception Group"))
            harmless = any(map(_harmless, filter(None, (line, above.get(line.stream)))))
            reading[line.stream], headed = _Traceback(line.index, line.indent if alone else 0, harmless), line
            if chain is not None:
                chain.open = False
            if alone or body.startswith("Traceback"):
                inside.add(line.index)
        elif before is not None:
            if not body or line.indent > before.indent or _compiled("frame").search(line.body):
                inside.add(line.index)
            elif _compiled("exception").match(body) and line.severity != "I":
                inside.add(line.index)
                del reading[line.stream]
                if chain is None or not chain.linked:
                    chain = chains[line.stream] = _Raised(before.first, before.harmless, when=line.when)
                    done.append(chain)
                chain.add(line.index, body)
            else:
                before.strangers += 1
                if before.strangers > 60:
                    del reading[line.stream]
        elif chain is not None:
            if _compiled("link").search(body):
                chain.linked = True
                inside.add(line.index)
            elif chain.linked and _compiled("exception").match(body):
                chain.add(line.index, body)
                inside.add(line.index)
            elif chain.open and body and not line.severity and line.index - chain.last <= 6 and _goes_on(line):
                chain.last = line.index
                chain.more.append(body)
                inside.add(line.index)
            elif body:
                chain.open = False
        above[line.stream] = line
    return done, inside


def _harmless(above: _Line) -> bool:
    """Whether a line above a traceback says that the program goes on without what failed."""
    warned = above.severity == "W" and above.body.endswith(":")
    return warned or _compiled("harmless").search(above.body) is not None


def _goes_on(line: _Line) -> bool:
    """Whether a line below an exception goes on with its message."""
    body = line.body.strip()
    another = any(_compiled(name).search(body) for name in ("exception", "own", "named"))
    return not (another or line.stream or _compiled("frame").search(line.body))


def _of_chain(chain: _Raised) -> Statement:
    """Of exceptions that came from one another, the first that says something."""
    graded = [
        (_grade_raised(text), _compiled("terse").match(text) is not None, *said)
        for said in chain.said
        for text in said[1:]
    ]
    grade, _, index, text = min(graded, key=lambda each: each[:3])
    if chain.harmless:
        grade = max(grade, Grade.WARNED)
    if (text.endswith(":") or "validation error" in text) and index == chain.said[-1][0]:
        text = " ".join([text, *chain.more])
    return Statement(grade, index, chain.first, chain.last, unwrapped(text), chain.when)


def _grade_raised(text: str) -> Grade:
    residue = unwrapped(text)
    if _compiled("follows").search(residue) or _compiled("follows").search(text):
        return Grade.FOLLOWS
    if _compiled("bare").search(text):
        return Grade.BARE
    if _compiled("passed on").search(text):
        return Grade.PASSED_ON
    return Grade.OWN if residue.partition(":")[2].strip() or " " in residue else Grade.BARE


def _of_line(line: _Line, below: Sequence[_Line], *, ruled: bool) -> Statement | None:
    """What a line outside of tracebacks states, or one `below`, where it is a title.

    `ruled`: a rule stands before it, as mpirun draws them around its help.
    """
    body = line.body.strip()
    if not body or _compiled("frame").search(line.body):
        return None
    grade = _grade_line(body, line)
    if ruled and grade is Grade.FAINT and not body.startswith("WARNING"):
        grade = Grade.OWN
    if grade is None:
        return None
    titled = _compiled("titled").search(body)
    said = next((each for each in below if titled and each.body.strip()), line)
    return Statement(grade, said.index, line.index, said.index, unwrapped(said.body.strip()), line.when)


def _grade_line(body: str, line: _Line) -> Grade | None:
    named = _compiled("named").search(body)
    own = named or line.severity == "E" or _compiled("own").search(body)
    if not own and (not _compiled("faint").search(body) or _compiled("calm").search(body)):
        return None
    residue = unwrapped(body)
    if _compiled("follows").search(residue) and not (own and _compiled("killed").search(body)):
        return Grade.FOLLOWS
    if own and _compiled("bare").search(residue):
        return Grade.BARE
    if line.severity == "W" or _compiled("warning").search(body):
        return Grade.WARNED
    if not own:
        return None if line.severity else Grade.FAINT
    if line.severity == "I" and not named:
        return Grade.FAINT
    passed_on = _compiled("passed on").search(body) or (line.shouted and not named)
    return Grade.PASSED_ON if passed_on else Grade.OWN


def unwrapped(text: str) -> str:
    """The innermost words of a line: without what loggers and other processes put around them, and without its place."""
    wrapper = _compiled("wrapper")
    while (found := wrapper.match(text)) and found.end():
        text = text[found.end() :]
    return _compiled("place").sub("", text).strip().rstrip('"')
