"""Which line says the first cause, by the form of a log alone: none of these failures is known by its words."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_pipeline.tensorrt.diagnosis.causes import LogText, first_cause
from trtllm_pipeline.tensorrt.diagnosis.statements import unwrapped

SHAPES = {
    "asyncio": (
        (
            "[I] fine",
            "ERROR:asyncio:Task exception was never retrieved",
            "future: <Task finished name='Task-3' coro=<f() done> exception=ValueError('max_beam_width must be positive')>",
            "Traceback (most recent call last):",
            '  File "a.py", line 3, in f',
            '    raise ValueError("x")',
            "ValueError: max_beam_width must be positive",
        ),
        {3, 7},
    ),
    "remote": (
        (
            "concurrent.futures.process._RemoteTraceback: ",
            '"""',
            "Traceback (most recent call last):",
            '  File "/usr/lib/python3.12/concurrent/futures/process.py", line 264, in _process_worker',
            "    r = call_item.fn(*call_item.args, **call_item.kwargs)",
            '  File "convert.py", line 10, in shard',
            "    w = torch.chunk(w, tp)[rank]",
            "IndexError: tuple index out of range for rank 5",
            '"""',
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            "Traceback (most recent call last):",
            '  File "convert.py", line 40, in <module>',
            "    f.result()",
            "IndexError: tuple index out of range for rank 5",
        ),
        {8},
    ),
    "keyerror-then": (
        (
            "Traceback (most recent call last):",
            '  File "configuration_auto.py", line 1073, in from_pretrained',
            '    config_class = CONFIG_MAPPING[config_dict["model_type"]]',
            "KeyError: 'minimax_m9'",
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            "Traceback (most recent call last):",
            '  File "a.py", line 5, in <module>',
            "    main()",
            "ValueError: The checkpoint has model type `minimax_m9` which this version knows nothing of.",
            "You can update with the command `pip install --upgrade x`.",
        ),
        {11, 4},
    ),
    "interleaved": (
        (
            "[rank0]: Traceback (most recent call last):",
            "[rank1]: Traceback (most recent call last):",
            '[rank0]:   File "a.py", line 1, in f',
            '[rank1]:   File "a.py", line 1, in f',
            "[rank1]:     g()",
            "[rank0]:     g()",
            "[rank1]: ValueError: shard 1 lacks tensor mlp.gate",
            "[rank0]: RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
        ),
        {7},
    ),
    "table": (
        (
            "I1122 08:11:09.440530 412 server.cc:674] ",
            "+----------------+---------+-------------------------------+",
            "| Model          | Version | Status                        |",
            "+----------------+---------+-------------------------------+",
            "| postprocessing | 1       | READY                         |",
            "| tensorrt_llm   | 1       | UNAVAILABLE: Internal: unexpected error when creating modelInstanceState: [TensorRT-LLM][ERROR] Assertion failed: hiddenSize must be even (/app/x.cpp:3) |",
            "|                |         | 1       0x7f5a2c41c3e4 tensorrt_llm::common::throwRuntimeError |",
            "+----------------+---------+-------------------------------+",
            "error: creating server: Internal - failed to load all models",
        ),
        {6},
    ),
    "pydantic": (
        (
            "[TensorRT-LLM] TensorRT LLM version: 1.0.0",
            "Traceback (most recent call last):",
            '  File "/usr/local/bin/trtllm-serve", line 8, in <module>',
            "    sys.exit(main())",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for Fancy",
            "moe_frobnicate",
            "  Extra inputs are not permitted [type=extra_forbidden, input_value=3, input_type=int]",
            "    For further information visit https://errors.pydantic.dev/2.9/v/extra_forbidden",
        ),
        {5, 7},
    ),
    "docker": (
        (
            "#12 [stage-1 5/9] RUN pip install x",
            "#12 3.221 Collecting x",
            "#12 9.120 ERROR: Ignored the following versions that require a different python version: 1.0",
            "#12 9.121 ERROR: Could not find a version that satisfies the requirement foo==9 (from versions: 1, 2)",
            "#12 9.122 ERROR: No matching distribution found for foo==9",
            '#12 ERROR: process "/bin/sh -c pip install x" did not complete successfully: exit code: 1',
            "------",
            " > [stage-1 5/9] RUN pip install x:",
            "------",
            'ERROR: failed to solve: process "/bin/sh -c pip install x" did not complete successfully: exit code: 1',
        ),
        {4, 5},
    ),
    "json": (
        (
            "sending",
            '{"error":"Failed to process the request(s) for model instance \'x_0\', message: ValueError: stop_words must be of shape [1, N]\\n\\nAt:\\n  /m/1/model.py(12): execute\\n"}',
            "1 of 1 requests failed",
        ),
        {2},
    ),
    "vllm": (
        (
            "(EngineCore_DP0 pid=59619) INFO 10-15 08:32:29 [pynccl.py:103] vLLM is using nccl==2.27.3",
            "(EngineCore_DP0 pid=59619) ERROR 10-15 08:32:29 [core.py:708] EngineCore failed to start.",
            "(EngineCore_DP0 pid=59619) ERROR 10-15 08:32:29 [core.py:708] Traceback (most recent call last):",
            '(EngineCore_DP0 pid=59619) ERROR 10-15 08:32:29 [core.py:708]   File "core.py", line 699, in run_engine_core',
            "(EngineCore_DP0 pid=59619) ERROR 10-15 08:32:29 [core.py:708]     engine_core = EngineCoreProc(*args, **kwargs)",
            "(EngineCore_DP0 pid=59619) ERROR 10-15 08:32:29 [core.py:708] ValueError: Free memory on device (3.1/23.6 GiB) on startup is less than desired",
            "(APIServer pid=1179246) Traceback (most recent call last):",
            '(APIServer pid=1179246)   File "utils.py", line 706, in launch_core_engines',
            "(APIServer pid=1179246)     wait_for_engine_startup(",
            "(APIServer pid=1179246) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ),
        {6},
    ),
    "group": (
        (
            "INFO:     Application startup",
            "  + Exception Group Traceback (most recent call last):",
            '  |   File "a.py", line 3, in <module>',
            "  |     main()",
            "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
            "  +-+---------------- 1 ----------------",
            "    | Traceback (most recent call last):",
            '    |   File "b.py", line 5, in run',
            '    |     raise ValueError("chat template lacks role tool")',
            "    | ValueError: chat template lacks role tool",
            "    +------------------------------------",
        ),
        {10},
    ),
    "torchrun": (
        (
            "W1122 08:00:00.000 120 torch/distributed/run.py:793] Setting OMP_NUM_THREADS",
            "Traceback (most recent call last):",
            '  File "q.py", line 3, in <module>',
            "    main()",
            "ValueError: calib_size 0 is too small",
            "E1122 08:11:02.1 120 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 133) of binary: /usr/bin/python3",
            "Traceback (most recent call last):",
            '  File "/usr/local/bin/torchrun", line 8, in <module>',
            "    sys.exit(main())",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
            "============================================================",
            "q.py FAILED",
            "------------------------------------------------------------",
            "Root Cause (first observed failure):",
            "[0]:",
            "  exitcode  : 1 (pid: 133)",
        ),
        {5},
    ),
    "click": (
        (
            "Usage: trtllm-serve [OPTIONS] COMMAND [ARGS]...",
            "Try 'trtllm-serve --help' for help.",
            "",
            "Error: No such command 'frobnicate'.",
        ),
        {4},
    ),
    "slurm": (
        (
            "srun: job 12 queued and waiting for resources",
            "slurmstepd: error: execve(): /opt/x/run.sh: Permission denied",
            "srun: error: node1: task 0: Exited with exit code 13",
            "srun: launch/slurm: _step_signal: Terminating StepId=1.0",
        ),
        {2},
    ),
    "warning-first": (
        (
            "[11/22/2026-09:01:44] [TRT-LLM] [W] Failed to import flashinfer: No module named 'flashinfer', some kernels are not available",
            "2026-11-22 09:00:01,000 - WARNING - x: could not find config, using defaults",
            "[11/22/2026-09:01:46] [TRT-LLM] [I] start",
            "[11/22/2026-09:01:47] [TRT-LLM] [E] Model weights have 33 layers, config says 32",
            "[11/22/2026-09:01:48] [TRT-LLM] [I] shutting down",
        ),
        {4},
    ),
    "cudnn": (
        (
            "terminate called after throwing an instance of 'c10::Error'",
            "  what():  CUDA kernel errors might be reported at some other API call: rope cache too small",
            "Exception raised from f at x.cpp:3 (most recent call first):",
            "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f in libc10.so)",
            "[node:1] *** Process received signal ***",
            "[node:1] Signal: Aborted (6)",
        ),
        {2},
    ),
    "worker-log": (
        (
            "[11/22/2026-09:02:15] [TRT-LLM] [RANK 0] [E] Failed to initialize executor on rank 0: head_dim 96 is not handled by this attention backend",
            "[11/22/2026-09:02:15] [TRT-LLM] [RANK 0] [E] Traceback (most recent call last):",
            '  File "worker.py", line 700, in worker_main',
            "    worker = worker_cls(",
            "ValueError: head_dim 96 is not handled by this attention backend",
            "",
            "[11/22/2026-09:02:16] [TRT-LLM] [E] Executor worker initialization error: Traceback (most recent call last):",
            '  File "worker.py", line 700, in worker_main',
            "    worker = worker_cls(",
            "ValueError: head_dim 96 is not handled by this attention backend",
            "",
            "Traceback (most recent call last):",
            '  File "/usr/local/bin/trtllm-serve", line 8, in <module>',
            "    sys.exit(main())",
            "RuntimeError: Executor worker returned error",
        ),
        {1, 5},
    ),
    "make": (
        (
            "[ 12%] Building CXX object x.o",
            "/app/a.cpp:12:10: fatal error: nvtx3/nvToolsExt.h: No such file or directory",
            '   12 | #include "nvtx3/nvToolsExt.h"',
            "compilation terminated.",
            "make[2]: *** [CMakeFiles/x.dir/build.make:76: x.o] Error 1",
            "make: *** [Makefile:146: all] Error 2",
            "subprocess.CalledProcessError: Command 'cmake --build .' returned non-zero exit status 2.",
        ),
        {2},
    ),
    "ld": (
        (
            "/usr/bin/ld: cannot find -lnvinfer: No such file or directory",
            "collect2: error: ld returned 1 exit status",
        ),
        {1},
    ),
    "k8s": (
        (
            "2026-11-18T09:33:30.123456789Z stderr F Traceback (most recent call last):",
            '2026-11-18T09:33:30.123456789Z stderr F   File "/a.py", line 3, in <module>',
            "2026-11-18T09:33:30.123456789Z stderr F     main()",
            "2026-11-18T09:33:30.123456789Z stderr F OSError: /models/x is a file, a directory is needed",
            "2026-11-18T09:33:31.1Z stdout F exit",
        ),
        {4},
    ),
    "mpi4py": (
        (
            "Traceback (most recent call last):",
            '  File "a.py", line 3, in <module>',
            "    main()",
            "AssertionError: tp_size (3) must divide 32 heads",
            "--------------------------------------------------------------------------",
            "MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD",
            "with errorcode 1.",
            "",
            "NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.",
            "--------------------------------------------------------------------------",
        ),
        {4},
    ),
    "argparse": (
        (
            "usage: convert_checkpoint.py [-h] [--model_dir MODEL_DIR]",
            "                             [--dtype {auto,float16}]",
            "convert_checkpoint.py: error: argument --tp_size: invalid int value: 'two'",
        ),
        {3},
    ),
    "openai": (
        (
            "Traceback (most recent call last):",
            '  File "c.py", line 3, in <module>',
            "    main()",
            "openai.BadRequestError: Error code: 400 - {'object': 'error', 'message': 'temperature must be non-negative', 'type': 'BadRequestError'}",
        ),
        {4},
    ),
    "tokenizers": (
        (
            "thread '<unnamed>' panicked at /root/tokenizers/src/models/bpe/mod.rs:12:5:",
            "index out of bounds: the len is 3 but the index is 9",
            "Traceback (most recent call last):",
            '  File "c.py", line 3, in <module>',
            "    main()",
            "pyo3_runtime.PanicException: index out of bounds: the len is 3 but the index is 9",
        ),
        {1, 2, 6},
    ),
    "loguru": (
        (
            "2024-05-01 12:00:00.123 | INFO     | app:main:12 - starting",
            "2024-05-01 12:00:01.123 | ERROR    | app:load:44 - adapter rank 128 is above what the engine takes",
            "2024-05-01 12:00:02.123 | INFO     | app:main:20 - bye",
        ),
        {2},
    ),
    "journal": (
        (
            "Nov 22 08:11:02 gpu01 tritonserver[1234]: Traceback (most recent call last):",
            'Nov 22 08:11:02 gpu01 tritonserver[1234]:   File "a.py", line 3, in <module>',
            "Nov 22 08:11:02 gpu01 tritonserver[1234]: ValueError: page size 7 is odd",
        ),
        {3},
    ),
    "ignored": (
        (
            "Exception ignored in: <function Engine.__del__ at 0x7f>",
            "Traceback (most recent call last):",
            '  File "a.py", line 3, in __del__',
            "AttributeError: 'Engine' object has no attribute 'session'",
            "[TRT-LLM] [E] cannot map rank 3 to a GPU",
        ),
        {5},
    ),
    "watchdog": (
        (
            "[rank0]:[E1122 08:11:02.123 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600000 milliseconds before timing out.",
            "[rank0]: Traceback (most recent call last):",
            '[rank0]:   File "a.py", line 3, in f',
            "[rank0]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
        ),
        {1},
    ),
    "python-logging": (
        (
            "2025-06-21 01:30:39,698 - app - INFO - ok",
            "2025-06-21 01:30:40,698 - app - ERROR - the adapter directory has no adapter_config.json",
            "2025-06-21 01:30:41,698 - app - INFO - exiting",
        ),
        {2},
    ),
    "faint-last": (
        (
            "libx: could not read the card, using another one",
            "starting the converter",
            "reading the model",
            "cannot open the table of heads /models/t.bin",
            "bye",
        ),
        {4},
    ),
    "tensorflow": (
        (
            "2024-05-01 08:00:00.123456: W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT",
            "2024-05-01 08:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:479] Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when one has already been registered",
            "2024-05-01 08:00:01.123456: I tensorflow/core/platform/x.cc:182] failed to see the point",
            "Traceback (most recent call last):",
            '  File "a.py", line 1, in <module>',
            "    f()",
            "ValueError: 7 heads over 2 ranks",
        ),
        {7},
    ),
    "mpi-spawn": (
        (
            "[node:00123] *** An error occurred in MPI_Comm_spawn",
            "[node:00123] *** reported by process [123,0]",
            "[node:00123] *** on communicator MPI_COMM_SELF",
            "[node:00123] *** MPI_ERR_UNKNOWN: unknown error",
            "[node:00123] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,",
        ),
        {1, 4},
    ),
    "ipython": (
        (
            "---------------------------------------------------------------------------",
            "ValueError                                Traceback (most recent call last)",
            "Cell In[3], line 1",
            "----> 1 llm = LLM(model)",
            "",
            "File /usr/lib/llm.py:33, in LLM.__init__(self, model)",
            "     31 def f():",
            '---> 33     raise ValueError("rank 9 of 8")',
            "",
            "ValueError: rank 9 of 8",
        ),
        {10},
    ),
    "vllm-old-prefix": (
        (
            "ERROR 03-12 15:02:44 worker_base.py:581] Error executing method 'init_device'. This might cause deadlock in distributed execution.",
            "ERROR 03-12 15:02:44 worker_base.py:581] Traceback (most recent call last):",
            'ERROR 03-12 15:02:44 worker_base.py:581]   File "worker.py", line 506, in init_worker',
            "ERROR 03-12 15:02:44 worker_base.py:581]     ensure(parallel_config.tensor_parallel_size,",
            "ERROR 03-12 15:02:44 worker_base.py:581] RuntimeError: world size 3 is odd",
        ),
        {5},
    ),
    "cmake": (
        (
            "-- Found CUDA",
            "CMake Error at CMakeLists.txt:12 (message):",
            "",
            "  the compiler of the host is younger than the one of the device",
            "",
            "-- Configuring incomplete, errors occurred!",
        ),
        {4},
    ),
    "nvcc": (
        (
            "[3/9] Building CUDA object a.cu.o",
            '/app/src/a.cu(123): error: identifier "__nv_fp4" is undefined',
            '1 error detected in the compilation of "/app/src/a.cu".',
            "ninja: build stopped: subcommand failed.",
        ),
        {2},
    ),
    "kubernetes": (
        (
            "Events:",
            "  Normal   Scheduled  2m    default-scheduler  Successfully assigned a to b",
            '  Warning  Failed     1m    kubelet            Error: failed to start container "x": image has no entry point',
            "  Warning  BackOff    1m    kubelet            Back-off restarting failed container",
        ),
        {3},
    ),
    "heap": (
        (
            "[TensorRT-LLM][INFO] fine",
            "free(): invalid pointer",
            "Aborted (core dumped)",
        ),
        {2},
    ),
    "printed-and-went-on": (
        (
            "(Engine pid=8) OSError: [Errno 30] the moon is read-only",
            "(Engine pid=8) INFO 05-07 10:11:40 [runner.py:4560] Starting to load the model",
            "(Engine pid=8) OSError: [Errno 30] the sun is read-only",
            "(Engine pid=8) ERROR 05-07 10:12:20 [core.py:1108] EngineCore failed to start.",
        ),
        {3},
    ),
    "compiler-with-a-name": (
        ("a.b.CompilationError: at 74:4: NameError('moon is not defined')", "Received a signal from a child process."),
        {1},
    ),
    "labels-of-srun": (
        (
            " 8: Traceback (most recent call last):",
            ' 8:   File "ops.py", line 121, in allgather',
            " 4: [11/22/2026-08:11:02] [TRT-LLM] [I] fine",
            " 8: RuntimeError: the fabric is odd",
            " 8: [11/22/2026-08:11:03] [TRT-LLM] [E] Failed to initialize executor on rank 8",
        ),
        {4},
    ),
    "an-error-after-which-it-skips": (
        ("[TRT-LLM] [E] Exception the moon is full caught while allocating; skipping (8, 2048)", "1 of 2 points"),
        {1},
    ),
    "nothing-but-what-is-skipped": (
        (
            "[TRT-LLM] [W] Failed to import y, falling back",
            "[WARNING] check moon(3) <= sun(2) failed, skipping.",
            "done",
        ),
        {2},
    ),
    "nothing-but-who-died": (
        (
            "E1122 08:11:02.1 1 python.cc:2005] Stub process is unhealthy and it will be restarted.",
            "error: creating server: Internal - failed to load all models",
        ),
        {1},
    ),
    "client-and-server": (
        (
            "HTTPError: 500 Server Error: Internal Server Error for url: http://localhost:8000/v1/chat/completions",
            "[TRT-LLM] [E] the template has no role for tools",
        ),
        {2},
    ),
    "written-out-without-a-message": (
        (
            '{"error":"Execute Failed, message: Traceback (most recent call last):\\n  File \\"m.py\\", line 5\\nAssertionError\\n"}',
            "bye",
        ),
        {1},
    ),
    "not-loaded": (
        (
            "| Model     | Version | Status                              |",
            "| /m/moon   | -       | Not loaded: No phase of it is there |",
            "error: creating server: Internal - failed to load all models",
        ),
        {2},
    ),
    "functions-tell-outwards": (
        (
            "read_moon: reading the moon",
            "moon_init_from_file: invalid phase 67",
            "moon_load: failed to load the moon from x.bin",
            "error loading model: moon_load: it is not there",
            "main: exiting due to model loading error",
        ),
        {2},
    ),
    "traceback-without-its-head": (
        (
            "ERROR 04-17 15:10:09 [engine.py:448]     raise_if_the_moon_is_invalid(",
            "ERROR 04-17 15:10:09 [engine.py:448] ValueError: the moon is full",
        ),
        {2},
    ),
    "one-way-after-another": (
        (
            "Traceback (most recent call last):",
            '  File "vocab.py", line 17, in set_vocab',
            "FileNotFoundError: File not found: moon.model",
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            "Traceback (most recent call last):",
            '  File "vocab.py", line 19, in set_vocab',
            "KeyError: 'moon'",
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            "Traceback (most recent call last):",
            '  File "vocab.py", line 21, in set_vocab',
            "NotImplementedError: the words of the moon are not known",
        ),
        {15},
    ),
    "no-exception-to-tell": (
        (
            'E1216 02:12:49.624646 179 model.py:248] "[moon] Failed to start engine: NoneType: None\\n"',
            'I1216 02:12:49.624943 179 pb_stub.cc:388] "Failed to initialize Python stub: TypeError: rise() takes no tide"',
        ),
        {2},
    ),
    "behind-what-was-ignored": (
        (
            "Exception ignored in: <function A.__del__ at 0x7f>",
            "Traceback (most recent call last):",
            "AttributeError: 'A' object has no attribute 'b'",
            "the moon could not be found",
        ),
        {4},
    ),
    "caused-by": (
        (
            "'MoonPool(host='moon', port=443): gave up (Caused by ConnectTimeoutError(<x>, 'timed out'))' thrown while requesting it",
            "ConnectionError: no way to the moon",
        ),
        {1, 2},
    ),
    "ranks-in-brackets": (
        (
            "[1] Traceback (most recent call last):",
            '[0] [0]   File "a.py", line 3, in f',
            '[1]   File "a.py", line 3, in f',
            "[1]     f()",
            "[1] ValueError: the request for the moon failed after 5 tries",
        ),
        {5},
    ),
    "logfmt": (
        (
            'time=2025-01-02T10:11:12.123Z level=INFO source=a.go:45 msg="the sun could not be found"',
            'time=2025-01-02T10:11:13.123Z level=ERROR source=a.go:55 msg="the moon is full"',
            "bye",
        ),
        {2},
    ),
    "json-severity": (
        (
            '{"timestamp":"2025-01-01T00:00:00Z","level":"WARN","fields":{"message":"error: the sun is odd"},"target":"x"}',
            '{"timestamp":"2025-01-01T00:00:01Z","severity":"ERROR","message":"the moon is full"}',
        ),
        {2},
    ),
    "tracing": (
        (
            "2024-01-01T00:00:00.123456Z  WARN moon_launcher: error: the sun is odd",
            "2024-01-01T00:00:01.123456Z ERROR moon_launcher: Method Warmup encountered an error.",
            "2024-01-01T00:00:02.123456Z ERROR moon_launcher::x: the moon is full",
        ),
        {3},
    ),
    "rich": (
        (
            "[12/01/24 10:00:00] WARNING  error: the sun is odd",
            "                    INFO     well",
            "[10:11:12] ERROR    the moon is full                  x.py:123",
        ),
        {3},
    ),
    "gunicorn": (
        (
            "[2024-01-01 00:00:00 +0000] [17] [INFO] error: the sun is odd",
            "[2024-01-01 00:00:01 +0000] [17] [ERROR] the moon is full",
        ),
        {2},
    ),
    "spdlog": (
        ("[2024-01-01 00:00:00.123] [warning] error: odd", "[2024-01-01 00:00:00.123] [error] [x.cpp:12] the moon"),
        {2},
    ),
    "kubectl": (("the sun is not found", 'Error from server (NotFound): pods "moon" not found', "bye"), {2}),
    "container-cli": (
        ("nvidia-container-cli: requirement error: unsatisfied condition: moon>=12", "exit", "x failed"),
        {1},
    ),
    "tensor-parallel-rank": (
        (
            "[2025-01-01 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):",
            '  File "scheduler.py", line 2, in run',
            "    f()",
            "RuntimeError: the moon is full",
            "",
            "[2025-01-01 10:00:01] Received sigquit from a child process. It usually means the child failed.",
        ),
        {4},
    ),
    "title": (
        (
            "Received an error from server:",
            "the moon cannot be reached in this mode",
            "Exception ignored in: <function x>",
        ),
        {2},
    ),
    "quoted-below": (
        (
            "docker: Error response from daemon: OCI runtime create failed: error running hook: exit status 1, stdout: , stderr: Auto-detected",
            "moon-cli: initialization error: the moon is full: unknown.",
            "Error response from daemon: No such container: x",
        ),
        {2},
    ),
    "contents-of-a-log": (
        (
            "slurmstepd: error: moon: failed to import the moon",
            "slurmstepd: error: moon: printing contents of log file ...",
            "slurmstepd: error: moon:     mkdir: cannot create directory '/moon': the sky is full",
            "slurmstepd: error: spank_task_init_privileged failed",
        ),
        {3},
    ),
    "status-of-http-first": (
        (
            "Traceback (most recent call last):",
            "requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://moon",
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            "Traceback (most recent call last):",
            "moon.errors.MoonError: 403 Client Error.",
            "",
            "Cannot access the moon.",
        ),
        {7, 9},
    ),
    "status-alone": (
        ("2024-07-29 09:16:41,414 ERROR request failed: HTTP 500", '{"error":"in ensemble \'e\', the moon is full"}'),
        {2},
    ),
    "compiler-in-a-message": (
        (
            "Traceback (most recent call last):",
            "RuntimeError: Error building extension 'moon': [1/7] nvcc",
            "FAILED: moon.o",
            "moon.cuh:21:10: fatal error: sun.h: No such file or directory",
            "ninja: build stopped: subcommand failed.",
        ),
        {4},
    ),
    "functions-before-a-traceback": (
        (
            "moon_alloc: allocating 20 MiB: failed: out of sky",
            "moon_init: failed to allocate the moon",
            "Traceback (most recent call last):",
            "ValueError: Failed to create moon_context",
        ),
        {1},
    ),
    "first-observed": (
        (
            "Traceback (most recent call last):",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "------------------------------------------------------------",
            "Root Cause (first observed failure):",
            "[0]:",
        ),
        {2},
    ),
    "help-of-mpirun": (
        (
            "--------------------------------------------------------------------------",
            "It looks like moon_init failed for some reason; your parallel process is",
            "likely to abort. There are many reasons for that, here's one:",
            "",
            "  moon_select failed",
            "  --> Returned value -1 instead of MOON_SUCCESS",
            "--------------------------------------------------------------------------",
        ),
        {5, 6},
    ),
    "title-of-a-traceback": (
        (
            "2025-06-01T10:00:03.0Z ERROR moon-manager: launcher: Moon complete standard error output:",
            "",
            "Traceback (most recent call last):",
            '  File "/a.py", line 8, in <module>',
            "RuntimeError: the moon is full rank=0",
        ),
        {5},
    ),
    "killed-behind-a-bar": ((" 10%|#         | 51/512 [00:10<01:30,  5.10it/s]Killed",), {1}),
    "time-limit": (
        (
            "slurmstepd: error: *** STEP 12.0 ON gpu1 CANCELLED AT 2025-01-01T10:00:00 DUE TO TIME LIMIT ***",
            "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        ),
        {1},
    ),
    "loader": (
        (
            "/opt/stub: /tmp/lib.so.6: version `MOON_3.4' not found (required by /opt/stub)",
            "E0102 12:10:33.902155 1 m.cc:654] \"failed to load 'x' version 1: Internal: Stub process 'x_0_0' is not healthy.\"",
            "I0102 12:10:33.902301 1 m.cc:789] \"failed to load 'x'\"",
        ),
        {1},
    ),
}
"""Name -> lines of a log, and the numbers of those that say its first cause."""


def log(folder: Path, *lines: str, name: str = "log") -> LogText:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return LogText(path)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_cause_of_a_failure_that_nobody_knows(shape: str, tmp_path: Path) -> None:
    lines, right = SHAPES[shape]
    cause = first_cause([log(tmp_path, *lines)], signatures=())
    assert cause is not None
    assert cause.line.number in right
    assert (cause.certain, cause.hint, cause.setting("build", {})) == (False, None, None)


def test_the_rank_that_failed_first_is_told_by_the_times(tmp_path: Path) -> None:
    """Also where its log comes last; times of different clocks are not compared."""
    late = ("[11/22/2026-08:11:09] [TRT-LLM] [E] the key of layer 3 is odd",)
    early = ("[11/22/2026-08:11:02] [TRT-LLM] [I] loading", "ValueError: the moon is full")
    other = ("2026-11-22 08:11:01,000 - ERROR - the sea is flat",)
    for logs, right in ((late, early), early), ((early, late), early), ((late, other), late):
        texts = [log(tmp_path, *lines, name=f"rank{rank}") for rank, lines in enumerate(logs)]
        cause = first_cause(texts, signatures=())
        assert cause is not None
        assert cause.line.text == right[-1]


@pytest.mark.parametrize(
    "lines",
    [
        ("all is well", "[TRT-LLM] [I] 0 errors", "will retry if a request fails"),
        ("[TRT-LLM] [W] cannot find the key, the default is taken", "UserWarning: x is not supported"),
        ("mpirun noticed that process rank 1 has exited", "RuntimeError: Executor worker returned error"),
        ("error: creating server: Internal - failed to load all models",),
        ('E1122 08:11:02.1 4 model.py:1] "Traceback (most recent call last):\\n  File \\"x\\", line 1, in f"',),
    ],
)
def test_what_only_follows_or_warns_is_no_cause(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert first_cause([log(tmp_path, *lines)], signatures=()) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "failed to load 'm' version 1: Internal: [TensorRT-LLM][ERROR] Assertion failed: it is odd (/app/x.cpp:3)",
            "Assertion failed: it is odd",
        ),
        ("[StatusCode.INTERNAL] in ensemble 'e', Cannot process new request: too long", "too long"),
        ("Failed to initialize executor on rank 3: the head is odd", "the head is odd"),
        ("RuntimeError: [TensorRT-LLM][ERROR] Encountered an error in forward function: no", "no"),
        ("error: creating server: Internal - failed to load all models", "failed to load all models"),
        ("ValueError: as it is", "ValueError: as it is"),
    ],
)
def test_what_others_put_around_a_cause_is_taken_off(line: str, words: str) -> None:
    assert unwrapped(line) == words
