"""Deployments written as a stack file and read again: every setting survives, for what runs and for what was resized."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.test_stack_text import deployments
from tests.examples import examples

from aimgpu.control.stack.overrides import unmask
from aimgpu.control.stack.stack_file import GpuChoice, parse_stack
from aimgpu.control.stack.stack_text import write_fields, write_stack
from aimgpu.domain import (
    Ask,
    Auto,
    Deployment,
    EngineOverrides,
    Fraction,
    Memory,
    Priority,
    ProcessIdentity,
    SecretKind,
    SecretSource,
    ServerProgram,
    ServiceObjective,
    Sharing,
    Spread,
)
from aimgpu.domain.objective import MEASURES, PERCENTS
from aimgpu.errors import InvalidStackFile
from aimgpu.hardware.simulated.hardware import SimulatedHardware
from aimgpu.units import GIB

words = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._+:/-]{0,20}\Z")
flags = st.from_regex(r"\A[A-Za-z][A-Za-z0-9.-]{0,12}\Z").filter(lambda flag: "_" not in flag)
# Values as a person can write them: what YAML would take for something else, quotes, colons, unusual characters.
values = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp", "Zs", "Cn")), min_size=1, max_size=12
).filter(lambda text: text == text.strip())
arguments = st.dictionaries(flags, st.lists(values, max_size=3), max_size=4).map(
    lambda given_flags: tuple((flag, *texts) for flag, texts in given_flags.items() if texts not in (["true"], ["false"]))
)
variables = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,12}\Z")
overrides = st.builds(
    EngineOverrides,
    arguments=arguments,
    environment=st.dictionaries(variables, values, max_size=3).map(lambda found: tuple(found.items())),
    image=st.none() | st.from_regex(r"\A[a-z0-9][a-z0-9._/:@-]{0,30}\Z"),
)
times = st.integers(1, 10**7)
rising = st.lists(times, min_size=4, max_size=4).map(sorted)


def plain(name: str = "chat") -> Deployment:
    return Deployment(name=name, model="org/m", ask=Ask(name=name, deployment=name, want=Auto()))


def read_back(one: Deployment) -> Deployment:
    """Values of variables are masked in what is written, and come from what is deployed."""
    (found,) = unmask(parse_stack(write_stack([one])).deployments, [one])
    return found


@pytest.mark.parametrize("argv", [("run", "--port={port}", "a b"), ("a b{port}",)])
def test_a_server_of_the_users_own_survives(argv: tuple[str, ...]) -> None:
    server = ServerProgram(argv=argv, directory="/srv", health="/ready", models=("a", "b"), ready_seconds=90)
    want = replace(plain().ask, want=Memory(memory_bytes=GIB))
    one = replace(plain(), engine="command", ask=want, overrides=EngineOverrides(server=server))
    assert read_back(one) == one


def test_other_names_and_the_default_survive() -> None:
    one = replace(plain(), aliases=("gpt-4o-mini", "qwen3:8b"), default=True)
    assert read_back(one) == one


@settings(max_examples=examples(20))
@given(overrides)
def test_what_goes_to_the_engine_survives_whatever_it_is(given_overrides: EngineOverrides) -> None:
    one = replace(plain(), overrides=given_overrides)
    assert read_back(one) == one


@settings(max_examples=examples(20))
@given(rising, st.sampled_from(MEASURES), st.sampled_from([None, *Priority]))
def test_every_promise_survives_for_all_and_for_one_class(chosen: list[int], measure: str, priority: Priority | None) -> None:
    milliseconds = [value / 1000 if measure == "tpot" else value for value in chosen]
    promised = ServiceObjective(
        **{f"{measure}_p{percent}_ms": value for percent, value in zip(PERCENTS, milliseconds, strict=True)}  # type: ignore[arg-type]
    )
    objective = promised if priority is None else ServiceObjective(**{priority.value: promised})  # type: ignore[arg-type]
    one = replace(plain(), objective=objective)
    assert read_back(one) == one


@settings(max_examples=examples(20))
@given(st.frozensets(words, max_size=3), st.frozensets(words, max_size=3), words, st.sampled_from([None, "amd", "nvidia"]))
def test_where_a_model_may_run_survives(
    names: frozenset[str], others: frozenset[str], partition: str, vendor: str | None
) -> None:
    ask = replace(
        plain().ask,
        products=names,
        refused_products=others,
        vendor=vendor,
        refused_vendor=None if vendor is None else "amd",
        spread=Spread.SPREAD,
        with_deployments=others,
        not_with_deployments=names,
        partition_id=partition,
        pinned=True,
    )
    one = replace(plain(), ask=ask)
    assert read_back(one) == one


@settings(max_examples=examples(20))
@given(st.integers(1, 2**45), st.sampled_from([Auto(), Fraction(ppm=5), Memory(memory_bytes=7)]))
def test_a_resized_model_is_written_with_the_share_that_it_has_now(size: int, want: Auto | Fraction | Memory) -> None:
    one = replace(plain(), ask=replace(plain().ask, want=want), resized_bytes=size)
    assert read_back(one).ask == one.present_ask
    assert one.present_ask.want == Memory(memory_bytes=size)


@settings(max_examples=examples(20))
@given(st.lists(deployments(), max_size=4, unique_by=lambda one: one.name))
def test_stacks_of_several_models_keep_their_order(several: list[Deployment]) -> None:
    found = unmask(parse_stack(write_stack(several)).deployments, several)
    assert list(found) == several


@pytest.mark.parametrize("sharing", [Sharing.FAIR, Sharing.PROMISE])
def test_how_a_gpu_is_shared_survives(sharing: Sharing) -> None:
    one = replace(plain(), sharing=sharing, objective=ServiceObjective(tpot_p95_ms=2.75))
    assert read_back(one) == one


def test_what_is_default_is_left_out_and_what_is_not_is_shown() -> None:
    assert write_fields(plain()) == {"model": "org/m", "gpu": "auto", "priority": "medium", "keep": "always"}
    shown = write_fields(replace(plain(), replicas=2, keep_seconds=90, sleeps_in_place=False))
    assert (shown["replicas"], shown["keep"], shown["sleep"]) == (2, "90s", "stop")


def test_no_setting_of_a_deployment_is_forgotten_by_the_writer() -> None:
    """A field that is added to Deployment and not to the writer would be lost when the page sends its form."""
    shown = write_fields(
        replace(
            plain(),
            engine="vllm",
            precision="fp16",
            context_tokens=5,
            concurrency=2,
            objective=ServiceObjective(ttft_p95_ms=5),
            replicas=2,
            keep_seconds=60,
            sleeps_in_place=False,
            launcher="docker",
            prepared=False,
            sharing=Sharing.FAIR,
            aliases=("gpt-4o",),
            default=True,
        )
    )
    written_as = {
        "context_tokens": "context",
        "objective": "slo",
        "keep_seconds": "keep",
        "sleeps_in_place": "sleep",
        "ask": "gpu",
    }
    elsewhere = {"name", "watchdog", "overrides", "resized_bytes"}  # the key of the entry; tested above and beside
    names = {written_as.get(field.name, field.name) for field in fields(Deployment) if field.name not in elsewhere}
    assert names <= shown.keys()


def test_secrets_are_written_as_where_they_are(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hub-secret")
    source = SecretSource(name="HF_TOKEN", kind=SecretKind.FILE, source=str(token))
    text = write_stack([replace(plain(), overrides=EngineOverrides(secrets=(source,)))])
    assert "hub-secret" not in text
    assert yaml.safe_load(text)["models"]["chat"]["env"] == {"HF_TOKEN": {"from_file": str(token)}}


@pytest.mark.parametrize(("count", "asked_for"), [(1, None), (2, "MI300X")])
def test_simulated_gpus_that_were_asked_for_are_written_and_the_one_in_place_of_none_is_not(
    count: int, asked_for: str | None
) -> None:
    devices = SimulatedHardware([("MI300X", count)]).read_devices()
    assert parse_stack(write_stack([plain()], devices)).gpus == GpuChoice(simulated=asked_for, count=count)


def test_no_models_are_a_stack_too() -> None:
    assert parse_stack(write_stack([])).deployments == ()


@settings(max_examples=examples(20))
@given(st.integers(1, 2**45))
def test_sizes_are_written_exactly(size: int) -> None:
    one = replace(plain(), ask=replace(plain().ask, want=Memory(memory_bytes=size), host_memory_bytes=size))
    assert read_back(one).ask == one.ask
    shown = write_fields(replace(one, ask=replace(one.ask, want=Memory(memory_bytes=24 * GIB))))
    assert shown["gpu"] == {"memory": "24GiB"}


@settings(max_examples=examples(20))
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_a_name_is_written_so_that_it_reads_back_or_cannot_be_a_name(name: str) -> None:
    complaint = refusal_of(name)
    if complaint is None:
        assert read_back(plain(name)) == plain(name)
    else:
        assert "cannot be a model's name" in complaint or "not YAML" in complaint


def refusal_of(name: str) -> str | None:
    try:
        read_back(plain(name))
    except InvalidStackFile as error:
        return error.message
    return None


def test_a_program_survives_and_one_of_a_caller_is_left_out() -> None:
    text = """programs:
  train: {command: [python, train.py], directory: /work, gpu: {memory: 8GiB}, preemptible: true, sharing: fair, env: {A: b}}
"""
    (program,) = parse_stack(text).deployments
    assert parse_stack(write_stack([program]).replace("***", "b")).deployments == (program,)
    assert program.overrides.program is not None
    caller = replace(program.overrides.program, caller=ProcessIdentity(pid=1, start_ticks=1, boot_id="b"))
    assert write_stack([replace(program, overrides=replace(program.overrides, program=caller))]) == write_stack([])


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{gpu: {memory: 1GiB}}", "what to run"),
        ("{command: true}", "must say how much"),
        ("{command: true, gpu: auto}", "must say how much"),
        ("{command: true, gpu: {memory: 1GiB}, keep: 10m}", "keep"),
        ("{command: '', gpu: {memory: 1GiB}}", "command"),
        ("{command: true, gpu: {memory: 1GiB}, sharing: promise}", "promise"),
        ("{command: true, gpu: {memory: 1GiB}, restart: often}", "restart"),
        ("{command: true, gpu: {memory: 1GiB}, after: [other]}", "not in this file"),
        ("{command: true, gpu: {memory: 1GiB}, after: [train]}", "after itself"),
    ],
)
def test_a_program_that_is_written_wrongly_is_named_with_its_line(entry: str, says: str) -> None:
    with pytest.raises(InvalidStackFile, match="line 2") as error:
        parse_stack(f"programs:\n  train: {entry}\n")
    assert says in error.value.message
