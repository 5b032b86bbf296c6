"""What the tools' own words in a log mean: whether trying again helps, and what to do.

The words are those of TensorRT-LLM, TensorRT, Triton, Open MPI, PyTorch and the Hugging Face libraries as users have
met them. A log without any of them says nothing about the class of a failure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.errors import FailureClass


@dataclass(frozen=True, slots=True)
class Signature:
    """Words in a log, and what they mean. `pattern` is searched for with ^ and $ at every line."""

    pattern: str
    failure: FailureClass
    hint: str


_REBUILD: Final = "build the engine again with the release and on the kind of GPU that serve it"

KILLED: Final = Signature(
    r"^\s*Killed\s*$|line \d+:\s+\d+ Killed\b|exited on signal 9 \(Killed\)"
    r"|(?:exit(?:ed with)?|returned non-zero exit) (?:code|status) (?:137|-9)\b|died with <Signals\.SIGKILL",
    FailureClass.BUG,
    "a process was killed: out of memory where the kernel's own count (`oom_kill`) says so, and the message with it",
)
"""Says that a process was killed, not by whom or why: `oom.verdict` knows more."""

PYTHON_STUB: Final = Signature(
    r"Failed to initialize Python stub",
    FailureClass.USER,
    "a Python model could not start; the server's log says why. tokenizer_dir must be the model's own folder",
)
"""Says that a Python model failed, not why: a message of its own knows more."""

SIGNATURES: Final = (
    # Particular causes before the general ones that the same log has as well.
    Signature(
        r"error: unrecognized arguments:|error: argument [^\n]*: invalid choice:|^Error: No such option",
        FailureClass.INFEASIBLE,
        "the installed release has no such option: take it out of the matrix, or install a release that has it",
    ),
    Signature(
        r"Networks? with FP8 [^\n]{0,60}require hardware",
        FailureClass.INFEASIBLE,
        "FP8 needs compute capability 8.9 (Ada) or 9.0 (Hopper) and up: another precision, or another GPU",
    ),
    Signature(
        r"FP8 FMHA cannot be enabled",
        FailureClass.INFEASIBLE,
        "this release has no FP8 context attention for this GPU: settings.build.use_fp8_context_fmha=disable",
    ),
    Signature(
        r"Version tag does not match|not compatible with this version of TensorRT, expecting library version",
        FailureClass.INFEASIBLE,
        _REBUILD,
    ),
    Signature(r"generated on an incompatible device", FailureClass.INFEASIBLE, _REBUILD),
    Signature(
        r"mpiSize == tp \* pp|MPI size \d+ != TP size|worldSize is expected to be equal to tp ?\* ?pp",
        FailureClass.INFEASIBLE,
        "an engine runs with exactly tp * pp ranks: launch as many, or build for another tp and pp",
    ),
    Signature(
        r"maxTokensInPagedKvCache[^\n]*must be large enough",
        FailureClass.OUT_OF_MEMORY,
        "the KV cache does not hold one sequence: build with a smaller max_seq_len, or give the cache more "
        "(kv_cache_free_gpu_mem_fraction, max_tokens_in_paged_kv_cache), or free GPU memory that others use",
    ),
    Signature(
        r"ro(?:tary|pe)_scaling[\s\S]{0,400}KeyError: 'type'|`rope_scaling` must be a dictionary with two fields",
        FailureClass.INFEASIBLE,
        "the model's config.json is younger than the installed release: install a newer one",
    ),
    Signature(
        r"GatedRepoError|Cannot access gated repo",
        FailureClass.USER,
        "accept the model's licence on its page, then set HF_TOKEN",
    ),
    Signature(
        r"HeaderTooLarge|invalid load key, 'v'|^version https://git-lfs",
        FailureClass.USER,
        "a file of the model is a git-lfs pointer, not weights: download the model again",
    ),
    Signature(
        r"Invalid HF URI|cnn_dailymail[\s\S]{0,400}(?:ConnectionError|DatasetNotFoundError|doesn't exist on the Hub)"
        r"|(?:ConnectionError|DatasetNotFoundError|Couldn't (?:reach|find))[^\n]{0,200}cnn_dailymail",
        FailureClass.USER,
        "the default calibration set cannot be fetched: let this machine reach the Hub once; TensorRT-LLM up to 0.9 takes "
        "no other, since 0.10 settings.quantize.calibration names it",
    ),
    Signature(
        r"(?:can't open file|No such file or directory:) '?[^\n']*\bexamples/",
        FailureClass.USER,
        "mount the examples of the installed release; other releases have them in other places",
    ),
    Signature(
        r"Tokenizer class \S+ does not exist",
        FailureClass.USER,
        "the tokenizer needs a newer transformers package, or the model's own code (trust_remote_code)",
    ),
    Signature(
        r"opal_init failed|opal_\w+_select failed|orte_init failed|ompi_mpi_init[^\n]*fail|libopen-(?:rte|pal)\.so[^\n]*cannot open",
        FailureClass.USER,
        "Open MPI and mpi4py do not fit each other, or MPI's libraries are not on LD_LIBRARY_PATH",
    ),
    Signature(
        r"Socket '[^'\n]+' already in use|[Aa]ddress already in use|failed to start \w+ service",
        FailureClass.TRANSIENT,
        "another program has the port: end it, or choose port 0 for a free one",
    ),
    Signature(
        r"tritonserver process\(es\) already found with PID",
        FailureClass.TRANSIENT,
        "end the server that runs already",
    ),
    Signature(
        r"boost::interprocess::lock_exception",
        FailureClass.TRANSIENT,
        "Triton's Python backend lost a race over its shared memory; where it comes back, make /dev/shm larger",
    ),
    Signature(
        r"Unable to (?:create|initialize) shared memory",
        FailureClass.USER,
        "shared memory is full: make /dev/shm larger (docker run --shm-size=2g)",
    ),
    Signature(r"No space left on device", FailureClass.USER, "free some space on the disk"),
    Signature(
        r"can't start new thread|pthread_create[^\n]{0,40}(?:failed|Resource temporarily unavailable)"
        r"|\bfork\b[^\n]{0,40}Resource temporarily unavailable",
        FailureClass.USER,
        "the limit on processes and threads is reached: raise it (ulimit -u, or docker run --pids-limit)",
    ),
    Signature(
        r"Error Code \d+: OutOfMemory|\bOutOfMemory \(|Requested amount of GPU memory[^\n]*could not be allocated",
        FailureClass.OUT_OF_MEMORY,
        "a smaller max_num_tokens, max_batch_size or max_seq_len needs less memory",
    ),
    Signature(
        r"OutOfMemoryError:|CUDA out of memory|CUDA (?:runtime )?error[^\n]*out of memory"
        r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        FailureClass.OUT_OF_MEMORY,
        "GPU memory ran out: fewer workers or load_model_on_cpu to convert; smaller max_batch_size or max_seq_len to serve",
    ),
    KILLED,
    Signature(
        r"\bbad_alloc\b|[Cc]annot allocate memory|\bMemoryError\b|failed to allocate (?!pinned)|(?:: |ran )out of memory",
        FailureClass.OUT_OF_MEMORY,
        "a smaller max_batch_size or max_seq_len needs less memory",
    ),
    Signature(
        r"[Ff]ailed to deserialize cuda engine",
        FailureClass.USER,
        f"a rank's file is incomplete or of another release: {_REBUILD}",
    ),
    Signature(
        r"error while loading shared libraries",
        FailureClass.USER,
        "install the library that is named, or put its folder on LD_LIBRARY_PATH",
    ),
    PYTHON_STUB,
)

_COMPILED: Final = tuple((re.compile(each.pattern, re.MULTILINE), each) for each in SIGNATURES)


def classify(log_tail: str) -> Signature | None:
    """The first signature of the table whose words are in `log_tail`; None where there is none."""
    return next((signature for pattern, signature in _COMPILED if pattern.search(log_tail)), None)


def words(signature: Signature, log_tail: str) -> str:
    """The line of `log_tail` that the words of its `signature` end on: the last line of a log is often another."""
    found = re.search(signature.pattern, log_tail, re.MULTILINE)
    assert found is not None, "classify has found it"
    begin = log_tail.rfind("\n", 0, found.end()) + 1
    return log_tail[begin:].partition("\n")[0].strip()
