"""What is read out of engines' logs, whatever they print: stages, shortfalls, reports, reasons."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.engines.llamacpp import log as llamacpp
from aimgpu.engines.vllm import log as vllm

MIB, GIB = 1 << 20, 1 << 30
TEXT = st.lists(st.text(st.characters(codec="utf-8"), max_size=80), max_size=8)
STARTING = (  # one line of each stage, in their order
    ("importing", "INFO 11-16 05:46:02 [api_server.py:1277] vLLM API server version 0.26.0"),
    ("loading weights", "(EngineCore pid=2021) INFO [gpu_model_runner.py:2930] Starting to load model /models/random-3b..."),
    (
        "allocating the KV cache",
        "(EngineCore pid=2021) INFO [gpu_model_runner.py:2980] Model loading took 6.02 GiB memory",
    ),
    ("compiling", "(EngineCore pid=2021) INFO [backends.py:559] Dynamo bytecode transform time: 4.90 s"),
    ("capturing graphs", "(EngineCore pid=2021) Capturing CUDA graphs (decode, FULL):  33%|###   | 1/3 [00:00<00:00]"),
    ("first token", "(EngineCore pid=2021) INFO [gpu_model_runner.py:3490] Graph capturing finished in 2 secs, took 0.31 GiB"),
)


def refusal(wanted: str, free: str) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 4.30 GiB "
        f"of which {free} is free. Process 7 has 4.29 GiB memory in use."
    )


@pytest.mark.parametrize("shown", range(1, len(STARTING) + 1))
def test_a_start_is_as_far_as_the_last_stage_that_it_logged(shown: int) -> None:
    lines = [line for _, line in STARTING[:shown]]
    assert vllm.read_stage(lines) == STARTING[shown - 1][0]
    random.Random(shown).shuffle(lines)
    assert vllm.read_stage(lines) == STARTING[shown - 1][0], "processes log side by side: their order is not relied on"


def test_a_start_that_has_logged_nothing_is_importing() -> None:
    assert vllm.read_stage(()) == "importing"


@pytest.mark.parametrize(
    ("wanted", "free", "missing"),
    [
        ("32.00 MiB", "8.12 MiB", round((32 - 8.12) * MIB)),
        ("1.50 GiB", "0 bytes", 3 << 29),
        ("2.00 MiB", "2.00 MiB", 1),  # in pieces: there was as much as that, and not in one
        ("2.00 MiB", "20.00 MiB", 1),
    ],
)
def test_what_a_start_missed_is_what_it_wanted_without_what_was_free(wanted: str, free: str, missing: int) -> None:
    assert vllm.read_missing_bytes([refusal(wanted, free)]) == pytest.approx(missing, abs=1)


def test_of_several_refusals_the_last_counts() -> None:
    lines = [refusal("1.00 GiB", "0 bytes"), "retrying", refusal("64.00 MiB", "0 bytes"), "Engine core initialization failed"]
    assert vllm.read_missing_bytes(lines) == 64 * MIB


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "torch.AcceleratorError: CUDA error: out of memory",
        "HIP out of memory. Tried to allocate some",
    ],
)
def test_a_death_of_memory_without_a_size_is_given_a_guess(line: str) -> None:
    found = vllm.read_missing_bytes([line])
    assert found is not None
    assert found >= 64 * MIB


@pytest.mark.parametrize(
    "line", ["KeyError: 'layers.0'", "No available memory for the cache blocks", "address already in use", ""]
)
def test_a_death_for_another_reason_misses_no_memory(line: str) -> None:
    assert vllm.read_missing_bytes([line]) is None
    assert llamacpp.read_missing_bytes([line]) is None


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        (["E alloc_tensor_range: allocating 68.01 MiB on device 0: cudaMalloc failed: out of memory"], round(68.01 * MIB)),
        (
            [
                "allocating 100.00 MiB on device 0: cudaMalloc failed: out of memory",
                "allocating 12.50 MiB on device 0: hipMalloc failed: out of memory",
            ],
            round(12.5 * MIB),
        ),
        (["allocating 0.00 MiB on device 0: cudaMalloc failed: out of memory"], 1),
        (["CUDA error: the resource allocation failed"], 128 * MIB),
        (["ROCm error: out of memory"], 128 * MIB),
    ],
)
def test_what_llama_cpp_missed(lines: list[str], missing: int) -> None:
    assert llamacpp.read_missing_bytes(lines) == missing


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("(EngineCore pid=42) ERROR 06-03 12:30:46 [core.py:396] ValueError: x", "ValueError: x"),
        ("INFO [gpu_worker.py:440] Available", "Available"),
        ("(APIServer pid=1) plain", "plain"),
        ("WARNING 06-03 12:30:46 scheduler.py:12] late", "late"),
        ("ValueError: (EngineCore pid=42) stays", "ValueError: (EngineCore pid=42) stays"),
        ("", ""),
    ],
)
def test_the_prefix_of_a_line_goes_and_nothing_else(line: str, plain: str) -> None:
    assert vllm.strip_prefix(line) == plain


def test_the_root_cause_is_preferred_to_the_wrappers_last_words() -> None:
    lines = [
        "(EngineCore pid=43) " + refusal("192.00 MiB", "11.00 MiB"),
        "(EngineCore pid=43) RuntimeError: something else",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_0': 1}",
    ]
    assert vllm.read_failure(lines) == "not enough GPU memory: it wanted 192.00 MiB more, 11.00 MiB of 4.30 GiB was free"
    assert vllm.read_failure(lines[1:]) == "RuntimeError: something else"
    assert vllm.read_failure(lines[2:]) is None


def test_settings_that_vllm_refuses_are_named() -> None:
    """As vLLM 0.32.0 printed them on the CPU; pydantic's own first line counts the errors only."""
    start = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
    lines = [
        "(APIServer pid=7) " + start,
        "(APIServer pid=7)   Value error, Sleep mode is not supported on current platform. [type=value_error, input_value=A(",
        "(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2.14/v/value_error",
    ]
    assert vllm.read_failure(lines) == "it refuses its settings: Sleep mode is not supported on current platform."
    field = [
        "ValidationError: 1 validation error for CacheConfig",
        "block_size",
        "  Input should be 1 or 8 [type=literal_error, input_",
    ]
    assert vllm.read_failure(field) == "it refuses its settings: block_size: Input should be 1 or 8"
    assert vllm.read_failure([start]) == start


def test_a_reason_is_never_longer_than_a_person_reads() -> None:
    reason = vllm.read_failure(["ValueError: " + "x" * 5000])
    assert reason is not None
    assert len(reason) <= 400


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("huggingface_hub.errors.GatedRepoError: 401", "the model may not be downloaded without a token (HF_TOKEN)"),
        ("OSError: [Errno 28] No space left on device: '/cache/x'", "a disk is full"),
        ("RuntimeError: No CUDA GPUs are available", "it sees no GPU"),
        ("vllm serve: error: unrecognized arguments: --foo", "it does not take these arguments: unrecognized arguments: --foo"),
        (
            "ValueError: Model architectures ['Foo'] are not supported for now.",
            "this vLLM does not know the architecture 'Foo'",
        ),
        ("OSError: org/m is not a local folder and is not a valid model identifier", "there is no such model"),
    ],
)
def test_known_causes_are_given_in_words(line: str, reason: str) -> None:
    assert vllm.read_failure([line]) == reason


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["0.00.004.067 E gguf_init_from_file: something odd", "0.00.005.000 E main: later"],
            "gguf_init_from_file: something odd",
        ),
        (["Traceback", "ModuleNotFoundError: No module named 'x'"], "ModuleNotFoundError: No module named 'x'"),
        (
            ["llama-server: error while loading shared libraries: libcudart.so.12: cannot open"],
            "it misses a library: libcudart.so.12",
        ),
        (
            ["CUDA error: no kernel image is available for execution on the device"],
            "this llama-server was not built for this GPU",
        ),
        (["ggml_cuda_init: CUDA driver version is insufficient"], "the GPU driver is too old for this llama-server"),
        (["aimgpu: the region is of another version"], "the interposer says: the region is of another version"),
        (["all is well"], None),
        ([], None),
    ],
)
def test_why_llama_cpp_did_not_load(lines: list[str], reason: str | None) -> None:
    assert llamacpp.read_failure(lines) == reason


@pytest.mark.parametrize(
    ("lines", "percent"), [([], None), (["...."], 4), (["." * 100], 100), (["." * 101], None), (["..", "......"], 6)]
)
def test_dots_are_percent(lines: list[str], percent: int | None) -> None:
    assert llamacpp.read_load_percent(lines) == percent


@pytest.mark.parametrize("number", ["...", "1.2.3", "9" * 400])
def test_numbers_that_are_none_do_not_break_the_reading(number: str) -> None:
    """A line that was cut, or two processes in one line."""
    lines = [
        refusal(f"{number} MiB", "1.00 MiB"),
        f"allocating {number} MiB on device 0: cudaMalloc failed: out of memory",
    ]
    assert vllm.read_missing_bytes(lines) == 1
    assert llamacpp.read_missing_bytes(lines) == 1


@given(TEXT)
def test_no_log_breaks_the_readers(lines: list[str]) -> None:
    assert vllm.read_stage(lines)
    percent = vllm.read_load_percent(lines)
    assert percent is None or 0 <= percent <= 100
    for read in (
        vllm.read_failure,
        vllm.read_missing_bytes,
        llamacpp.read_failure,
        llamacpp.tells_no_gpu,
    ):
        read(lines)
