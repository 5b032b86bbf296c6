"""The tools' words as users have met them, and words that only look like them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.failure_logs import failure_logs
from trtllm_pipeline.base.errors import FailureClass
from trtllm_pipeline.tensorrt.diagnosis.causes import LogText, first_cause
from trtllm_pipeline.tensorrt.diagnosis.signatures import Signature, Weight, chosen, read_signatures, signatures

INFEASIBLE, USER = FailureClass.INFEASIBLE, FailureClass.USER
MEMORY, TRANSIENT = FailureClass.OUT_OF_MEMORY, FailureClass.TRANSIENT

MET = (
    # what was in the log, class, a word of the hint
    ("Usage: trtllm-serve [OPTIONS] MODEL\n\nError: No such option: --cluster_size", INFEASIBLE, "option"),
    ("[E] 1: [defaultAllocator.cpp::allocate::20] OutOfMemory (no further information)", MEMORY, "max_num_tokens"),
    (
        "[TRT] [E] Requested amount of GPU memory (21474836480 bytes) could not be allocated. There may not be enough",
        MEMORY,
        "max_num_tokens",
    ),
    ("convert.sh: line 12:  4711 Killed                  python3 convert_checkpoint.py", FailureClass.BUG, "oom_kill"),
    ("Loading weights\nKilled\n", FailureClass.BUG, "oom_kill"),
    ("worker 2 died with <Signals.SIGKILL: 9>", FailureClass.BUG, "oom_kill"),
    ("CUDA call failed lazily: CUDA_ERROR_OUT_OF_MEMORY", MEMORY, "max_batch_size"),
    ("[TensorRT-LLM][ERROR] CUDA runtime error in cudaMalloc(ptr, n): out of memory", MEMORY, "max_batch_size"),
    (
        "The engine plan file is not compatible with this version of TensorRT, expecting library version 10.3 got 10.6",
        INFEASIBLE,
        "docs/reference/images.md",
    ),
    (
        "maxTokensInPagedKvCache (512) must be large enough to process at least 1 sequence to completion",
        MEMORY,
        "max_seq_len",
    ),
    ("error: creating server: failed to start GRPC service", TRANSIENT, "port"),
    ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", USER, "HF_TOKEN"),
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
    ("datasets.exceptions.DatasetNotFoundError: Dataset 'cnn_dailymail' doesn't exist on the Hub", USER, "calibration"),
    ("ValueError: Invalid HF URI: hf://datasets/cnn_dailymail", USER, "calibration"),
    ("opal_shmem_base_select failed\n--> Returned value -1 instead of OPAL_SUCCESS", USER, "mpi4py"),
    ("orte_init failed\n--> Returned value Unable to start a daemon", USER, "mpi4py"),
    ("ompi_mpi_init: ompi_rte_init failed", USER, "mpi4py"),
    ("python3: can't open file '/app/examples/llama/convert_checkpoint.py': [Errno 2] No such file", USER, "examples"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'examples/quantization/quantize.py'", USER, "examples"),
    ("libgomp: pthread_create failed: Resource temporarily unavailable", USER, "ulimit -u"),
    ("sh: 0: Cannot fork: Resource temporarily unavailable", USER, "ulimit -u"),
    ("llama_model_load: failed to allocate buffer of 2 GiB", MEMORY, "max_batch_size"),
    ("worker 0 ran out of memory", MEMORY, "max_batch_size"),
    ("OSError: [Errno 12] Cannot allocate memory", MEMORY, "max_batch_size"),
)

WORDINGS = (
    ("mpi-library", "ImportError: libopen-rte.so.40: cannot open shared object file: No such file or directory"),
    # key, what a tool says; of those that MET, the signatures' own words and the corpus do not have
    ("unknown-option", "quantize.py: error: the following arguments are required: --model_dir"),
    ("llm-api-arguments", "TypeError: LLM.__init__() got an unexpected keyword argument 'kv_cache'"),
    ("precision-on-gpu", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."),
    ("precision-on-gpu", "RuntimeError: this kernel is only supported on Blackwell"),
    ("gpu-not-supported", "CUDA capability sm_120 is not compatible with the current PyTorch installation."),
    ("driver-combination", "Error 804: forward compatibility was attempted on non supported HW"),
    ("driver-combination", "Error 803: system has unsupported display driver / cuda driver combination"),
    ("driver-too-old", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."),
    ("driver-too-old", "the provided PTX was compiled with an unsupported toolchain."),
    ("no-gpu", 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'),
    ("no-gpu", "docker: Error response from daemon: unknown or invalid runtime name: nvidia."),
    ("no-gpu", "pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found"),
    ("no-gpu", "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"),
    ("no-gpu", "RuntimeError: Found no NVIDIA driver on your system."),
    ("no-gpu", "cuInit: CUDA_ERROR_NO_DEVICE"),
    ("fabric-manager", "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 802"),
    ("engine-tensor", "[TensorRT-LLM][ERROR] Assertion failed: getIdx() should not be used with entry 10"),
    ("plugin-missing", "Cannot deserialize plugin since corresponding IPluginCreator not found in Plugin Registry"),
    ("numpy-abi", "A module that was compiled using NumPy 1.x cannot be run in NumPy 2.0.1"),
    ("numpy-abi", "ValueError: numpy.dtype size changed, may indicate binary incompatibility."),
    ("too-few-gpus", "RuntimeError: CUDA error: invalid device ordinal"),
    ("too-few-gpus", "instance group tensorrt_llm_0 of model tensorrt_llm specifies invalid or unsupported gpu id 1"),
    (
        "heads-over-ranks",
        'File "u.py", line 5, in ensure_divisibility\n    assert a % b == 0\nAssertionError: 28 is not divisible by 8',
    ),
    ("peer-access", "CUDA runtime error in cudaIpcOpenMemHandle(&p, handle, 1): invalid argument"),
    ("mpi-library", "ImportError: libmpi.so.40: cannot open shared object file: No such file or directory"),
    ("mpi-spawn", "    comm = MPI.COMM_SELF.Spawn(x)\nmpi4py.MPI.Exception: MPI_ERR_UNKNOWN: unknown error"),
    ("mpi-setup", "orte_init failed for some reason\n  x failed\n  --> Returned value No permission (-17) instead of"),
    ("mpi-setup", "PMI2_Init failed to initialize.  Return code: 14"),
    ("mpi-daemon", "ORTE was unable to reliably start one or more daemons."),
    ("mpi-error", "mpi4py.MPI.Exception: MPI_ERR_SPAWN: could not spawn processes"),
    ("collective-timeout", "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)"),
    ("nccl-network", "NCCL WARN socketProgress: Connection closed by remote peer 10.0.0.3<36138>"),
    ("nccl-network", "ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)"),
    ("registry-login", "Failed to pull image: server message: insufficient_scope: authorization failed"),
    ("container-start", "[321.0] error: pyxis: couldn't mkdir /run/pyxis/1000: No such file or directory"),
    ("stopped", "##[error]The runner has received a shutdown signal."),
    ("model-code", "Ignore import error when loading sglang.srt.models.deepseek_v2. Command '['/usr/bin/gcc']'"),
    ("gpu-not-supported", "API Usage Error (Target GPU SM 120 is not supported by this TensorRT release.)"),
    ("rendezvous-timeout", "waitForInput: socket SocketImpl(fd=100, remote=[n]:20000) timed out after 1800000ms"),
    ("memory-limit", "kernel: pt_nccl_heartbt invoked oom-killer:"),
    ("chat-template", "ValueError: No chat template is set for this processor."),
    ("nccl-shared-memory", "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"),
    ("nccl", "RuntimeError: ncclInternalError: Internal check failed."),
    ("engine-file-missing", "[TensorRT-LLM][ERROR] Assertion failed: Error opening engine file: /engines/rank0.engine"),
    ("paged-context-fmha", "Assertion failed: Chunked context requires paged context FMHA"),
    ("tensor-names", "unexpected shape for input 'text_input' for model 'ensemble'."),
    ("prompt-too-long", "Assertion failed: inputLen + 1 <= maxSeqLen"),
    ("prompt-too-long", "ValueError: default_max_tokens (-1) should be greater than 0, default_max_tokens (-1)"),
    ("prompt-too-long", "the input sequence length (9000) is larger than max_seq_len (8192)"),
    ("kv-cache-one-sequence", "Impossible to fit in any sequence in kvCache"),
    ("gpu-memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ("shared-memory", "Failed to increase the shared memory pool size for key"),
    ("model-not-supported", "has model type `gemma3` but Transformers does not recognize this architecture."),
    ("model-not-supported", "llama_model_load: error loading model: unknown model architecture: 'new'"),
    ("model-not-supported", "ValueError: Unsupported model type: olmo"),
    ("model-not-supported", "CONFIG_MAPPING[config_dict[\"model_type\"]]\nKeyError: 'qwen3'"),
    ("weights-shape", "size mismatch for lm_head.weight: copying a param with shape torch.Size([2, 2])"),
    ("weights-missing", "KeyError: 'model.layers.0.self_attn.q_proj.weight'"),
    ("weights-missing", "safetensors_rust.SafetensorError: File does not contain tensor lm_head.weight"),
    ("tokenizer-class", "ValueError: Couldn't instantiate the backend tokenizer from one of: (1)"),
    ("remote-code", "Loading x requires you to execute the configuration file in that repo on your local machine."),
    ("remote-code", "Please set the option `trust_remote_code=True` to remove this error."),
    ("model-file-missing", "OSError: Error no file named pytorch_model.bin found in directory /models/x."),
    ("model-name", "OSError: /models/x is not a local directory and is not a valid model identifier"),
    ("model-name", "OSError: Incorrect path_or_model_id: '/models/x'. Please provide either the path"),
    ("model-name", "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error."),
    ("damaged-weights", "SafetensorError: Error while deserializing header: InvalidHeaderDeserialization"),
    ("damaged-weights", "OSError: Consistency check failed: file should be of size 9 but has size 8 (x.safetensors)."),
    ("damaged-weights", "RuntimeError: PytorchStreamReader failed reading zip archive"),
    ("hub-unreachable", "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api"),
    ("hub-unreachable", "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach the hub"),
    ("hub-not-cached", "Cannot find the requested files; outgoing traffic has been disabled."),
    ("program-missing", "sh: 1: trtllm-build: not found"),
    ("program-missing", 'exec: "tritonserver": executable file not found in $PATH'),
    ("program-missing", "FileNotFoundError: [Errno 2] No such file or directory: 'mpirun'"),
    ("python-module", "ImportError: cannot import name 'AutoModelForX' from 'transformers'"),
    (
        "python-module",
        "ImportError: This modeling file requires the following packages that were not found in your environment",
    ),
    ("python-module", "ImportError: LlamaTokenizer requires the SentencePiece library but it was not found"),
    ("permission", "bash: /engines/rank0.engine: Permission denied"),
    ("gpu-fault", "RuntimeError: CUDA error: device-side assert triggered"),
    ("gpu-fault", "CUDA error: unspecified launch failure"),
    ("gpu-fault", "cublas failed: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx"),
    ("gpu-fault", "[TensorRT-LLM][ERROR] CUDA runtime error in cudaMemGetInfo(&free, &total): unknown error"),
    ("network-invalid", "[TRT] [E] Network validation failed."),
    ("release-mismatch", "AttributeError: module 'transformers' has no attribute 'x'"),
    ("release-mismatch", "AttributeError: 'LlamaConfig' object has no attribute 'head_dim'"),
    ("packages", "ERROR: Could not find a version that satisfies the requirement tensorrt-llm==0.9"),
    ("packages-conflict", "ERROR: ResolutionImpossible: for help visit the documentation"),
    ("packages-python", "ERROR: Package 'x' requires a different Python: 3.9.1 not in '>=3.10'"),
    ("stub-died", "Timed out occurred while waiting for the stub process."),
    ("driver-mismatch", "NVML: Driver/library version mismatch"),
    ("limit", "the limit of 16 open sessions was exceeded"),
    ("network", "socket.gaierror: [Errno -2] Name or service not known"),
    ("certificate", "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"),
    ("network", "OSError: [Errno 101] Network is unreachable"),
    ("network", "OSError: [Errno 113] No route to host"),
    ("proxy", "ProxyError('Cannot connect to proxy.')"),
    ("network", "SSLError(SSLEOFError(8, 'EOF occurred in violation of protocol'))"),
    ("network", "ssh: connect to host gpu02 port 22: Connection timed out"),
    ("package-build", "ERROR: Failed building wheel for tensorrt"),
    ("package-build", "ERROR: Could not build wheels for mpi4py"),
    ("file-missing", "NotADirectoryError: [Errno 20] Not a directory: '/models/x'"),
    ("crash", "mpirun noticed that process rank 1 with PID 0 on node h exited on signal 11 (Segmentation fault)."),
    ("crash", "Signal code: Address not mapped (1)"),
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


def classify(text: str) -> Signature | None:
    """The signature that says most about `text` by its words alone: of the most particular, the first in it."""
    found = [(each, match) for each in signatures() if (match := re.search(each.pattern, text, re.MULTILINE))]
    return min(found, key=lambda each: (each[0].weight, text.count("\n", 0, each[1].end())), default=(None, None))[0]


@pytest.mark.parametrize(("log", "failure", "word"), MET)
def test_words_as_they_were_met(log: str, failure: FailureClass, word: str) -> None:
    found = classify(f"[I] line before\n{log}\n[I] line after")
    assert (found.failure, word in found.hint) == (failure, True), found


@pytest.mark.parametrize(("key", "log"), WORDINGS)
def test_other_wordings(key: str, log: str) -> None:
    found = classify(f"[I] line before\n{log}\n[I] line after")
    assert found.key == key


@pytest.mark.parametrize(
    ("line", "key", "words"),
    [
        ("RuntimeError: two tides cannot be combined", "support-words", "does not support"),
        ("RuntimeError: the pump must be at least 3 m above the sea", "rule-words", "breaks the rule"),
        ("ERROR: access denied for this account", "access-words", "refused"),
        ("RuntimeError: the pump timed out after 30 s", "timeout-words", "in time"),
        ("RuntimeError: the moons do not match the tides", "mismatch-words", "must agree"),
        ("RuntimeError: tide 'spring' was not found", "absent-words", "missing"),
        ("ValueError: unknown tide: spring", "choice-words", "misspelled"),
        # The version of a model is not a release.
        ("RuntimeError: failed to load 'sea' version 1: the pump requires 3 moons", "rule-words", "breaks the rule"),
        ("KeyError: 'tide'", "missing-key", "no entry tide"),
        ("AttributeError: 'NoneType' object has no attribute 'tide'", "none-value", "(None)"),
    ],
)
def test_words_of_any_program_give_a_hint_alone(tmp_path: Path, line: str, key: str, words: str) -> None:
    path = tmp_path / "log"
    path.write_text(f'Traceback (most recent call last):\n  File "/x/site-packages/sea/a.py", line 3, in f\n{line}\n')
    found = first_cause([LogText(path)])
    assert found is not None
    assert found.signature is not None
    assert found.hint is not None
    assert (found.signature.key, found.certain, words in found.hint) == (key, False, True)
    assert ("pip show sea" in found.hint) == ("{code}" in found.signature.hint)


def test_of_the_parts_of_a_hint_the_first_that_the_log_fills_counts() -> None:
    hint = "the pump<s {a}|{b} pump|s> stopped<: {c}>"
    assert chosen(hint, {"a": "x", "b": "y", "c": ""}) == "the pumps {a} stopped"
    assert chosen(hint, {"b": "y", "c": "z"}) == "the pump{b} pump stopped: {c}"
    assert chosen(hint, {}) == "the pumps stopped"


@pytest.mark.parametrize("log", INNOCENT)
def test_innocent_words(log: str) -> None:
    found = classify(log)
    assert found is None or found.weight is Weight.WORDS


def test_every_signature_has_words_of_its_own_and_a_source() -> None:
    for signature in signatures():
        assert [classify(words) for words in signature.met] == [signature] * len(signature.met), signature.key
        assert all(signature.source), signature.key
    assert len({each.key for each in signatures()}) == len(signatures()) >= 40


def test_hints_and_settings_name_groups_of_their_patterns() -> None:
    for signature in signatures():
        groups = {*re.compile(signature.pattern).groupindex, "code"}
        for text in (signature.hint, *signature.settings.values()):
            assert set(re.findall(r"\{(\w+)\}", text)) <= set(groups), signature.key
        for choice in re.findall(r"<([^<>]*)>", signature.hint):
            assert all("{" in part for part in choice.split("|")[:-1]), (
                f"{signature.key}: a part that hides those after it"
            )


ROW = "- {key: a, category: options, failure: user, patterns: x, hint: h, met: x, source: [s]"


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        (f"{ROW}}}\n{ROW}}}", "a: the key is not unique"),
        (f"{ROW}, setings: {{}}}}", "a: .*unexpected keyword argument 'setings'"),
        (ROW.replace("failure: user, ", "") + "}", "a: 'failure'"),
        (ROW.replace("category: options, ", "") + "}", "a: .*missing 1 required .*'category'"),
        (ROW.replace("user", "users") + "}", "a: 'users' is not a valid FailureClass"),
        (f"{ROW}, weight: heavy}}", "a: 'HEAVY'"),
    ],
)
def test_a_faulty_row_is_named(tmp_path: Path, rows: str, fault: str) -> None:
    path = tmp_path / "signatures.yaml"
    path.write_text(f"phrases: {{}}\nsignatures:\n{rows}\n")
    with pytest.raises(ValueError, match=rf"signatures\.yaml: {fault}"):
        read_signatures(path)


def test_the_table_is_read_by_the_first_diagnosis_alone() -> None:
    """Commands that diagnose nothing do not pay for it."""
    code = (
        "import sys; from trtllm_pipeline.tensorrt.diagnosis import causes, signatures; "
        "assert not signatures.signatures.cache_info().currsize and 'yaml' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_pattern_finds_recorded_words() -> None:
    """Each pattern finds some of the recorded words, so a misspelled one shows."""
    texts = [log for log, _, _ in MET]
    texts += [words for signature in signatures() for words in signature.met]
    texts += [words for _, words in WORDINGS]
    texts += [each.text for each in failure_logs("development")]
    for signature in signatures():
        for part in (*signature.patterns, *signature.likely):
            assert any(re.search(part, text, re.MULTILINE) for text in texts), f"{signature.key} never met: {part}"


@pytest.mark.parametrize(
    ("log", "line", "number"),
    [
        ("Loading\n  MemoryError: 5 GiB  \nbye\n", "MemoryError: 5 GiB", 2),
        ("Killed", "Killed", 1),
        ("rope_scaling = 1\nKeyError: 'type'\n[TensorRT-LLM] version 0.11", "KeyError: 'type'", 2),
    ],
)
def test_the_line_that_says_it_is_quoted(tmp_path: Path, log: str, line: str, number: int) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    cause = first_cause([LogText(path)])
    assert (cause.line.message, cause.line.number) == (line, number)
