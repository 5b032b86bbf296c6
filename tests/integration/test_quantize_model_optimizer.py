"""The quantization worker on tiny models, on the CPU: what it writes is the model, within what each format can hold."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.checkpoints import dequantized, quantize
from tests.helpers.needed import quantize_package
from tests.standins.installation import install
from trtllm_pipeline.base.errors import FailureClass, StageError

torch = quantize_package("torch")
quantize_package("modelopt.torch.quantization")
transformers = quantize_package("transformers")

from safetensors.torch import load_file  # noqa: E402

from trtllm_pipeline.tensorrt.modelopt import (  # noqa: E402
    awq_search,
    calibration_batches,
    calibration_memory,
    formats,
    forward,
    job,
    kernel_warmup,
    quantization_worker,
)
from trtllm_pipeline.tensorrt.stage.calibration_rows import Row, read_rows  # noqa: E402
from trtllm_pipeline.tensorrt.stage.params import Selection  # noqa: E402

# Threads that wait for each other make tiny tensors forty times slower on a busy machine.
torch.set_num_threads(1)

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 256, 512, 4, 4, 2, 320
HEAD = HIDDEN // HEADS
ALGORITHMS = {
    "bf16": None,
    "fp16": None,
    "fp8": "FP8",
    "int8_wo": "W8A16",
    "int4_wo": "W4A16",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
}
LENGTHS = (3, 5, 8, 12, 17, 24, 31, 40)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with random weights; some input channels are ten times louder, as in trained models."""
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    return folder


def write_model(folder: Path, kind: str, **changes: Any) -> None:
    config = transformers.CONFIG_MAPPING[kind](
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "norm" in name:
                value.copy_(torch.rand_like(value) + 0.5)
                value[::32] *= 10
            else:
                value.normal_(std=0.2 if name.endswith("bias") else value.shape[-1] ** -0.5)
    made.to(torch.bfloat16).save_pretrained(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of them, for what no family does its own way."""
    folder = tmp_path_factory.mktemp("one")
    write_model(folder, "llama")
    return folder


@pytest.fixture(autouse=True)
def strict_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our modules import nothing that TensorRT-LLM's environment may lack: the worker runs there."""
    allowed = {*sys.stdlib_module_names, "trtllm_pipeline", "numpy", "torch", "transformers", "modelopt", "jinja2"}
    real = builtins.__import__

    def checked(name: str, globals: Mapping[str, Any] | None = None, *rest: Any, **named: Any) -> Any:  # noqa: A002
        by = str((globals or {}).get("__name__"))
        assert not by.startswith("trtllm_pipeline.") or name.partition(".")[0] in allowed, f"{by} imports {name}"
        return real(name, globals, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", checked)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of many lengths, as token ids."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    random = np.random.default_rng(0)
    texts = [json.dumps({"input_ids": random.integers(3, VOCABULARY, length).tolist()}) for length in LENGTHS]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def joined(folder: Path, tp: int, pp: int) -> dict[str, Any]:
    """All ranks' tensors as those of one rank: layers numbered through, parts concatenated."""
    found: dict[str, Any] = {}
    for stage in range(pp):
        parts = [load_file(folder / f"rank{stage * tp + rank}.safetensors") for rank in range(tp)]
        for name in parts[0]:
            whole = _concatenated(name, [part[name] for part in parts])
            pieces = name.split(".")
            if pieces[1] == "layers":
                pieces[2] = str(int(pieces[2]) + stage * LAYERS // pp)
            found[".".join(pieces)] = whole
    return found


def _concatenated(name: str, parts: list[Any]) -> Any:
    module, kind = name.split(".")[-2:]
    column = module in {"qkv", "fc", "gate", "lm_head", "vocab_embedding"}
    row = module in {"dense", "proj"}
    if module == "qkv" and parts[0].dim() > 0 and kind != "prequant_scaling_factor" and parts[0].shape[0] > 1:
        # Each rank has its queries, then its keys, then its values.
        scale = parts[0].shape[0] * len(parts) // ((HEADS + 2 * KV_HEADS) * HEAD) or 1
        packed = (HEADS + 2 * KV_HEADS) * HEAD // (parts[0].shape[0] * len(parts)) or 1
        assert scale == 1
        sizes = [count * HEAD // packed // len(parts) for count in (HEADS, KV_HEADS, KV_HEADS)]
        return torch.cat(
            [torch.cat(group) for group in zip(*(_bytes(part).split(sizes) for part in parts), strict=True)]
        ).view(parts[0].dtype)
    if column and parts[0].dim() > 0 and parts[0].shape[0] > 1 and kind in {"weight", "bias", "weights_scaling_factor"}:
        return torch.cat([_bytes(part) for part in parts]).view(parts[0].dtype)
    if row and kind == "weight":
        return torch.cat([_bytes(part) for part in parts], dim=1).view(parts[0].dtype)
    if row and kind == "weights_scaling_factor" and parts[0].dim() == 2:
        return torch.cat(parts, dim=1)
    if row and kind == "prequant_scaling_factor":
        return torch.cat(parts)
    for part in parts[1:]:
        assert torch.equal(part, parts[0]), f"{name} should be the same on every rank"
    return parts[0]


def _bytes(tensor: Any) -> Any:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def originals(folder: Path) -> Iterator[tuple[str, Any]]:
    """The projections of the model in `directory` by their names in a checkpoint."""
    source = load_file(folder / "model.safetensors")
    for index in range(LAYERS):
        hf, ours = f"model.layers.{index}.", f"transformer.layers.{index}."
        qkv = [source[f"{hf}self_attn.{part}_proj.weight"] for part in "qkv"]
        yield f"{ours}attention.qkv", torch.cat(qkv).float()
        yield f"{ours}attention.dense", source[f"{hf}self_attn.o_proj.weight"].float()
        yield f"{ours}mlp.fc", source[f"{hf}mlp.gate_proj.weight"].float()
        yield f"{ours}mlp.gate", source[f"{hf}mlp.up_proj.weight"].float()
        yield f"{ours}mlp.proj", source[f"{hf}mlp.down_proj.weight"].float()


@pytest.mark.parametrize("precision", sorted(ALGORITHMS))
def test_every_parallelism_holds_the_same_model(model: Path, rows: Path, tmp_path: Path, precision: str) -> None:
    whole = quantize(model, rows, tmp_path / "tp1pp1", precision=precision)
    expected = joined(whole, 1, 1)
    # W4A8 searches for long, and is cut as INT4 is.
    for tp, pp in ((2, 2),) if precision == "w4a8_awq" else ((2, 1), (1, 2), (2, 2)):
        out = quantize(model, rows, tmp_path / f"tp{tp}pp{pp}", precision=precision, tp=tp, pp=pp)
        found = joined(out, tp, pp)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(_bytes(found[name]), _bytes(tensor)), f"{name} at tp{tp}pp{pp}"
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        assert config["mapping"] == {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}


# Largest error of one weight as a part of the largest in its group, by what half a step of the format is.
# FP8 E4M3 has three bits of mantissa: half a step is at most 2^-4 of the value. Smoothing and taking it back round to bfloat16 four times, 2^-9 each.
TOLERANCES = {
    "bf16": 0.0,
    "fp16": 2**-11,
    "int8_wo": 0.0,
    "int4_wo": 0.0,
    "fp8": 2**-4,
    "int8_sq": 0.5 / 127 + 2**-7,
    "int4_awq": 0.5 / 7 + 2**-7,
    "w4a8_awq": 0.5 / 7 + 2**-4,
}


@pytest.mark.parametrize("precision", sorted(TOLERANCES))
def test_dequantized_weights_are_the_original_ones(model: Path, rows: Path, tmp_path: Path, precision: str) -> None:
    tensors = joined(quantize(model, rows, tmp_path, precision=precision), 1, 1)
    for name, original in originals(model):
        found = dequantized(tensors, name)
        smoothing = tensors.get(f"{name}.prequant_scaling_factor")
        # Rounding happens on smoothed weights, so that is where its steps are equal.
        factor = torch.ones(original.shape[1]) if smoothing is None else 1 / smoothing.float()
        group = 128 if "awq" in precision else original.shape[1]
        largest = (original * factor).abs().unflatten(1, (-1, group)).amax(2, keepdim=True)
        error = ((found - original) * factor).abs().unflatten(1, (-1, group)) / largest
        assert error.max() <= TOLERANCES[precision], f"{name}: {error.max()}"
        if precision in {"fp8", "int8_sq", "int4_awq", "w4a8_awq"}:
            assert error.max() > 0, f"{name} is not quantized"


def test_config_says_what_the_checkpoint_is(model: Path, rows: Path, tmp_path: Path) -> None:
    source = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for precision, algorithm in ALGORITHMS.items():
        out = quantize(
            model,
            rows,
            tmp_path / precision,
            precision=precision,
            pp=2,
            kv_cache_precision="fp8",
            calibration={"samples": 1},
        )
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        expected = {
            "architecture": source["architectures"][0],
            "dtype": "float16" if precision == "fp16" else "bfloat16",
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_size": HEAD,
            "hidden_act": "silu",
            "norm_epsilon": source["rms_norm_eps"],
            "rotary_base": 1000000.0,
            "rotary_scaling": None,
            "position_embedding_type": "rope_gpt_neox",
        }
        assert {name: config[name] for name in expected} == expected
        quantization = config["quantization"]
        assert quantization["quant_algo"] == algorithm
        assert quantization["kv_cache_quant_algo"] == "FP8"
        if "awq" in precision:
            assert (quantization["group_size"], quantization["has_zero_point"]) == (128, False)
            assert quantization["pre_quant_scale"] is True
        if algorithm is not None and not precision.endswith("_wo"):
            # The head is on the last stage only, and still every rank's builder has to know.
            assert quantization["exclude_modules"] == ["lm_head"]
        assert config.get("qwen_type") == ("qwen2" if source["model_type"] == "qwen2" else None)
        scales = [name for name in joined(out, 1, 2) if name.endswith("kv_cache_scaling_factor")]
        assert len(scales) == LAYERS


def test_facts_of_the_run(llama: Path, rows: Path, tmp_path: Path) -> None:
    out = quantize(llama, rows, tmp_path, precision="fp8")
    facts = json.loads((out / quantization_worker.FACTS_FILE).read_text(encoding="utf-8"))
    assert facts["calibration"]["rows"] == len(LENGTHS)
    assert facts["calibration"]["tokens"] == sum(LENGTHS)
    assert facts["calibration"]["batch_size"] == len(LENGTHS)
    assert {"load", "calibrate", "export", "write"} <= facts["times_s"].keys()
    assert facts["peak_memory"]["host_bytes"] > 0
    assert json.loads((tmp_path / "progress.json").read_text(encoding="utf-8"))["done"] > 0
    again = quantize(llama, rows, tmp_path / "again", precision="fp8", calibration={"samples": 4})
    other = json.loads((again / quantization_worker.FACTS_FILE).read_text(encoding="utf-8"))
    assert other["calibration"]["rows"] == 4
    assert other["calibration"]["digest"] != facts["calibration"]["digest"]


@pytest.mark.parametrize("precision", ["fp8", "int8_sq"])
def test_a_batch_leaves_the_statistics_of_its_rows_one_by_one(
    model: Path, rows: Path, tmp_path: Path, precision: str
) -> None:
    outs = {
        size: quantize(
            model, rows, tmp_path / str(size), precision=precision, batch_size=size, kv_cache_precision="fp8"
        )
        for size in (1, 8)
    }
    single, batched = (joined(outs[size], 1, 1) for size in (1, 8))
    measured = [name for name in single if name.endswith(("activation_scaling_factor", "cache_scaling_factor"))]
    assert len(measured) == LAYERS * 6
    for name in measured:
        # bfloat16 products differ with the shape of a batch; the test below compares in float32.
        torch.testing.assert_close(batched[name].float(), single[name].float(), rtol=0.06, atol=0, msg=name)


def test_padding_is_not_measured(model: Path, rows: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = [list(row.tokens or ()) for row in read_rows(rows)]
    padded = [row + [0] * (max(LENGTHS) - len(row)) for row in tokens]
    single, batched, unblanked = (_maxima(loaded, *case) for case in ((tokens, 1), (tokens, 8), (padded, 8)))
    assert len(single) == LAYERS * 9
    for name, value in single.items():
        assert batched[name] == pytest.approx(value, rel=1e-4), name
    assert any(unblanked[name] > value * 1.02 for name, value in single.items()), "padding would not have shown"


def _maxima(model: Any, tokens: list[list[int]], size: int) -> dict[str, float]:
    import copy

    import modelopt.torch.quantization as mtq

    measured = copy.deepcopy(model)
    configuration = formats.configuration(formats.precision("fp8"), "FP8", for_engines=True)
    loop = forward.CalibrationLoop(tokens, size, 1, restart=False, progress=lambda _done, _total: None)
    mtq.quantize(measured, configuration, forward_loop=loop)
    return {
        name: float(module.amax)
        for name, module in measured.named_modules()
        if name.endswith(("input_quantizer", "k_bmm_quantizer", "v_bmm_quantizer")) and module.is_enabled
    }


def test_maxima_are_those_of_model_optimizers_own_calibrator(model: Path, rows: Path) -> None:
    import copy

    import modelopt.torch.quantization as mtq

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = [list(row.tokens or ()) for row in read_rows(rows)]
    theirs = copy.deepcopy(loaded)

    def loop(found: Any) -> None:
        with torch.no_grad():
            for row in tokens:
                found(torch.tensor([row]))

    mtq.quantize(theirs, {**mtq.FP8_DEFAULT_CFG}, forward_loop=loop)
    ours = _maxima(loaded, tokens, 4)
    for name, module in theirs.named_modules():
        if name.endswith("input_quantizer") and module.is_enabled:
            assert ours[name] == pytest.approx(float(module.amax), rel=1e-4), name


class _Scarce:
    """An allocator with room for some rows: beyond them it asks for what no machine has, and fails as torch's does."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.failed = 0

    def __call__(self, _module: Any, args: tuple[Any, ...]) -> None:
        values = args[0] if args else None
        if isinstance(values, torch.Tensor) and values.dim() == 3 and values.shape[0] > self.rows:
            self.failed += 1
            torch.empty(2**52, dtype=torch.uint8)


@pytest.mark.parametrize("precision", ["fp8", "int4_awq"])
def test_batches_are_halved_until_they_fit(
    llama: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    scarce = _Scarce(2)
    plain = quantize(llama, rows, tmp_path / "plain", precision=precision, batch_size=2)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(scarce)
    try:
        out = quantize(llama, rows, tmp_path / "scarce", precision=precision, batch_size=8)
    finally:
        handle.remove()
    assert scarce.failed == 2
    log = capsys.readouterr().out
    assert "memory ran out at 8 rows of 40 tokens; continuing 4" in log
    assert "memory ran out at 4 rows of 40 tokens; continuing 2" in log
    facts = json.loads((out / quantization_worker.FACTS_FILE).read_text(encoding="utf-8"))
    assert facts["calibration"]["batch_size"] == 2
    expected = joined(plain, 1, 1)
    for name, tensor in joined(out, 1, 1).items():
        assert torch.equal(_bytes(tensor), _bytes(expected[name])), name


def test_a_row_that_does_not_fit_is_an_error(llama: Path, rows: Path, tmp_path: Path) -> None:
    handle = torch.nn.modules.module.register_module_forward_pre_hook(_Scarce(0))
    try:
        with pytest.raises(StageError, match="single row of 40 tokens") as caught:
            quantize(llama, rows, tmp_path, precision="fp8")
    finally:
        handle.remove()
    assert caught.value.failure is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8_wo", "int4_awq", "int8_sq", "nvfp4"])
def test_hugging_face_checkpoint(model: Path, rows: Path, tmp_path: Path, precision: str) -> None:
    out = quantize(model, rows, tmp_path, precision=precision, checkpoint_format="hugging_face")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert transformers.AutoConfig.from_pretrained(out).hidden_size == HIDDEN
    tensors = load_file(out / "model.safetensors")
    if precision == "bf16":
        source = load_file(model / "model.safetensors")
        assert tensors.keys() == source.keys()
        assert all(torch.equal(tensors[name], source[name]) for name in source)
        return
    quantization = json.loads((out / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
    assert quantization["quant_algo"] == formats.PRECISIONS[precision].algorithm
    assert "lm_head" in quantization["exclude_modules"]
    assert config["quantization_config"]["quant_method"] == "modelopt"
    name = "model.layers.0.mlp.down_proj.weight"
    if precision in {"fp8", "int8_wo"}:
        scale = tensors[f"{name}_scale"].float()
        found = tensors[name].float() * (scale if scale.dim() == 0 else scale.reshape(-1, 1))
        original = load_file(model / "model.safetensors")[name].float()
        limit = 2**-4 * original.abs().max() if precision == "fp8" else 0.51 * scale.max()
        assert (found - original).abs().max() <= limit
        assert not torch.equal(found, original)


def test_what_cannot_be_cut_is_refused(llama: Path, rows: Path, tmp_path: Path) -> None:
    for params, said in (
        ({"precision": "fp8", "tp": 3}, "4 attention heads cannot be split evenly over 3 GPUs"),
        ({"precision": "fp8", "pp": 3}, "4 layers cannot be split evenly into 3 stages"),
        ({"precision": "int4_awq", "tp": 4}, "must be a multiple of 128 for int4_awq"),
        ({"precision": "int3"}, "'int3' is not known"),
    ):
        with pytest.raises(StageError, match=said) as caught:
            quantize(llama, rows, tmp_path / said[:12], **params)
        assert caught.value.failure is FailureClass.INFEASIBLE
        assert caught.value.hint


def test_key_and_value_heads_are_repeated_over_more_ranks(rows: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama")
    out = quantize(tmp_path / "model", rows, tmp_path / "attempt", precision="bf16", tp=4)
    source = load_file(tmp_path / "model" / "model.safetensors")
    for rank in range(4):
        qkv = load_file(out / f"rank{rank}.safetensors")["transformer.layers.0.attention.qkv.weight"]
        query, key, value = qkv.split([HEAD, HEAD, HEAD])
        own = slice(rank * HEAD, (rank + 1) * HEAD)
        shared = slice(rank // 2 * HEAD, (rank // 2 + 1) * HEAD)
        for part, found, rows_of in (("q", query, own), ("k", key, shared), ("v", value, shared)):
            assert torch.equal(found, source[f"model.layers.0.self_attn.{part}_proj.weight"][rows_of])


def test_qwen3_keeps_its_query_and_key_norms(rows: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3", head_dim=HEAD)
    tensors = joined(quantize(tmp_path / "model", rows, tmp_path / "attempt", precision="fp8"), 1, 1)
    source = load_file(tmp_path / "model" / "model.safetensors")
    for part in "qk":
        found = tensors[f"transformer.layers.3.attention.{part}_layernorm.weight"]
        assert torch.equal(found, source[f"model.layers.3.self_attn.{part}_norm.weight"])


def test_rotary_scaling_reaches_the_checkpoint(rows: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    write_model(tmp_path / "model", "llama", rope_scaling=dict(scaling))
    out = quantize(tmp_path / "model", rows, tmp_path / "attempt", precision="bf16")
    found = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert found["rotary_base"] == 1000000.0
    assert found["rotary_scaling"] == {**scaling, "type": "llama3"}


def test_memory_that_ran_out_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**52, dtype=torch.uint8)
    assert calibration_memory.is_out_of_memory(caught.value)
    with pytest.raises(RuntimeError) as other:
        torch.empty(2) @ torch.empty(3)
    assert not calibration_memory.is_out_of_memory(other.value)


def test_a_model_whose_search_ran_out_of_memory_is_gone_before_the_next_is_loaded(
    llama: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    there: list[int] = []
    load = quantization_worker.Quantization.load

    def watched(self: quantization_worker.Quantization, rehearse: Any) -> Any:
        there.append(sum(each() is not None for each in loaded))
        model = load(self, rehearse)
        loaded.extend(weakref.ref(module) for module in model.modules())
        return model

    monkeypatch.setattr(quantization_worker.Quantization, "load", watched)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(_Scarce(4))
    try:
        quantize(llama, rows, tmp_path, precision="int4_awq", batch_size=8)
    finally:
        handle.remove()
    assert there == [0, 0]


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("bfloat16", 5e-3)])
@pytest.mark.parametrize("precision", ["int4_awq", "w4a8_awq"])
def test_losses_of_a_search_are_those_by_outputs(
    llama: Path, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: str, within: float
) -> None:
    """Of the layers that read the hidden state; the others read twice as many channels, for which the rows are too few."""
    import modelopt.torch.quantization as mtq

    tokens = np.random.default_rng(0).integers(3, VOCABULARY, (8, 100)).tolist()
    tokens[-1] = tokens[-1][:60]
    by_products: list[object] = []
    of = awq_search._Products.of
    monkeypatch.setattr(awq_search._Products, "of", lambda *given: by_products.append(given[1]) or of(*given))
    found = []
    for away in (awq_search.by_products, lambda _model: nullcontext()):
        monkeypatch.setattr(awq_search, "by_products", away)
        model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=getattr(torch, dtype)).eval()
        configuration = formats.configuration(formats.precision(precision), None, for_engines=True)
        algorithm = configuration["algorithm"]
        method = {"method": algorithm} if isinstance(algorithm, str) else algorithm
        configuration["algorithm"] = {**method, "debug": True}
        loop = forward.CalibrationLoop(tokens, 8, 2, restart=True, progress=lambda _done, _total: None)
        mtq.quantize(model, configuration, forward_loop=loop)
        found.append({name: m.awq_lite for name, m in model.named_modules() if hasattr(m, "awq_lite")})
    ours, theirs = found
    assert len(by_products) == 6 * 11 * LAYERS, "all but the last of a layer's seven"
    assert ours.keys() == theirs.keys()
    for name, searched in ours.items():
        other = theirs[name].loss
        assert searched.loss == pytest.approx(other, rel=within), name
        assert other[searched.best_alpha] <= min(other.values()) * (1 + within), name


def test_kernels_loaded_ahead_change_nothing(
    llama: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[tuple[int, str]] = []
    attempt = kernel_warmup._attempt

    def spy(rehearse: Any, layer: Any) -> None:
        rehearsed.append((layer.config.num_hidden_layers, str(layer.dtype)))
        attempt(rehearse, layer)

    for precision in ("fp8", "int4_awq"):
        plain = quantize(llama, rows, tmp_path / "plain" / precision, precision=precision)
        with monkeypatch.context() as patch:
            patch.setattr(kernel_warmup, "_device", lambda _folder: torch.device("cpu"))
            patch.setattr(kernel_warmup, "_attempt", spy)
            out = quantize(llama, rows, tmp_path / "ahead" / precision, precision=precision)
        assert (out / "rank0.safetensors").read_bytes() == (plain / "rank0.safetensors").read_bytes()
    assert rehearsed == [(1, "torch.bfloat16")] * 2, "without a GPU it should not happen by itself"


@pytest.mark.parametrize("part", ["_layer", "rehearsal"])
def test_what_goes_wrong_while_loading_kernels_is_only_told(
    llama: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    part: str,
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: broken\nmore")

    monkeypatch.setattr(kernel_warmup, "_device", lambda _folder: torch.device("cpu"))
    monkeypatch.setattr(kernel_warmup, part, broken if part == "_layer" else lambda *_: broken)
    out = quantize(llama, rows, tmp_path, precision="fp8")
    assert (out / "rank0.safetensors").exists()
    assert "not loaded ahead, so the first batch will be slower: CUDA error: broken\n" in capsys.readouterr().out


def test_texts_and_conversations_become_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    rows = [Row(text="a b c"), Row(messages=[{"role": "user", "content": "d"}]), Row(tokens=[7])]
    plain, chats = (
        calibration_batches.tokenize(tmp_path, rows, Selection(max_length=2, chat_template=chat))
        for chat in (False, True)
    )
    assert plain == [[1, 2], [5, 4], [7]]
    assert chats == [[5, 1], [5, 4], [7]]
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(StageError, match="tokenizer"):
        calibration_batches.tokenize(tmp_path, rows, Selection())


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate("?abcd>")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "?",
        "chat_template": "{% for message in messages %}> {{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


LANE = """\
name: lane
axes:
  model: [tiny]
  precision: [fp8]
  parallel: [tp2]
  max_batch_size: [2]
  lengths: ["256,32"]
  toolchain: [{toolchain}]
settings:
  quantize: {{ calibration: {{ samples: 4 }} }}
  serve: {{ frontend: trtllm_serve }}
"""


@pytest.mark.parametrize(
    ("release", "toolchain", "until"),
    [("1.1.0", "tensorrt_llm", "build"), ("1.3.0", "tensorrt_llm_pytorch", "repository")],
)
def test_the_lanes_go_on_with_what_the_worker_left(tmp_path: Path, release: str, toolchain: str, until: str) -> None:
    installed = install(tmp_path / "trt", release, gpus=2, examples=False)
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(LANE.format(toolchain=toolchain), encoding="utf-8")
    words = ("run", "--matrix", str(matrix), "--workspace", str(tmp_path / "w"), "--until", until, "--format", "json")
    environment = {**os.environ, **installed.environment, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "trtllm_pipeline", *words],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (tmp_path / "w" / "store" / "quantize").iterdir()
    config = json.loads((made / "out" / "config.json").read_text(encoding="utf-8"))
    facts = json.loads((made / "out" / quantization_worker.FACTS_FILE).read_text(encoding="utf-8"))
    assert facts["precision"] == "fp8"
    recorded = json.loads((made / "job.json").read_text(encoding="utf-8"))["commands"]
    assert recorded[0][:2] == [sys.executable, str(Path(job.__file__).with_name("__main__.py"))]
    if toolchain == "tensorrt_llm":
        assert config["mapping"]["tp_size"] == 2
        (engine,) = (tmp_path / "w" / "store" / "build").iterdir()
        built = json.loads((engine / "out" / "config.json").read_text(encoding="utf-8"))
        assert built["pretrained_config"]["quantization"] == config["quantization"]
    else:
        assert config["quantization_config"]["quant_algo"] == "FP8"
        assert (made / "out" / "tokenizer.json").is_file()


def config_of(family: str) -> Any:
    """A small configuration of a family that transformers has."""
    kind = type(transformers.AutoConfig.for_model(family))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "moe" in family else {}
    return kind(**sizes, **heads, **mixture)


@pytest.mark.parametrize(
    ("family", "rotated"), [("llama", True), ("qwen3", True), ("gemma2", True), ("phi", True), ("glm", False)]
)
def test_rotation_in_fewer_steps_is_transformers_own(family: str, rotated: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = transformers.AutoModel.from_config(config_of(family), attn_implementation="eager").float().eval()
    file = sys.modules[type(decoder).__module__]
    theirs = file.apply_rotary_pos_emb
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = decoder(tokens).last_hidden_state
        with forward._short_rotation(decoder):
            assert (file.apply_rotary_pos_emb is not theirs) == rotated
            found = decoder(tokens).last_hidden_state
    assert file.apply_rotary_pos_emb is theirs
    assert torch.allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gemma2", "phi"])
@pytest.mark.parametrize("precision", ["fp8", "int4_awq"])
def test_exceptions_left_out_concern_nothing(family: str, precision: str) -> None:
    import modelopt.torch.quantization as mtq

    whole = formats.configuration(formats.precision(precision), "FP8", for_engines=False) | {"algorithm": None}
    model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    short = formats.concerning(whole, model)
    assert len(short["quant_cfg"]) < len(whole["quant_cfg"]) / 2
    quantizers = []
    for configuration in (whole, short):
        quantized = mtq.quantize(transformers.AutoModelForCausalLM.from_config(config_of(family)), configuration)
        quantizers.append({name: str(each) for name, each in quantized.named_modules() if name.endswith("quantizer")})
    assert quantizers[0] == quantizers[1]
    assert any("disabled" not in text for text in quantizers[0].values())


def test_what_quantizing_does_not_need_is_not_imported() -> None:
    code = """
import sys
from trtllm_pipeline.tensorrt.modelopt import imports
imports.leave_out()
import modelopt.torch.export, modelopt.torch.quantization, transformers
from transformers import AutoModelForCausalLM
import scipy.stats
assert "torch._inductor.compile_fx" not in sys.modules
assert not [name for name, module in sys.modules.items() if name.startswith("scipy.") and getattr(module, "__file__", None)]
try:
    scipy.stats.entropy([1])
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "scipy.stats.entropy is not available in the quantization worker"


def test_the_benchmark_measures_ours_and_a_plain_script(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "quantize.py"
    runs = ("--process", "fp8", "--runs", "fp8", "--by-hand", "fp8")
    command = (script, "--shape", "toy", "--samples", "2", "--length", "16", *runs, "--json", "out.json")
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["runs"]
    assert [(run["run"], run["by"]) for run in told] == [("fp8", "process"), ("fp8", "ours"), ("fp8", "hand")]
    assert len({round(run["written_gb"], 3) for run in told}) == 1


def test_a_model_optimizer_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import modelopt.torch.quantization as mtq

    monkeypatch.setattr(mtq, "FP8_DEFAULT_CFG", {"quant_cfg": {"*weight_quantizer": {"num_bits": (4, 3)}}})
    with pytest.raises(StageError, match=r"Model Optimizer 0\..* is too old") as caught:
        formats.configuration(formats.precision("fp8"), None, for_engines=True)
    assert caught.value.failure is FailureClass.USER
