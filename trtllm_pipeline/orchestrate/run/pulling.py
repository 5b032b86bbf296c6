"""Artifacts of a plan that a remote store has and that a run pulls instead of building them.

Measurements are not pulled: they belong to the machine that they were taken on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Fingerprint, RemoteError, Scope, StageRunId, amount, count, size
from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.orchestrate.plan.plan import Plan, to_run, wanted
from trtllm_pipeline.orchestrate.plan.request import Request
from trtllm_pipeline.orchestrate.run.forecast import Offers
from trtllm_pipeline.orchestrate.run.loop import Observer
from trtllm_pipeline.orchestrate.store import remote_store
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.remote_store import BOUND, ArtifactKey, ArtifactTransfer, Progress, Remote
from trtllm_pipeline.orchestrate.store.store import Store

_EVERY_S: Final = 5.0
_POLL_S: Final = 0.1


class RemoteSource:
    """The remote store that a request names. Raises UsageError for an invalid URL, and a policy without keys."""

    def __init__(self, url: str, request: Request, gpus: Collection[str]) -> None:
        self._url = url
        self._gpus = () if request.allow_other_gpu else gpus
        keys = None if request.trusted_keys is None else Path(request.trusted_keys)
        self._policy = provenance.policy(keys, required=request.require_signed)
        self._failed: set[StageRunId] = set()
        """Failed pulls: these are built."""

    def offers(self, plan: Plan, present: Collection[Fingerprint]) -> Offers:
        """Return the artifacts of `plan` to pull, if the workspace has the artifacts `present`."""
        try:
            with closing(Remote(self._url)) as remote:
                return self._offers(remote, plan, present)
        except RemoteError as error:
            return Offers(remote_store.shown(self._url), fault=error.message)

    def _offers(self, remote: Remote, plan: Plan, present: Collection[Fingerprint]) -> Offers:
        runs = plan.stage_runs
        available: dict[StageRunId, ArtifactTransfer] = {}
        refused: dict[StageRunId, ArtifactTransfer] = {}

        def needed() -> set[StageRunId]:
            return to_run(plan, lambda run: run.fingerprint in present or run.id in available)

        # From the last stage to the first: if an engine is available, its inputs are not requested.
        for stage in reversed(dict.fromkeys(run.stage.name for run in runs.values())):
            keys = {
                ArtifactKey(stage, runs[each].fingerprint): each
                for each in needed() - self._failed
                if runs[each].stage.name == stage and runs[each].stage.scope is Scope.ARTIFACT and stage not in BOUND
            }
            for key, each in remote_store.offered(remote, keys, self._gpus).items():
                (refused if each.state == "refused" else available)[keys[key]] = each
        # A later response may make earlier pulls needless.
        read = wanted(plan).union(*(runs[each].needs for each in needed()))
        pulls = {run: available[run] for run in runs if run in available and run in read}
        return Offers(remote.url, pulls, refused)

    def pull(
        self, plan: Plan, store: Store, present: Mapping[Fingerprint, Artifact], observer: Observer
    ) -> Mapping[Fingerprint, Artifact]:
        """Pull artifacts that `plan` needs. Returns all present ones. Failed pulls are reported and left to be built.

        Raises StateError if they do not fit on the disk.
        """
        here = dict(present)
        while True:
            offers = self.offers(plan, here)
            if offers.fault is not None:
                observer.pulling(f"{offers.fault}; its artifacts are built here", wrong=True)
            for run, each in offers.refused.items():
                self._fail(run, each, observer)
            if not offers.pulls:
                return here
            # If a pull fails, its inputs may be available too.
            self._pull(offers, store, here, observer)

    def _pull(self, offers: Offers, store: Store, here: dict[Fingerprint, Artifact], observer: Observer) -> None:
        run_of = {each.fingerprint: run for run, each in offers.pulls.items()}
        remote_store.check_room(store, offers.pulls.values())
        observer.pulling(f"pulling {count(len(run_of), 'artifact')} from {offers.url}, {size(offers.size_bytes)}")
        judge = partial(provenance.check, policy=self._policy, contents=False)  # every file has just been read
        progress = Progress(paced(offers.size_bytes, observer.pulling))
        elsewhere: list[ArtifactTransfer] = []
        with closing(Remote(self._url)) as remote:
            try:
                for each in remote_store.pull(store, remote, offers.pulls.values(), judge, progress):
                    if each.state == "refused":
                        self._fail(run_of.pop(each.fingerprint), each, observer)
                    elif each.state == "busy":
                        elsewhere.append(each)
            except RemoteError as error:
                observer.pulling(f"{error.message}; the remaining artifacts are built here", wrong=True)
        # Only now: two invocations that wait for each other would deadlock.
        for each in elsewhere:
            if _wait_for_pull(store, each, observer):
                del run_of[each.fingerprint]  # present, or to be pulled
        here |= store.present({each.fingerprint: each.stage for each in offers.pulls.values()})
        # This includes artifacts that another process builds: the run waits for them as usual.
        self._failed.update(run for fingerprint, run in run_of.items() if fingerprint not in here)

    def _fail(self, run: StageRunId, each: ArtifactTransfer, observer: Observer) -> None:
        self._failed.add(run)
        observer.pulling(f"{each.id} is not pulled: {each.message}; it is built here", wrong=True)


def _wait_for_pull(store: Store, each: ArtifactTransfer, observer: Observer) -> bool:
    """Wait while another process pulls this artifact, so that its inputs are not built meanwhile. False if none does."""
    arriving = store.arriving(each.stage, each.fingerprint)
    if not arriving.is_dir():
        # A claim that was held only briefly: no other process builds or pulls it.
        return store.get(each.stage, each.fingerprint) is not None or not store.is_claimed(each.fingerprint)
    observer.pulling(f"{each.id}: waiting for another process to pull it")
    while arriving.is_dir() and store.is_claimed(each.fingerprint):
        time.sleep(_POLL_S)
    return True


def paced(total_bytes: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Return a function that takes the bytes transferred so far and reports progress every few seconds."""
    begun = last = time.monotonic()

    def show(done_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _EVERY_S:
            last = now
            say(f"{amount(done_bytes, total_bytes, 'bytes')}, {done_bytes / 1e6 / (now - begun):.0f} MB/s")

    return show
