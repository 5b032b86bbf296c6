"""The tools' words as users have met them, and words that only look like them."""

from __future__ import annotations

import re

import pytest

from trtllm_pipeline.errors import FailureClass
from trtllm_pipeline.processes.signatures import SIGNATURES, classify, words

INFEASIBLE, USER = FailureClass.INFEASIBLE, FailureClass.USER
MEMORY, TRANSIENT = FailureClass.OUT_OF_MEMORY, FailureClass.TRANSIENT

MET = (
    # what was in the log, class, a word of the hint
    ("trtllm-build: error: unrecognized arguments: --max_output_len 1024", INFEASIBLE, "option"),
    ("quantize.py: error: argument --qformat: invalid choice: 'nvfp4' (choose from 'fp8')", INFEASIBLE, "option"),
    ("Usage: trtllm-serve [OPTIONS] MODEL\n\nError: No such option: --cluster_size", INFEASIBLE, "option"),
    ("[E] 1: [defaultAllocator.cpp::allocate::20] OutOfMemory (no further information)", MEMORY, "max_num_tokens"),
    ("[TRT] [E] Error Code 2: OutOfMemory (Requested size was 21474836480 bytes.)", MEMORY, "max_num_tokens"),
    (
        "[TRT] [E] Requested amount of GPU memory (21474836480 bytes) could not be allocated. There may not be enough",
        MEMORY,
        "max_num_tokens",
    ),
    ("convert.sh: line 12:  4711 Killed                  python3 convert_checkpoint.py", FailureClass.BUG, "oom_kill"),
    ("Loading weights\nKilled\n", FailureClass.BUG, "oom_kill"),
    (
        "subprocess.CalledProcessError: Command '['trtllm-build']' returned non-zero exit status 137.",
        FailureClass.BUG,
        "oom_kill",
    ),
    ("worker 2 died with <Signals.SIGKILL: 9>", FailureClass.BUG, "oom_kill"),
    (
        "mpirun noticed that process rank 1 with PID 0 on node h exited on signal 9 (Killed).",
        FailureClass.BUG,
        "oom_kill",
    ),
    ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", MEMORY, "load_model_on_cpu"),
    ("torch.OutOfMemoryError: HIP or CUDA ran dry", MEMORY, "load_model_on_cpu"),
    ("CUDA call failed lazily: CUDA_ERROR_OUT_OF_MEMORY", MEMORY, "max_batch_size"),
    ("RuntimeError: cudaErrorMemoryAllocation", MEMORY, "max_batch_size"),
    ("[TensorRT-LLM][ERROR] CUDA runtime error in cudaMalloc(ptr, n): out of memory", MEMORY, "max_batch_size"),
    ("[TRT] [E] Networks with FP8 precision require hardware with FP8 support", INFEASIBLE, "8.9"),
    ("Assertion failed: FP8 FMHA cannot be enabled on Pre-Hopper Arch", INFEASIBLE, "use_fp8_context_fmha"),
    (
        "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match",
        INFEASIBLE,
        "again",
    ),
    (
        "The engine plan file is not compatible with this version of TensorRT, expecting library version 10.3 got 10.6",
        INFEASIBLE,
        "again",
    ),
    (
        "The engine plan file is generated on an incompatible device, expecting compute 8.9 got compute 9.0",
        INFEASIBLE,
        "GPU",
    ),
    ("[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine", USER, "incomplete"),
    ("[TensorRT-LLM][ERROR] Assertion failed: mpiSize == tp * pp (1 != 2)", INFEASIBLE, "tp * pp"),
    ("RuntimeError: MPI size 1 != TP size 2 * PP size 1", INFEASIBLE, "tp * pp"),
    ("worldSize is expected to be equal to tp*pp when participantIds are not specified", INFEASIBLE, "tp * pp"),
    (
        "maxTokensInPagedKvCache (512) must be large enough to process at least 1 sequence to completion",
        MEMORY,
        "max_seq_len",
    ),
    ("failed to start HTTP service: Unavailable - Socket '0.0.0.0:8000' already in use", TRANSIENT, "port"),
    ("error: creating server: failed to start GRPC service", TRANSIENT, "port"),
    ("OSError: [Errno 98] Address already in use", TRANSIENT, "port"),
    ("tritonserver process(es) already found with PID(s): [812]. Use --force to proceed anyway.", TRANSIENT, "end the"),
    ("terminate called after throwing an instance of 'boost::interprocess::lock_exception'", TRANSIENT, "/dev/shm"),
    ("ValueError: Tokenizer class QWenTokenizer does not exist or is not currently imported.", USER, "transformers"),
    ("pb_stub.cc:366]  Failed to initialize Python stub: KeyError: 'x'", USER, "tokenizer_dir"),
    ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", USER, "HF_TOKEN"),
    ("Cannot access gated repo for url https://hub/m/resolve/main/config.json.", USER, "HF_TOKEN"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", USER, "git-lfs"),
    ("version https://git-lfs.github.com/spec/v1\noid sha256:ab", USER, "git-lfs"),
    ("_pickle.UnpicklingError: invalid load key, 'v'.", USER, "git-lfs"),
    (
        '    if rotary_scaling["type"] == "linear":\n       ~~~~~~^^^^^\nKeyError: \'type\'',
        INFEASIBLE,
        "newer",
    ),
    (
        "`rope_scaling` must be a dictionary with two fields, `type` and `factor`, got {'factor': 8.0}",
        INFEASIBLE,
        "newer",
    ),
    ("ConnectionError: Couldn't reach 'cnn_dailymail' on the Hub (LocalEntryNotFoundError)", USER, "calibration"),
    ("datasets.exceptions.DatasetNotFoundError: Dataset 'cnn_dailymail' doesn't exist on the Hub", USER, "calibration"),
    ("ValueError: Invalid HF URI: hf://datasets/cnn_dailymail", USER, "calibration"),
    ("It looks like opal_init failed for some reason; your parallel process is likely to abort.", USER, "mpi4py"),
    ("opal_shmem_base_select failed\n--> Returned value -1 instead of OPAL_SUCCESS", USER, "mpi4py"),
    ("orte_init failed\n--> Returned value Unable to start a daemon", USER, "mpi4py"),
    ("ompi_mpi_init: ompi_rte_init failed", USER, "mpi4py"),
    ("ImportError: libopen-rte.so.40: cannot open shared object file: No such file or directory", USER, "mpi4py"),
    ("python3: can't open file '/app/examples/llama/convert_checkpoint.py': [Errno 2] No such file", USER, "examples"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'examples/quantization/quantize.py'", USER, "examples"),
    ("Unable to create shared memory region 'r': No space left on device", USER, "/dev/shm"),
    ("OSError: [Errno 28] No space left on device", USER, "disk"),
    ("RuntimeError: can't start new thread", USER, "ulimit -u"),
    ("libgomp: pthread_create failed: Resource temporarily unavailable", USER, "ulimit -u"),
    ("sh: 0: Cannot fork: Resource temporarily unavailable", USER, "ulimit -u"),
    ("tritonserver: error while loading shared libraries: libcudart.so.12: cannot open", USER, "LD_LIBRARY_PATH"),
    ("terminate called after throwing an instance of 'std::bad_alloc'", MEMORY, "max_batch_size"),
    ("MemoryError", MEMORY, "max_batch_size"),
    ("llama_model_load: failed to allocate buffer of 2 GiB", MEMORY, "max_batch_size"),
    ("worker 0 ran out of memory", MEMORY, "max_batch_size"),
    ("OSError: [Errno 12] Cannot allocate memory", MEMORY, "max_batch_size"),
)

INNOCENT = (
    "",
    "[I] 0 OutOfMemory errors, 0 retries",
    "will retry with a smaller batch should it run out of memory",
    "Killed 3 stale workers of an earlier run",
    "0 jobs Killed",
    "unrecognized arguments are passed on to the model",
    "checking that the address is not already taken: free",
    "[TRT-LLM] [I] Version tag 0.16.0 matches",
    "Total Activation Memory: 1024 MiB, no allocation failed",
    'W1 pinned_memory_manager.cc:170] "failed to allocate pinned system memory: no pinned memory pool"',
    "[I] FP8 FMHA is enabled",
    "rope_scaling: {'type': 'linear'}",
    "loading calibration rows of cnn_dailymail: 512 rows",
    "reading examples/llama/README.md",
    "exit code 0 after 137 s",
    "max_tokens_in_paged_kv_cache is not set",
    "mpiSize 2, tp 2, pp 1",
    "Failed requests: 0",
)


@pytest.mark.parametrize(("log", "failure", "word"), MET)
def test_words_as_they_were_met(log: str, failure: FailureClass, word: str) -> None:
    found = classify(f"[I] line before\n{log}\n[I] line after")
    assert found is not None
    assert (found.failure, word in found.hint) == (failure, True), found


@pytest.mark.parametrize("log", INNOCENT)
def test_innocent_words(log: str) -> None:
    assert classify(log) is None


def test_every_signature_has_been_met() -> None:
    used = {found for log, _, _ in MET if (found := classify(log))}
    assert set(SIGNATURES) == used


def test_no_part_of_a_pattern_is_beyond_reach() -> None:
    """Each alternative at the top level is what finds some of the recorded words, so none can be misspelt unseen."""
    texts = [log for log, _, _ in MET]
    for signature in SIGNATURES:
        depth, parts, current = 0, [], ""
        for before, char in zip(f" {signature.pattern}", signature.pattern, strict=False):
            depth += (char == "(" and before != "\\") - (char == ")" and before != "\\")
            if char == "|" and depth == 0:
                parts.append(current)
                current = ""
            else:
                current += char
        for part in [*parts, current]:
            assert any(re.search(part, text, re.MULTILINE) for text in texts), f"never met: {part}"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("Loading\n  MemoryError: 5 GiB  \nbye\n", "MemoryError: 5 GiB"),
        ("Killed", "Killed"),
        ("rope_scaling = 1\nKeyError: 'type'\n[TensorRT-LLM] version 0.11", "KeyError: 'type'"),
    ],
)
def test_the_line_that_says_it_is_quoted(log: str, line: str) -> None:
    signature = classify(log)
    assert signature is not None
    assert words(signature, log) == line
