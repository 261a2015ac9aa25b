"""Every environment variable that a user may set. One that the code reads and this table lacks fails `make check`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    default: str
    meaning: str


SETTINGS = (
    Setting(
        "AIMGPU_HOME",
        "$XDG_STATE_HOME/aimgpu, else ~/.local/state/aimgpu",
        "Folder of the daemon: ledger, token, keys, logs.",
    ),
    Setting("AIMGPU_CACHE", "$XDG_CACHE_HOME/aimgpu, else ~/.cache/aimgpu", "Folder of what can be fetched again: models."),
    Setting("AIMGPU_HOST", "127.0.0.1", "Address that `aimgpu up` listens on; any other than loopback needs an API key."),
    Setting("AIMGPU_PORT", "8080", "Port that `aimgpu up` listens on."),
    Setting(
        "AIMGPU_PROBE_PORT",
        "none",
        "A port beside the daemon's where `/healthz` and `/readyz` are answered also while it is busy: alive while its event "
        "loop has turned within 30 seconds, ready within 2.",
    ),
    Setting("AIMGPU_TLS_CERT", "none", "PEM file with the certificate that `aimgpu up` serves TLS with; as `--tls-cert`."),
    Setting("AIMGPU_TLS_KEY", "that of the certificate", "PEM file with the key of that certificate; as `--tls-key`."),
    Setting(
        "AIMGPU_API_KEY",
        "none",
        "A key that callers must send, at least 32 characters: `aimgpu up` keeps its hash, `aimgpu chat` sends it.",
    ),
    Setting("AIMGPU_URL", "http://127.0.0.1:8080", "The gateway that the web chat of `examples/web_chat` passes questions to."),
    Setting(
        "AIMGPU_SEPARATE_CACHES",
        "1",
        "With 0, engines may reuse one API key's prompts for another's, which shows in the time of an answer. Keys of one "
        "`--cache-group` do so anyway. Apart, vLLM gets a salt; llama.cpp reuses nothing once there are keys of two groups.",
    ),
    Setting(
        "AIMGPU_WAKE_HEARTBEAT",
        "5s",
        "How often a caller of a stream gets a comment (`: waking chat, about 30 s`) while its model wakes or starts; with 0, "
        "never. The first one commits the answer to status 200: a later refusal is an error event of the stream.",
    ),
    Setting(
        "AIMGPU_MEDIA_DOMAINS",
        "none",
        "Domains that URLs in requests (`image_url` and the like) may name, separated by commas. An engine fetches them; all "
        "other URLs but `data:` are refused, and vLLM is started with the same list.",
    ),
    Setting(
        "AIMGPU_RAW_GRAMMARS",
        "checked",
        "Callers' own grammars and patterns: `checked` lets pass what engines compile and follow quickly, `any` trusts callers "
        "not to block a model, `none` takes no grammars.",
    ),
    Setting(
        "AIMGPU_KEEP_PROMPTS",
        "0",
        "Of how many requests, the last ones and at most 200, the page shows the prompt to the daemon's user. Its first 2000 "
        "characters are kept in memory, never on disk; with 0 none is.",
    ),
    Setting(
        "AIMGPU_HOSTS",
        "none",
        "Names of this machine beside its own (addresses, localhost, the host name), separated by commas: `gpu.example.org`. "
        "A request without a key or the token that names another host is refused.",
    ),
    Setting(
        "AIMGPU_CORS_ORIGINS",
        "none",
        "Web pages of these origins may call the models, separated by commas: `https://chat.example.org`.",
    ),
    Setting(
        "AIMGPU_RESTART_LIMIT",
        "8",
        "How often in a row a model may fail (within ten minutes of each other) and be started again, with growing pauses; "
        "after that, not before the next `aimgpu up`. 0: never again. `aimgpu ps` shows the count and the next try.",
    ),
    Setting(
        "AIMGPU_MPS",
        "0",
        "With 1, tenants that share an NVIDIA partition run under MPS (level driver), with the launch gate beside it.",
    ),
    Setting(
        "AIMGPU_GATE_ALLOWANCE",
        "5",
        "Percent of a critical model's requests that long launches of lower-priority models may delay (`sharing: strict`).",
    ),
    Setting(
        "AIMGPU_CGROUP",
        "aimgpu, under the root of cgroup v2",
        "A control group that was delegated to the daemon, for the kernel's limit on AMD device memory (dmem).",
    ),
    Setting(
        "AIMGPU_LLAMA_SERVER",
        "llama-server on PATH",
        "The llama-server that the engine llamacpp runs on a GPU; without one it runs on the CPU, and says so.",
    ),
    Setting("AIMGPU_SIMULATED", "none", "Simulated GPUs of a Kubernetes node agent instead of real ones: MI300X:2,H200:1."),
    Setting(
        "AIMGPU_INTERPOSER",
        "that of the wheel",
        "Another interposer library; without one in the wheel it is built on first use.",
    ),
    Setting(
        "AIMGPU_BUILD_NATIVE", "0", "1 builds the interposer with this machine's C compiler although the wheel carries one."
    ),
)

# Set by us for processes that we start; users leave them alone.
INTERNAL = {
    "AIMGPU_COMPLETE": "asks for shell completion (with a leading underscore)",
    "AIMGPU_ENGINE_KEY": "the key that an engine answers to",
    "AIMGPU_FAIL": "whether the interposer refuses (closed) or lets pass (open) what it cannot count",
    "AIMGPU_SOFTWARE_GPU": "the file in which the software GPU keeps what it holds and did",
    "AIMGPU_REGION": "the shared-memory regions of a tenant's devices; `later` in a prepared process, which has none",
    "AIMGPU_TENANT": "a tenant's name in its regions",
    "AIMGPU_MEMORY_BYTES": "what a container was granted of a GPU",
    "AIMGPU_COMPUTE_PERCENT": "the compute limit of a container on a GPU; 0: none",
    "AIMGPU_LEVEL": "how the grant of a container is enforced",
    "AIMGPU_INSTANCE": "marks an engine's process as ours",
}
