"""Artifacts of a plan that a remote store has: what running the plan pulls instead of making it.

Only what is made is pulled. What is measured belongs to the machine that it was measured on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Fingerprint, RemoteError, Scope, StageRunId, amount, count, size
from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.orchestrate.plan.plan import Plan, to_run, wanted
from trtllm_pipeline.orchestrate.plan.request import Request
from trtllm_pipeline.orchestrate.run.loop import Observer
from trtllm_pipeline.orchestrate.store import remote_store
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.remote_store import BOUND, ArtifactKey, ArtifactTransfer, Progress, Remote
from trtllm_pipeline.orchestrate.store.store import Store

_EVERY_S: Final = 5.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Offers:
    """What a remote store has of a plan."""

    url: str
    pulls: Mapping[StageRunId, ArtifactTransfer] = field(default_factory=dict)
    """What is needed and there."""
    refused: Mapping[StageRunId, ArtifactTransfer] = field(default_factory=dict)
    """What is there and cannot be taken."""
    fault: str | None = None
    """Why nothing is known of it."""

    @property
    def size_bytes(self) -> int:
        """Of all that is to be pulled."""
        return sum(each.transfer_bytes for each in self.pulls.values())


class RemoteSource:
    """The remote store that a request names. Raises UsageError for a URL that cannot be one, and a policy without keys."""

    def __init__(self, url: str, request: Request, gpus: Collection[str]) -> None:
        self._url = url
        self._gpus = () if request.allow_other_gpu else gpus
        keys = None if request.trusted_keys is None else Path(request.trusted_keys)
        self._policy = provenance.policy(keys, required=request.require_signed)
        self._failed: set[StageRunId] = set()
        """What could not be pulled: it is made."""

    def offers(self, plan: Plan, present: Collection[Fingerprint]) -> Offers:
        """What of `plan` is pulled, where the workspace has the artifacts `present`."""
        try:
            with closing(Remote(self._url)) as there:
                return self._offers(there, plan, present)
        except RemoteError as error:
            return Offers(remote_store.shown(self._url), fault=error.message)

    def _offers(self, there: Remote, plan: Plan, present: Collection[Fingerprint]) -> Offers:
        runs = plan.stage_runs
        found: dict[StageRunId, ArtifactTransfer] = {}
        refused: dict[StageRunId, ArtifactTransfer] = {}

        def needed() -> set[StageRunId]:
            return to_run(plan, lambda run: run.fingerprint in present or run.id in found)

        # From the last stage to the first: of what an engine was made from nothing is asked for where the engine is there.
        for stage in reversed(dict.fromkeys(run.stage.name for run in runs.values())):
            keys = {
                ArtifactKey(stage, runs[each].fingerprint): each
                for each in needed() - self._failed
                if runs[each].stage.name == stage and runs[each].stage.scope is Scope.ARTIFACT and stage not in BOUND
            }
            for key, each in remote_store.offered(there, keys, self._gpus).items():
                (refused if each.state == "refused" else found)[keys[key]] = each
        # What an early answer needed, a later one may have made needless.
        read = wanted(plan).union(*(runs[each].needs for each in needed()))
        pulls = {run: found[run] for run in runs if run in found and run in read}
        return Offers(there.url, pulls, refused)

    def pull(
        self, plan: Plan, store: Store, present: Mapping[Fingerprint, Artifact], observer: Observer
    ) -> Mapping[Fingerprint, Artifact]:
        """Pull what `plan` needs; returns what is present then. What cannot be pulled is told, and left to be made.

        Raises StateError where it does not fit on the disk.
        """
        here = dict(present)
        while True:
            offers = self.offers(plan, here)
            if offers.fault is not None:
                observer.pulling(f"{offers.fault}; what is there is made here", wrong=True)
            for run, each in offers.refused.items():
                self._fail(run, each, observer)
            if not offers.pulls:
                return here
            # What it needs may be there as well where one of these cannot be pulled.
            self._pull(offers, store, here, observer)

    def _pull(self, offers: Offers, store: Store, here: dict[Fingerprint, Artifact], observer: Observer) -> None:
        run_of = {each.fingerprint: run for run, each in offers.pulls.items()}
        remote_store.check_room(store, offers.pulls.values())
        observer.pulling(f"pulling {count(len(run_of), 'artifact')} from {offers.url}, {size(offers.size_bytes)}")
        judge = partial(provenance.check, policy=self._policy, contents=False)  # every file has just been read
        progress = Progress(paced(offers.size_bytes, observer.pulling))
        elsewhere: list[ArtifactTransfer] = []
        with closing(Remote(self._url)) as there:
            try:
                for each in remote_store.pull(store, there, offers.pulls.values(), judge, progress):
                    if each.state == "refused":
                        self._fail(run_of.pop(each.fingerprint), each, observer)
                    elif each.state == "busy":
                        elsewhere.append(each)
            except RemoteError as error:
                observer.pulling(f"{error.message}; what was not pulled is made here", wrong=True)
        # Only now: two that wait for each other would hold what the other waits for.
        for each in elsewhere:
            if _wait_for_pull(store, each, observer):
                del run_of[each.fingerprint]  # it is there, or to be pulled
        here |= store.present({each.fingerprint: each.stage for each in offers.pulls.values()})
        # Also what another process makes: it is waited for as for anything that others make.
        self._failed.update(run for fingerprint, run in run_of.items() if fingerprint not in here)

    def _fail(self, run: StageRunId, each: ArtifactTransfer, observer: Observer) -> None:
        self._failed.add(run)
        observer.pulling(f"{each.id} is not pulled: {each.message}; it is made here", wrong=True)


def _wait_for_pull(store: Store, each: ArtifactTransfer, observer: Observer) -> bool:
    """Wait while another process pulls this: what it would be made of is not to be made meanwhile. False where none does."""
    arriving = store.arriving(each.stage, each.fingerprint)
    if not arriving.is_dir():
        # What somebody only had for a moment is neither made nor pulled by others.
        return store.get(each.stage, each.fingerprint) is not None or not store.is_claimed(each.fingerprint)
    observer.pulling(f"{each.id}: waiting for another process that pulls it")
    while arriving.is_dir() and store.is_claimed(each.fingerprint):
        time.sleep(_POLL_S)
    return True


def paced(total_bytes: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Takes the bytes transferred so far and says every few seconds how far it is."""
    begun = last = time.monotonic()

    def show(done_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _EVERY_S:
            last = now
            say(f"{amount(done_bytes, total_bytes, 'bytes')}, {done_bytes / 1e6 / (now - begun):.0f} MB/s")

    return show
