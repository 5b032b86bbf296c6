"""What the tools' own words in a log mean: whether trying again helps, what to do, and which setting does it.

The words are those of TensorRT-LLM, TensorRT, Triton, Open MPI, NCCL, PyTorch and the Hugging Face libraries as users
have met them; `source` says where. `processes/diagnosis.py` chooses among those that a log has.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from trtllm_pipeline.errors import FailureClass

_TRTLLM: Final = "https://github.com/NVIDIA/TensorRT-LLM/issues/"
_BACKEND: Final = "https://github.com/triton-inference-server/tensorrtllm_backend/issues/"
_SERVER: Final = "https://github.com/triton-inference-server/server/issues/"
_INFEASIBLE, _USER, _BUG = FailureClass.INFEASIBLE, FailureClass.USER, FailureClass.BUG
_MEMORY, _TRANSIENT = FailureClass.OUT_OF_MEMORY, FailureClass.TRANSIENT


class Weight(IntEnum):
    """How much words say about the cause. Of those in a log, the lightest that are there count."""

    CAUSE = 0
    """Nothing but this cause has these words."""
    GENERAL = 1
    """The cause, where no more particular words are there; other causes may bring them about as well."""
    CLASS = 2
    """A kind of trouble that many causes have: said of the line that the form of the logs has for the first cause."""
    SYMPTOM = 3
    """What follows from a cause: never said to be one."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Words in a log, and what they mean."""

    key: str
    category: str
    pattern: str
    """Searched for with ^ and $ at every line."""
    failure: FailureClass
    hint: str
    """What to do. `{name}` stands for the pattern's group of this name."""
    met: tuple[str, ...]
    """Words as they were met."""
    source: tuple[str, ...]
    """Where they were met: addresses, or the program that writes them."""
    weight: Weight = Weight.CAUSE
    settings: tuple[tuple[str, str], ...] = ()
    """(stage, "settings.SECTION.KEY=VALUE"): what to change when this stage failed so; "" is any. A value `half` is half of
    what it was, `{name}` a group of the pattern."""


_REBUILD: Final = "build the engine again with the release and on the kind of GPU that serve it"
_IMAGE: Final = (
    "build and serve in one image: docs/images.md has the image of each release of TensorRT-LLM "
    "(pipeline doctor shows the release that is here)"
)
_ONE_RELEASE: Final = (
    "packages of different releases are mixed: use NVIDIA's image of one release (docs/images.md), and do not install "
    "torch, tensorrt or tensorrt_llm over it"
)
_NEWER: Final = (
    "the installed release, or this backend of it, does not know this kind of model: install a newer one, take the other "
    "backend, or choose another model; the folder must be the model's own, not a converted checkpoint"
)
_LENGTHS: Final = 'build for longer prompts (axes.lengths="ISL,OSL"), or send shorter ones'
_LESS_MEMORY: Final = (
    ("build", "settings.build.max_num_tokens=half"),
    ("launch", "settings.repository.kv_cache_free_gpu_mem_fraction=0.7"),
    ("quantize", "settings.quantize.batch_size=1"),
)

KILLED: Final = Signature(
    "killed",
    "memory",
    r"(?:^[ \t]*|\])Killed[ \t]*$|line \d+:\s+\d+ Killed\b|: tasks? [\d,-]+: Killed$|exited on signal 9 \(Killed\)"
    r"|(?:[Ee]xit(?:ed with)?|returned non-zero exit) (?:code|status):? (?:137|-9)\b|died with <Signals\.SIGKILL",
    _BUG,
    "a process was killed: out of memory where the kernel's own count (`oom_kill`) says so, and the message with it",
    ("exited on signal 9 (Killed)", "returned non-zero exit status 137", "srun: error: gpu01: task 0: Killed"),
    (f"{_TRTLLM}102", f"{_TRTLLM}743", f"{_TRTLLM}538"),
    Weight.GENERAL,
)
"""Says that a process was killed, not by whom or why: `out_of_memory.verdict` knows more."""

PYTHON_STUB: Final = Signature(
    "python-stub",
    "repository",
    r"Failed to initialize Python stub",
    _USER,
    "a Python model could not start; the server's log says why. tokenizer_dir must be the model's own folder",
    ("Failed to initialize Python stub",),
    (f"{_BACKEND}197", f"{_BACKEND}109"),
    Weight.SYMPTOM,
)
"""Says that a Python model failed, not why: a message of its own knows more."""

SIGNATURES: Final = (
    # On one line the first wins: particular causes stand before general ones.
    #
    # ---- options and arguments
    Signature(
        "unknown-option",
        "options",
        r"error: unrecognized arguments:|error: argument [^\n]*: invalid choice:|^Error: No such option"
        r"|^Error: Invalid value for(?![^\n]*does not exist)|error: the following arguments are required:",
        _INFEASIBLE,
        "the program refuses the option that is named: the installed release has no such option or value, or asks for one "
        "that is missing; change it in the matrix, or install a release that has it",
        ("error: unrecognized arguments:", "error: argument --qformat: invalid choice:", "Error: Invalid value for"),
        (f"{_TRTLLM}2119", f"{_TRTLLM}2049", f"{_TRTLLM}1110", f"{_TRTLLM}2143"),
    ),
    Signature(
        "llm-api-arguments",
        "options",
        r"validation errors? for \w*(?:L[lL][mM]Args|KvCacheConfig|BuildConfig|SchedulerConfig)"
        r"|(?:LLM|LlmArgs)\.(?:__init__|generate\w*)\(\) got an unexpected keyword",
        _INFEASIBLE,
        "an argument of the LLM API that this release does not have, or not so: see settings.repository.llm_args",
        ("validation error for TorchLlmArgs",),
        ("pydantic, in tensorrt_llm/llmapi/llm_args.py",),
    ),
    Signature(
        "guided-decoding",
        "options",
        r"GuidedDecodingParams, but GuidedDecoder is not setup",
        _USER,
        "the request asks for an answer of a certain form, and the server was started without guided_decoding_backend: "
        "settings.repository.llm_args has it with PyTorch",
        ("Request is specified with GuidedDecodingParams, but GuidedDecoder is not setup",),
        (f"{_TRTLLM}2624",),
    ),
    # ---- which GPU can do what
    Signature(
        "fp8-hardware",
        "gpu",
        r"Networks? with FP8 [^\n]{0,60}require hardware",
        _INFEASIBLE,
        "FP8 needs compute capability 8.9 (Ada) or 9.0 (Hopper) and up: another precision, or another GPU",
        ("Networks with FP8 precision require hardware with FP8 support",),
        (f"{_TRTLLM}1428",),
    ),
    Signature(
        "fp8-context-fmha",
        "gpu",
        r"FP8 FMHA cannot be enabled|FP8 Paged Context FMHA only works with",
        _INFEASIBLE,
        "this release has no FP8 context attention for this GPU or precision",
        ("FP8 FMHA cannot be enabled", "FP8 Paged Context FMHA only works with"),
        (f"{_TRTLLM}1864", f"{_TRTLLM}2855"),
        settings=(("", "settings.build.use_fp8_context_fmha=disable"),),
    ),
    Signature(
        "precision-on-gpu",
        "gpu",
        r"INT8/INT4 quantization is not supported on SM|[Bb]float16 is only supported on|(?:un|not )supported on pre-\w+|only support(?:ed|s)? (?:on |for )?(?:Hopper|Blackwell|Ada|Ampere|SM)\b|not supported in this architecture"
        r"|Arch unsupported for CUTLASS",
        _INFEASIBLE,
        "this GPU, or this release on it, does not have what is named, a precision or a kernel: pipeline plan shows the "
        "precisions that it has",
        ("INT8/INT4 quantization is not supported on SM>=100",),
        ("tensorrt_llm/builder.py of 1.2.0", f"{_BACKEND}415"),
    ),
    Signature(
        "smooth-quant-gpu",
        "gpu",
        r"No valid SQ GEMM tactic",
        _INFEASIBLE,
        "int8_sq needs a GPU of compute capability 8.0 (Ampere) and up: another precision, or another GPU",
        ("Assertion failed: No valid SQ GEMM tactic",),
        (f"{_TRTLLM}435",),
    ),
    Signature(
        "ptx-feature",
        "gpu",
        r"ptxas[\w-]* [^\n]*(?:not supported on \.target|requires \.target sm_\w+ or higher)",
        _INFEASIBLE,
        "a kernel that Triton or a plugin compiles here uses an instruction that this GPU does not have: leave out what needs it, "
        "such as speculative_config (MTP) or bfloat16, or take another release",
        ("ptxas x.ptx, line 12; error   : Feature '.rs' not supported on .target 'sm_121a'",),
        ("https://github.com/triton-lang/triton/pull/9734", "https://github.com/hiyouga/LlamaFactory/issues/7417"),
    ),
    Signature(
        "gpu-not-supported",
        "gpu",
        r"Assertion failed: Unsupported [Aa]rch|no kernel image is available for execution"
        r"|sm_\d+ is not compatible|invalid device function|should be supported by fmha|Value 'sm_\w+' is not defined",
        _INFEASIBLE,
        "the release has no kernels for this GPU, or no compiler to make them: TensorRT-LLM needs Ampere or newer, and "
        "Blackwell a release of 0.17 or newer; pipeline doctor shows the GPU",
        ("Assertion failed: Unsupported architecture", "no kernel image is available for execution on the device"),
        (f"{_TRTLLM}1515", f"{_TRTLLM}199", f"{_TRTLLM}159", f"{_TRTLLM}484", f"{_TRTLLM}775"),
    ),
    # ---- driver and CUDA
    Signature(
        "driver-too-old",
        "driver",
        r"CUDA driver version is insufficient|This container was built for NVIDIA Driver Release"
        r"|forward compatibility was attempted on non supported HW|unsupported display driver / cuda driver combination"
        r"|NVIDIA driver on your system is too old|PTX was compiled with an unsupported toolchain|API call is not supported in the installed CUDA driver"
        r"|NVMLError_FunctionNotFound|CUDA version [\d.]+ is not compatible with",
        _USER,
        "the NVIDIA driver is older than what this image needs: a newer driver on the host, or the image of an older "
        "release (docs/images.md)",
        (
            "CUDA driver version is insufficient",
            "This container was built for NVIDIA Driver Release 535.86 or later",
            "CUDA error: API call is not supported in the installed CUDA driver",
        ),
        (f"{_TRTLLM}23", "https://github.com/NVIDIA/TensorRT/issues/1786"),
    ),
    Signature(
        "triton-helper",
        "driver",
        r"(?:/\.triton/\S*|cuda_utils[\w.-]*)\.so: undefined symbol: cu[A-Z]",
        _USER,
        "the helper that Triton compiled was not linked with the driver's libcuda: ldconfig -p has to list libcuda.so.1 of the "
        "driver, and not only a stub; then remove Triton's cache (~/.triton), so that it is compiled again",
        ("/root/.triton/cache/x/cuda_utils.so: undefined symbol: cuModuleGetFunction",),
        ("https://github.com/sgl-project/sglang/issues/3065", "https://github.com/hiyouga/LlamaFactory/issues/5833"),
        Weight.CLASS,
    ),
    Signature(
        "driver-symbol",
        "driver",
        r"(?<!cuda_utils\.so: )undefined symbol: (?:cu(?!File)[A-Z]|nvml[A-Z])\w+",
        _USER,
        "a function of the NVIDIA driver is missing: the driver of the host is older than the CUDA of this image, or another libcuda "
        "or libnvidia-ml than the driver's is loaded (LD_LIBRARY_PATH, the NVIDIA container toolkit). Install a newer driver on the "
        "host, or take the image of an older release (docs/images.md); other Python packages do not help",
        ("libtensorrt_llm.so: undefined symbol: cuKernelGetName", "undefined symbol: nvmlDeviceGetGpuFabricInfoV"),
        (
            f"{_TRTLLM}3629",
            "https://github.com/aws/deep-learning-containers/issues/5253",
            "https://github.com/leptonai/gpud/pull/1183",
        ),
    ),
    Signature(
        "driver-mismatch",
        "driver",
        r"[Dd]river/library version mismatch",
        _USER,
        "the NVIDIA driver that runs is another one than its libraries: after an update, the machine has to be restarted",
        ("Failed to initialize NVML: Driver/library version mismatch",),
        ("nvidia-smi",),
    ),
    Signature(
        "no-gpu",
        "driver",
        r"no CUDA-capable device is detected|No CUDA GPUs are available|could not select device driver"
        r"|unknown or invalid runtime name: nvidia|NVML Shared Library Not Found|NVMLError_(?:LibraryNotFound|DriverNotLoaded)"
        r"|lib(?:cuda|nvidia-ml|nvidia-ptxjitcompiler|nvcuvid)\.so(?:\.1)?: cannot open shared object|Found no NVIDIA driver|CUDA_ERROR_NO_DEVICE",
        _USER,
        "no GPU is visible: docker run --gpus all, the NVIDIA container toolkit, and CUDA_VISIBLE_DEVICES; nvidia-smi must "
        "work in this container",
        ("no CUDA-capable device is detected", "No CUDA GPUs are available"),
        ("CUDA runtime", "PyTorch", "docker"),
    ),
    Signature(
        "fabric-manager",
        "driver",
        r"system not yet initialized|\bError 802\b",
        _USER,
        "on machines with NVSwitch the fabric manager must run, in the driver's own version: systemctl status "
        "nvidia-fabricmanager",
        ("system not yet initialized",),
        ("CUDA runtime, error 802",),
    ),
    Signature(
        "torch-without-cuda",
        "driver",
        r"Torch not compiled with CUDA enabled",
        _USER,
        "this PyTorch was built for CPUs: use NVIDIA's image of the release (docs/images.md), or the wheels for its CUDA",
        ("Torch not compiled with CUDA enabled",),
        ("PyTorch",),
    ),
    # ---- one release for building and serving
    Signature(
        "tensorrt-version",
        "release",
        r"not compatible with this version of TensorRT, expecting library version (?P<here>[\d.]+) got (?P<built>[\d.]+)",
        _INFEASIBLE,
        f"the engine was built with TensorRT {{built}}, the server has {{here}}: {_IMAGE}",
        ("not compatible with this version of TensorRT, expecting library version 9.2.0.5 got 9.3.0.1",),
        (f"{_BACKEND}424", f"{_BACKEND}194"),
    ),
    Signature(
        "engine-version",
        "release",
        r"Assertion failed: d == a \+ length|remaining_buffer_size|Version tag does not match|not compatible with this version of TensorRT|kSERIALIZATION_VERSION failed",
        _INFEASIBLE,
        f"the engine was built with another release of TensorRT than the server has: {_IMAGE}",
        ("Version tag does not match", "Assertion failed: d == a + length"),
        (f"{_BACKEND}531", f"{_BACKEND}299", f"{_BACKEND}190", f"{_TRTLLM}660", f"{_BACKEND}213", f"{_BACKEND}679"),
    ),
    Signature(
        "engine-device",
        "release",
        r"generated on an incompatible device",
        _INFEASIBLE,
        _REBUILD,
        ("generated on an incompatible device",),
        (f"{_TRTLLM}3031",),
    ),
    Signature(
        "engine-config-key",
        "release",
        r"json\.exception\.out_of_range\.403\][^\n]{0,20}key '(?P<name>[^'\n]+)' not found",
        _INFEASIBLE,
        "the config.json that the server reads has no key {name}: gpt_model_path must name the engine's own folder, and the "
        f"engine must be of a model that generates text, not of BERT's kind, and of the server's release: {_IMAGE}",
        ("[json.exception.out_of_range.403] key 'use_context_fmha_for_generation' not found",),
        (f"{_TRTLLM}1803", f"{_SERVER}7362"),
    ),
    Signature(
        "engine-tensor",
        "release",
        r"(?:Tensor|(?:Input|Output) tensor) '\w+' not found|getIdx\(\) should not be used with entry"
        r"|[Tt]ensor names in engine are not the same"
        r"|KeyError: '(?:builder_config|build_config|plugin_config|pretrained_config)'",
        _INFEASIBLE,
        "the engine is not what this program expects: a folder that holds none, such as a checkpoint's, or one built by another "
        f"release, or without a feature that is used: {_IMAGE}",
        ("Tensor 'context_lengths' not found", "KeyError: 'builder_config'"),
        (f"{_TRTLLM}1661", f"{_BACKEND}320", "tensorrt_llm/runtime"),
    ),
    Signature(
        "not-converted",
        "model",
        r"KeyError: 'architecture'$",
        _USER,
        "trtllm-build was given a folder whose config.json names no architecture: it takes a converted checkpoint, not the "
        "model's own folder",
        ("KeyError: 'architecture'",),
        ("tensorrt_llm/models/modeling_utils.py, PretrainedConfig",),
    ),
    Signature(
        "plugin-missing",
        "release",
        r"(?:getPluginCreator )?could not find plugin:? ?\w+|not found in Plugin Registry"
        r"|libnvinfer_plugin_tensorrt_llm\.so\.\d+: cannot open shared object",
        _INFEASIBLE,
        f"TensorRT-LLM's plugins are not loaded, or of another release than the engine: {_IMAGE}",
        ("getPluginCreator could not find plugin: Gemmtensorrt_llm version: 1",),
        (f"{_TRTLLM}107", f"{_TRTLLM}1584", f"{_TRTLLM}452", f"{_TRTLLM}1199", f"{_BACKEND}545"),
    ),
    Signature(
        "tensor-too-large",
        "limits",
        r"tensor volume exceeds 2147483647",
        _INFEASIBLE,
        "TensorRT has no tensors of more than 2147483647 elements: a smaller max_batch_size, max_input_len or max_num_tokens",
        ("tensor volume exceeds 2147483647, dimensions are [512,1024,22016]",),
        (f"{_TRTLLM}2422",),
    ),
    Signature(
        "undefined-symbol",
        "release",
        r"undefined symbol: _Z\w*\d(?:c10|at|torch|caffe2|tensorrt_llm|nvinfer1)(?:\d|[A-Z]\w)",
        _USER,
        _ONE_RELEASE,
        ("libth_common.so: undefined symbol: _ZN3c1021throwNullDataPtrErrorEv",),
        (f"{_TRTLLM}808", f"{_TRTLLM}2380", f"{_TRTLLM}2180", f"{_BACKEND}618", f"{_TRTLLM}7665"),
    ),
    Signature(
        "python-symbol",
        "release",
        r"undefined symbol: _?Py[A-Z_]\w+",
        _USER,
        "a compiled Python module was built for another Python than the one that loads it: install its package with this Python",
        ("undefined symbol: _PyThreadState_UncheckedGet",),
        ("https://docs.python.org/3/c-api/stable.html",),
    ),
    Signature(
        "library-symbol",
        "release",
        r"undefined symbol: \w+",
        _USER,
        "the library that should have this symbol is of another release than the one that needs it. Its name tells which library "
        "it is: cuda, cublas, cudnn, nccl, nvJitLink, MPI, ucp, ibv; ldd shows which file is loaded. LD_LIBRARY_PATH often "
        "names another installation than that of the image",
        ("libtorch_cuda.so: undefined symbol: ncclCommWindowRegister",),
        ("https://github.com/pytorch/pytorch/issues/119072", "the dynamic loader"),
        Weight.CLASS,
    ),
    Signature(
        "numpy-abi",
        "release",
        r"numpy\.core\.multiarray failed to import|compiled using NumPy 1\.x|numpy\.dtype size changed",
        _USER,
        "numpy is newer than what was compiled against it: pip install 'numpy<2' in that environment",
        ("numpy.core.multiarray failed to import",),
        ("numpy",),
        Weight.GENERAL,
    ),
    Signature(
        "conda-libstdcxx",
        "release",
        r"(?:conda|forge|/envs/)[^\n:]*/libstdc\+\+\.so\.6: version `(?:GLIBCXX|CXXABI)_[\d.]+' not found",
        _USER,
        "the C++ library of this conda environment is older than the packages need: conda install -c conda-forge libstdcxx-ng, or "
        "leave its lib folder out of LD_LIBRARY_PATH",
        ("/opt/conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found",),
        ("https://github.com/ztxz16/fastllm/issues/102", "https://github.com/kvcache-ai/ktransformers/issues/524"),
    ),
    Signature(
        "glibc",
        "release",
        r"version `(?:GLIBC(?:XX)?|CXXABI)_[\d.]+' not found",
        _USER,
        "the distribution is older than the packages: use NVIDIA's image of the release (docs/images.md)",
        ("version `GLIBCXX_3.4.30' not found",),
        ("the dynamic loader",),
    ),
    # ---- ranks and GPUs
    Signature(
        "ranks",
        "ranks",
        r"mpiSize == tp \* pp|MPI size \d+ != TP size|worldSize is expected to be equal to tp ?\* ?pp"
        r"|Engine world size \([^)\n]*\) != Runtime world size",
        _INFEASIBLE,
        "an engine runs with exactly tp * pp ranks: launch as many, or build for another tp and pp (axes.parallel)",
        (
            "mpiSize == tp * pp",
            "MPI size 1 != TP size",
            "worldSize is expected to be equal to tp*pp",
            "Engine world size (2 * 1) != Runtime world size (1)",
        ),
        (f"{_TRTLLM}1047", f"{_TRTLLM}1992", f"{_TRTLLM}2021", f"{_TRTLLM}753", f"{_TRTLLM}1796", f"{_TRTLLM}440"),
    ),
    Signature(
        "too-few-gpus",
        "ranks",
        r"Only \d+ GPUs are available, but \d+ are required|Number of GPUs per node \d+ must be at least"
        r"|invalid device ordinal|specifies invalid or unsupported gpu id",
        _INFEASIBLE,
        "the layout has more ranks than there are GPUs to see: a smaller tp and pp (axes.parallel), or more GPUs; look at "
        "CUDA_VISIBLE_DEVICES and docker's --gpus",
        ("Only 8 GPUs are available, but 16 are required", "Number of GPUs per node 1 must be at least as large as TP"),
        (f"{_TRTLLM}2594", f"{_BACKEND}283"),
    ),
    Signature(
        "heads-over-ranks",
        "ranks",
        r"\b(?:divisible|divided|divides?|multiple of)\b[^\n]{0,40}\b(?:tp|tp_size|tensor.parallel\w*|world.size)\b"
        r"|heads to match the number of GPUs",
        _INFEASIBLE,
        "the model cannot be split over this many GPUs: another tp (axes.parallel)",
        ("num_attention_heads must be divisible by tp_size",),
        ("tensorrt_llm/models",),
    ),
    Signature(
        "gpu-twice",
        "ranks",
        r"Duplicate GPU detected",
        _USER,
        "two ranks were given one GPU: every rank needs its own; look at CUDA_VISIBLE_DEVICES of the ranks",
        ("Duplicate GPU detected",),
        (f"{_TRTLLM}9263",),
    ),
    Signature(
        "peer-access",
        "ranks",
        r"peer access is not supported|Can't enable access between nodes"
        r"|cudaIpcOpenMemHandle",
        _INFEASIBLE,
        "these GPUs cannot reach each other's memory, as the custom all-reduce does",
        ("peer access is not supported between these two devices",),
        ("CUDA runtime", f"{_TRTLLM}2066"),
        settings=(("", "settings.build.use_custom_all_reduce=disable"),),
    ),
    Signature(
        "mpi-slots",
        "ranks",
        r"not enough slots available|All nodes which are allocated for this job are already filled",
        _USER,
        "mpirun was given fewer slots than ranks: more CPUs for the container, or OMPI_MCA_rmaps_base_oversubscribe=1",
        ("There are not enough slots available in the system to satisfy the 2 slots",),
        (f"{_TRTLLM}5854", f"{_TRTLLM}5495"),
    ),
    Signature(
        "mpi-daemon",
        "ranks",
        r"ORTE was unable to reliably start",
        _USER,
        "mpirun could not start its daemon on another node: ssh to it without a password, the same Open MPI on its PATH, and "
        "a network between them",
        ("ORTE was unable to reliably start one or more daemons.",),
        (f"{_BACKEND}698",),
    ),
    Signature(
        "mpi-root",
        "ranks",
        r"mpirun has detected an attempt to run as root",
        _USER,
        "mpirun refuses to run as root: set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        ("mpirun has detected an attempt to run as root",),
        ("Open MPI",),
    ),
    Signature(
        "mpi-setup",
        "ranks",
        r"opal_init failed|opal_\w+_select failed|orte_init failed|ompi_mpi_init[^\n]*fail"
        r"|libopen-(?:rte|pal)\.so[^\n]*cannot open|libmpi\w*\.so[^\n]*cannot open|not built with SLURM's PMI support"
        r"|PMI2?_Init failed|\b(?:PRTE|ORTE) ERROR",
        _USER,
        "Open MPI and mpi4py do not fit each other, MPI's libraries are not on LD_LIBRARY_PATH, or Slurm starts ranks in a "
        "way that this MPI does not know (srun --mpi=pmix)",
        ("opal_init failed", "not built with SLURM's PMI support"),
        (f"{_TRTLLM}1294", f"{_TRTLLM}2405", f"{_TRTLLM}2476"),
    ),
    Signature(
        "mpi-error",
        "ranks",
        r"Failed: MPI error|\bMPI_ERR_(?!UNKNOWN|OTHER|INTERN|LASTCODE)\w+",
        _BUG,
        "MPI refused a call: as many ranks as the engine has, all started by one mpirun of the MPI that the image comes with; "
        "the mapping in the engine's config.json (moe_tp_size, moe_ep_size) must fit tp and pp",
        ("Assertion failed: Failed: MPI error",),
        (f"{_TRTLLM}1826",),
    ),
    Signature(
        "nccl-shared-memory",
        "memory",
        r"NCCL WARN[^\n]*(?:Error while creating shared memory segment|No space left on device)"
        r"|not enough space for /dev/shm",
        _USER,
        "shared memory is full: make /dev/shm larger (docker run --shm-size=16g, or --ipc=host)",
        ("there is not enough space for /dev/shm/vader_segment",),
        (f"{_TRTLLM}1021",),
    ),
    Signature(
        "collective-timeout",
        "ranks",
        r"[Ww]atchdog caught collective operation timeout|detected by watchdog at work|watchdog timeout after \d+ ?ms"
        r"|[Ww]atchdog got stuck for|\bgloo\b[^\n]*[Tt]imed out waiting|Heartbeat monitor timed out",
        _BUG,
        "a collective operation did not end within its limit: a rank failed, hangs, or is slow, as while it loads weights; see the "
        "logs of the other ranks first. For slow weights: faster storage, or a longer limit (--dist-timeout of SGLang, "
        "--distributed-timeout-seconds of vLLM)",
        (
            "[Rank 6] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE)",
            "NCCL communicator was aborted on rank 3. Original reason for failure was: watchdog timeout after 600000 ms",
            "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress",
            "[PG ID 0 Rank 1] Heartbeat monitor timed out! Process will be terminated after dumping debug info",
        ),
        ("https://github.com/sgl-project/sglang/issues/3784", "https://github.com/vllm-project/vllm/issues/5531"),
        Weight.GENERAL,
    ),
    Signature(
        "rendezvous-timeout",
        "ranks",
        r"Timed out after \d+ seconds waiting for clients|[Cc]lient socket has timed out|store[- ]based barrier"
        r"|wait timeout after \d+ ?ms",
        _BUG,
        "not all ranks met within the limit: a rank did not start, as its own log says, or the address and port of the first "
        "rank (MASTER_ADDR, --dist-init-addr) cannot be reached from it",
        (
            "DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
            "Timed out initializing process group in store based barrier on rank: 1",
            "wait timeout after 300000ms, keys: /default_pg/0//cuda//1",
        ),
        ("https://github.com/verl-project/verl/issues/4373", "PyTorch, TCPStore.cpp and socket.cpp"),
        Weight.GENERAL,
    ),
    Signature(
        "server-watchdog",
        "ranks",
        r"[Ww]atchdog timeout \((?:self\.)?\w*watchdog_timeout|\bHang detected on rank \d+",
        _BUG,
        "the server ended itself since a pass over its requests took longer than its watchdog allows: it hangs, or compiles kernels "
        "or loads weights slowly; a longer limit (--watchdog-timeout of SGLang, hang_detection_timeout of TensorRT-LLM) shows which",
        ("Watchdog timeout (self.watchdog_timeout=300)", "Hang detected on rank 0 in PyExecutor."),
        ("https://github.com/sgl-project/sglang/pull/1816", "https://github.com/NVIDIA/TensorRT-LLM/pull/10480"),
        Weight.GENERAL,
    ),
    Signature(
        "nccl",
        "ranks",
        r"NCCL error(?![^\n]*(?:remote process exited|out of memory))|nccl(?:Internal|System|UnhandledCuda|InvalidUsage)\w*Error"
        r"|NCCL WARN(?![^\n]*out of memory)|NCCL failure|WARN Socket creation failed",
        _BUG,
        "the GPUs could not talk to each other: NCCL_DEBUG=INFO names why; often too small a /dev/shm, GPUs without peer "
        "access (NCCL_P2P_DISABLE=1), or two releases of NCCL",
        ("NCCL error allreducePlugin.cpp:295 'internal error'",),
        (f"{_TRTLLM}213", f"{_TRTLLM}1131", f"{_BACKEND}103"),
        Weight.GENERAL,
    ),
    # ---- the Triton repository
    Signature(
        "not-a-model",
        "repository",
        r"failed to open text file for read \S+/config\.pbtxt: No such file",
        _USER,
        "Triton takes every folder of a model repository for a model, and this one has no config.pbtxt: tokenizers and engines "
        "lie elsewhere",
        ("failed to open text file for read /triton_model_repo/tokenizer/config.pbtxt: No such file or directory",),
        (f"{_BACKEND}83", f"{_SERVER}1633"),
    ),
    Signature(
        "placeholder",
        "repository",
        r"Error parsing text-format inference\.ModelConfig:[^\n]*got: \$|backend library for backend '\$\{",
        _USER,
        "a placeholder of the templates was not filled: pipeline models lint FOLDER names it, and pipeline stage "
        "repository writes all of them",
        ("Error parsing text-format inference.ModelConfig: 29:17: Expected integer, got: $",),
        (f"{_SERVER}8592", f"{_BACKEND}501", f"{_BACKEND}250", f"{_TRTLLM}2758", f"{_TRTLLM}1995"),
    ),
    Signature(
        "config-syntax",
        "repository",
        r"Error parsing text-format inference\.ModelConfig|failed to read text proto",
        _USER,
        "a config.pbtxt cannot be read; the line names its place: pipeline models lint FOLDER says more",
        ("Error parsing text-format inference.ModelConfig",),
        (f"{_BACKEND}210", f"{_BACKEND}393", "https://github.com/triton-inference-server/server"),
    ),
    Signature(
        "backend-missing",
        "repository",
        r"unable to find backend library for backend '(?P<name>\w+)'|unable to find '[\w./]+' for model '[^\n]*, in [^\n]*backends/",
        _USER,
        "this Triton has no such backend: use the image whose tag ends in -trtllm-python-py3 (docs/images.md)",
        ("unable to find backend library for backend 'tensorrtllm'",),
        (f"{_SERVER}7950", f"{_BACKEND}66"),
    ),
    Signature(
        "engine-folder",
        "repository",
        r"json\.exception\.parse_error\.101\] parse error at line 1, column 1|Error opening engine file"
        r"|No such file or directory: '[^'\n]*rank\d+\.engine'|Both encoder and decoder model paths are empty",
        _USER,
        "gpt_model_path does not name the engine's folder (config.json and rank*.engine): pipeline models lint FOLDER "
        "says what it names",
        (
            "[json.exception.parse_error.101] parse error at line 1, column 1",
            "Both encoder and decoder model paths are empty",
        ),
        (f"{_BACKEND}61", f"{_BACKEND}207", f"{_TRTLLM}2440"),
    ),
    Signature(
        "engine-features",
        "options",
        r"requires GPT attention plugin with packed input and paged KV cache",
        _USER,
        "the engine was built without what in-flight batching needs: build it with gpt_attention_plugin, "
        "remove_input_padding and paged KV cache",
        ("requires GPT attention plugin with packed input and paged KV cache",),
        (f"{_BACKEND}91",),
        settings=(("", "settings.build.kv_cache_type=paged"),),
    ),
    Signature(
        "paged-context-fmha",
        "options",
        r"KV cache (?:block )?reuse is set, model has to be built with paged context FMHA"
        r"|[Cc]hunked context[^\n]{0,60}paged (?:context|KV)",
        _USER,
        "reuse of the KV cache and chunked context need an engine with paged context attention",
        ("When KV cache block reuse is set, model has to be built with paged context FMHA support",),
        (f"{_BACKEND}271", f"{_BACKEND}251"),
        settings=(("", "settings.build.use_paged_context_fmha=enable"),),
    ),
    Signature(
        "python-model-file",
        "repository",
        r"ModuleNotFoundError: No module named 'model'",
        _USER,
        "Triton's Python backend finds no model.py in the model's version folder, or may not read it: it lies in MODEL/1/model.py",
        ("ModuleNotFoundError: No module named 'model'",),
        (f"{_SERVER}7410",),
    ),
    Signature(
        "no-version",
        "repository",
        r"at least one version must be available under the version policy",
        _USER,
        "a model's folder has no version: it needs a folder called 1, also an empty one",
        ("at least one version must be available under the version policy",),
        ("Triton",),
    ),
    Signature(
        "tensor-names",
        "repository",
        r"unexpected inference (?:input|output) '[^'\n]*'(?: for model|, allowed)|inference input '\w+' data-type is '"
        r"|unexpected shape for input '|Invalid tensor name: \w",
        _USER,
        "the request has another tensor than the model's config.pbtxt: pipeline models lint FOLDER compares the models",
        ("unexpected inference input 'x' for model",),
        ("Triton",),
    ),
    Signature(
        "unknown-model",
        "repository",
        r"Request for unknown model: '",
        _USER,
        "the server has no model of this name, or it did not load: the server's log says which models are ready",
        ("Request for unknown model: 'ensemble' is not found",),
        (f"{_BACKEND}393", "Triton"),
        Weight.GENERAL,
    ),
    Signature(
        "ensemble-tensors",
        "repository",
        r"inconsistent (?:data ?type|shape)",
        _USER,
        "the models of the ensemble do not fit together: pipeline models lint FOLDER says where",
        ("inconsistent data type",),
        ("Triton",),
    ),
    Signature(
        "decoupled",
        "repository",
        r"doesn't support models with decoupled transaction policy",
        _USER,
        "a decoupled model answers over gRPC streams and generate_stream alone",
        ("ModelInfer RPC doesn't support models with decoupled transaction policy",),
        ("Triton",),
    ),
    # ---- limits that show at the first request
    Signature(
        "beam-width",
        "limits",
        r"samplingConfig\.beamWidth <= maxBeamWidth|Request with beam width (?P<beams>\d+) differs from the max beam width"
        r"|Request beam width \d+ is not equal to max_beam_width|Streaming mode is only supported with beam width of 1"
        r"|name batch_size_beam_width must be equal",
        _USER,
        "engine, repository and request must have one beam width (1 with streaming): settings.build.max_beam_width and "
        "settings.repository.max_beam_width",
        (
            "Assertion failed: samplingConfig.beamWidth <= maxBeamWidth",
            "Request with beam width 4 differs from the max beam width 12",
            "Streaming mode is only supported with beam width of 1",
        ),
        (f"{_BACKEND}115", f"{_BACKEND}154", f"{_BACKEND}140", f"{_TRTLLM}1282", f"{_TRTLLM}7368", f"{_TRTLLM}1784"),
    ),
    Signature(
        "lora",
        "options",
        r"LoRA task \d+ not found in cache",
        _USER,
        "the first request with an adapter has to bring its weights; later ones, too, when others have taken its place",
        ("LoRA task 0 not found in cache. Please send LoRA weights with request",),
        ("tensorrt_llm/batch_manager/peftCacheManager.cpp",),
    ),
    Signature(
        "lora-rank",
        "options",
        r"Invalid low_rank|LoRA rank \d+ is greater than max_lora_rank",
        _INFEASIBLE,
        "the adapter's rank is above what engine or server were made for (max_lora_rank): name all adapters in the recipe, by "
        "which it is chosen, or raise it",
        (
            "Invalid low_rank (1024). low_rank must be smaller than mMaxLowRank (64)",
            "LoRA rank 64 is greater than max_lora_rank 16.",
        ),
        (f"{_TRTLLM}1903", "https://github.com/gpustack/gpustack/issues/5438"),
    ),
    Signature(
        "speculative",
        "options",
        r"(?:Assertion failed|Error): (?:[^\n]{0,60}(?:[Ss]peculative decoding|[Ll]ookahead|[Mm]edusa|mTokens\.empty)"
        r"|Number of draft tokens)",
        _INFEASIBLE,
        "speculative decoding: the engine must be built for it (speculative_decoding_mode, max_draft_len), requests bring what "
        "its kind asks for, and not every GPU and release has its kernels",
        ("Assertion failed: No available XQA kernels are found for speculative decoding mode",),
        (f"{_TRTLLM}2879", f"{_TRTLLM}6158", f"{_BACKEND}473", f"{_TRTLLM}2816", f"{_TRTLLM}2684"),
    ),
    Signature(
        "cross-kv-cache",
        "options",
        r"Do not set crossKvCacheFraction",
        _USER,
        "cross_kv_cache_fraction is for models with an encoder alone",
        ("Do not set crossKvCacheFraction for decoder-only model",),
        (f"{_TRTLLM}2814",),
        settings=(("", "settings.repository.cross_kv_cache_fraction=null"),),
    ),
    Signature(
        "cross-kv-cache-missing",
        "options",
        r"Must set crossKvCacheFraction",
        _USER,
        "a model with an encoder needs a share of the KV cache for it",
        ("Must set crossKvCacheFraction for encoder-decoder model",),
        (f"{_TRTLLM}2419",),
        settings=(("", "settings.repository.cross_kv_cache_fraction=0.5"),),
    ),
    Signature(
        "max-num-tokens",
        "limits",
        r"should not exceed max_num_tokens(?: \((?P<limit>\d+)\))?",
        _USER,
        "a prompt is longer than one pass over the requests takes ({limit} tokens): a larger max_num_tokens, or "
        "enable_chunked_context",
        ("The sum of prompt length (9000.0), query length (0) should not exceed max_num_tokens (8192)",),
        (f"{_TRTLLM}2702", "tensorrt_llm/llmapi/llm.py"),
        settings=(("", "settings.repository.enable_chunked_context=true"),),
    ),
    Signature(
        "prompt-too-long",
        "limits",
        r"Prompt length \(\d+\) exceeds maximum (?:input|sequence) length|max_context_len <= mMaxContextLength"
        r"|Assertion failed: [^\n]*[<=][^\n]*\b(?:maxInputLen|max_input_len|maxSeqLen|maxSequenceLen|max_seq_len)\b"
        r"|must be less than max sequence length"
        r"|default_max_tokens \([^)\n]*\) (?:should|must) be greater than 0"
        r"|(?:input|prompt)[^\n]{0,60}(?:larger|longer|exceeds?|greater)[^\n]{0,30}max_(?:seq|input)_len",
        _USER,
        _LENGTHS,
        ("Prompt length (5056) exceeds maximum sequence length (2048)",),
        (f"{_BACKEND}565", f"{_BACKEND}141", f"{_TRTLLM}600", f"{_TRTLLM}4641"),
    ),
    Signature(
        "engine-shape",
        "limits",
        r"does not satisfy any optimization profile|engine supports \[min, opt, max\]",
        _USER,
        "a request is larger than what the engine was built for: max_batch_size, lengths or beam width of the matrix",
        ("Runtime dimension does not satisfy any optimization profile",),
        (f"{_TRTLLM}214", f"{_TRTLLM}272"),
    ),
    Signature(
        "engine-static-shape",
        "limits",
        r"Static dimension mismatch while setting input shape",
        _USER,
        "what the program gives has another size than the engine fixed when it was built: a beam width, a tp and pp, or a model "
        "other than the engine's, or a script that was not written for them",
        ("Static dimension mismatch while setting input shape",),
        (f"{_TRTLLM}265", f"{_TRTLLM}1444"),
    ),
    Signature(
        "batch-too-large",
        "limits",
        r"inference request batch-size must be <=|max-batch \d+ but TensorRT engine only supports max-batch",
        _USER,
        "a request has a larger batch than the engine or the model's max_batch_size: axes.max_batch_size",
        ("inference request batch-size must be <= 4",),
        ("Triton",),
    ),
    # ---- memory
    Signature(
        "kv-cache-one-sequence",
        "memory",
        r"maxTokensInPagedKvCache[^\n]*must be large enough|maximum number of tokens that can be stored in KV cache|Impossible to fit in any sequence in kvCache",
        _MEMORY,
        "the KV cache does not hold one sequence: build with a smaller max_seq_len, or give the cache more "
        "(kv_cache_free_gpu_mem_fraction, max_tokens_in_paged_kv_cache), or free GPU memory that others use",
        ("maxTokensInPagedKvCache (64) must be large enough",),
        (f"{_BACKEND}168", f"{_BACKEND}366", f"{_TRTLLM}494", f"{_TRTLLM}542", f"{_BACKEND}59"),
        settings=(("", "settings.repository.kv_cache_free_gpu_mem_fraction=0.95"),),
    ),
    Signature(
        "kv-cache-blocks",
        "memory",
        r"[Nn]o free blocks left|Can't allocate new blocks",
        _MEMORY,
        "the KV cache is full: fewer requests at a time, or a larger cache (kv_cache_free_gpu_mem_fraction)",
        ("Can't allocate new blocks. No free blocks left.",),
        ("tensorrt_llm/batch_manager/kvCacheManager.cpp",),
        settings=(("", "settings.repository.batch_scheduler_policy=guaranteed_no_evict"),),
    ),
    Signature(
        "executor-memory",
        "memory",
        r"Executor creation failed due to insufficient GPU memory",
        _MEMORY,
        "the server's parts do not fit into GPU memory together: a smaller share for the KV cache, or fewer tokens in a pass",
        ("Executor creation failed due to insufficient GPU memory",),
        (f"{_TRTLLM}5872",),
        settings=(("", "settings.repository.kv_cache_free_gpu_mem_fraction=0.7"),),
    ),
    Signature(
        "memory-share",
        "memory",
        r"No available memory for the cache blocks|Not enough memory\. Please try to increase",
        _MEMORY,
        "weights and a forward pass take all of the share of GPU memory that the server may have: a larger share "
        "(gpu_memory_utilization of vLLM, mem_fraction_static of SGLang), fewer tokens in a pass, or more GPUs",
        (
            "No available memory for the cache blocks.",
            "Not enough memory. Please try to increase",
        ),
        ("https://github.com/vllm-project/vllm/issues/17431", "https://github.com/sgl-project/sglang/issues/4330"),
    ),
    Signature(
        "build-memory",
        "memory",
        r"Error Code \d+: OutOfMemory|\bOutOfMemory \(|Requested amount of GPU memory[^\n]*could not be allocated",
        _MEMORY,
        "a smaller max_num_tokens, max_batch_size or max_seq_len needs less memory",
        ("Error Code 2: OutOfMemory", "Requested amount of GPU memory (8 bytes) could not be allocated"),
        (f"{_TRTLLM}346", f"{_TRTLLM}1543", f"{_TRTLLM}2451"),
        Weight.GENERAL,
        _LESS_MEMORY,
    ),
    Signature(
        "gpu-memory",
        "memory",
        r"OutOfMemoryError:|CUDA out of memory|CUDA (?:runtime )?error[^\n]*out of memory"
        r"|Cuda failure[^\n]*out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaMalloc failed: out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
        _MEMORY,
        "GPU memory ran out: fewer workers or load_model_on_cpu to convert; smaller max_batch_size or max_seq_len to serve; "
        "nvidia-smi shows who else uses the GPU",
        ("CUDA out of memory", "cudaErrorMemoryAllocation"),
        (f"{_TRTLLM}1221", f"{_TRTLLM}1304", f"{_TRTLLM}401", f"{_TRTLLM}1670"),
        Weight.GENERAL,
        _LESS_MEMORY,
    ),
    KILLED,
    Signature(
        "shared-memory",
        "memory",
        r"Unable to (?:create|initialize) shared memory|[Ff]ailed to (?:create|increase)[^\n]{0,30}shared memory",
        _USER,
        "shared memory is full: make /dev/shm larger (docker run --shm-size=2g)",
        ("Unable to create shared memory", "Unable to initialize shared memory"),
        ("Triton's Python backend",),
    ),
    Signature(
        "shared-memory-lock",
        "memory",
        r"boost::interprocess::lock_exception",
        _TRANSIENT,
        "Triton's Python backend lost a race over its shared memory; where it comes back, make /dev/shm larger",
        ("boost::interprocess::lock_exception",),
        ("Triton's Python backend",),
    ),
    Signature(
        "host-memory",
        "memory",
        r"\bbad_alloc\b|[Cc]annot allocate memory|\bMemoryError\b|failed to allocate (?!pinned)[^\n]{0,40}(?:memory|bytes|[KMG]i?B)\b|(?:: |ran )out of memory",
        _MEMORY,
        "a smaller max_batch_size or max_seq_len needs less memory",
        ("bad_alloc", "MemoryError"),
        ("the C++ and Python runtimes",),
        Weight.GENERAL,
    ),
    # ---- the model and its files
    Signature(
        "model-not-supported",
        "model",
        r"Unknown architecture for AutoModelForCausalLM: (?P<name>\w+)|model architecture \w+ is not supported in TRT-LLM"
        r"|Unsupported model architecture: \w+|Transformers does not recognize this architecture"
        r"|unknown model architecture: '|[Uu]nsupported model[_ ]type"
        r"|(?:CONFIG_MAPPING\[|configuration_auto\.py\", line \d+, in __getitem__)[\s\S]{0,400}KeyError: '[\w.-]+'",
        _INFEASIBLE,
        _NEWER,
        (
            "ValueError: Unknown architecture for AutoModelForCausalLM: Qwen3ForCausalLM",
            "model architecture DeepseekV3ForCausalLM is not supported in TRT-LLM yet",
            "RuntimeError: Unsupported model architecture: LlamaForCausalLM",
        ),
        (
            *(f"{_TRTLLM}2845", f"{_TRTLLM}7706", f"{_TRTLLM}5395", f"{_TRTLLM}5510", f"{_TRTLLM}1026"),
            *(f"{_TRTLLM}9940", f"{_TRTLLM}2158"),
        ),
    ),
    Signature(
        "rope-scaling",
        "model",
        r"ro(?:tary|pe)_scaling[\s\S]{0,400}KeyError: 'type'|`rope_scaling` must be a dictionary with two fields",
        _INFEASIBLE,
        "the model's config.json is younger than the installed release: install a newer one",
        ("rope_scaling ... KeyError: 'type'",),
        (f"{_TRTLLM}2052", f"{_TRTLLM}2105"),
    ),
    Signature(
        "weights-shape",
        "model",
        r"not the same shape as the original|size mismatch for \S+: copying a param",
        _INFEASIBLE,
        "the checkpoint is not what is expected: converted by another release, for another tp, with a group size that does not "
        "divide the weights over this tp, or a form of weights that is not read; convert it again with this release",
        ("The value updated is not the same shape as the original",),
        (f"{_TRTLLM}2014", f"{_TRTLLM}894"),
    ),
    Signature(
        "weight-columns",
        "model",
        r"Number of bytes for rows and cols must be a multiple",
        _INFEASIBLE,
        "what a rank gets of a weight is not a whole number of the tiles that weight-only quantization stores: a smaller tp "
        "(axes.parallel), or another precision",
        ("Number of bytes for rows and cols must be a multiple of 32. However, num_col_bytes = 3696",),
        (f"{_TRTLLM}894",),
    ),
    Signature(
        "no-architectures",
        "model",
        r"\.architectures\[0\][\s\S]{0,400}'NoneType' object is not subscriptable",
        _USER,
        "the model's config.json has no `architectures`: add the name of the model's class to it, or install a newer release of the "
        "program that reads it",
        ("architecture=model.config.architectures[0] ... TypeError: 'NoneType' object is not subscriptable",),
        ("transformers, PretrainedConfig.architectures",),
    ),
    Signature(
        "weights-missing",
        "model",
        r"(?:Required|Expected) but not provided tensors|tensor names are different from those expected"
        r"|KeyError: '(?:model|transformer|lm_head|language_model|layers\.\d+)\.[\w.]+'"
        r"|SafetensorError: File does not contain tensor|Missing key\(s\) in state_dict",
        _INFEASIBLE,
        "the checkpoint's weights are not those that the model asks for: another release or precision made it, it is not quantized "
        "in the way that was asked for, or the release does not know this variant of the model",
        ("Required but not provided tensors",),
        (f"{_TRTLLM}6680", f"{_TRTLLM}1109"),
    ),
    Signature(
        "tokenizer-class",
        "model",
        r"Tokenizer class \S+ does not exist|data did not match any variant of untagged enum"
        r"|Couldn't instantiate the backend tokenizer",
        _USER,
        "the tokenizer needs a newer transformers package, sentencepiece or tiktoken, or the model's own code "
        "(trust_remote_code)",
        ("Tokenizer class QWenTokenizer does not exist", "data did not match any variant of untagged enum"),
        (f"{_BACKEND}62",),
    ),
    Signature(
        "remote-code",
        "model",
        r"requires you to execute the (?:\w+ )?\w+ file in that repo|custom code which must be executed to correctly load the model"
        r"|set the option `?trust_remote_code=True",
        _USER,
        "the model has Python code of its own: read it, then name its files and their SHA-256 in "
        "settings.download.trust_remote_code, which lets them be fetched and run",
        ("contains custom code which must be executed to correctly load the model",),
        ("transformers",),
    ),
    Signature(
        "model-file-missing",
        "model",
        r"does not appear to have a file named \S+|Error no file named \S+ found in directory",
        _USER,
        "the model's folder lacks a file: download it whole; the file is named in the message",
        ("does not appear to have a file named configuration_phi3.py",),
        ("transformers",),
    ),
    Signature(
        "model-name",
        "model",
        r"HFValidationError|Repo id must (?:be in the form|use alphanumeric)|is not a valid model identifier"
        r"|Incorrect path_or_model_id|RepositoryNotFoundError",
        _USER,
        "this is neither a folder nor a model of the hub that can be seen: a path that does not exist here is taken for a name. "
        "Look at tokenizer_dir and the model's path, also whether it is mounted; a private model needs HF_TOKEN",
        ("HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name'",),
        (f"{_BACKEND}109", "https://github.com/yao8839836/kg-llm/issues/1"),
    ),
    Signature(
        "model-config",
        "model",
        r"Unrecognized model in \S+ Should have a `model_type`",
        _USER,
        "the folder is no Hugging Face model (its config.json has no model_type): a converted checkpoint or an engine folder is "
        "something else",
        ("Unrecognized model in /ckpt. Should have a `model_type` key in its config.json",),
        (f"{_TRTLLM}10735",),
    ),
    Signature(
        "gated",
        "hub",
        r"GatedRepoError|Cannot access gated repo",
        _USER,
        "accept the model's licence on its page, then set HF_TOKEN",
        ("Cannot access gated repo",),
        ("huggingface_hub",),
    ),
    Signature(
        "registry-login",
        "hub",
        r"unauthorized: authentication required|pull access denied",
        _USER,
        "docker login to the registry that the image is from (nvcr.io: user $oauthtoken), with a key that may read it",
        ("unauthorized: authentication required", "pull access denied for x"),
        ("https://github.com/NVIDIA/nim-anywhere/issues/4", "Docker"),
    ),
    Signature(
        "git-lfs",
        "model",
        r"HeaderTooLarge|invalid load key, 'v'|^version https://git-lfs|using Git LFS",
        _USER,
        "a file is not what its name says, mostly a git-lfs pointer in its place: download the model again (git lfs pull)",
        ("HeaderTooLarge", "version https://git-lfs"),
        (f"{_TRTLLM}2052", f"{_SERVER}7382"),
    ),
    Signature(
        "not-torchscript",
        "model",
        r"PytorchStreamReader failed locating file constants\.pkl",
        _USER,
        "Triton's PyTorch backend takes TorchScript alone: save the model with torch.jit.trace or torch.jit.script, not torch.save",
        ("PytorchStreamReader failed locating file constants.pkl: file not found",),
        (f"{_SERVER}8692",),
    ),
    Signature(
        "damaged-weights",
        "model",
        r"MetadataIncompleteBuffer|InvalidHeaderDeserialization|PytorchStreamReader failed"
        r"|Unable to load weights from pytorch checkpoint file|Error while deserializing header"
        r"|integrity check failed, expected|Consistency check failed: file should be of size",
        _USER,
        "a file of the model is damaged or not whole: download it again",
        ("Error while deserializing header: MetadataIncompleteBuffer",),
        (f"{_TRTLLM}793",),
    ),
    Signature(
        "dataset-name",
        "hub",
        r"Invalid HF URI[^\n]*'hf://datasets/[^\n]*Repository id must be 'namespace/name'",
        _USER,
        "the huggingface_hub that is installed takes data sets only by their whole name, with a namespace, such as "
        "abisee/cnn_dailymail: name it so (settings.quantize.calibration), or take the huggingface_hub that the release asks for",
        ("Invalid HF URI 'hf://datasets/cnn_dailymail@96df5e6/x'. Repository id must be 'namespace/name'",),
        ("https://github.com/NVIDIA/TensorRT-LLM/pull/15802",),
    ),
    Signature(
        "calibration-data",
        "hub",
        r"Invalid HF URI|cnn_dailymail[\s\S]{0,400}(?:ConnectionError|DatasetNotFoundError|doesn't exist on the Hub)"
        r"|(?:ConnectionError|DatasetNotFoundError|Couldn't (?:reach|find))[^\n]{0,200}cnn_dailymail",
        _USER,
        "the default calibration set cannot be fetched: let this machine reach the Hub once; TensorRT-LLM up to 0.9 takes "
        "no other, since 0.10 settings.quantize.calibration names it",
        ("Couldn't reach 'cnn_dailymail'",),
        (f"{_TRTLLM}1472",),
    ),
    Signature(
        "visual-example",
        "hub",
        r"ConnectionPool\(host='qianwen-res[^\n]*Max retries exceeded with url",
        _USER,
        "the script that builds Qwen2-VL's visual engine fetches an image of its own while it does, and cannot reach it from "
        "here: run this stage once where the internet is reached, or set HTTPS_PROXY; on 1.0 and later, the toolchain "
        "tensorrt_llm_pytorch needs no such engine",
        (
            "HTTPSConnectionPool(host='qianwen-res.oss-cn-beijing.aliyuncs.com', port=443): Max retries exceeded with url: /Qwen-VL",
        ),
        ("build_qwen2_vl_engine of TensorRT-LLM's multimodal_builder.py, and requests",),
    ),
    Signature(
        "certificate",
        "hub",
        r"CERTIFICATE_VERIFY_FAILED",
        _USER,
        "a certificate is not trusted here, often that of a company's proxy or mirror: install its authority, or name the file with "
        "it (SSL_CERT_FILE, REQUESTS_CA_BUNDLE)",
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed",),
        ("Python's ssl",),
    ),
    Signature(
        "hub-unreachable",
        "hub",
        r"We couldn't connect to 'https?://|LocalEntryNotFoundError"
        r"|ConnectionPool\(host='(?!localhost|127\.|0\.0|qianwen-res)[^\n]*Max retries exceeded with url|OfflineModeIsEnabled|outgoing traffic has been disabled",
        _USER,
        "the hub cannot be reached from here, and a program asks for a file that the model's folder lacks: a proxy "
        "(HTTPS_PROXY), or a folder that has all files",
        ("We couldn't connect to 'https://huggingface.co'",),
        ("transformers and huggingface_hub",),
    ),
    Signature(
        "examples-missing",
        "model",
        r"(?:can't open file|No such file or directory:) '?[^\n']*\bexamples/[^\n']*\.py",
        _USER,
        "mount the examples of the installed release; other releases have them in other places",
        ("can't open file '/app/examples/llama/build.py'",),
        ("TensorRT-LLM's source tree",),
    ),
    # ---- the machine
    Signature(
        "port",
        "machine",
        r"Socket '[^'\n]+' already in use|[Aa]ddress already in use|failed to start \w+ service",
        _TRANSIENT,
        "another program has the port: end it, or choose port 0 for a free one",
        ("Address already in use", "failed to start HTTP service"),
        (f"{_BACKEND}243", f"{_BACKEND}275", f"{_BACKEND}524"),
    ),
    Signature(
        "server-running",
        "machine",
        r"tritonserver process\(es\) already found with PID",
        _TRANSIENT,
        "end the server that runs already",
        ("tritonserver process(es) already found with PID",),
        ("TensorRT-LLM's launch_triton_server.py",),
    ),
    Signature(
        "job-time-limit",
        "machine",
        r"CANCELLED AT [^\n]*DUE TO TIME LIMIT",
        _USER,
        "the job reached the time limit of the cluster's scheduler, which then killed it: ask for more time",
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-02T03:00:11 DUE TO TIME LIMIT ***",),
        ("https://github.com/ZettaAI/zetta_utils/issues/671", "Slurm"),
    ),
    Signature(
        "disk-full",
        "machine",
        r"No space left on device|Disk quota exceeded",
        _USER,
        "free some space: df shows where, on a disk or in /dev/shm",
        ("No space left on device", "Disk quota exceeded"),
        ("the operating system",),
    ),
    Signature(
        "processes",
        "machine",
        r"can't start new thread|pthread_create[^\n]{0,40}(?:failed|Resource temporarily unavailable)"
        r"|\bfork\b[^\n]{0,40}Resource temporarily unavailable",
        _USER,
        "the limit on processes and threads is reached: raise it (ulimit -u, or docker run --pids-limit)",
        ("can't start new thread",),
        ("the operating system",),
    ),
    Signature(
        "open-files",
        "machine",
        r"Too many open files",
        _USER,
        "the limit on open files is reached: raise it (ulimit -n, or docker run --ulimit nofile=65536)",
        ("Too many open files",),
        ("the operating system",),
    ),
    Signature(
        "program-missing",
        "machine",
        r": command not found$|^(?:[\w/.-]*sh: )?(?:\d+: |line \d+: )?[\w.-]+: not found$"
        r"|executable file not found in \$PATH|FileNotFoundError: [^\n]*'(?:[^'\n]*/bin/[\w.-]+|trtllm-\w+|mpirun|tritonserver|nvidia-smi)'",
        _USER,
        "a program is not installed here, or not on PATH: pipeline doctor shows what was found where",
        ("trtllm-build: command not found",),
        (f"{_TRTLLM}1207",),
    ),
    Signature(
        "cpu-instructions",
        "machine",
        r"Illegal instruction",
        _USER,
        "the CPU, or the virtual machine's view of it, lacks instructions that the program was compiled for, such as AVX",
        ("Illegal instruction",),
        ("the operating system",),
    ),
    # ---- said where nothing more particular is
    Signature(
        "engine-file",
        "release",
        r"[Ff]ailed to deserialize cuda engine",
        _USER,
        f"a rank's file is incomplete or of another release: {_REBUILD}",
        ("Failed to deserialize cuda engine",),
        (f"{_TRTLLM}1038", f"{_BACKEND}235"),
        Weight.GENERAL,
    ),
    Signature(
        "python-module",
        "release",
        r"ModuleNotFoundError: No module named '(?!model')(?P<name>[\w.]+)'|ImportError: cannot import name '\w+' from '[\w.]+'"
        r"|requires the following packages that were not found in your environment|ImportError: [^\n]* requires the \S+ library",
        _USER,
        "a Python package is missing or of another release than the script expects: use NVIDIA's image of one release "
        "(docs/images.md) and the requirements of its own examples",
        ("ModuleNotFoundError: No module named 'tensorrt'",),
        (f"{_TRTLLM}1839", f"{_BACKEND}297"),
        Weight.GENERAL,
    ),
    Signature(
        "shared-library",
        "release",
        r"error while loading shared libraries|DLL load failed|FileNotFoundError: Could not find: [\w.-]+\.(?:dll|so)|cannot open shared object file(?![^\n]*\(ignored\))",
        _USER,
        "install the library that is named, or put its folder on LD_LIBRARY_PATH",
        ("error while loading shared libraries", "cannot open shared object file"),
        (f"{_TRTLLM}6102", f"{_TRTLLM}877", f"{_TRTLLM}1656"),
        Weight.GENERAL,
    ),
    Signature(
        "permission",
        "machine",
        r"PermissionError: \[Errno 13\]|: [Pp]ermission denied\b",
        _USER,
        "this user may not read or write the file that is named",
        ("PermissionError: [Errno 13] Permission denied",),
        ("the operating system",),
        Weight.GENERAL,
    ),
    Signature(
        "gpu-fault",
        "gpu",
        r"an illegal memory access was encountered|device-side assert triggered|thread: \[\d+,\d+,\d+\] Assertion|unspecified launch failure"
        r"|CUBLAS_STATUS_(?:EXECUTION_FAILED|NOT_SUPPORTED|INTERNAL_ERROR|NOT_INITIALIZED|INVALID_VALUE)"
        r"|[Ff]ailed to run cutlass|Error occurred when running GEMM"
        r"|CUDA (?:runtime )?error(?![^\n]*out of memory)(?![^\n]*(?:driver|device))[^\n]*: ",
        _BUG,
        "a kernel failed on the GPU: CUDA_LAUNCH_BLOCKING=1 shows which; another release, or without the feature that was "
        "added last",
        ("an illegal memory access was encountered",),
        ("https://github.com/NVIDIA/TensorRT-LLM/pull/3979", f"{_TRTLLM}456", f"{_TRTLLM}5389"),
        Weight.CLASS,
    ),
    Signature(
        "builder-tactics",
        "gpu",
        r"[Cc]ould not find any implementation for node",
        _INFEASIBLE,
        "TensorRT has no kernel for a layer on this GPU within the memory it may use: free GPU memory, smaller limits, or "
        "another release",
        ("Could not find any implementation for node",),
        ("TensorRT",),
        Weight.CLASS,
        _LESS_MEMORY,
    ),
    Signature(
        "network-invalid",
        "options",
        r"\[network\.cpp::\w+::\d+\] Error Code \d+: |Network validation failed|Error Code 4: (?:Internal Error|API Usage)"
        r"|could not find any supported formats",
        _INFEASIBLE,
        "TensorRT refuses the network that was made of these options: types of plugins and weights must fit together "
        "(gemm_plugin and gpt_attention_plugin auto, or the checkpoint's dtype)",
        ("[network.cpp::validate::3516] Error Code 4: Internal Error",),
        (f"{_TRTLLM}1273", f"{_TRTLLM}1077"),
        Weight.CLASS,
    ),
    Signature(
        "release-mismatch",
        "release",
        r"TypeError: [^\n]*(?:got an unexpected keyword argument|missing \d+ required)|AttributeError: module '[\w.]+' has no"
        r"|AttributeError: '(?!NoneType)\w+' object has no attribute '\w+'",
        _USER,
        "often a script and a package, or a model and a package, are of different releases: scripts of the very release that is "
        "installed, and the transformers package that it names",
        ("TypeError: __init__() got an unexpected keyword argument 'use_cache'",),
        (f"{_TRTLLM}2471", "https://docs.python.org/3/library/exceptions.html"),
        Weight.CLASS,
    ),
    Signature(
        "shapes",
        "options",
        r"(?:[Ss]hape|[Ss]ize|dimension|dim|dtype|data type|tensor)s?\b[^\n]{0,80}(?:mismatch|must|expected|not match|differ|unequal)"
        r"|(?:mismatch|expected|must have)[^\n]{0,60}(?:shape|size|dims?|dimensions?|dtype|elements)\b|->dtype\(\) ==",
        _BUG,
        "tensors do not fit together: a checkpoint, an engine or a request is not of the form that the program expects",
        ("bitmask must have the same batch size as logits",),
        ("PyTorch", "TensorRT-LLM"),
        Weight.CLASS,
    ),
    Signature(
        "limit",
        "limits",
        r"(?:exceeds?|larger than|greater than|longer than|more than|less than|smaller than|at most|out of range)\b[^\n]{0,60}"
        r"(?:\bmax|limit|allowed|capacity|length)|\b(?:max\w*|limit)\b[^\n]{0,60}exceeded|No free slots",
        _USER,
        "a limit is exceeded that the line names: build or serve with a larger one, or ask for less at a time",
        ("the value exceeds the maximum that is allowed",),
        ("many programs",),
        Weight.CLASS,
    ),
    Signature(
        "network",
        "hub",
        r"[Cc]onnection refused|Name or service not known|Temporary failure in name resolution"
        r"|Network is unreachable|No route to host|ProxyError|SSLError|[Ff]ailed to (?:connect|download)|[Cc]onnection timed out",
        _USER,
        "an address cannot be reached from here: is its server running, and does the network, a proxy (HTTPS_PROXY) or a "
        "certificate stand between",
        ("Temporary failure in name resolution",),
        ("the operating system",),
        Weight.CLASS,
    ),
    Signature(
        "package-build",
        "release",
        r"metadata-generation-failed|subprocess-exited-with-error|Failed building wheel|Could not build wheels"
        r"|Building wheel for [^\n]+\.\.\. error",
        _USER,
        "a package has no wheel for this machine and could not be built here: the lines of its own build say why; NVIDIA's "
        "image of the release has it (docs/images.md)",
        ("error: subprocess-exited-with-error", "error: metadata-generation-failed"),
        ("pip", f"{_TRTLLM}777"),
        Weight.CLASS,
    ),
    Signature(
        "packages",
        "release",
        r"No matching distribution found for|Could not find a version that satisfies the requirement|ResolutionImpossible"
        r"|requires a different Python",
        _USER,
        "pip found no package for this Python, platform and index: TensorRT-LLM's wheels need --extra-index-url "
        "https://pypi.nvidia.com and the Python that the release names",
        ("No matching distribution found for tensorrt",),
        ("pip", f"{_TRTLLM}2050", f"{_TRTLLM}777"),
        Weight.GENERAL,
    ),
    Signature(
        "stub-died",
        "repository",
        r"Stub process '?[^\n]{0,60}is not healthy|[Tt]imed out occurred while waiting for the stub process",
        _BUG,
        "the process of a Python model died or did not start in time: its own lines stand before; often memory or /dev/shm",
        ("Stub process 'preprocessing_0_0' is not healthy.",),
        ("Triton's Python backend",),
        Weight.CLASS,
    ),
    Signature(
        "not-supported",
        "options",
        r"^(?:\S+: )*(?:AssertionError|NotImplementedError|ValueError|RuntimeError): [^\n]*"
        r"(?:not (?:yet )?(?:supported|implemented|available)|[Uu]nsupported|doesn't support|does not support|only supports?)"
        r"|Assertion failed: [^\n]*(?:not (?:yet )?supported|[Uu]nsupported|only supports?)",
        _INFEASIBLE,
        "this release refuses the combination that the line names: take it out of the matrix, or another release",
        ("NotImplementedError: Quantization mode w4a8 is not supported",),
        (f"{_TRTLLM}5395",),
        Weight.CLASS,
    ),
    Signature(
        "file-missing",
        "machine",
        r"FileNotFoundError: |NotADirectoryError: |No such file or directory(?![^\n]*\(ignored\))",
        _USER,
        "the file or folder that is named does not exist here: look at the path, and whether it is mounted",
        ("FileNotFoundError: [Errno 2] No such file or directory: 'config.json'",),
        ("the operating system",),
        Weight.CLASS,
    ),
    Signature(
        "crash",
        "machine",
        r"Segmentation fault|exited on signal (?:8|11)\b|Signal \((?:8|11)\) received|Signal: (?:Bus error|Floating point exception)"
        r"|Signal code: (?:Address not mapped|Invalid permissions)",
        _BUG,
        "a program crashed without a word: its core or a backtrace may tell; often libraries of two releases",
        ("Segmentation fault (core dumped)", "Signal (11) received.", "Signal: Floating point exception (8)"),
        (f"{_BACKEND}250", f"{_BACKEND}371", f"{_TRTLLM}1645"),
        Weight.CLASS,
    ),
    # ---- symptoms
    PYTHON_STUB,
    Signature(
        "ensemble",
        "repository",
        r"which has no loaded version|failed to load all models",
        _BUG,
        "a model that the ensemble needs did not load: the lines before say why",
        ("ensemble 'ensemble' depends on 'tensorrt_llm' which has no loaded version",),
        (f"{_BACKEND}568", f"{_TRTLLM}1995"),
        Weight.SYMPTOM,
    ),
    Signature(
        "rank-ended",
        "ranks",
        r"MPI_ABORT was invoked|mpirun (?:noticed|detected) that|Primary job\s+terminated normally"
        r"|remote process exited or there was a network error",
        _BUG,
        "a rank ended, and the others with it: its own lines say why",
        ("MPI_ABORT was invoked on rank 0", "Primary job  terminated normally, but 1 process returned"),
        (f"{_TRTLLM}213", f"{_TRTLLM}753"),
        Weight.SYMPTOM,
    ),
)
