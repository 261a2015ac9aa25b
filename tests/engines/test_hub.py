"""Models of the hub, from a hub on loopback."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.engines.conftest import MakeRequest
from tests.engines.hub_server import HubServer, serve_hub
from tests.engines.package_index import TINY, WEIGHTS

from aimgpu.cli.commands.sizing.size import size
from aimgpu.engines.launch_environment import model_location, model_mounts
from aimgpu.engines.models.hub import GGUF, SAFETENSORS, HubCache, HubFile, HubName, choose_files, parse_hub_name
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.errors import ModelUnavailable

FILES = {"m-Q4_K_M.gguf": b"g" * 5000, "m-Q8_0.gguf": b"h" * 9000, "README.md": b"text"}
FOLDER = {"config.json": b"{}", "model.safetensors": b"w" * 4000, "tokenizer.json": b"[]", "onnx/model.onnx": b"o"}
NAME = HubName(repository="org/name", tag=None)
BOTH = frozenset({GGUF, SAFETENSORS})
StartHub = Callable[..., HubServer]


def ignore(_what: str, _done: int, _total: int | None) -> None:
    """Progress that nobody looks at."""


@pytest.fixture
def start() -> Iterator[StartHub]:
    with ExitStack() as stack:
        yield lambda files=FILES, **given: stack.enter_context(serve_hub(HubServer(dict(files), **given)))


def cache(tmp_path: Path, hub: HubServer, **environment: str) -> HubCache:
    return HubCache(tmp_path, {"HF_ENDPOINT": hub.url, **environment})


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("org/name", ("org/name", None)),
        ("org/name:Q8_0", ("org/name", "Q8_0")),
        ("hf.co/org/name", ("org/name", None)),
        ("qwen3:4b", None),
        ("smollm2", None),
        ("./org/name", None),
        ("/models/x.gguf", None),
        ("org/x.gguf", None),
        ("org/../name", None),
        ("a/b/c", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths_and_tags(model: str, found: tuple[str, str | None] | None) -> None:
    parsed = parse_hub_name(model)
    assert (parsed and (parsed.repository, parsed.tag)) == found


def test_one_quantisation_is_fetched_with_progress_and_found_again(tmp_path: Path, start: StartHub) -> None:
    hub = start()
    seen: list[tuple[str, int, int | None]] = []
    model = cache(tmp_path, hub).fetch(NAME, BOTH, lambda *step: seen.append(step))
    assert (model.format, model.path.name, model.path.read_bytes()) == (GGUF, "m-Q4_K_M.gguf", FILES["m-Q4_K_M.gguf"])
    assert seen[-1] == ("m-Q4_K_M.gguf", 5000, 5000)
    assert cache(tmp_path, hub).find(NAME) == model


def test_a_tag_chooses_the_quantisation(tmp_path: Path, start: StartHub) -> None:
    name = HubName(repository="org/name", tag="q8_0")
    assert cache(tmp_path, start()).fetch(name, BOTH, ignore).path.name == "m-Q8_0.gguf"


def test_a_folder_of_safetensors_comes_with_what_stands_beside_it(tmp_path: Path, start: StartHub) -> None:
    model = cache(tmp_path, start(FOLDER)).fetch(NAME, BOTH, ignore)
    assert model.format == SAFETENSORS
    assert {path.name for path in model.path.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not (model.path / "onnx").exists()


def test_safetensors_are_not_fetched_for_an_engine_that_needs_gguf(tmp_path: Path, start: StartHub) -> None:
    hub = start(FOLDER)
    with pytest.raises(ModelUnavailable, match="safetensors"):
        cache(tmp_path, hub).fetch(NAME, frozenset({GGUF}), ignore)
    assert hub.ranges == []


def test_a_broken_connection_is_tried_again(tmp_path: Path, start: StartHub) -> None:
    hub = start(cut_after=2000)
    assert cache(tmp_path, hub).fetch(NAME, BOTH, ignore).path.read_bytes() == FILES["m-Q4_K_M.gguf"]
    assert len(hub.ranges) == 2


def test_another_content_than_listed_is_refused_and_not_kept(tmp_path: Path, start: StartHub) -> None:
    hub = start(FILES | {"m-Q4_K_M.gguf": b"x" * 5000}, listed=FILES)
    with pytest.raises(ModelUnavailable, match="another content"):
        cache(tmp_path, hub).fetch(NAME, BOTH, ignore)
    assert cache(tmp_path, hub).find(NAME) is None
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_token_goes_to_the_hub_and_to_no_other_host(tmp_path: Path, start: StartHub) -> None:
    hub = start(token="secret")
    cache(tmp_path, hub, HF_TOKEN="secret").fetch(NAME, BOTH, ignore)
    assert set(hub.hub_tokens) == {"Bearer secret"}
    assert set(hub.store_tokens) == {""}


def test_a_gated_or_unknown_model_is_refused_in_words(tmp_path: Path, start: StartHub) -> None:
    with pytest.raises(ModelUnavailable, match="org/name") as gated:
        cache(tmp_path, start(token="secret")).fetch(NAME, BOTH, ignore)
    assert "HF_TOKEN" in (gated.value.hint or "")
    with pytest.raises(ModelUnavailable, match="org/other"):
        cache(tmp_path, start()).fetch(HubName(repository="org/other", tag=None), BOTH, ignore)


def test_without_a_network_it_says_so(tmp_path: Path) -> None:
    gone = HubServer({}, url="http://127.0.0.1:9")
    with pytest.raises(ModelUnavailable, match="cannot fetch org/name"):
        cache(tmp_path, gone).fetch(NAME, BOTH, ignore)
    with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE"):
        cache(tmp_path, gone, HF_HUB_OFFLINE="1").fetch(NAME, BOTH, ignore)


@pytest.mark.parametrize("hostile", ["../evil.gguf", "/etc/evil.gguf", "a/../../evil.gguf", "evil\n.gguf"])
def test_a_listing_cannot_lead_out_of_its_folder(tmp_path: Path, start: StartHub, hostile: str) -> None:
    hub = start({hostile: b"x"})
    with pytest.raises(ModelUnavailable, match="lists a file"):
        cache(tmp_path, hub).fetch(NAME, BOTH, ignore)


def test_what_another_program_downloaded_is_found_and_half_a_model_is_not(tmp_path: Path) -> None:
    """The layout is that of the hub's own library: links of a revision into blobs."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a1")
    found = HubCache(tmp_path, {})
    for number, name in enumerate(["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]):
        assert found.find(NAME) is None
        (repository / "blobs" / str(number)).write_bytes(b"{}")
        (snapshot / name).symlink_to(repository / "blobs" / str(number))
    assert found.find_config(NAME) == snapshot
    model = found.find(NAME)
    assert model is not None
    assert (model.path, model.format) == (snapshot, SAFETENSORS)
    (repository / "blobs/2").unlink()
    assert found.find(NAME) is None


def test_a_container_sees_the_blobs_behind_the_links_of_the_cache(
    tmp_path: Path, start: StartHub, make_request: MakeRequest
) -> None:
    path = cache(tmp_path, start()).fetch(NAME, BOTH, ignore).path
    assert path.is_symlink()
    request = make_request(model_path=path)
    (mount,) = model_mounts(request)
    assert model_location(path) == str(path)  # parts of a split model are found by their names
    assert path.resolve().is_relative_to(mount.path)
    assert path.is_relative_to(mount.path)


def test_size_reads_the_config_that_the_hub_has(tmp_path: Path, start: StartHub, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000, "torch_dtype": "bfloat16",
    }  # fmt: skip
    monkeypatch.setenv("HF_ENDPOINT", start({"config.json": json.dumps(config).encode(), "model.safetensors": b"w"}).url)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("AIMGPU_HOME", str(tmp_path / "home"))
    done = CliRunner().invoke(size, ["org/name", "--engine", "vllm", "--gpu", "MI300X", "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.output)
    assert "config.json" in json.dumps(shown)
    weights = next(term for term in shown["terms"] if term["name"] == "weights")
    assert 0 < weights["memory_bytes"] < 1 << 20  # some 200,000 parameters
    assert not list(tmp_path.rglob("*.safetensors"))


def test_config_json_alone_is_fetched_for_an_estimate(tmp_path: Path, start: StartHub) -> None:
    hub = start(FOLDER)
    folder = cache(tmp_path, hub).fetch_config(NAME)
    assert folder is not None
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert cache(tmp_path, hub).find(NAME) is None
    assert cache(tmp_path / "other", start()).fetch_config(NAME) is None


def test_all_parts_of_a_split_model_are_chosen_in_order() -> None:
    names = [f"big-Q4_K_M-0000{number}-of-00003.gguf" for number in (2, 3, 1)]
    files = [HubFile(name=name, size_bytes=1, sha256=None) for name in [*names, "mmproj-f16.gguf"]]
    chosen, _ = choose_files(files, NAME, BOTH)
    assert [file.name for file in chosen] == sorted(names)


def test_several_files_without_a_usual_one_are_listed() -> None:
    files = [HubFile(name=name, size_bytes=1, sha256=None) for name in ("a-IQ2.gguf", "a-IQ3.gguf")]
    with pytest.raises(ModelUnavailable) as refused:
        choose_files(files, NAME, BOTH)
    assert "a-IQ2.gguf" in (refused.value.hint or "")


def test_the_store_brings_models_of_the_hub(tmp_path: Path, start: StartHub) -> None:
    store = LocalModelStore(tmp_path, packaged=(TINY,), hub=cache(tmp_path / "hub", start()))
    assert store.find("org/name") is None
    assert store.fetch("org/name", ignore).format == GGUF
    assert store.find("org/name") is not None


def test_a_packaged_model_whose_content_was_changed_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "models" / TINY.sha256[:16]
    folder.mkdir(parents=True)
    (folder / TINY.file_name).write_bytes(WEIGHTS)
    assert LocalModelStore(tmp_path, packaged=(TINY,)).find("tiny") is not None
    (folder / TINY.file_name).write_bytes(b"!" + WEIGHTS[1:])
    assert LocalModelStore(tmp_path, packaged=(TINY,)).find("tiny") is None


def test_the_only_quantisation_of_a_repository_is_taken_though_it_is_unusual() -> None:
    files = [HubFile(name="a-IQ2_XXS.gguf", size_bytes=1, sha256=None)]
    chosen, _ = choose_files(files, NAME, BOTH)
    assert [file.name for file in chosen] == ["a-IQ2_XXS.gguf"]
