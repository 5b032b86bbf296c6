"""Files exchanged between the pipeline and nodes that do not share its workspace, at an fsspec URL
(`settings.cluster.exchange`).

    URL/artifacts/DIGEST/            an input artifact of a job, by the BLAKE3 of its manifest, which is sent last
    URL/parcels/NAME/parcel.json     a job, and its input artifacts and files
    URL/parcels/NAME/files/INPUT/    an input file of the user
    URL/parcels/NAME/orders.json     see `agent`; written by the pipeline
    URL/parcels/NAME/answers.json    {"answers": see `agent`, "logs": {ID: N}, "progress": {ID: {...}}}; written by the node
    URL/parcels/NAME/log.N           the N-th piece of an attempt's log
    URL/parcels/NAME/result.json     list of an attempt's output files, which are in URL/parcels/NAME/result/

Both sides have the same directories at the same paths, and each copies the other's changes. So the executor and the agent
work as on a shared file system. `python -m trtllm_pipeline.orchestrate.clusters.exchange URL NAME` is the agent of such a
node. It keeps received artifacts on its own disk, at the workspace's path.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from blake3 import blake3

from trtllm_pipeline.base import (
    FailureClass,
    Fingerprint,
    Json,
    RemoteError,
    StageError,
    StageRunId,
    StateError,
    digest_file,
    read_object,
    reading,
    terminal,
    write_json,
    writing,
)
from trtllm_pipeline.orchestrate.clusters import agent
from trtllm_pipeline.orchestrate.run import file_views
from trtllm_pipeline.orchestrate.run.executor import Job, Usage, read_job
from trtllm_pipeline.orchestrate.store import claims, manifest
from trtllm_pipeline.orchestrate.store.claims import Claim
from trtllm_pipeline.orchestrate.store.index import LOG
from trtllm_pipeline.orchestrate.store.manifest import FileEntry, Kind, Manifest
from trtllm_pipeline.orchestrate.store.remote_store import NotTransferableError, Progress, Remote
from trtllm_pipeline.tensorrt import JOB, OUT, PROGRESS_FILE, failure

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_S: Final = 1.0
_PATIENCE_S: Final = 300.0
"""How long to retry a URL that does not respond."""
_PARCELS: Final = "parcels"
_PARCEL: Final = "parcel.json"
_ANSWERS: Final = agent.ANSWERS
_RESULT: Final = "result.json"
_LEFT: Final = "result"
_NAME: Final = "parcel"
"""The file with the parcel's name among an attempt's orders. A node that finds it is on the pipeline's own machine."""
_CLAIM: Final = ".agent"
"""Suffix of the file with which an agent claims an attempt on its node."""
_FILES: Final = "files"
"""Directory of an attempt on a node: copies of users' files."""


def _at(name: str, file: str) -> str:
    return f"{_PARCELS}/{name}/{file}"


def _parcel_name(name: str, attempt: Path) -> str:
    """Return the parcel name of another attempt of the agent that has the parcel `name`."""
    return f"{attempt.name}-{name.rpartition('-')[2]}"


def _artifact(content: bytes) -> str:
    """Return the path of the artifact with this manifest."""
    return f"artifacts/{blake3(content).hexdigest()}"


def _contents(files: Sequence[FileEntry], records: Sequence[FileEntry] = ()) -> Manifest:
    """Return a manifest of files that are sent and fetched without an artifact."""
    return Manifest("", Fingerprint(""), "", "", tuple(files), {}, tuple(records))


@dataclass(slots=True, eq=False)
class _Mail:
    """The exchange with one agent."""

    attempt: Path
    name: str
    attempts: dict[StageRunId, Path] = field(default_factory=dict)
    ordered: bytes = b""
    """The orders at the URL."""
    answered: bytes = b""
    """The last processed answers."""
    pieces: dict[str, int] = field(default_factory=dict)
    """Number of processed pieces of each log."""
    fetched: set[str] = field(default_factory=set)
    sending: list[Future[None]] = field(default_factory=list)
    failed: dict[str, Json] = field(default_factory=dict)
    """Our own answers, for failed transfers."""
    copying: Future[None] | None = None
    copied_s: float = -math.inf
    """Start of the last finished copy."""
    silent_since: float | None = None
    over: threading.Event = field(default_factory=threading.Event)
    progress: Progress = field(default_factory=Progress)

    def end(self) -> None:
        self.over.set()
        self.progress.stopped = True


def _may_pass(error: BaseException) -> bool:
    """Return True if a retry may succeed: the URL does not respond, or a disk fails."""
    return isinstance(error, (RemoteError, OSError)) and not isinstance(error, NotTransferableError)


def _patiently(do: Callable[[], T], over: threading.Event | None = None) -> T:
    """Return the result of `do`. Retries for some minutes while the URL does not respond and `over` is not set."""
    until, over = time.monotonic() + _PATIENCE_S, over or threading.Event()
    while True:
        try:
            return do()
        except NotTransferableError:
            raise
        except RemoteError:
            if time.monotonic() > until or over.wait(_POLL_S):
                raise


class Exchange:
    """The pipeline's side."""

    def __init__(self, url: str) -> None:
        """Raises UsageError for an invalid URL."""
        self._url = url
        self._remote = Remote(url)
        self._remote.check_writable()
        self._mail: dict[Path, _Mail] = {}
        self._pool = ThreadPoolExecutor(8, "exchange")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._copy_all, name="exchange", daemon=True)
        self._thread.start()

    def post(self, job: Job, attempt: Path) -> None:
        """Send a job and its inputs to the agent of `attempt`."""
        mail = self._mail.get(attempt)
        if mail is None:  # random part: other workspaces have attempts of this name
            mail = self._mail[attempt] = _Mail(attempt, f"{attempt.name}-{secrets.token_hex(4)}")
            (agent.folder_of(attempt) / _NAME).write_text(mail.name, encoding="utf-8")
        mail.attempts[job.id] = Path(job.attempt)
        mail.sending.append(self._pool.submit(self._send, mail, job))

    def command(self, attempt: Path) -> tuple[str, ...]:
        """Return the command that runs the agent of an attempt on a node."""
        return (sys.executable, "-m", __name__, self._url, self._mail[attempt].name)

    def is_copying(self, attempt: Path, since_s: float) -> bool:
        """Return True if answers of an agent from before `since_s` may still be in transit."""
        return self._mail[attempt].copied_s < since_s

    def drop(self, attempt: Path) -> None:
        """Forget an agent that has ended, and remove its parcels."""
        mail = self._mail.pop(attempt)
        mail.end()
        self._pool.submit(self._remove, mail)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for mail in self._mail.values():
            mail.end()
        self._pool.shutdown()
        self._remote.close()

    def _remove(self, mail: _Mail) -> None:
        # Transfers in progress would arrive after the removal. They were queued earlier, so the pool runs them first.
        wait([*mail.sending, *([mail.copying] if mail.copying else [])])
        for each in mail.attempts.values():
            with suppress(RemoteError):
                self._remote.remove(f"{_PARCELS}/{_parcel_name(mail.name, each)}")

    def _send(self, mail: _Mail, job: Job) -> None:
        try:
            _patiently(partial(self._send_parcel, mail, job), mail.over)
        except Exception as error:  # noqa: BLE001  the pool would hide it, and the job would wait forever
            self._fail(mail, job.id, f"{job.stage}: its inputs cannot be sent: {agent.message_of(error)}")

    def _send_parcel(self, mail: _Mail, job: Job) -> None:
        artifacts: list[Json] = []
        for path in {*job.inputs.values(), *job.viewed.values()}:
            folder = Path(path).parent
            if Path(path).name == OUT and (folder / manifest.NAME).is_file():
                sealed = manifest.read(folder)
                content = reading.read_bytes(folder / manifest.NAME)
                place = _artifact(content)
                if self._remote.read(f"{place}/{manifest.NAME}") is None:
                    self._remote.send_files(place, folder, sealed, mail.progress)
                    self._remote.write(f"{place}/{manifest.NAME}", content)
                artifacts.append([str(folder), content.decode()])
        files: dict[str, Json] = {}
        for each, path in job.files.items():
            entry = FileEntry(Path(path).name, Path(path).stat().st_size, digest_file(Path(path)))
            place = _at(_parcel_name(mail.name, Path(job.attempt)), f"{_FILES}/{each}")
            self._remote.send_files(place, Path(path).parent, _contents((), [entry]), mail.progress)
            files[each] = manifest.listed([entry])
        shown: dict[str, Json] = {
            each: [str(file.relative_to(job.inputs[each])) for file in manifest.walk(Path(job.inputs[each]))]
            for each in job.viewed
        }
        parcel: dict[str, Json] = {"job": reading.read_text(Path(job.attempt) / JOB), "artifacts": artifacts}
        name = _parcel_name(mail.name, Path(job.attempt))
        self._remote.write(_at(name, _PARCEL), writing.object_text({**parcel, "files": files, "views": shown}).encode())

    def _fail(self, mail: _Mail, run: str, why: str) -> None:
        failure.write(mail.attempts[StageRunId(run)], StageError(why, failure=FailureClass.TRANSIENT))
        mail.failed[run] = {"failed": True, "usage": asdict(Usage(0.0, 0.0, 0))}

    def _copy_all(self) -> None:
        while not self._end.wait(_POLL_S):
            for mail in list(self._mail.values()):
                if mail.copying is None or mail.copying.done():
                    mail.copying = self._pool.submit(self._copy_of, mail)

    def _copy_of(self, mail: _Mail) -> None:
        begun_s = time.monotonic()
        try:
            self._copy(mail)
        finally:
            mail.copied_s = begun_s

    def _copy(self, mail: _Mail) -> None:
        folder, now = agent.folder_of(mail.attempt), time.monotonic()
        try:
            orders = reading.read_bytes(folder / agent.ORDERS)
            if orders != mail.ordered:
                self._remote.write(_at(mail.name, agent.ORDERS), orders)
                mail.ordered = orders
            content = self._remote.read(_at(mail.name, _ANSWERS)) or mail.answered
            if content != mail.answered:
                self._process(mail, json.loads(content))
                mail.answered = content
            mail.silent_since = None
        except FileNotFoundError:  # it has ended
            return
        except Exception as error:  # noqa: BLE001  the pool would hide it
            logger.debug("%s", error)
            mail.silent_since = mail.silent_since or now
            if now - mail.silent_since > _PATIENCE_S:
                for run in mail.attempts.keys() - mail.fetched:
                    self._fail(mail, run, f"no answer from its node: {agent.message_of(error)}")
        if mail.failed:
            answers = read_object(folder / agent.ANSWERS) or {"ended": {}}
            answers["ended"] = {**mail.failed, **answers["ended"]}
            write_json(folder / agent.ANSWERS, answers)

    def _process(self, mail: _Mail, message: Mapping[str, Any]) -> None:
        for run, number in message["logs"].items():
            attempt = mail.attempts[run]
            for piece in range(mail.pieces.get(run, 0), 0 if run in mail.fetched else number):
                content = self._remote.read(_at(_parcel_name(mail.name, attempt), f"log.{piece}")) or b""
                with (attempt / LOG).open("ab") as log:
                    log.write(content)
                mail.pieces[run] = piece + 1
        for run, progress in message["progress"].items():
            write_json(mail.attempts[run] / PROGRESS_FILE, progress)
        for run in message["answers"]["ended"].keys() - mail.fetched:
            attempt = mail.attempts[run]
            self._fetch(attempt, _parcel_name(mail.name, attempt), agent.folder_of(mail.attempt) / OUT)
            mail.fetched.add(run)
        write_json(agent.folder_of(mail.attempt) / agent.ANSWERS, message["answers"])

    def _fetch(self, attempt: Path, name: str, place: Path) -> None:
        """Fetch the output of an attempt from its node into its directory here."""
        left = json.loads(self._remote.read(_at(name, _RESULT)) or b"{}")
        sealed = _contents(manifest.entries(left["files"]), manifest.entries(left["records"]))
        shutil.rmtree(place, ignore_errors=True)
        self._remote.fetch_files(_at(name, _LEFT), place, sealed, Progress())
        for entry in sealed.records:
            (attempt / entry.path).parent.mkdir(parents=True, exist_ok=True)
            (place / entry.path).replace(attempt / entry.path)
        if sealed.files:
            shutil.rmtree(attempt / OUT, ignore_errors=True)
            (place / OUT).rename(attempt / OUT)
        shutil.rmtree(place)


@dataclass(slots=True)
class _Node:
    """A node's side, for one agent."""

    remote: Remote
    name: str
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4))
    attempts: dict[StageRunId, Path] = field(default_factory=dict)
    unpacked: dict[str, Future[Job]] = field(default_factory=dict)
    """Unpacked jobs by their directories in the orders."""
    sent: dict[StageRunId, Future[bool]] = field(default_factory=dict)
    """Ended stage runs: whether they have failed."""
    logged: dict[StageRunId, tuple[int, int]] = field(default_factory=dict)
    """Bytes and pieces of each log that were sent."""
    answered: bytes = b""
    """The last answers that were sent."""
    over: threading.Event = field(default_factory=threading.Event)
    progress: Progress = field(default_factory=Progress)
    claimed: dict[Path, Claim] = field(default_factory=dict)
    """Claimed attempts on this node. Other agents do not remove them while this one lives."""
    ending: bool = False
    """True if the agent was stopped because its inputs are missing."""

    def run(self) -> None:
        """Run the agent and send its answers."""
        attempt = Path(json.loads(_patiently(partial(self.parcel, self.name))["job"])["attempt"])
        folder = agent.folder_of(attempt)
        known = folder / _NAME
        if known.is_file() and known.read_text(encoding="utf-8") == self.name:  # the pipeline's own machine
            agent.run(attempt)
            return
        for path in attempt.parent.glob(f"*{_CLAIM}"):  # left by killed agents
            if (claim := claims.take(path)) is not None:
                _remove(path.with_name(path.name.removesuffix(_CLAIM)), claim)
        try:
            job = _patiently(partial(self.unpack, self.name))
            self.attempts[job.id] = attempt
            folder.mkdir()
            _patiently(partial(self.take_orders, folder))
            copier = threading.Thread(target=self.copy, args=(folder,))
            copier.start()
            try:
                agent.run(attempt)
            finally:
                self.over.set()
                copier.join()
        finally:
            self.over.set()
            self.progress.stopped = True
            self.pool.shutdown()
            for each, held in self.claimed.items():
                _remove(each, held)

    def parcel(self, name: str) -> dict[str, Any]:
        """Wait for a parcel. The job's inputs are sent before it. Raises StateError if it will not arrive."""
        orders, heard_s = b"", time.monotonic()
        while (content := self.remote.read(_at(name, _PARCEL))) is None:
            now = self.remote.read(_at(self.name, agent.ORDERS)) or b""
            if now != orders:
                orders, heard_s = now, time.monotonic()
            if time.monotonic() - heard_s > _PATIENCE_S:
                raise StateError(f"{name}: no parcel and no sign of life from the pipeline for {_PATIENCE_S:g} s")
            if self.over.wait(_POLL_S):
                raise StateError(f"{name}: its agent has ended")
        parcel: dict[str, Any] = json.loads(content)
        return parcel

    def unpack(self, name: str) -> Job:
        """Create an attempt's directory as on the pipeline's machine."""
        parcel = self.parcel(name)
        attempt = Path(json.loads(parcel["job"])["attempt"])
        self.claim(attempt)
        for folder, sealed in parcel["artifacts"]:
            self.keep(Path(folder), sealed.encode(), attempt.parent)
        shutil.rmtree(attempt, ignore_errors=True)
        (attempt / OUT).mkdir(parents=True)
        (attempt / JOB).write_text(parcel["job"], encoding="utf-8")
        job = read_job(attempt / JOB)
        moved = dict[str, str]()
        for each, listed in parcel["files"].items():
            (entry,) = manifest.entries(listed)
            place = _at(name, f"{_FILES}/{each}")
            self.remote.fetch_files(place, attempt / _FILES / each, _contents((), [entry]), self.progress)
            moved[job.files[each]] = str(attempt / _FILES / each / entry.path)
        for each, files in parcel["views"].items():
            file_views.make(attempt, each, Path(job.viewed[each]), files)
        job = replace(
            job,
            files={each: moved[path] for each, path in job.files.items()},
            commands=tuple(tuple(moved.get(word, word) for word in command) for command in job.commands),
        )
        job.write(attempt / JOB)
        return job

    def claim(self, attempt: Path) -> None:
        """Claim an attempt's directories for this agent: another pipeline may use the same workspace path and name."""
        if attempt not in self.claimed:
            attempt.parent.mkdir(parents=True, exist_ok=True)
            self.claimed[attempt] = self.taken(attempt.with_name(f"{attempt.name}{_CLAIM}"))
            shutil.rmtree(agent.folder_of(attempt), ignore_errors=True)

    def taken(self, path: Path) -> Claim:
        """Wait for the claim on `path`. Raises StateError if the agent ends before."""
        while (claim := claims.take(path)) is None:
            if self.over.wait(_POLL_S):
                raise StateError(f"{path.name}: its agent has ended")
        return claim

    def keep(self, folder: Path, content: bytes, work: Path) -> None:
        """Fetch an artifact into `folder`, unless it is there and undamaged."""
        sealed = manifest.decode(content, folder.parent.name, folder.name, str(folder))
        with self.taken(work / f"{folder.name}.lock"):
            if not any(each.kind is Kind.DAMAGED for each in manifest.inspect(folder, contents=False)):
                return
            arriving = work / f"{folder.name}.arriving"
            shutil.rmtree(arriving, ignore_errors=True)
            self.remote.fetch_files(_artifact(content), arriving, sealed, self.progress)
            (arriving / manifest.NAME).write_bytes(content)
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            arriving.rename(folder)

    def copy(self, folder: Path) -> None:
        """Copy orders and answers until all the agent's answers are sent."""
        silent_since: float | None = None
        while True:
            over = self.over.wait(_POLL_S)
            try:
                self.take_orders(folder)
                everything = self.say(folder)
                silent_since = None
                if over and everything:
                    return
            except Exception as error:  # noqa: BLE001  the agent needs this thread, and a failure would go unnoticed
                silent_since = silent_since or time.monotonic()
                while_it_runs = _may_pass(error) and not over
                if not while_it_runs and time.monotonic() - silent_since > _PATIENCE_S:
                    self.give_up(f"its output cannot be sent: {agent.message_of(error)}")
                    if over:
                        return

    def give_up(self, why: str) -> None:
        """End the agent once, with the reason."""
        if not self.ending:
            self.ending = True
            print(why, file=sys.stderr)  # noqa: T201  the pipeline reads the last line of the task
            os.kill(os.getpid(), signal.SIGTERM)

    def take_orders(self, folder: Path) -> None:
        """Give the agent its orders, and each job when its inputs have arrived."""
        orders = json.loads(self.remote.read(_at(self.name, agent.ORDERS)) or b"{}")
        here: list[Json] = []
        for each in orders.get("jobs", ()):
            if each not in self.unpacked:
                unpack = partial(self.unpack, _parcel_name(self.name, Path(each)))
                self.unpacked[each] = self.pool.submit(_patiently, unpack, self.over)
            if not self.unpacked[each].done():
                break
            if error := self.unpacked[each].exception():
                self.give_up(f"{each}: its inputs cannot be fetched: {error}")
                break
            self.attempts[self.unpacked[each].result().id] = Path(each)
            here.append(each)
        write_json(folder / agent.ORDERS, {**orders, "jobs": here})

    def say(self, folder: Path) -> bool:
        """Send answers, logs and progress. Returns whether all output is sent."""
        answers = read_object(folder / agent.ANSWERS)
        if answers is None:
            return True
        for run, ended in answers["ended"].items():
            failed = run in self.sent and self.sent[run].done() and self.sent[run].exception()
            if run not in self.sent or (failed and _may_pass(failed) and not self.over.is_set()):
                sending = partial(self.send, self.attempts[run], failed=ended["failed"])
                self.sent[run] = self.pool.submit(_patiently, sending)
        done = {run: future.result() for run, future in self.sent.items() if future.done()}
        ended = {run: {**answers["ended"][run], "failed": failed} for run, failed in done.items()}
        for run in self.attempts.keys() - done.keys():
            self.say_log(run)
        content = writing.object_text(
            {
                "answers": {**answers, "ended": ended},
                "logs": {run: pieces for run, (_, pieces) in self.logged.items()},
                "progress": {
                    run: progress
                    for run, attempt in self.attempts.items()
                    if run not in done and (progress := read_object(attempt / PROGRESS_FILE)) is not None
                },
            }
        ).encode()
        if content != self.answered:
            self.remote.write(_at(self.name, _ANSWERS), content)
            self.answered = content
        return len(done) == len(answers["ended"])

    def say_log(self, run: StageRunId) -> None:
        size, pieces = self.logged.get(run, (0, 0))
        attempt = self.attempts[run]
        with suppress(FileNotFoundError), (attempt / LOG).open("rb") as log:
            log.seek(size)
            if content := log.read():
                self.remote.write(_at(_parcel_name(self.name, attempt), f"log.{pieces}"), content)
                self.logged[run] = size + len(content), pieces + 1

    def send(self, attempt: Path, *, failed: bool) -> bool:
        """Send the output of an attempt. Returns whether it has failed."""
        shutil.rmtree(attempt / _FILES, ignore_errors=True)
        file_views.remove(attempt)
        try:
            files = () if failed else manifest.scan(attempt / OUT)
        except StateError as error:
            failure.write(attempt, StageError(error.message))
            files, failed = (), True
        records = [entry for entry in manifest.scan_records(attempt) if entry.link is None and entry.path != JOB]
        name = _parcel_name(self.name, attempt)
        self.remote.send_files(_at(name, _LEFT), attempt, _contents(files, records), Progress())
        result: dict[str, Json] = {"files": manifest.listed(files), "records": manifest.listed(records)}
        self.remote.write(_at(name, _RESULT), writing.object_text(result).encode())
        return failed


def _remove(attempt: Path, claim: Claim) -> None:
    """Remove an attempt from this node, and release its claim."""
    for folder in (attempt, agent.folder_of(attempt)):
        shutil.rmtree(folder, ignore_errors=True)
    claim.release()


def main(argv: Sequence[str]) -> int:
    """Run the agent of a parcel on this node. Returns the exit code, which does not depend on the stage."""
    url, name = argv
    agent.prepare()
    remote = Remote(url)
    try:
        return agent.exit_code(_Node(remote, name).run)
    finally:
        remote.close()


if __name__ == "__main__":
    terminal.start()
    sys.exit(main(sys.argv[1:]))
