"""The events for a client while its responses are generated. Tasks fill a feed, and the sender empties it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_pipeline.measure import http
from trtllm_pipeline.serve.gateway.api_error import ApiError
from trtllm_pipeline.serve.gateway.choice import Choice
from trtllm_pipeline.serve.gateway.dialects.parsing import Content
from trtllm_pipeline.serve.gateway.model_texts import ModelTexts
from trtllm_pipeline.serve.gateway.openai_answers import Answers, TokenUsage, failed_event
from trtllm_pipeline.serve.gateway.parsed_request import ParsedRequest
from trtllm_pipeline.serve.gateway.prometheus_metrics import RequestMetrics
from trtllm_pipeline.serve.gateway.responses_answers import ResponseAnswers
from trtllm_pipeline.serve.gateway.triton_backend import PreparedPrompt
from trtllm_pipeline.tensorrt import params


class _Waking:
    """An answer on its way to a client: the tasks that fill it wake the sender."""

    def __init__(self, *, stream: bool) -> None:
        self.stream = stream
        self.gone = False
        """True if the client has disconnected."""
        self.tasks: list[asyncio.Task[None]] = []
        """The tasks that fill it. Cancelled when the rest is not needed."""
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def wait(self) -> None:
        """Wait for a change since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def leave(self) -> None:
        self.gone = True
        self.cancel()
        self.changed()

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


class PassedFeed(_Waking):
    """The answer of an OpenAI-compatible server, which is passed on."""

    calls = 0
    drafts = (0, 0)
    failed = staticmethod(failed_event)

    def __init__(self, metrics: RequestMetrics, *, stream: bool) -> None:
        super().__init__(stream=stream)
        self.waiting = bytearray()
        """The part that has not been sent."""
        self.over = False
        self.failure: ApiError | None = None
        self.counts: Mapping[str, Any] = {}
        """The server's counts. In a stream, it sends them only to clients that request them."""
        self.paused: http.Connection | None = None
        self._metrics = metrics

    def arrived(self, *, output: bool) -> None:
        if output:
            self._metrics.output()
        self.changed()

    def end(self, failure: ApiError | None = None) -> None:
        if not self.over:
            self.over, self.failure = True, failure
            self.changed()

    def take(self) -> bytes:
        if not self.stream and (not self.over or self.failure is not None):
            return b""
        data = bytes(self.waiting)
        self.waiting.clear()
        if self.paused is not None:
            self.paused.resume()
            self.paused = None
        return data

    def fail(self, failure: ApiError) -> None:
        self.end(failure)
        self.cancel()

    def usage(self) -> TokenUsage:
        """The server's token counts, as far as it sent them."""
        return TokenUsage(*(_count(self.counts.get(name)) for name in ("prompt_tokens", "completion_tokens")))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value <= params.MOST_TOKENS else None


class ChoicesFeed(_Waking):
    """The choices of a request that Triton answers."""

    def __init__(
        self,
        request: ParsedRequest,
        prompts: Sequence[PreparedPrompt],
        texts: ModelTexts | None,
        metrics: RequestMetrics,
    ) -> None:
        super().__init__(stream=request.stream)
        self.choices: list[Choice] = []
        self._asked = request
        self._prompts = prompts
        self._texts = texts
        self._metrics = metrics
        self._answers = (ResponseAnswers if request.endpoint == "responses" else Answers)(request, texts)
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._ended = False

    def arrived(self, choice: Choice, tokens: int, output: bool) -> None:
        self._metrics.tokens(tokens)
        if output:
            self._metrics.output(choice.index)
        if self.stream or choice.finish is not None:
            self.changed()

    def enough(self, choice: Choice) -> None:
        """A choice has ended before the server finished it: a stop word."""
        self.tasks[choice.index].cancel()

    @property
    def failure(self) -> ApiError | None:
        return next((choice.failure for choice in self.choices if choice.failure is not None), None)

    @property
    def over(self) -> bool:
        return self._ended or self.failure is not None

    @property
    def calls(self) -> int:
        return sum(choice.calls for choice in self.choices)

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens drafted and accepted by speculative decoding, if the server reports them."""
        counts = [(choice.drafted_tokens or 0, choice.accepted_tokens or 0) for choice in self.choices]
        return sum(drafted for drafted, _ in counts), sum(accepted for _, accepted in counts)

    def fail(self, failure: ApiError) -> None:
        for choice in self.choices:
            choice.fail(failure)
        self.cancel()

    def take(self) -> bytes:
        if self._ended or (not self.stream and self.failure is not None):
            return b""
        done = all(choice.finish is not None for choice in self.choices) and self._counted()
        if not self.stream:
            if not done:
                return b""
            self._ended = True
            echoed = [prompt.text for prompt in self._prompts] if self._asked.echo else []
            return self._answers.whole(self.choices, echoed, self.usage())
        parts: list[str] = []
        for choice in self.choices:
            self._take(choice, parts)
        if done and self.failure is None:
            self._ended = True
            return "".join(parts).encode() + self._answers.end(self.usage)
        return "".join(parts).encode()

    def failed(self, failure: ApiError) -> bytes:
        return self._answers.failed(failure)

    def _counted(self) -> bool:
        """True if threads have finished counting long prompts."""
        return all(prompt.tokens.when_counted(self.changed) for prompt in self._prompts)

    def cancel(self) -> None:
        super().cancel()
        for prompt in self._prompts:
            prompt.tokens.cancel()

    def _take(self, choice: Choice, parts: list[str]) -> None:
        index, answers = choice.index, self._answers
        ended = choice.finish is not None and choice.failure is None and index not in self._finished
        if not (choice.deltas or choice.tokens or ended):
            return
        if index not in self._begun:
            self._begun.add(index)
            parts.append(answers.role(index))
            if self._asked.echo:
                parts.append(answers.events(index, (Content(self._prompts[index].text),), ()))
        if choice.deltas or choice.tokens:
            parts.append(answers.events(index, choice.deltas, choice.tokens))
            choice.deltas, choice.tokens = [], []
        if ended:
            self._finished.add(index)
            parts.append(answers.finish(index, str(choice.finish)))

    def usage(self) -> TokenUsage:
        """Token counts from the server, or from the model's tokenizer. A prompt that choices share counts once."""
        n, texts = self._asked.n, self._texts
        prompts: list[int | None] = []
        for index in range(0, len(self._prompts), n):
            counted = self._prompts[index].tokens.number
            of_server = (choice.input_tokens for choice in self.choices[index : index + n])
            known = (number for number in (counted, *of_server) if number is not None)
            prompts.append(next(known, None))
        made = [
            choice.output_tokens
            if texts is None or choice.output_tokens is not None
            else texts.answer_tokens(choice.raw)
            for choice in self.choices
        ]
        return TokenUsage(_sum(prompts), _sum(made))


def _sum(counts: Sequence[int | None]) -> int | None:
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)


Feed = PassedFeed | ChoicesFeed
