"""The five models on a real Triton server: protocols, text, sampling, limits, cancellation."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.helpers.embedded_engines import END_ID, LETTERS, SCRIPT, script_engine
from tests.helpers.triton_client import Answer, Client, serve, tensors
from tests.helpers.waiting import eventually

BOTH = ("ensemble", "tensorrt_llm_bls")
ALL = ("preprocessing", "tensorrt_llm", "postprocessing", *BOTH)
REST = SCRIPT[1:]
"""What follows the prompt "s", up to the end token."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("decoupled")
    engine = script_engine(folder / "engine", max_input_len=64, max_seq_len=2048)
    with serve(folder, engine) as client:
        yield client


def letters(count: int, start: int = 1) -> str:
    return "".join(LETTERS[(start + i) % 26] for i in range(count))


def ids(answer: Answer) -> bytes:
    return bytes(answer.ids)


@pytest.mark.seam
def test_all_models_are_ready_and_describe_themselves_as_tensorrt_llm_does(client: Client) -> None:
    with grpcclient.InferenceServerClient(client.grpc_url) as grpc:
        assert all(grpc.is_model_ready(model) for model in ALL)
        metadata = grpc.get_model_metadata("ensemble")
        inputs = {tensor.name: tensor.datatype for tensor in metadata.inputs}
        outputs = {tensor.name: tensor.datatype for tensor in metadata.outputs}
        engine = {tensor.name: tensor.datatype for tensor in grpc.get_model_metadata("tensorrt_llm").inputs}
    assert inputs["text_input"] == "BYTES"
    assert inputs["max_tokens"] == "INT32"
    assert inputs["random_seed"] == "UINT64"
    assert inputs["return_log_probs"] == "BOOL"
    assert outputs["text_output"] == "BYTES"
    assert outputs["cum_log_probs"] == outputs["output_log_probs"] == "FP32"
    assert engine["input_ids"] == engine["stop_words_list"] == "INT32"
    assert engine["runtime_top_p"] == "FP32"
    assert inputs["return_num_output_tokens"] == engine["return_num_input_tokens"] == "BOOL"
    assert outputs["num_input_tokens"] == outputs["num_output_tokens"] == "INT32"


@pytest.mark.seam
@pytest.mark.parametrize("model", BOTH)
def test_generate_over_http(client: Client, model: str) -> None:
    assert client.text(model, text_input="s", max_tokens=40, bad_words="", stop_words="") == REST
    assert client.text(model, text_input="A", max_tokens=30) == letters(30)
    assert client.text(model, text_input="A", max_tokens=3, exclude_input_in_output=False) == "A" + letters(3)


@pytest.mark.seam
@pytest.mark.parametrize("model", BOTH)
def test_streaming_equals_not_streaming_and_never_cuts_a_character(client: Client, model: str) -> None:
    whole = client.text(model, text_input="s", max_tokens=40)
    answer = client.ask(model, text_input="s", max_tokens=40)
    events = client.events(model, text_input="s", max_tokens=40)
    assert answer.text == whole == REST
    assert "".join(event["text_output"] for event in events) == whole
    pieces = [text for text in answer.texts if text]
    assert pieces == list(REST)
    assert {"世", "界", "🎉", "é"} < set(pieces)


def test_an_answer_that_ends_within_a_character_is_still_sent(client: Client) -> None:
    cut = len("top-世".encode()) + 1
    assert client.text(text_input="s", max_tokens=cut) == "top-世\ufffd"
    assert client.ask(text_input="s", max_tokens=cut).text == "top-世\ufffd"


@pytest.mark.seam
@pytest.mark.parametrize("model", BOTH)
def test_stop_words_end_an_answer_and_are_part_of_it(client: Client, model: str) -> None:
    assert client.text(model, text_input="A", max_tokens=30, stop_words=["KL", "FG"]) == "BCDEFG"
    assert client.ask(model, text_input="A", max_tokens=30, stop_words=["FG", "QQ"]).text == "BCDEFG"
    assert client.ask(model, text_input="s", max_tokens=30, stop_words=["世"]).text == "top-世"


@pytest.mark.parametrize("model", BOTH)
def test_bad_words_are_never_generated(client: Client, model: str) -> None:
    assert client.text(model, text_input="A", max_tokens=10, bad_words=["FG"]) == "BCDEF....."
    assert client.text(model, text_input="A", max_tokens=10, bad_words=["F", "xyz"]) == "BCDE......"
    assert client.ask(model, text_input="A", max_tokens=10, bad_words=["FG"]).text == "BCDEF....."


def test_end_id_and_min_length(client: Client) -> None:
    assert client.text(text_input="A", max_tokens=9, end_id=ord("D")) == "BC"
    assert client.text(text_input="s", max_tokens=26, end_id=-1) == REST + "stop"
    assert client.text(text_input="s", max_tokens=40, min_length=25) == REST + "." * (40 - len(REST.encode()))
    assert client.text(text_input="s", max_tokens=40, min_tokens=25) == REST + "." * (40 - len(REST.encode()))


@pytest.mark.parametrize("model", BOTH)
def test_sampling_is_reproducible_by_seed(client: Client, model: str) -> None:
    def sample(**settings: object) -> str:
        return client.text(model, text_input="A", max_tokens=24, temperature=3.0, top_k=50, **settings)

    answers = {seed: sample(random_seed=seed) for seed in range(4)}
    assert len(set(answers.values())) == 4
    assert all(sample(random_seed=seed) == answer for seed, answer in answers.items())
    assert sample(seed=2) == answers[2]
    assert sample() == answers[0], "without a seed TensorRT-LLM's default, 0, holds"
    assert sample(random_seed=3, bad_words=["."]) == sample(random_seed=3, bad_words=["."])


def test_sampling_settings_mean_what_they_say(client: Client) -> None:
    assert client.text(text_input="A", max_tokens=24, temperature=5.0, top_k=1, random_seed=7) == letters(24)
    assert client.text(text_input="A", max_tokens=24, temperature=0.0, top_p=0.9) == letters(24)
    # The likeliest token has 0.87 of the probability, so a nucleus of 0.8 holds nothing else.
    assert client.text(text_input="A", max_tokens=24, top_p=0.8, random_seed=7) == letters(24)
    two = {client.text(text_input="A", max_tokens=24, temperature=9.0, top_k=2, random_seed=seed) for seed in range(3)}
    assert len(two) > 1
    assert set("".join(two)) <= set(LETTERS + ".\0"), "of equals the first is the second choice"
    assert "." in client.text(text_input="A", max_tokens=40, repetition_penalty=3.0)


@pytest.mark.parametrize("model", BOTH)
def test_log_probs(client: Client, model: str) -> None:
    expected = float(10 - np.log(np.exp(10) + np.exp(8) + 256))
    _, answer = client.generate(model, text_input="A", max_tokens=5, return_log_probs=True)
    assert answer["output_log_probs"] == pytest.approx([expected] * 5, abs=2e-3)
    assert answer["cum_log_probs"] == pytest.approx(5 * expected, abs=1e-2)
    streamed = client.ask(model, text_input="A", max_tokens=5, return_log_probs=True)
    assert [float(r.as_numpy("output_log_probs").item()) for r in streamed.results] == answer["output_log_probs"]
    assert float(streamed.results[-1].as_numpy("cum_log_probs").item()) == pytest.approx(answer["cum_log_probs"])
    assert "cum_log_probs" not in client.generate(model, text_input="A", max_tokens=5)[1]


COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}


@pytest.mark.seam
@pytest.mark.parametrize("model", BOTH)
def test_token_counts(client: Client, model: str) -> None:
    _, answer = client.generate(model, text_input="AB", max_tokens=5, **COUNTS)
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (2, 5)
    _, answer = client.generate(model, text_input="AB", max_tokens=5, exclude_input_in_output=False, **COUNTS)
    assert (answer["text_output"], answer["num_output_tokens"]) == ("ABCDEFG", 5)
    assert not answer.keys() & COUNTS.keys()
    bare = client.generate(model, text_input="AB", max_tokens=5)[1]
    assert not {"num_input_tokens", "num_output_tokens"} & bare.keys()
    one = client.generate(model, text_input="AB", max_tokens=5, return_num_output_tokens=True)[1]
    assert one["num_output_tokens"] == 5
    assert "num_input_tokens" not in one


@pytest.mark.parametrize("model", BOTH)
def test_token_counts_of_a_stream_add_up(client: Client, model: str) -> None:
    """Each token here is a byte, so a response counts the bytes of its text: several where a character was held."""
    answer = client.ask(model, text_input="s", max_tokens=40, **COUNTS)
    counts = [int(result.as_numpy("num_output_tokens").item()) for result in answer.results]
    assert counts == [len(text.encode()) for text in answer.texts]
    assert {1, 2, 3, 4} <= set(counts)
    assert sum(counts) == len(REST.encode())
    assert {int(result.as_numpy("num_input_tokens").item()) for result in answer.results} == {1}
    events = client.events(model, text_input="s", max_tokens=len("top-世".encode()) + 1, **COUNTS)
    assert [event["num_output_tokens"] for event in events] == [1, 1, 1, 1, 3, 1], "the last ends within a character"


def test_token_counts_of_a_batch_and_of_the_engine_alone(client: Client) -> None:
    both = {name: np.array([[True], [True]]) for name in COUNTS}
    with client.stream() as stream:
        prompts = {"text_input": np.array([["ABC"], ["s"]]), "max_tokens": np.array([[3], [40]])}
        stream.send("ensemble", "1", **prompts, **both)
        ids: dict[str, object] = {"input_ids": list(b"ZA"), "input_lengths": 2, "request_output_len": 20}
        stream.send("tensorrt_llm", "2", streaming=True, end_id=ord("D"), **ids, **COUNTS)
        answers = stream.finish()
    (result,) = answers["1"].results
    assert result.as_numpy("num_input_tokens").tolist() == [[3], [1]]
    assert result.as_numpy("num_output_tokens").tolist() == [[3], [len(REST.encode())]]
    assert sum(int(each.as_numpy("num_output_tokens").item()) for each in answers["2"].results) == len("BC")


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"text_input": ""}, "the prompt has no tokens"),
        ({"text_input": "A" * 65}, "a prompt of 65 tokens exceeds the engine's max_input_len 64"),
        ({"max_tokens": 3000}, "1 prompt tokens + 3000 output tokens exceed the engine's max_seq_len 2048"),
        ({"max_tokens": 0}, "request_output_len is 0"),
        ({"beam_width": 2}, "beam_width is not supported"),
        ({"return_context_logits": True}, "return_context_logits is not supported"),
        ({"lora_task_id": 0}, "lora_task_id is not supported"),
        ({"embedding_bias_words": ["x"]}, "embedding_bias_words is not supported"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be between 0 and 1"),
        ({"temperature": -1.0}, "temperature is -1.0; it must be a number of at least 0"),
    ],
)
def test_what_cannot_be_served_is_refused_with_words(
    client: Client, model: str, values: dict[str, object], words: str
) -> None:
    request = {"text_input": "A", "max_tokens": 4, **values}
    status, answer = client.generate(model, **request)
    assert status == 400
    assert words in answer["error"]
    assert words in (client.ask(model, **request).error or "")


def test_neutral_values_of_unsupported_inputs_are_taken(client: Client) -> None:
    neutral = {"beam_width": 1, "num_return_sequences": 1, "return_context_logits": False, "length_penalty": 1.0}
    assert client.text(text_input="A", max_tokens=4, **neutral) == letters(4)


@pytest.mark.seam
@pytest.mark.parametrize("model", BOTH)
def test_inputs_nobody_knows_are_refused(client: Client, model: str) -> None:
    status, answer = client.generate(model, text_input="A", max_tokens=4, temprature=0.5)
    assert status == 400
    assert "temprature" in answer["error"]
    assert "unexpected" in (client.ask(model, text_input="A", max_tokens=4, temprature=1).error or "")


def test_a_batch_of_prompts(client: Client) -> None:
    with client.stream() as stream:
        values = {"text_input": np.array([["A"], ["s"]]), "max_tokens": np.array([[3], [40]])}
        stream.send("ensemble", "1", return_log_probs=np.array([[True], [True]]), **values)
        answer = stream.finish()["1"]
        assert [text.decode() for text in answer.results[0].as_numpy("text_output").flat] == [letters(3), REST]
        assert answer.results[0].as_numpy("cum_log_probs").shape == (2, 1)
        stream.send("ensemble", "2", stream=np.array([[True], [True]]), **values)
        assert "a streamed request has 1 row, this one has 2" in (stream.finish()["2"].error or "")


def test_requests_share_one_stream_and_the_running_batch(client: Client) -> None:
    with client.stream() as stream:
        stream.send("ensemble", "long", text_input="A", max_tokens=1500, stream=True)
        while not stream.answers["long"].results:
            stream.receive()
        for name in ("a", "b", "c", "d", "e"):  # one more than the engine has free slots
            stream.send("ensemble", name, text_input=name.upper(), max_tokens=20, stream=True)
        while {"a", "b", "c", "d", "e"} & stream.open:
            stream.receive()
        assert "long" in stream.open, "short requests end while the long one runs"
        answers = stream.finish()
    assert answers["long"].text == letters(1500)
    assert answers["c"].text == letters(20, start=3)


@pytest.mark.parametrize("model", BOTH)
def test_stop_ends_a_running_request(client: Client, model: str) -> None:
    with client.stream() as stream, client.stream() as other:
        stream.send(model, "42", text_input="A", max_tokens=2000, stream=True)
        while len(stream.answers["42"].results) < 5:
            stream.receive()
        other.send(model, "42", text_input="", max_tokens=1, stop=True)
        assert other.finish()["42"].text == ""
        answer = stream.finish()["42"]
    assert answer.error is None
    assert 5 <= len(answer.text) < 1900
    assert answer.text == letters(len(answer.text))


def test_stop_without_an_id_is_refused(client: Client) -> None:
    assert "stop needs the id" in client.generate(text_input="", max_tokens=1, stop=True)[1]["error"]


@pytest.mark.timing
@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_cancelling_a_stream_ends_its_requests(client: Client, model: str) -> None:
    values: dict[str, object] = {"text_input": "A", "max_tokens": 2000, "stream": True}
    if model == "tensorrt_llm":
        values = {"input_ids": [65], "input_lengths": 1, "request_output_len": 2000, "streaming": True}
    used = []
    for cancel in (False, True):
        before = engine_ticks(client)
        with client.stream(cancel=cancel) as stream:
            stream.send(model, "1", **values)
            while len(stream.answers["1"].results) < 3:
                stream.receive()
            if not cancel:
                stream.finish()
        time.sleep(0.3)
        used.append(engine_ticks(client) - before)
    assert used[1] < used[0] / 3


def engine_ticks(client: Client) -> int:
    """Processor time the engine's process has used, in ticks of 10 ms."""
    pid = next(pid for pid, model in client.server.stubs.items() if model == "tensorrt_llm")
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def test_the_engine_model_alone(client: Client) -> None:
    words = np.array([[list(b"FG"), [2, -1]]], dtype=np.int32)
    request = {"input_ids": list(b"ZA"), "input_lengths": 2, "request_output_len": 20}
    with client.stream() as stream:
        stream.send("tensorrt_llm", "1", stop_words_list=words, **request)
        stream.send("tensorrt_llm", "2", streaming=True, end_id=ord("D"), **request)
        stream.send("tensorrt_llm", "3", exclude_input_in_output=False, end_id=ord("D"), **request)
        answers = stream.finish()
    assert ids(answers["1"]) == b"BCDEFG"
    assert answers["1"].results[0].as_numpy("output_ids").shape == (1, 1, 6)
    assert answers["1"].results[0].as_numpy("sequence_length").tolist() == [[6]]
    assert ids(answers["2"]) == b"BC"
    assert ids(answers["3"]) == b"ZABC"
    with client.stream() as stream:
        stream.send("tensorrt_llm", "1", input_ids=[65], input_lengths=3, request_output_len=1)
        assert "input_lengths has 3 tokens; input_ids has 1" in (stream.finish()["1"].error or "")


def test_a_client_gets_the_outputs_that_it_asks_for_and_no_process_dies(client: Client) -> None:
    """Python 3.12 ends the stub of a model that sends others."""
    pids = set(client.server.stubs)
    request = {"input_ids": list(b"ZA"), "input_lengths": 2, "request_output_len": 4}
    for turn in range(3):
        with client.stream() as stream:
            stream.send("tensorrt_llm", "1", ["output_ids"], streaming=bool(turn), return_log_probs=True, **request)
            stream.send(
                "tensorrt_llm_bls", "2", ["text_output"], text_input="ZA", max_tokens=4, return_num_output_tokens=True
            )
            answers = stream.finish()
        assert ids(answers["1"]) == b"BCDE"
        assert answers["2"].text == "BCDE", answers["2"].error
        names = {
            id_: {each.name for result in answer.results for each in result.get_response().outputs}
            for id_, answer in answers.items()
        }
        assert names == {"1": {"output_ids"}, "2": {"text_output"}}
    assert set(client.server.stubs) == pids
    assert not client.server.dead_models()


@pytest.mark.seam
def test_preprocessing_writes_word_lists_as_tensorrt_llm_does(client: Client) -> None:
    with grpcclient.InferenceServerClient(client.grpc_url) as grpc:
        text, stop = (np.array(each, dtype=np.object_) for each in ([[b"AB"]], [[b"st", b"p"]]))
        inputs = [
            grpcclient.InferInput(name, value.shape, "BYTES")
            for name, value in (("QUERY", text), ("STOP_WORDS_DICT", stop))
        ]
        for each, value in zip(inputs, (text, stop), strict=True):
            each.set_data_from_numpy(value)
        result = grpc.infer("preprocessing", [*inputs, *tensors({"REQUEST_OUTPUT_LEN": 5})])
    assert result.as_numpy("INPUT_ID").tolist() == [[65, 66]]
    assert result.as_numpy("STOP_WORDS_IDS").tolist() == [[[*b"stp"], [2, 3, -1]]]
    assert result.as_numpy("OUT_END_ID").tolist() == [[END_ID]]


def test_the_example_client(client: Client) -> None:
    script = Path(__file__).parents[2] / "examples" / "stream.py"
    command = [sys.executable, str(script), "--url", client.grpc_url, "--prompt", "s"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, REST + "\n")


@pytest.fixture(scope="module")
def unary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server whose models send one response a request, as unary gRPC needs."""
    folder = tmp_path_factory.mktemp("unary")
    with serve(folder, script_engine(folder / "engine"), decoupled=False, exclude_input_in_output=False) as client:
        yield client


@pytest.mark.parametrize("model", BOTH)
def test_unary_requests(unary: Client, model: str) -> None:
    assert unary.text(model, text_input="A", max_tokens=4) == "A" + letters(4)
    with grpcclient.InferenceServerClient(unary.grpc_url) as grpc:
        result = grpc.infer(model, tensors({"text_input": "s", "max_tokens": 40}))
        assert result.as_numpy("text_output").flat[0].decode() == SCRIPT
        with pytest.raises(InferenceServerException, match="exceeds the engine's max_input_len 256"):
            grpc.infer(model, tensors({"text_input": "A" * 300, "max_tokens": 40}))


def test_unary_requests_share_the_running_batch(unary: Client) -> None:
    ended: list[str] = []
    with grpcclient.InferenceServerClient(unary.grpc_url) as grpc:
        for name, count in (("long", 500), ("short", 5)):
            inputs = tensors({"text_input": "A", "max_tokens": count})
            grpc.async_infer("ensemble", inputs, callback=lambda result, error, name=name: ended.append(name))
        assert eventually(lambda: len(ended) == 2)
    assert ended == ["short", "long"]


@pytest.mark.parametrize("model", BOTH)
def test_streaming_needs_decoupled_models(unary: Client, model: str) -> None:
    status, answer = unary.generate(model, text_input="A", max_tokens=4, stream=True)
    assert status == 400
    assert "decoupled" in answer["error"]


def test_accumulate_tokens_carries_the_text_so_far(tmp_path: Path) -> None:
    with serve(tmp_path, script_engine(tmp_path / "engine"), accumulate_tokens=True) as client:
        answer = client.ask("tensorrt_llm_bls", text_input="s", max_tokens=40, return_log_probs=True, **COUNTS)
        assert answer.texts[: len(REST)] == [REST[: i + 1] for i in range(len(REST))]
        assert answer.results[3].as_numpy("output_log_probs").shape == (1, 1, 4)
        counts = [int(result.as_numpy("num_output_tokens").item()) for result in answer.results]
        assert sum(counts) == len(REST.encode()), "tokens are counted once, though their text comes again"
        assert client.ask("ensemble", text_input="A", max_tokens=3).texts == ["B", "C", "D"]
        assert client.text("tensorrt_llm_bls", text_input="s", max_tokens=40) == REST
