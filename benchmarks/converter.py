"""Every precision of the embedded converter against the float reference: size, time and distance.

    python benchmarks/converter.py                          the generated models
    python benchmarks/converter.py --model DIR [--tokens N] a Hugging Face folder, e.g. one that `pipeline download` left

The text is `converter.txt` beside this file, which no calibration set contains. `weights` puts the dequantized file into the
reference; `llama.cpp` is what a server computes, keys and values in float32. `greedy` counts how many of 40 tokens after each
of three prompts are the reference's before the first that is not. Exit code 1 when a precision leaves its tolerance.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import fidelity
from tokenizers import Tokenizer

from trtllm_pipeline.stages.base import StageContext
from trtllm_pipeline.toolchains.embedded import convert, random_model, runtime
from trtllm_pipeline.toolchains.embedded.params import ARCHITECTURES, ConvertEmbedded
from trtllm_pipeline.toolchains.embedded.quantize import PRECISIONS
from trtllm_pipeline.toolchains.embedded.reference import Reference

TEXT = Path(__file__).with_suffix(".txt")
PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time")
COLUMNS = "precision  MB  seconds  through  KL  top1  max_error  perplexity  reference  greedy  within"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder; default: a generated model of each architecture"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the text that are compared")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [args.model] if args.model else []
        for architecture in () if args.model else ARCHITECTURES.values():
            folders.append(Path(name) / f"tiny-{architecture}")
            random_model.write_model(folders[-1], architecture)
        results = [compare(folder, Path(name), args) for folder in folders]
    return 0 if all(results) else 1


def compare(folder: Path, scratch: Path, args: argparse.Namespace) -> bool:
    """Print the table of one model. True when all precisions are within their tolerances."""
    reference = Reference.from_folder(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[: args.tokens]
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    print(f"\n{folder.name}, {len(text)} tokens\n{COLUMNS}")
    answers: list[list[int]] | None = None
    good = True
    for precision in args.precision:
        attempt = scratch / f"{folder.name}-{precision}"
        (attempt / "out").mkdir(parents=True)
        started = time.perf_counter()
        convert.run(StageContext(ConvertEmbedded(precision=precision), {"model": folder}, {}, attempt / "out", attempt))
        seconds = time.perf_counter() - started
        path = attempt / "out" / runtime.MODEL_FILE
        eos = json.loads((attempt / "out" / runtime.CONFIG_FILE).read_text(encoding="utf-8"))["eos_token_ids"]
        if answers is None:
            answers = [reference.generate(prompt, 40, stop=eos) for prompt in prompts]
        found = {"weights": fidelity.measure(reference, [text], fidelity.dequantized(path, reference.config))}
        with fidelity.open_llama_cpp(
            path, context=args.tokens + 64, vocab_size=reference.config.vocab_size, threads=args.threads
        ) as model:
            found["llama.cpp"] = fidelity.measure(reference, [text], model)
            greedy = [same(answer, model.generate(prompt, 40)) for answer, prompt in zip(answers, prompts, strict=True)]
        for through, numbers in found.items():
            within = fidelity.TOLERANCES[precision].admits(
                numbers.kl, numbers.perplexity / numbers.reference_perplexity
            )
            good = good and within
            print(
                f"{precision:9} {path.stat().st_size / 1e6:7.1f} {seconds:6.1f} {through:10} {numbers.kl:9.6f}"
                f" {numbers.top1:6.3f} {numbers.max_error:8.4f} {numbers.perplexity:10.2f}"
                f" {numbers.reference_perplexity:10.2f} {'' if through == 'weights' else greedy!s:14} {within}",
                flush=True,
            )
        path.unlink()
    return good


def same(expected: list[int], found: list[int]) -> str:
    """How many tokens agree before the first that does not, of how many."""
    pairs = zip(expected, found, strict=False)
    count = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(found)))
    return f"{count}/{len(expected)}"


if __name__ == "__main__":
    sys.exit(main())
