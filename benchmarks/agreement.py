"""Compare `pipeline bench load` with an independent client that shares no code with it.

    python benchmarks/agreement.py [--cells PATTERN] [--levels 1,2,4,8] [--rounds 5] [--requests 24] [--aiperf PATH] [--format json]
    python benchmarks/agreement.py --scripted [--levels 16,64] [--rounds 3] [--requests 192] [--aiperf PATH] [--format json]

With --scripted, both clients load a server with known throughput. Each request gets its first token after PREFILL_S and
another every GAP_S(requests in flight), so a concurrency of C gets C n / (PREFILL_S + (n - 1) GAP_S(C)) tokens per second for
a mean output of n tokens. Output lengths range from a fifth of the mean to nearly twice the mean. The column `right`
has the known values. With --aiperf, aiperf and our client also take turns at the server's OpenAI endpoint, with outputs of
the mean length. That throughput includes ramp-up and drain for both. `--requests default` sends as many requests at each
level as `bench load` does by default.

Without --scripted, the server has a real model. The benchmark builds one cell of the quickstart and serves it with `pipeline
stage launch`. Both clients send the same prompts with greedy sampling and equal output lengths, level by level. They take
turns, and the first one changes from round to round. The other client is written from scratch with tritonclient's asyncio
API: it records the time in Python when it gets a response, and counts tokens by encoding the whole output. Its throughput
covers the time in which all of its users are busy: from the last user's first response to the first user's last one. With
--aiperf, aiperf and our client also take turns at llama.cpp's own OpenAI server with the same engine. That throughput
includes ramp-up and drain for both.

The server has one half of the CPUs, and the clients take turns on the other half, so that a client with many processes
does not slow the measured server.

Figures are medians over the rounds. The interval is that of the ratio ours / theirs over the pairs of the rounds
(Student's t on the logarithms). The clients agree within noise if it contains 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.helpers.scripted_server import Script, ScriptedServer, config
from trtllm_pipeline.measure.load.load import Load as Levels
from trtllm_pipeline.measure.load.prompts import read_prompts
from trtllm_pipeline.measure.load.stats import paired_change
from trtllm_pipeline.measure.load.workloads import Workload, made

ROOT: Final = Path(__file__).resolve().parents[1]
PROMPT_TOKENS: Final = 64
PREFILL_S: Final = 0.2
PROMPTS: Final = 192
TRIES: Final = 5
PIPELINE: Final = (sys.executable, "-m", "trtllm_pipeline")
CPUS: Final = sorted(os.sched_getaffinity(0))
OF_SERVER: Final = CPUS[: max(1, len(CPUS) // 2)]
OF_CLIENTS: Final = CPUS[len(OF_SERVER) :] or CPUS


@dataclass(frozen=True, slots=True)
class Figures:
    """One client's results for one level: medians in milliseconds, and tokens per second at full concurrency."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one level by both clients. `low` and `high` are the ends of the ratio's 95% interval."""

    server: str
    concurrency: int
    figure: str
    ours: float
    theirs: float
    ratio: float
    low: float | None
    high: float | None
    right: float | None = None


Measure = Callable[[int], Figures]
"""Measures one concurrency."""
Asked = tuple[str, int]
"""Text and max_tokens of a request."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of both clients."""

    prompts: Path
    requests: int | None
    """Of each level. None: the default of `bench load`."""
    max_tokens: int
    tokenizer: Path | None
    """None: each message is a token."""

    def asked(self, concurrency: int) -> tuple[list[Asked], list[Asked]]:
        """Warm-up and measured requests, those that ours takes of the file."""
        (level,) = Levels(concurrency=(concurrency,), requests=self.requests).levels(read_prompts(self.prompts))
        warm, measured = (
            [(each.text, each.max_tokens or self.max_tokens) for each in part]
            for part in (level.warmup, level.measured)
        )
        return warm, measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="*/int8_wo", help="one cell of the quickstart, with a batch size of 8")
    parser.add_argument("--scripted", action="store_true", help="use a server with known throughput")
    parser.add_argument("--levels", help="requests in flight (default: 1,2,4,8; scripted: 16,64)")
    parser.add_argument("--rounds", type=int, help="(default: 5; scripted: 3)")
    parser.add_argument("--requests", help="of each level, or `default` (default: 24; scripted: 192)")
    parser.add_argument("--max-tokens", type=int, help="(default: 16; scripted, the mean: 64)")
    parser.add_argument("--aiperf", metavar="PATH", help="the program, in a separate environment")
    parser.add_argument("--workspace", metavar="DIR", help="workspace for the cell (default: a temporary directory)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve_scripted())
        return
    levels = args.levels or ("16,64" if args.scripted else "1,2,4,8")
    requests = None if args.requests == "default" else int(args.requests or (192 if args.scripted else 24))
    max_tokens: int = args.max_tokens or (64 if args.scripted else 16)
    rounds: int = args.rounds or (3 if args.scripted else 5)
    turns = tuple(map(int, levels.split(","))), rounds
    with tempfile.TemporaryDirectory(prefix="agreement-") as scratch:
        folder = Path(scratch)
        if args.scripted:
            load = Load(scripted_prompts(requests or PROMPTS, max_tokens, folder), requests, max_tokens, None)
            rows = scripted(load, folder, *turns, args.aiperf)
        else:
            model, engine, repository = build(args.cells, Path(args.workspace or folder / "workspace"))
            load = Load(prompts(model, folder), requests, max_tokens, model)
            with triton(repository, folder) as url:
                mine = ours(load, folder, "-u", url, "--model", "ensemble")
                rows = list(compare("Triton", mine, independent(load, url), *turns))
        if args.aiperf and not args.scripted:
            with llama(engine, folder) as url:
                where = ("-u", url, "--protocol", "openai", "--endpoint-type", "completions", "--model", "engine")
                other = aiperf(load, folder, url, args.aiperf, "engine")
                rows += compare("llama.cpp", ours(load, folder, *where, whole=True), other, *turns)
    if args.format == "json":
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(
        f"{'server':<12}{'in flight':>10}  {'figure':<22}{'right':>9}{'ours':>9}{'theirs':>9}{'ratio':>8}   95% interval"
    )
    for row in rows:
        interval = "-" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        right = "-" if row.right is None else f"{row.right:.2f}"
        print(
            f"{row.server:<12}{row.concurrency:>10}  {row.figure:<22}{right:>9}{row.ours:>9.2f}{row.theirs:>9.2f}"
            f"{row.ratio:>8.3f}   {interval}"
        )


def compare(server: str, mine: Measure, other: Measure, levels: Sequence[int], rounds: int) -> Iterator[Row]:
    """Let both measure every level in every round, in turns."""
    rows: dict[int, list[tuple[Figures, Figures]]] = {level: [] for level in levels}
    for number in range(rounds):
        for level in levels:
            first, second = (mine, other) if number % 2 == 0 else (other, mine)
            pair = first(level), second(level)
            pair = pair if number % 2 == 0 else pair[::-1]
            rows[level].append(pair)
            print(f"{server}, round {number + 1} of {rounds}, {level} in flight: {pair[0]} {pair[1]}", file=sys.stderr)
    for level, pairs in rows.items():
        for name in Figures.__dataclass_fields__:
            left, right = ([getattr(figures, name) for figures in side] for side in zip(*pairs, strict=True))
            interval = paired_change(right, left)
            ends = (None, None) if interval is None else (1 + interval[0], 1 + interval[1])
            medians = statistics.median(left), statistics.median(right)
            yield Row(server, level, name, *medians, medians[0] / medians[1], *ends)


def prompts(model: Path, folder: Path) -> Path:
    """Prefixes of ordinary text: a model continues them, but may end at once after a question."""
    from tokenizers import Tokenizer

    texts = made(Tokenizer.from_file(str(model / "tokenizer.json")), Workload(input_tokens=PROMPT_TOKENS, prompts=48))
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"id": prompt.id, "input": prompt.text}) for prompt in texts))
    return path


# A server whose throughput is known


def gap_s(in_flight: int) -> float:
    """Time between two tokens of a request."""
    return 0.02 + 0.0006 * in_flight


def scripted(load: Load, folder: Path, levels: Sequence[int], rounds: int, program: str | None) -> list[Row]:
    """Ours and the other clients at the scripted server, and the known values. `program` is aiperf's."""
    with serving([sys.executable, __file__, "--serve"], folder / "scripted.log") as server:
        assert server.stdout is not None
        at = json.loads(server.stdout.readline())
        mine = ours(load, folder, "-u", at["grpc"], "--model", "ensemble")
        rows = list(compare("scripted", mine, independent(load, at["grpc"]), levels, rounds))
        if program is not None:
            equal, url = replace(load, prompts=equal_prompts(load.prompts, folder)), f"http://{at['http']}"
            where = ("-u", url, "--protocol", "openai", "--endpoint-type", "completions", "--model", "ensemble")
            other = aiperf(replace(equal, tokenizer=words_only(folder)), folder, url, program, "ensemble")
            rows += compare("aiperf", ours(equal, folder, *where, whole=True), other, levels, rounds)
    return [replace(row, right=known(row.figure, row.concurrency, load.max_tokens)) for row in rows]


def known(figure: str, concurrency: int, tokens: int) -> float:
    """The server's figure at full concurrency. Its latencies have no other part."""
    gap = gap_s(concurrency)
    tokens_per_s = concurrency * tokens / (PREFILL_S + (tokens - 1) * gap)
    return {"ttft_ms": PREFILL_S * 1e3, "tpot_ms": gap * 1e3, "output_tokens_per_s": tokens_per_s}[figure]


def scripted_prompts(count: int, max_tokens: int, folder: Path) -> Path:
    """Different prompts with `max_tokens` output tokens on average: each longer output has an equally shorter counterpart."""
    draw, most = random.Random(1), max_tokens * 4 // 5
    more = [draw.randint(0, most) for _ in range(count // 2)]
    lengths = [max_tokens + each for each in (*more, *(-each for each in more))] + [max_tokens] * (count % 2)
    draw.shuffle(lengths)
    path = folder / "prompts.jsonl"
    rows = [{"id": f"{n}", "input": f"Number {n} of many.", "max_tokens": each} for n, each in enumerate(lengths)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def equal_prompts(prompts: Path, folder: Path) -> Path:
    """The same prompts without lengths of their own."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    path = folder / "equal.jsonl"
    path.write_text("\n".join(json.dumps({"id": row["id"], "input": row["input"]}) for row in rows))
    return path


def words_only(folder: Path) -> Path:
    """The directory of a tokenizer, which aiperf needs to start, for the server's one word."""
    from tokenizers import Tokenizer, models

    path = folder / "tokenizer"
    path.mkdir()
    Tokenizer(models.WordLevel({"word": 0}, unk_token="word")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


async def serve_scripted() -> None:
    """Print the scripted server's address, and serve until stdin closes."""
    in_flight = 0

    def respond(_model: str, values: Mapping[str, Any]) -> Script:
        def paced() -> Iterator[tuple[float, str]]:
            nonlocal in_flight
            in_flight += 1
            at_s = PREFILL_S
            for _ in range(count):
                yield at_s, " word"
                at_s += gap_s(in_flight)
            in_flight -= 1

        count = int(values["max_tokens"])
        # Each event is drawn when the one before has been sent: its time depends on how many are in flight then.
        return Script(paced(), counts=(1,) * count)  # type: ignore[arg-type]

    server = ScriptedServer(respond, {"ensemble": config("ensemble", counts=True)})
    print(json.dumps(await server.start()), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop()


# Servers


def build(cells: str, workspace: Path) -> tuple[Path, Path, Path]:
    """Model, engine and model repository of one cell."""
    matrix = str(ROOT / "matrices" / "quickstart.yaml")
    chosen = ("--matrix", matrix, "--set", "axes.max_batch_size=[8]", "--cells", cells, "--workspace", str(workspace))
    done = subprocess.run(
        [*PIPELINE, "run", *chosen, "--until", "repository", "--progress", "quiet"], stdout=sys.stderr, check=False
    )
    if done.returncode:
        raise SystemExit(f"pipeline run failed with {done.returncode}")
    plan = [*PIPELINE, "plan", *chosen, "--format", "json"]
    runs = json.loads(subprocess.run(plan, capture_output=True, text=True, check=True).stdout)["stage_runs"]
    made = {run["stage"]: workspace / "store" / run["stage"] / run["fingerprint"] / "out" for run in runs}
    return made["download"], made["build"], made["repository"]


@contextmanager
def triton(repository: Path, folder: Path) -> Iterator[str]:
    """The gRPC address of a server of the repository."""
    words = [
        *PIPELINE,
        "stage",
        "launch",
        "--repository",
        str(repository),
        "--threads",
        str(len(OF_SERVER)),
        "--format",
        "json",
    ]
    with serving(words, folder / "launch.log") as server:
        text = ""
        for line in server.stdout or ():
            text += line
            if line.startswith("}"):
                break
        yield str(json.loads(text)["grpc"])


@contextmanager
def llama(engine: Path, folder: Path) -> Iterator[str]:
    """URL of llama.cpp's own server with the engine's weights, its cache of prompts off as in ours."""
    program = (
        "import sys, time, xllamacpp as x\n"
        "p = x.CommonParams(); p.model.path = sys.argv[1]; p.model_alias = {'engine'}; p.n_ctx = 2048; p.n_parallel = 8\n"
        "p.cache_prompt = False; p.cache_ram_mib = 0; p.verbosity = 1\n"
        "p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[2])\n"
        "s = x.Server(p); print(s.listening_address, flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", program, str(engine / "model.gguf"), str(len(OF_SERVER))]
    with serving(words, folder / "llama.log") as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()


@contextmanager
def serving(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a server on one half of the CPUs until the block ends. Processes started in the block get the other half."""
    with log.open("w") as errors:
        os.sched_setaffinity(0, OF_SERVER)
        server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        os.sched_setaffinity(0, OF_CLIENTS)
        try:
            yield server
        finally:
            server.terminate()
            server.communicate(timeout=60)
            os.sched_setaffinity(0, CPUS)


# Clients


def ours(load: Load, folder: Path, *where: str, whole: bool = False) -> Measure:
    """The command. `whole`: throughput from first to last, with ramp-up and drain."""

    def measure(concurrency: int) -> Figures:
        count = () if load.requests is None else ("--requests", str(load.requests))
        words = ("--input-data", str(load.prompts), *count, "--concurrency", str(concurrency))
        counter = () if load.tokenizer is None else ("--tokenizer", str(load.tokenizer))
        length = ("--max-tokens", str(load.max_tokens), *counter, "--format", "json")
        events = folder / f"events-{time.monotonic_ns()}.jsonl"
        command = [*PIPELINE, "bench", "load", *where, *words, *length, "--event-file", str(events)]
        for _ in range(TRIES):  # a busy machine makes a measurement invalid
            events.unlink(missing_ok=True)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                break
        else:
            why = json.loads(done.stdout)["findings"] if done.stdout else done.stderr
            raise SystemExit(f"{' '.join(command)}\n{why}")
        (level,) = json.loads(done.stdout)["levels"]
        rates = level["repeats"][0]["whole"] if whole else level
        return Figures(level["ttft_ms"]["p50"], level["tpot_ms"]["p50"], rates["output_tokens_per_s"])

    return measure


def independent(load: Load, url: str) -> Measure:
    """A stopwatch around tritonclient's asyncio API."""
    from tokenizers import Tokenizer

    tokenizer = None if load.tokenizer is None else Tokenizer.from_file(str(load.tokenizer / "tokenizer.json"))

    def count(parts: Parts) -> int:
        text = "".join(text for _, text in parts)
        return len(parts) if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False).ids)

    def measure(concurrency: int) -> Figures:
        warm, measured = load.asked(concurrency)
        everything = asyncio.run(stopwatch(url, [*warm, *measured], concurrency))
        answers = everything[len(warm) :]
        ttft_ms = [(parts[0][0] - sent_s) * 1e3 for _, sent_s, parts in answers]
        tpot_ms = [(parts[-1][0] - parts[0][0]) * 1e3 / (n - 1) for _, _, parts in answers if (n := count(parts)) > 1]
        return Figures(statistics.median(ttft_ms), statistics.median(tpot_ms), busy_rate(everything, count))

    return measure


def busy_rate(answers: Sequence[Answered], count: Callable[[Parts], int]) -> float:
    """Tokens per second from the last user's first response to the first user's last response."""
    ends: dict[int, list[float]] = {}
    for user, _, parts in answers:
        ends.setdefault(user, []).append(parts[-1][0])
    start_s, end_s = max(min(each) for each in ends.values()), min(max(each) for each in ends.values())
    inside = 0.0
    for _, _, parts in answers:
        inside += count(parts) * sum(start_s < at_s <= end_s for at_s, _ in parts) / len(parts)
    return inside / (end_s - start_s)


Parts = list[tuple[float, str]]
"""When each text came, in seconds."""
Answered = tuple[int, float, Parts]
"""Which user sent it, when, and what came."""


async def stopwatch(url: str, requests: Sequence[Asked], concurrency: int) -> list[Answered]:
    """Answers in the order of the requests, `concurrency` of them in flight."""
    import numpy as np
    from tritonclient.grpc.aio import InferenceServerClient, InferInput

    def tensor(name: str, kind: str, value: Any) -> Any:
        made = InferInput(name, [1, 1], kind)
        made.set_data_from_numpy(np.array([[value]], dtype={"BYTES": object, "INT32": np.int32, "BOOL": bool}[kind]))
        return made

    async def ask(client: Any, user: int, text: str, max_tokens: int) -> Answered:
        values = {"text_input": ("BYTES", text.encode()), "max_tokens": ("INT32", max_tokens), "top_k": ("INT32", 1)}
        inputs = [tensor(name, *value) for name, value in {**values, "stream": ("BOOL", True)}.items()]

        async def request() -> Any:
            yield {"model_name": "ensemble", "inputs": inputs, "enable_empty_final_response": True}

        parts: Parts = []
        sent_s = time.perf_counter()
        async for result, error in client.stream_infer(request()):
            now_s = time.perf_counter()
            if error is not None:
                raise SystemExit(f"the server says: {error}")
            output = result.as_numpy("text_output")
            if output is not None and output.size and output.reshape(-1)[0]:
                parts.append((now_s, output.reshape(-1)[0].decode(errors="replace")))
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        return user, sent_s, parts

    answers: dict[int, Answered] = {}
    waiting = iter(enumerate(requests))

    async def user(name: int) -> None:
        async with InferenceServerClient(url) as client:
            for number, questions in waiting:
                answers[number] = await ask(client, name, *questions)

    await asyncio.gather(*map(user, range(concurrency)))
    return [answers[number] for number in range(len(requests))]


def aiperf(load: Load, folder: Path, url: str, program: str, model: str) -> Measure:
    """The medians that aiperf reports. Its inter-token latency is our TPOT, (e2e - TTFT) / (n - 1)."""

    def measure(concurrency: int) -> Figures:
        warm, measured = load.asked(concurrency)
        to = folder / f"aiperf-{time.monotonic_ns()}"
        to.mkdir()
        (to / "inputs.jsonl").write_text("\n".join(json.dumps({"text": text}) for text, _ in [*warm, *measured]))
        command = [
            *(program, "profile", "--model", model, "--url", url, "--endpoint-type", "completions", "--streaming"),
            *("--concurrency", str(concurrency), "--request-count", str(len(measured))),
            *("--warmup-request-count", str(len(warm)), "--input-file", str(to / "inputs.jsonl")),
            *("--custom-dataset-type", "single-turn", "--dataset-sampling-strategy", "sequential"),
            *("--extra-inputs", f"max_tokens:{load.max_tokens}", "--extra-inputs", "temperature:0"),
            *("--tokenizer", str(load.tokenizer), "--use-server-token-count", "--ui", "none"),
            *("--artifact-dir", str(to / "artifacts")),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        results = list((to / "artifacts").rglob("profile_export_aiperf.json"))
        if done.returncode or not results:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        data: Mapping[str, Any] = json.loads(results[0].read_text())
        names = (("time_to_first_token", "p50"), ("inter_token_latency", "p50"), ("output_token_throughput", "avg"))
        return Figures(*(data[name][statistic] for name, statistic in names))

    return measure


if __name__ == "__main__":
    main()
