"""The first requests to a running server: does it answer, over every protocol, as its repository specifies?

Writes `smoke.json` with every check. Requests are sent one after the other: greedy answers must not depend on the rest
of the batch, or "streaming equals non-streaming" could fail because of rounding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import FailureClass, ServerError, StageError, running_since, write_json
from trtllm_pipeline.measure import ImagesAsked, Prompt, Service, Target, http, prompts, session, target, triton
from trtllm_pipeline.models import Engine, model_config, read_tokenizer
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.lora import ADAPTERS
from trtllm_pipeline.tensorrt.stage.model_inputs import model_folder
from trtllm_pipeline.tensorrt.stage.params import SmokeParams
from trtllm_pipeline.tensorrt.stage.server_requests import adapter_options, chosen_adapters, draft_options, protocol_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer


HEALTH: Final = "health"
_REQUEST_FAILED: Final = "the request failed"
_ABOUT_IMAGES: Final = "Name one color of the image."
IMAGES_PROTOCOL: Final = "openai_chat"
"""Protocol of requests with an image."""


@dataclass(frozen=True, slots=True)
class SmokeCheck:
    """One check. `detail` is the finding, and the expectation if they differ."""

    name: str
    protocol: str
    model: str
    ok: bool
    detail: str
    duration_ms: float


class _CheckError(Exception):
    """A check's expectation was not met."""


def run(context: StageContext[SmokeParams]) -> None:
    """Run all checks. Raises StageError that names the failed ones."""
    smoke = _Smoke(context)
    asyncio.run(smoke.all())
    write_json(
        context.out / "smoke.json",
        {
            "schema": 1,
            "checks": [asdict(check) for check in smoke.checks],
            "skipped": smoke.skipped,
            "answer": smoke.answer,
        },
    )
    for check in smoke.checks:
        mark = "ok" if check.ok else "failed"
        print(f"{mark:6} {check.name} {check.model} {check.protocol} ({check.duration_ms:.0f} ms): {check.detail}")  # noqa: T201 - the stage's log
    failed = [check for check in smoke.checks if not check.ok]
    if failed:
        one = failed[0]
        more = f" ({len(failed) - 1} more checks failed)" if len(failed) > 1 else ""
        raise StageError(
            f"smoke check {one.name} failed on model {one.model} over {one.protocol}: {one.detail}{more}",
            failure=failure_of(one),
            hint="if the answer is right, correct settings.smoke.expected or the recipe's"
            if one.name == "expected"
            else None,
        )


def failure_of(check: SmokeCheck) -> FailureClass:
    """The class of a failed check. TRANSIENT if the server is not ready: it was ready before, and is restarting."""
    if check.name == HEALTH:
        return FailureClass.TRANSIENT
    failure = triton.failure_class(check.detail)
    return FailureClass.CHECK if failure is FailureClass.BUG and _REQUEST_FAILED not in check.detail else failure


class _Smoke:
    """The checks of one server, in order."""

    def __init__(self, context: StageContext[SmokeParams]) -> None:
        self.context = context
        self.params = context.params
        self.service = Service.read(context.inputs["service"])
        self.tokenizer = read_tokenizer(model_folder(context.inputs))
        # Completions answer a bare prompt, as Triton does. Chat wraps it into the model's template.
        streamed = protocol_for(self.service)
        self.protocols = (streamed, f"{streamed}_unary") if self.service.kind == "openai" else triton.PROTOCOLS
        self.target = Target(
            self.protocols[0],
            self.service,
            self.service.model,
            self.params.request_timeout_s,
            self.params.max_tokens,
            options=draft_options(self.service.model, context.inputs["engine"]),
        )
        of_triton = self.params.images is not None and self.service.kind != "openai"
        self.pictures = ImagesAsked.parse(str(self.params.images)).make(0) if of_triton else ()
        """Inputs of every prompt: an ensemble with a visual engine rejects prompts without an image."""
        self.checks: list[SmokeCheck] = []
        self.skipped: list[dict[str, str]] = []
        self.answer: str | None = None

    async def all(self) -> None:
        """All checks, cheap and basic ones first."""
        service, first = self.service, self.protocols[0]
        models = [model for model in (service.model, service.bls_model) if model]
        everywhere = "http, grpc" if first == "grpc" else "http"
        async with self._client(service.model, first) as client:
            since = None if service.pid is None else running_since(service.pid)
            await self._check(HEALTH, everywhere, service.model, self._health(client))
            if isinstance(client, triton.Client):
                for path in sorted(self.context.inputs["repository"].glob("*/config.pbtxt")):
                    await self._check("configuration", first, path.parent.name, self._configuration(client, path))
                if (self.context.inputs["repository"] / triton.PREPROCESSING).is_dir() and not self.pictures:
                    await self._check("tokens", "http", triton.PREPROCESSING, self._tokens(client))
        if ADAPTERS[0] in self.context.inputs:
            await self._check("adapter", first, service.model, self._adapters())
        for model in models:
            for protocol in self.protocols:
                await self._answers(model, protocol)
        if self.params.images is not None and self.service.kind == "openai":
            await self._check("images", IMAGES_PROTOCOL, service.model, self._images(self.params.images))
        if self.answer is not None and self.params.expected is not None:
            await self._check("expected", first, service.model, self._expected(self.answer))
        async with self._client(service.model, first) as client:
            if self.answer:
                await self._check("stop_words", first, service.model, self._stop_words(client))
        # Triton's OpenAI front end aborts a stream that it cannot start, without a reason.
        whole = first if service.kind != "openai" else self.protocols[-1]
        async with self._client(service.model, whole) as client:
            await self._check("limits", whole, service.model, self._limits(client))
        async with self._client(service.model, first) as client:
            await self._check("alive", everywhere, service.model, self._alive(client, since))

    def _client(self, model: str, protocol: str) -> target.AnyClient:
        return replace(self.target, model=model, protocol=protocol).client()

    async def _check(self, name: str, protocol: str, model: str, looking: Awaitable[str]) -> None:
        start = time.monotonic()
        try:
            ok, detail = True, await looking
        except (_CheckError, StageError) as error:
            ok, detail = False, str(error)
        self.checks.append(SmokeCheck(name, protocol, model, ok, detail, round((time.monotonic() - start) * 1e3, 1)))

    async def _adapters(self) -> str:
        """Each adapter answers. Later requests use the wanted one."""
        limit, plain, answers = self.params.request_timeout_s, self.target, []
        async with self._client(self.service.model, self.protocols[0]) as client:
            answers.append(f"{(await self._ask(client)).text!r} without")
            options_by_name = await adapter_options(self.service, self.context.inputs, limit, self.params.lora_names)
            for name, options in options_by_name.items():
                self.target = replace(plain, options={**plain.options, **options})
                answers.insert(-1, f"{(await self._ask(client)).text!r} with {name}")
        wanted = chosen_adapters(options_by_name, self.params.lora)
        self.target = replace(plain, options={**plain.options, **(wanted[0] if wanted else {})})
        return ", ".join(answers)

    async def _answers(self, model: str, protocol: str) -> None:
        async with self._client(model, protocol) as client:
            reason = None
            if isinstance(client, triton.Client):
                if lacking := [name for name in self.target.options if not client.model.takes(name)]:
                    reason = f"the model has no input {', '.join(lacking)} in this release"
                elif protocol == "grpc_unary" and client.model.decoupled:
                    reason = "the model is decoupled, and Triton serves those over ModelStreamInfer alone"
            if reason is None:
                await self._check("answer", protocol, model, self._answer(client))
            else:
                self.skipped.append({"name": "answer", "protocol": protocol, "model": model, "reason": reason})

    async def _health(self, client: target.AnyClient) -> str:
        ready = await client.ready()
        if not all(ready.values()):
            raise _CheckError(f"expected every endpoint to be ready, got {ready}")
        return "ready"

    async def _configuration(self, client: triton.Client, path: Path) -> str:
        written = model_config.read(path, allow_unknown=True)
        served, metadata = await client.config(path.parent.name), await client.metadata(path.parent.name)
        _same(_described(written, path.parent.name), _described(served, path.parent.name))
        batch = [-1] if written.max_batch_size else []
        for reported, tensors in ((metadata.inputs, written.input), (metadata.outputs, written.output)):
            types = {name: kind.removeprefix("TYPE_") for name, kind in triton.data_types(tensors).items()}
            types |= {name: "BYTES" for name, kind in types.items() if kind == "STRING"}
            promised = {t.name: (types[t.name], [*batch, *t.dims]) for t in tensors}
            _same(promised, {t.name: (t.datatype, list(t.shape)) for t in reported})
        return f"{len(written.input)} inputs and {len(written.output)} outputs match config.pbtxt"

    async def _tokens(self, client: triton.Client) -> str:
        """Preprocessing produces the tokens of the model's own tokenizer, with which the model was trained."""
        added = await client.adds_special_tokens()
        expected: list[int] = self.tokenizer.encode(self.params.prompt, add_special_tokens=added).ids
        try:
            tokens = await client.input_ids(self.params.prompt)
        except (ServerError, http.HttpError, OSError) as error:
            raise _CheckError(f"{triton.PREPROCESSING} returns no tokens: {error}") from None
        if tokens != expected:
            raise _CheckError(
                f"{triton.PREPROCESSING} converts {self.params.prompt!r} to {tokens}; expected {expected} from the model's tokenizer, "
                f"{'with' if added else 'without'} its special tokens"
            )
        return f"{len(tokens)} tokens match the tokenizer, {'with' if added else 'without'} its special tokens"

    async def _answer(self, client: target.AnyClient) -> str:
        answer = await self._ask(client)
        text = answer.text
        if not text.strip():
            raise _CheckError(f"the answer to {self.params.prompt!r} is empty")
        if text.lstrip().startswith(self.params.prompt.strip()):
            raise _CheckError(f"the answer starts with the prompt itself: {text!r}; expected new text only")
        if self.answer is None:
            self.answer = text
        elif text != self.answer:
            raise _CheckError(f"the greedy answer should be {self.answer!r} as over the first protocol, got {text!r}")
        return f"{text!r} in {len(answer.events)} parts"

    async def _images(self, spec: str) -> str:
        """A prompt with images is answered, and has more input tokens than the same prompt without them."""
        bare = Prompt("text", _ABOUT_IMAGES)
        bare = replace(bare, messages=({"role": "user", "content": bare.text},))
        tokens = []
        async with self._client(self.service.model, IMAGES_PROTOCOL) as client:
            for prompt in (bare, prompts.with_images(bare, ImagesAsked.parse(spec).make(0))):
                answer = await client.session().generate(self.target.generation(prompt, 0))
                if answer.error is not None:
                    raise _CheckError(f"{_REQUEST_FAILED}: {answer.error}")
                if prompt.images and not answer.text.strip():
                    raise _CheckError(f"the answer to {prompt.text!r} with an image is empty")
                tokens.append(answer.input_tokens or 0)
        if tokens[1] <= tokens[0]:
            raise _CheckError(
                f"the server counts {tokens[1]} input tokens with an image of {spec.partition('@')[2]} and {tokens[0]} "
                "without: it ignores the image"
            )
        return f"{answer.text!r} to {spec.partition('@')[2]} pixels, {tokens[1] - tokens[0]} input tokens more"

    async def _expected(self, answer: str) -> str:
        """All protocols gave the same answer, so this is checked once."""
        expected = self.params.expected
        assert expected is not None
        if expected not in answer:
            raise _CheckError(
                f"the greedy answer to {self.params.prompt!r} should contain {expected!r}, got {answer!r}"
            )
        return f"the answer contains {expected!r}"

    async def _stop_words(self, client: target.AnyClient) -> str:
        """A stop word from the greedy answer must end it."""
        assert self.answer is not None
        stop = stop_word(self.answer, self.tokenizer)
        if stop is None:
            return "not tested: no word of the short answer is one token"
        text = (await self._ask(client, stop)).text
        upto = self.answer.index(stop)
        # TensorRT-LLM keeps the stop word in the answer, others leave it out.
        if text.strip() not in {self.answer[:upto].strip(), self.answer[: upto + len(stop)].strip()}:
            raise _CheckError(f"stop word {stop!r} should end the answer {self.answer!r} there, got {text!r}")
        return f"{stop!r} ended the answer: {text!r}"

    async def _limits(self, client: target.AnyClient) -> str:
        """A prompt longer than the engine's limit must be rejected with a message."""
        limits = Engine.read(self.context.inputs["engine"], max_seq_len=self.params.max_seq_len)
        longest = limits.max_input_len or limits.max_seq_len
        if longest is None:
            return "not tested: the engine specifies no limit"
        prompt = " ".join(["word"] * (longest + 1))
        tokens = len(self.tokenizer.encode(prompt).ids)
        answer = await self._generate(client, Prompt("limit", prompt, max_tokens=1))
        if answer.error is None:
            raise _CheckError(f"a prompt of {tokens} tokens should be rejected ({longest} fit), got {answer.text!r}")
        if str(longest) not in answer.error and not any(word in answer.error.lower() for word in ("long", "exceed")):
            raise _CheckError(
                f"the rejection of a prompt of {tokens} tokens should name the limit {longest}: {answer.error}"
            )
        return f"{tokens} tokens rejected: {answer.error}"

    async def _alive(self, client: target.AnyClient, since: int | None) -> str:
        """After the rejection: same process, ready, and still answering."""
        await self._health(client)
        pid = self.service.pid
        if pid is not None and running_since(pid) != since:
            raise _CheckError(f"the server's process {pid} is not the one from the start")
        text = (await self._ask(client)).text
        if self.answer is not None and text != self.answer:
            raise _CheckError(f"the greedy answer should still be {self.answer!r}, got {text!r}")
        return "same process, ready, same answer"

    async def _ask(self, client: target.AnyClient, stop: str | None = None) -> session.Answer:
        prompt = Prompt("smoke", self.params.prompt, stop_words=() if stop is None else (stop,))
        answer = await self._generate(client, prompt)
        if answer.error is not None:
            raise _CheckError(f"{_REQUEST_FAILED}: {answer.error}")
        return answer

    async def _generate(self, client: target.AnyClient, prompt: Prompt) -> session.Answer:
        sent = prompts.with_images(prompt, self.pictures) if self.pictures else prompt
        return await client.session().generate(self.target.generation(sent, 0))


def stop_word(answer: str, tokenizer: Tokenizer) -> str | None:
    """A part of `answer` to stop at: one token with a letter in it, neither first nor last, at its first occurrence.

    TensorRT-LLM compares token ids, so the part alone must encode to that token.
    """
    encoding = tokenizer.encode(answer, add_special_tokens=False)
    for token, (start, end) in list(zip(encoding.ids, encoding.offsets, strict=True))[1:-1]:
        part = answer[start:end]
        alone = tokenizer.encode(part, add_special_tokens=False).ids
        if any(map(str.isalpha, part)) and alone == [token] and answer.index(part) == start:
            return part
    return None


def _described(config: Any, folder: str) -> dict[str, Any]:
    """The values that must match between a config.pbtxt in `folder` and the configuration of its model in a server."""
    return {
        "name": config.name or folder,
        "backend": config.platform or config.backend,
        "max_batch_size": config.max_batch_size,
        "inputs": _tensors(config.input),
        "outputs": _tensors(config.output),
        # An ensemble is decoupled if its steps are. Triton derives that itself.
        "decoupled": config.platform != "ensemble" and config.model_transaction_policy.decoupled,
    }


def _tensors(tensors: Any) -> dict[str, tuple[int, list[int], bool]]:
    return {t.name: (t.data_type, list(t.dims), getattr(t, "optional", False)) for t in tensors}


def _same(expected: dict[str, Any], got: dict[str, Any]) -> None:
    """Raise _CheckError naming the first key whose values differ."""
    for key in {**expected, **got}:
        if expected.get(key) != got.get(key):
            raise _CheckError(
                f"{key} should be {expected.get(key)} as in config.pbtxt, the server reports {got.get(key)}"
            )
