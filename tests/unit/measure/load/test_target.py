from __future__ import annotations

from dataclasses import replace

import pytest

from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.measure.client.images import ImagesAsked
from trtllm_pipeline.measure.load.prompts import Prompt, each_with_an_image, with_images
from trtllm_pipeline.measure.load.target import Target, service_at


@pytest.mark.parametrize(
    ("url", "interface", "http", "grpc"),
    [
        ("host", "grpc", "", "host:8001"),
        ("host:", "grpc", "", "host:8001"),
        ("grpc://host:9/", "grpc", "", "host:9"),
        ("[::1]", "grpc", "", "[::1]:8001"),
        ("[::1]:65535", "http", "[::1]:65535", ""),
        ("http://host", "http", "host:8000", ""),
        ("https://host/triton", "http", "https://host/triton", ""),
        ("host:1/v1", "openai", "http://host:1/v1", ""),
    ],
)
def test_where_a_service_is(url: str, interface: str, http: str, grpc: str) -> None:
    service = service_at(url, interface, "m")
    assert (service.http, service.grpc) == (http, grpc)


@pytest.mark.parametrize(
    ("url", "interface"),
    [
        *((url, "grpc") for url in ("host:0", "host:65536", "host:-1", "host:x", "::1", ":8001", "host:1/path")),
        ("http://host:65536", "http"),
        ("host:1/path", "http"),
        ("http://host:65536/v1", "openai"),
        ("http://", "openai"),
    ],
)
def test_what_is_no_place_is_told_with_the_url(url: str, interface: str) -> None:
    with pytest.raises(ServerError, match=f"^{url}: ") as caught:
        service_at(url, interface, "m")
    assert caught.value.failure is FailureClass.USER


def test_of_triton_questions_with_an_image_keep_it_alone_and_others_get_one() -> None:
    own = with_images(Prompt("1", "What?"), ImagesAsked.parse("1@9x9").make(0))
    plain = Prompt("2", "Who?")
    triton = service_at("host", "grpc", "m")
    chat = replace(triton, kind="openai")
    assert [prompt.images for prompt in each_with_an_image((own, plain), "1@8x8", triton)] == [1, 1]
    assert each_with_an_image((own, plain), "1@8x8", triton)[0] == own
    assert [prompt.images for prompt in each_with_an_image((own, plain), "1@8x8", chat)] == [2, 1]
    assert each_with_an_image((own, plain), None, triton) == (own, plain)


def test_triton_is_sent_the_question_and_the_image_apart() -> None:
    target = Target("grpc", service_at("host", "grpc", "ensemble"), "ensemble", 30.0, 4)
    prompt = with_images(Prompt("1", "What is it?"), ImagesAsked.parse("1@8x8").make(0))
    request = target.generation(prompt, 0)
    assert request.text == "What is it?"
    assert str(request.options["image_url_input"]).startswith("data:image/jpeg;base64,")
    assert "image_url_input" not in target.generation(Prompt("2", "Hello"), 0).options
    with pytest.raises(ServerError, match="prompt 1 has 2 images; Triton accepts one per prompt"):
        target.generation(with_images(Prompt("1", "Which?"), ImagesAsked.parse("2@8x8").make(0)), 0)


def asking(protocol: str, **request: object) -> dict[str, object]:
    """Options of a request for a row with these fields, without those that every request has."""
    prompt = Prompt("row 3", "x", messages=({"role": "user", "content": "x"},), request=request)
    target = Target(protocol, service_at("http://host:1", "openai", "m"), "m", 30.0, 4, seed=5)
    return dict(target.generation(prompt, 1).options)


def test_a_row_s_own_fields_go_before_those_of_the_run() -> None:
    tools, given = [{"type": "function"}], {"type": "json_object"}
    assert asking("openai_chat", tools=tools, tool_choice="required", response_format=given) == {
        "temperature": 0.0,
        "tools": tools,
        "tool_choice": "required",
        "response_format": given,
    }
    assert asking("openai_chat", temperature=0.7) == {"temperature": 0.7, "seed": 6}
    assert asking("openai_chat", temperature=0.7, seed=9) == {"temperature": 0.7, "seed": 9}
    # The prompt of these protocols was rendered with the tools.
    assert asking("openai_completions", tools=tools, tool_choice="auto", response_format=given) == {
        "temperature": 0.0,
        "response_format": given,
    }
    sampled = asking("grpc", tools=tools, temperature=0.7, seed=9, top_p=0.5)
    assert (sampled["temperature"], sampled["random_seed"], sampled["top_p"]) == (0.7, 9, 0.5)


@pytest.mark.parametrize(
    ("protocol", "request_"),
    [
        ("grpc", {"response_format": {"type": "json_object"}}),
        ("http", {"tool_choice": "required"}),
        ("openai_completions", {"tool_choice": "required"}),
        ("openai_completions", {"parallel_tool_calls": False}),
    ],
)
def test_what_a_protocol_cannot_send_of_a_row_is_refused(protocol: str, request_: dict[str, object]) -> None:
    (name,) = request_
    with pytest.raises(ServerError, match=f"prompt row 3: {name} cannot be sent over {protocol}") as caught:
        asking(protocol, **request_)
    assert caught.value.failure is FailureClass.USER
