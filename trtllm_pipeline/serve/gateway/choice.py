"""One choice of a request while it is generated: turns server output into text without stop words, reasoning and calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from trtllm_pipeline.measure import session
from trtllm_pipeline.serve.gateway.api_error import ApiError
from trtllm_pipeline.serve.gateway.dialects.parsing import (
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    Delta,
    Reasoning,
)
from trtllm_pipeline.serve.gateway.stops import StopWords

CUT: Final = "\ufffd"
"""Part of a character."""


class Token(NamedTuple):
    """One part of the generated text, with log probabilities of its tokens."""

    text: str
    log_probs: list[float]
    top: list[list[tuple[int, float]]]
    """The most likely tokens at each position: id, log probability."""


class Choice(session.Answer):
    """One choice as it arrives. `deltas` waits for the sender to take it. `changed` is called after each response with
    its number of tokens and whether it has output, and at the end.

    Texts that arrive between sends are joined, so an unread response uses no memory beyond its text.
    """

    def __init__(
        self,
        index: int,
        stops: StopWords,
        parser: AnswerParser | None,
        *,
        max_tokens: int,
        accumulates: bool,
        wants_tokens: bool,
        changed: Callable[[Choice, int, bool], None],
        enough: Callable[[Choice], None],
        count: Callable[[str], int] | None = None,
    ) -> None:
        """`count`: counts the tokens of a text, for servers that send several per response without counting them."""
        super().__init__()
        self.index = index
        self.deltas: list[Delta] = []
        self.tokens: list[Token] = []
        self.finish: str | None = None
        """The finish reason in OpenAI's terms. None while it is generated."""
        self.failure: ApiError | None = None
        self.calls = 0
        self.max_tokens = max_tokens
        self.responses = 0
        self.wants_tokens = wants_tokens
        self.enough = enough
        self._stops = stops
        self._parser = parser
        self._accumulates = accumulates
        self._accumulated = ""
        self._raw: list[str] = []
        self._changed = changed
        self._count = count

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def received(self, now_ns: int, text: str, tokens: int | None, *, reasoning: bool = False) -> None:  # noqa: ARG002
        if self.finish is not None:
            return
        if self.first_event_ns is None:
            self.first_event_ns = now_ns
        self.responses += 1
        if tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + tokens
        if self._accumulates:
            text = self._added(text)
        if text:
            self._take(text, tokens)
        else:
            self._changed(self, tokens or 0, False)

    def whole(self) -> None:
        """The server has completed it, so the next send may include the end."""
        if self.responses:  # an end without any response is a failure
            self.end()

    def _added(self, text: str) -> str:
        """The new text of a response that repeats all text so far. A split character comes whole with a later one."""
        whole = text.rstrip(CUT)
        length = len(self._accumulated)
        if len(whole) <= length or not whole.startswith(self._accumulated):
            return ""
        self._accumulated = whole
        return whole[length:]

    def _take(self, text: str, tokens: int | None) -> None:
        self._raw.append(text)
        shown = self._stops.feed(text)
        stopped = self._stops.found is not None
        if self.wants_tokens and (shown or not stopped):
            last = -(tokens or 0)  # some servers repeat the tokens of earlier responses
            self.tokens.append(Token(shown if stopped else text, self.log_probs[last:], self.top_log_probs[last:]))
        self._changed(self, tokens or 0, self._put(shown))
        if stopped or (self._parser is not None and self._parser.done):
            self.end("stop")
            self.enough(self)

    def _put(self, text: str) -> bool:
        """Add text, without stop words. Returns whether it contains output."""
        if not text:
            return False
        return self._append((Content(text),) if self._parser is None else self._parser.feed(text))

    def _append(self, deltas: Sequence[Delta]) -> bool:
        for delta in deltas:
            self.calls += isinstance(delta, CallStart)
            last = self.deltas[-1] if self.deltas else None
            if isinstance(last, Content) and isinstance(delta, Content):
                self.deltas[-1] = Content(last.text + delta.text)
            elif isinstance(last, Reasoning) and isinstance(delta, Reasoning):
                self.deltas[-1] = Reasoning(last.text + delta.text)
            elif isinstance(last, CallArguments) and isinstance(delta, CallArguments) and last.index == delta.index:
                self.deltas[-1] = CallArguments(last.index, last.text + delta.text)
            else:
                self.deltas.append(delta)
        return bool(deltas)

    def end(self, reason: str | None = None) -> None:
        """Mark it as ended. Without a reason, it ended normally."""
        if self.finish is not None:
            return
        output = self._put(self._stops.end())
        if self._parser is not None:
            output |= self._append(self._parser.end())
        if reason is None:
            made = self.output_tokens
            if made is None:
                made = self.responses if self._count is None else self._count(self.raw)
            reason = "length" if made >= self.max_tokens else "stop"
        called = self._parser is not None and self._parser.called
        self.finish = "tool_calls" if called and reason == "stop" else reason
        self._changed(self, 0, output)

    def fail(self, failure: ApiError) -> None:
        if self.finish is None:
            self.finish, self.failure = "error", failure
            self._changed(self, 0, False)
