import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aimgpu.cli.stack_source import read_source
from aimgpu.control.stack.stack_file import GpuChoice, Stack, parse_stack
from aimgpu.control.stack.stack_text import write_stack
from aimgpu.domain import (
    Auto,
    ByClass,
    EngineOverrides,
    Fraction,
    IsolationRequirement,
    Memory,
    PartitionKind,
    Priority,
    QueueSettings,
    ServerProgram,
    ServiceObjective,
    Sharing,
    Spread,
    Whole,
)
from aimgpu.engines.command.presets import PRESETS
from aimgpu.errors import InvalidStackFile
from aimgpu.units import GIB

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "stack.yaml"

FULL = """
gpus: {simulated: MI300X, count: 2}
models:
  chat:
    model: Qwen/Qwen2.5-7B-Instruct
    engine: vllm
    precision: FP16
    context: 8192
    concurrency: 8
    gpu: {memory: 24GiB, compute: 30%}
    isolation: enforced
    priority: high
    slo: {ttft_p95: 500ms, tpot_p95: 50ms, latency_p95: 2s, availability: 99.5%}
    replicas: 3
    keep: 10m
    sleep: stop
    launcher: docker
"""


def test_a_stack_may_ask_for_software_gpus() -> None:
    choice = parse_stack("gpus: {software: MI300X, count: 2}\nmodels:\n  chat:\n    model: m\n").gpus
    assert (choice.simulated, choice.count, choice.software) == ("MI300X", 2, True)


def test_simulated_and_software_exclude_each_other() -> None:
    message, hint = complaint("gpus: {software: MI300X, simulated: MI300X}\nmodels:\n  chat:\n    model: m\n")
    assert "both 'simulated' and 'software'" in message
    assert "simulated: MI300X" in hint


def one(fields: str) -> Stack:
    return parse_stack(f"models:\n  chat:\n    model: m\n{fields}")


def complaint(text: str) -> tuple[str, str]:
    with pytest.raises(InvalidStackFile) as caught:
        parse_stack(text)
    return caught.value.message, caught.value.hint or ""


def test_a_model_has_other_names_and_may_be_the_default() -> None:
    (chat,) = one("    aliases: [gpt-4o-mini, 'qwen3:8b', 'llama3:latest']\n    default: true\n").deployments
    assert (chat.aliases, chat.default) == (("gpt-4o-mini", "qwen3:8b", "llama3"), True)
    assert one("    aliases: gpt-4o\n").deployments[0].aliases == ("gpt-4o",)


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("aliases: [b]", "", "'b' is a name of both 'a' and 'b'"),
        ("aliases: [x]", "aliases: ['x:latest']", "'x' is a name of both 'a' and 'b'"),
        ("", "aliases: ['a:latest']", "'a' is a name of both 'a' and 'b'"),
        ("default: true", "default: true", "both 'a' and 'b' have `default: true`"),
    ],
)
def test_two_models_share_no_name(first: str, second: str, shown: str) -> None:
    message, _ = complaint(f"models:\n  a:\n    model: m\n    {first}\n  b:\n    model: m\n    {second}\n")
    assert shown in message
    assert "line 5" in message


@pytest.mark.parametrize("alias", ["chat", "'chat:latest'", "[x, 'x:latest']", "'a b'", "'-a'", "[]", f"{'x' * 129}"])
def test_an_alias_that_says_nothing_new_or_is_no_name_is_refused(alias: str) -> None:
    with pytest.raises(InvalidStackFile):
        one(f"    aliases: {alias}\n")


def test_every_key_of_the_format_is_read() -> None:
    stack = parse_stack(FULL)
    assert stack.gpus == GpuChoice(simulated="MI300X", count=2)
    (chat,) = stack.deployments
    assert (chat.name, chat.model, chat.engine, chat.precision) == ("chat", "Qwen/Qwen2.5-7B-Instruct", "vllm", "fp16")
    assert (chat.context_tokens, chat.concurrency, chat.replicas, chat.keep_seconds) == (8192, 8, 3, 600)
    assert not chat.sleeps_in_place
    assert chat.launcher == "docker"
    assert chat.objective == ServiceObjective(ttft_p95_ms=500, tpot_p95_ms=50, latency_p95_ms=2000, availability_ppm=995_000)
    assert chat.ask.want == Memory(memory_bytes=24 * GIB)
    assert (chat.ask.name, chat.ask.deployment, chat.ask.compute_ppm) == ("chat", "chat", 300_000)
    assert (chat.ask.isolation, chat.ask.priority) == (IsolationRequirement.ENFORCED, Priority.HIGH)


def test_several_percentiles_a_rate_and_promises_by_class_are_read() -> None:
    (chat,) = one(
        "    slo: {ttft_p50: 100ms, ttft_p90: 100ms, ttft_p99: 1s, throughput: 200 tok/s,"
        " classes: {low: {latency_p95: 60s}, high: {ttft_p99: 500ms, throughput: 50}}}\n"
    ).deployments
    assert chat.objective == ServiceObjective(
        ttft_p50_ms=100,
        ttft_p90_ms=100,
        ttft_p99_ms=1000,
        tokens_per_second=200,
        low=ServiceObjective(latency_p95_ms=60_000),
        high=ServiceObjective(ttft_p99_ms=500, tokens_per_second=50),
    )
    (only,) = one("    slo: {classes: {high: {availability: 99.9%}}}\n").deployments
    assert only.objective == ServiceObjective(high=ServiceObjective(availability_ppm=999_000))


def test_what_is_left_out_has_its_default() -> None:
    stack = parse_stack("models: {chat: {model: m}}")
    assert stack.gpus == GpuChoice(simulated=None, count=1)
    (chat,) = stack.deployments
    assert (chat.engine, chat.precision, chat.context_tokens, chat.objective, chat.keep_seconds) == (None,) * 5
    assert (chat.concurrency, chat.replicas, chat.launcher) == (None, 1, "process")
    assert (chat.sharing, chat.overrides) == (Sharing.STRICT, EngineOverrides())
    assert (chat.ask.want, chat.ask.compute_ppm) == (Auto(), None)
    assert (chat.ask.isolation, chat.ask.priority) == (IsolationRequirement.NONE, Priority.MEDIUM)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("auto", Auto()),
        ("{memory: 1.5GiB}", Memory(memory_bytes=1610612736)),
        ("{fraction: 0.5}", Fraction(ppm=500_000)),
        ("{fraction: 33.3333%}", Fraction(ppm=333_333)),
        ("{partition: CPX}", PartitionKind(kind="cpx")),
        ("{partition: 1g.18gb}", PartitionKind(kind="1g.18gb")),
        ("{whole: 2}", Whole(count=2)),
        ("{compute: 30%}", Auto()),
    ],
)
def test_a_gpu_can_be_wanted_in_each_way(text: str, want: object) -> None:
    assert one(f"    gpu: {text}\n").deployments[0].ask.want == want


def test_compute_may_stand_beside_gpu_or_in_it_but_not_both() -> None:
    assert one("    compute: 30%\n").deployments[0].ask.compute_ppm == 300_000
    assert one("    gpu: {compute: 30%}\n").deployments[0].ask.compute_ppm == 300_000
    message, _ = complaint("models:\n  a:\n    model: m\n    gpu: {compute: 1%}\n    compute: 2%\n")
    assert "line 5: 'compute' is also under 'gpu'" in message


def test_words_that_yaml_takes_for_booleans_are_names() -> None:
    assert [d.name for d in parse_stack("models: {on: {model: no}, 1: {model: m}}").deployments] == ["on", "1"]


def test_relative_paths_count_from_the_stack_file(tmp_path: Path) -> None:
    text = (
        "models: {a: {model: ./x}, b: {model: sub/m.gguf}, c: {model: ~/m.gguf},"
        " d: {model: org/name}, e: {model: /abs/m.gguf}, f: {model: llama3:8b}}"
    )
    stack = parse_stack(text, base_directory=tmp_path)
    assert [d.model for d in stack.deployments] == [
        str(tmp_path / "x"),
        str(tmp_path / "sub" / "m.gguf"),
        str(Path.home() / "m.gguf"),
        "org/name",
        "/abs/m.gguf",
        "llama3:8b",
    ]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("model:\n  a: {model: m}\n", "line 1: unknown key 'model'", "belongs under 'models: NAME'"),
        ("modles:\n  a: {model: m}\n", "line 1: unknown key 'modles'", "Did you mean 'models'?"),
        ("models:\n  a:\n    model: m\n    contxt: 5\n", "line 4: unknown key 'contxt' in 'a'", "Did you mean 'context'?"),
        ("models:\n  a:\n    model: m\n    memory: 5GiB\n", "line 4: unknown key 'memory'", "'memory' belongs under 'gpu'"),
        ("models:\n  a:\n    model: m\n    ttft_p95: 5s\n", "line 4: unknown key 'ttft_p95'", "belongs under 'slo'"),
        ("models:\n  a:\n    model: m\n    gpu: {memroy: 5GiB}\n", "line 4: unknown key 'memroy' in 'gpu'", "'memory'"),
        (
            "models:\n  a:\n    model: m\n    slo:\n      tftt_p95: 5s\n",
            "line 5: unknown key 'tftt_p95' in 'slo'",
            "'ttft_p95'",
        ),
        ("gpus: {simulatd: MI300X}\nmodels: {a: {model: m}}", "line 1: unknown key 'simulatd' in 'gpus'", "'simulated'"),
        ("models:\n  a:\n    model: m\n    priority: hihg\n", "line 4: 'priority' cannot be 'hihg'", "Did you mean 'high'?"),
        ("models:\n  a:\n    model: m\n    engine: vlm\n", "line 4: 'engine' cannot be 'vlm'", "Did you mean 'vllm'?"),
        ("gpus: none\nmodels: {a: {model: m}}", "line 1: 'gpus' cannot be 'none'", "auto"),
    ],
)
def test_a_typo_names_the_line_the_key_and_the_nearest_right_one(text: str, message: str, hint: str) -> None:
    said, hinted = complaint(text)
    assert message in said
    assert hint in hinted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("context: many", "'context' must be a whole number, not 'many'"),
        ("context: 8k", "'context' must be a whole number"),
        ("context: -1", "'context' must be a whole number"),
        ("context: 010", "'context' must be a whole number"),
        ("context: 1.5", "'context' must be a whole number"),
        ("context: 0", "'context' cannot be 0"),
        ("context:", "'context' has no value"),
        ("context: [1]", "'context' must be one value, not a list"),
        ("replicas: 1001", "'replicas' cannot be 1001"),
        ("gpu: {memory: 24}", "'memory': '24' is not a size"),
        ("gpu: {memory: 0GiB}", "'memory' cannot be '0GiB'"),
        ("gpu: {memory: -5GiB}", "'memory': '-5GiB' is not a size"),
        ("gpu: {fraction: 1.5}", "'fraction': '1.5' is more than the whole"),
        ("gpu: {fraction: nan}", "'fraction': 'nan' is not a part"),
        ("gpu: {memory: 1GiB, whole: 1}", "'gpu' says both 'memory' and 'whole'"),
        ("gpu: {}", "'gpu' is empty"),
        ("gpu: [auto]", "'gpu' must be one value, not a list"),
        ("gpu: {partition: '../x'}", "'partition' cannot be '../x'"),
        ("slo: {ttft_p95: 500}", "'ttft_p95': '500' is not a duration"),
        ("slo: fast", "'slo' must be a mapping, not 'fast'"),
        ("slo: {}", "'slo' is empty"),
        ("slo: {ttft_p95: 500ms, ttft_p99: 300ms}", "ttft_p99 (300ms) is shorter than ttft_p95 (500ms)"),
        ("slo: {latency_p99: 1s, latency_p50: 2s}", "latency_p99 (1s) is shorter than latency_p50 (2s)"),
        ("slo: {classes: {low: {tpot_p90: 20ms, tpot_p50: 40ms}}}", "tpot_p90 (20ms) is shorter than tpot_p50 (40ms)"),
        ("slo: {throughput: fast}", "'throughput': 'fast' is not a rate of tokens"),
        ("slo: {throughput: 200ms}", "'throughput': '200ms' is not a rate of tokens"),
        ("slo: {throughput: 0}", "'throughput' cannot be '0'"),
        ("slo: {throughput: 0.5tok/s}", "'throughput': '0.5tok/s' is not a whole number of tokens"),
        ("slo: {classes: {}}", "'classes' is empty"),
        ("slo: {classes: {low: {}}}", "'low' is empty"),
        ("slo: {classes: {lwo: {ttft_p95: 1s}}}", "unknown key 'lwo' in 'classes'"),
        ("slo: {classes: {low: {classes: {}}}}", "unknown key 'classes' in 'low'"),
        ("keep: 1500ms", "'keep' must be whole seconds"),
        ("keep: 0s", "'keep' cannot be '0s'"),
        ("priority: null", "'priority' has no value"),
    ],
)
def test_a_wrong_value_names_its_line_and_key(line: str, message: str) -> None:
    said, hint = complaint(f"models:\n  chat:\n    model: m\n    {line}\n")
    assert said.startswith(f"stack file, line 4: {message}")
    assert hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "stack file is empty"),
        ("# nothing\n", "stack file is empty"),
        ("gpus: auto\n", "there is no 'models'"),
        ("models:\n", "'models' must be a mapping from names to models, not empty"),
        ("models: [a]\n", "'models' must be a mapping from names to models, not a list"),
        ("- a\n", "the file must be a mapping with 'models' in it, not a list"),
        ("models:\n  a:\n", "line 2: 'a' must be a mapping such as {model: MODEL}, not empty"),
        ("models:\n  a: {engine: vllm}\n", "line 2: 'a' does not say which model"),
        ("models:\n  a b: {model: m}\n", "line 2: 'a b' cannot be a model's name"),
        ("models:\n  a/b: {model: m}\n", "line 2: 'a/b' cannot be a model's name"),
        ("models:\n  [a]: {model: m}\n", "line 2: a key must be a plain word"),
        ("models:\n  a: {model: m}\n  b: {model: m}\n  a: {model: n}\n", "line 4: 'a' is here twice; it was first on line 2"),
        ("models:\n  a:\n    model: m\n    model: n\n", "line 4: 'model' is here twice; it was first on line 3"),
        ("models: {a: {model: m}}\n---\nmodels: {}\n", "line 2: a second document begins"),
        ("models: &x {a: {model: m}}\n", "line 1: anchors and aliases"),
        ("models:\n  a: {model: m}\n  b: *a\n", "line 3: anchors and aliases"),
        ("models: !!python/object:os.system {a: b}\n", "line 1: tags (!) are not allowed"),
        ("models:\n  a: {model: m\n", "line 3:"),
        ("models:\n\ta: {model: m}\n", "line 2:"),
        ("models: \x07", "stack file is not YAML"),
        ("[" * 100_000, "nested too deep"),
        ("#" * 1_000_001, "too large"),
        ("gpus: {count: 2}\nmodels: {a: {model: m}}", "line 1: 'gpus' does not say what to simulate"),
    ],
)
def test_a_file_that_is_no_stack_says_why(text: str, message: str) -> None:
    said, hint = complaint(text)
    assert message in said
    assert hint


def test_a_tab_is_called_by_its_name() -> None:
    assert complaint("models:\n\ta: {model: m}\n")[1] == "Indent with spaces, not with tabs."


def test_a_billion_laughs_are_not_laughed() -> None:
    lines = ["a0: &a0 [lol]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert "anchors and aliases" in complaint("\n".join(lines))[0]


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(InvalidStackFile, match="there is no file"):
        read_source(tmp_path / "none.yaml")
    with pytest.raises(InvalidStackFile, match="Is a directory"):
        read_source(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidStackFile, match="not UTF-8"):
        read_source(binary)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodels: {a: {model: m}}")
    assert len(read_source(path).stack.deployments) == 1


def test_the_example_has_three_models_on_one_device() -> None:
    stack = read_source(EXAMPLE).stack
    assert [d.name for d in stack.deployments] == ["chat", "code", "small"]
    assert len({d.ask.priority for d in stack.deployments}) == 3
    assert len({d.context_tokens for d in stack.deployments}) == 3
    assert {d.engine for d in stack.deployments} == {"llamacpp"}


def message_of(text: str) -> str | None:
    try:
        parse_stack(text)
    except InvalidStackFile as error:
        return error.message
    return None


@given(st.text(max_size=300))
def test_any_text_is_a_stack_or_a_complaint(text: str) -> None:
    assert message_of(text) != ""


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["1GiB", "50%"]))
keys = st.sampled_from(["model", "gpu", "gpus", "models", "slo", "memory", "context", "keep", "count", "x"])
trees = st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=2), max_leaves=8)


@given(trees)
def test_any_yaml_is_a_stack_or_a_complaint_that_names_a_line(tree: object) -> None:
    message = message_of(yaml.safe_dump({"models": {"a": tree}}))
    assert message is None or re.match(r"stack file, line \d+: ", message), message


def test_a_name_that_cannot_be_is_told_on_its_own_line() -> None:
    assert (message_of("models:\n  'no name':\n    model: m\n") or "").startswith("stack file, line 2: 'no name' cannot be")


def test_where_a_model_may_run_is_read() -> None:
    place = "{products: [MI300X, MI325X], not_products: MI210, vendor: amd, not_vendor: nvidia, spread: true, with: embed, "
    place += "not_with: [batch], partition: sim-mi300x-0/cpx-3, pinned: true}"
    ask = one(f"    place: {place}\n    host: {{cpu: 0.5, memory: 16GiB}}\n").deployments[0].ask
    assert (ask.products, ask.refused_products) == (frozenset({"MI300X", "MI325X"}), frozenset({"MI210"}))
    assert (ask.vendor, ask.refused_vendor, ask.spread) == ("amd", "nvidia", Spread.SPREAD)
    assert (ask.with_deployments, ask.not_with_deployments) == (frozenset({"embed"}), frozenset({"batch"}))
    assert (ask.partition_id, ask.pinned) == ("sim-mi300x-0/cpx-3", True)
    assert (ask.cpu_millis, ask.host_memory_bytes) == (500, 16 * GIB)
    assert one("    host: {cpu: 1500m}\n").deployments[0].ask.cpu_millis == 1500
    assert one("    place: {spread: false}\n").deployments[0].ask.spread is Spread.PACK


def test_a_share_may_be_wanted_of_several_gpus() -> None:
    ask = one("    gpu: {memory: 20GiB, devices: 2}\n").deployments[0].ask
    assert (ask.want, ask.devices) == (Memory(memory_bytes=20 * GIB), 2)
    assert one("    gpu: {devices: 2}\n").deployments[0].ask.want == Auto()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("place: {}", "'place' is empty"),
        ("host: {}", "'host' is empty"),
        ("place: {part: MI300X}", "unknown key 'part'"),
        ("place: {products: []}", "'products' is an empty list"),
        ("place: {products: [[MI300X]]}", "'products' must be one value"),
        ("place: {with: 'a b'}", "'with' cannot be 'a b'"),
        ("place: {vendor: intel}", "'vendor' cannot be 'intel'"),
        ("place: {pinned: maybe}", "'pinned' cannot be 'maybe'"),
        ("host: {cpu: many}", "is not a number of cores"),
        ("host: {cpu: 0}", "'cpu' cannot be '0'"),
        ("host: {memory: 16}", "'memory'"),
        ("gpu: {whole: 2, devices: 2}", "'gpu' says both 'whole' and 'devices'"),
        ("pinned: true", "unknown key 'pinned'"),
        ("vendor: amd", "unknown key 'vendor'"),
    ],
)
def test_a_wrong_place_names_its_line_and_key(line: str, message: str) -> None:
    found, hint = complaint(f"models:\n  a:\n    model: m\n    {line}\n")
    assert "line 4" in found
    assert message in found
    assert hint


def test_the_bounds_of_the_queue_are_read() -> None:
    text = "queue: {per_gpu: 64, longest_wait: {high: 10s, low: 5m}, most_queued: 100}\nmodels: {chat: {model: m}}"
    assert parse_stack(text).queue == QueueSettings(
        per_gpu=64, longest_wait_ms=ByClass(high=10_000, low=300_000), most_queued=ByClass(high=100, medium=100, low=100)
    )
    assert parse_stack("queue: default\nmodels: {chat: {model: m}}").queue == QueueSettings()
    assert parse_stack("models: {chat: {model: m}}").queue is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("queue: {}", "'queue' is empty"),
        ("queue: fast", "'queue' cannot be 'fast'"),
        ("queue: {per_gpu: 0}", "'per_gpu' cannot be 0"),
        ("queue: {per_gpu: 64s}", "'per_gpu' must be a whole number"),
        ("queue: {per_gp: 1}", "unknown key 'per_gp' in 'queue'"),
        ("queue: {longest_wait: 30}", "'longest_wait': '30' is not a duration"),
        ("queue: {longest_wait: {high: 25h}}", "'high' is longer than a day"),
        ("queue: {longest_wait: {urgent: 1s}}", "unknown key 'urgent' in 'longest_wait'"),
        ("queue: {most_queued: {}}", "'most_queued' is empty"),
        ("queue: {most_queued: {low: 0}}", "'low' cannot be 0"),
        ("per_gpu: 3", "unknown key 'per_gpu'"),
    ],
)
def test_a_wrong_bound_names_its_line_and_key(line: str, message: str) -> None:
    found, hint = complaint(f"{line}\nmodels: {{chat: {{model: m}}}}\n")
    assert "line 1" in found
    assert message in found
    assert hint


OWN = "models:\n  own:\n    engine: command\n"


def test_a_server_of_the_users_own_is_read(tmp_path: Path) -> None:
    text = OWN + "    command: python server.py --port {port} --json '{\"a\":1}'\n    directory: ./server\n    health: /ready\n"
    text += "    models: [a, b]\n    ready_timeout: 5m\n    gpu: {fraction: 0.5}\n"
    (own,) = parse_stack(text, base_directory=tmp_path).deployments
    assert own.model == "own"
    assert own.overrides.server == ServerProgram(
        argv=("python", "server.py", "--port", "{port}", "--json", '{"a":1}'),
        directory=str(tmp_path / "server"),
        health="/ready",
        models=("a", "b"),
        ready_seconds=300,
    )


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ("gpu: {memory: 1GiB}", "needs the command"),
        ("command: run {port}", "nobody can size"),
        ("command: run {port}\n    gpu: auto", "nobody can size"),
        ("command: run {prot}\n    gpu: {memory: 1GiB}", "unknown placeholder {prot}"),
        ("command: run\n    gpu: {memory: 1GiB}", "where the port goes"),
        ('command: "run \'{port}"\n    gpu: {memory: 1GiB}', "cannot be split"),
        ("command: run {port}\n    args: {a: 1}\n    gpu: {memory: 1GiB}", "'args' beside 'command'"),
        ("command: run {port}\n    health: ready\n    gpu: {memory: 1GiB}", "'health' cannot be"),
        ("command: run {port}\n    models: [a, a]\n    gpu: {memory: 1GiB}", "'models' has a name twice"),
        ("command: run {port}\n    ready_timeout: 500ms\n    gpu: {memory: 1GiB}", "whole seconds"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(fields: str, shown: str) -> None:
    message, _ = complaint(f"{OWN}    {fields}\n")
    assert shown in message


def test_a_preset_is_a_command_with_the_users_flags_last(tmp_path: Path) -> None:
    text = "models:\n  chat:\n    engine: sglang\n    model: org/m\n    gpu: {fraction: 0.5}\n"
    text += "    args: {tp-size: 2, mem_fraction_static: '0.7'}\n    env: {A: b}\n"
    (chat,) = parse_stack(text, base_directory=tmp_path).deployments
    server = chat.overrides.server
    assert (chat.engine, chat.overrides.arguments, chat.overrides.environment) == ("command", (), (("A", "b"),))
    assert server is not None
    assert server.argv[:4] == ("sglang", "serve", "--model-path", "{model}")
    assert server.argv[-6:] == ("--mem-fraction-static", "{memory_fraction}", "--tp-size", "2", "--mem-fraction-static", "0.7")
    assert (server.health, server.models, server.ready_seconds) == ("/health", (), 1200)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_read_back_as_the_same_command(name: str, tmp_path: Path) -> None:
    text = f"models: {{a: {{engine: {name}, model: org/m, ready_timeout: 90s, gpu: {{memory: 1GiB}}}}}}"
    read = parse_stack(text, base_directory=tmp_path).deployments
    assert read[0].overrides.server is not None
    assert read[0].overrides.server.ready_seconds == 90
    assert parse_stack(write_stack(read)).deployments == read


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ("gpu: {memory: 1GiB}", "a preset needs the model"),
        ("model: m", "nobody can size"),
        ("model: m\n    gpu: {memory: 1GiB}\n    command: run {port}", "'command' beside a preset"),
        ("model: m\n    gpu: {memory: 1GiB}\n    args: {port: 1}", "the preset sets --port itself"),
        ("model: m\n    gpu: {memory: 1GiB}\n    adapters: {a: ./x}", "'adapters' beside 'engine: tei'"),
    ],
)
def test_a_preset_that_cannot_be_started_is_refused(fields: str, shown: str) -> None:
    message, hint = complaint(f"models:\n  own:\n    engine: tei\n    {fields}\n")
    assert shown in message
    assert hint


def test_keys_of_a_command_are_refused_beside_another_engine() -> None:
    message, hint = complaint("models:\n  a:\n    model: m\n    ready_timeout: 5m\n")
    assert "'ready_timeout' is for a server of your own" in message
    assert "engine: command" in hint


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("gpu: 2GiB", "Write `gpu: {memory: 2GiB}`, or `gpu: auto`."),
        ("gpu: 50%", "Write `gpu: {fraction: 50%}`, or `gpu: auto`."),
        ("gpu: 1", "Write `gpu: {whole: 1}`, or `gpu: auto`."),
        ("gpu: cpx", "Write `gpu: {partition: cpx}`, or `gpu: auto`."),
        ("gpu: much", "Write `gpu: {memory: 24GiB}`, or `gpu: auto`."),
        ("memory: 2GiB", "'memory' belongs under 'gpu': `gpu: {memory: 2GiB}`."),
        ("gpu: {memory: 2}", "Did you mean '2GiB'?"),
        ("gpu: {fraction: 50}", "Did you mean '50%'?"),
        ("context: 8k", "Did you mean '8192'?"),
        ("keep: forever", "Did you mean 'always'?"),
        ("slo: {ttft: 500ms}", "Did you mean 'ttft_p95'?"),
        ("slo: {ttft_p95: 500}", "Did you mean '500ms'?"),
    ],
)
def test_a_hint_has_what_to_write(entry: str, hint: str) -> None:
    with pytest.raises(InvalidStackFile) as caught:
        parse_stack(f"models:\n  chat:\n    model: smollm2\n    {entry}\n")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("models: {chat: smollm2}", "Write `chat: {model: smollm2}`."),
        ("chat: {model: smollm2}", "'chat' belongs under 'models': `models: {chat: {model: ...}}`."),
        ("models: {my chat: {model: smollm2}}", "Did you mean 'my-chat'?"),
    ],
)
def test_a_hint_has_where_a_model_belongs(text: str, hint: str) -> None:
    with pytest.raises(InvalidStackFile) as caught:
        parse_stack(text)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)
