"""Every key of a stack file with every kind of wrong value: the complaint has line, key, value and what is allowed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.control.stack import place, queue, slo, stack_file
from aimgpu.control.stack.overrides import OVERRIDE_KEYS
from aimgpu.control.stack.stack_file import ENGINES, LAUNCHERS, PREPARED, SLEEPS, parse_stack
from aimgpu.domain import IsolationRequirement, Priority, Sharing, Vendor, WatchdogPolicy
from aimgpu.domain.objective import MEASURES, PERCENTS
from aimgpu.errors import InvalidStackFile

TIMES = [f"{measure}_p{percent}" for measure in MEASURES for percent in PERCENTS]


@dataclass(frozen=True)
class Kind:
    """Values that are not of this kind, and what the hint of each complaint must have."""

    wrong: Sequence[str]
    allowed: Sequence[str]


def number(most: int) -> Kind:
    wrong = ["many", "-1", "1.5", "0", "1e3", "010", "0x10", str(most + 1), "9" * 20, "9" * 5000, "'1 2'", "true", "1_000"]
    return Kind(wrong, [f"from 1 to {most}", "For example: "])


def choice(*options: str) -> Kind:
    wrong = ["nonsense", "0", "'high,low'", options[0].upper() + "X", f"{options[0]}{options[-1]}", "x" * 5000]
    return Kind(wrong, [f"It is one of: {', '.join(options)}."])


SIZE = Kind(
    ["24", "0GiB", "-1GiB", "24XiB", "'1,5GiB'", "0.5B", "lots", "9" * 5000],
    ["For example: ", "Write a size such as 24GiB", "fewer"],
)
PART = Kind(
    ["101%", "0%", "-1%", "1.5", "half", "30ppm", "0.00000001"], ["For example: ", "Write a part such as 30%", "100%", "fewer"]
)
TIME = Kind(["5", "0s", "-5s", "soon", "5S", "1m30s", "0.1ms"], ["For example: ", "Write a duration such as 500ms", "fewer"])
TOKEN_TIME = Kind(["5", "0ms", "-5ms", "soon", "0.0001ms"], ["For example: ", "Write a time per token such as 50ms", "fewer"])
RATE = Kind(["0", "-1", "0.5", "200ms", "fast"], ["For example: ", "Write a rate of tokens such as 200tok/s", "fewer"])
CORES = Kind(["0", "-1", "many", "1.2345", "500mm", "1e3"], ["For example"])
WORD = Kind(["'a b'", "../x", "'-x'", "ä", "x" * 200], ["For example: "])
NAMES = Kind(["'a b'", "['a b']", "[[a]]", "[{a: b}]", "''", "ä", "x" * 200], ["For example: "])
FLAG = choice("true", "false")
ALIASES = Kind(["'a b'", "['a b']", "ä", "'-x'", "x" * 200], ["Use up to 128 letters"])
OWN = "\n    engine: command\n    gpu: {{memory: 1GiB}}"  # beside the key of a server of the user's own
RUN = f"{OWN}\n    command: run {{{{port}}}}"
ANY = Kind([], [])
# One key with the text in front of it, and what it takes. {} stands for the value, on line 4.
KEYS: dict[str, tuple[str, Kind]] = {
    "aliases": ("aliases: {}", ALIASES),
    "default": ("default: {}", FLAG),
    "command": (f"command: {{}}{OWN}", ANY),
    "directory": (f"directory: {{}}{RUN}", ANY),
    "health": (f"health: {{}}{RUN}", Kind(["ready", "'/a b'", "/ä"], ["health: /health"])),
    "models": (f"models: {{}}{RUN}", ANY),
    "ready_timeout": (f"ready_timeout: {{}}{RUN}", TIME),
    "engine": ("engine: {}", choice(*ENGINES)),
    "precision": ("precision: {}", WORD),
    "context": ("context: {}", number(100_000_000)),
    "concurrency": ("concurrency: {}", number(10_000)),
    "replicas": ("replicas: {}", number(1000)),
    "compute": ("compute: {}", PART),
    "isolation": ("isolation: {}", choice(*IsolationRequirement)),
    "priority": ("priority: {}", choice(*Priority)),
    "keep": ("keep: {}", TIME),
    "sleep": ("sleep: {}", choice(*SLEEPS)),
    "prepared": ("prepared: {}", choice(*PREPARED)),
    "launcher": ("launcher: {}", choice(*LAUNCHERS)),
    "watchdog": ("watchdog: {}", choice(*WatchdogPolicy)),
    "sharing": ("sharing: {}", choice(*Sharing)),
    "memory": ("gpu: {{memory: {}}}", SIZE),
    "fraction": ("gpu: {{fraction: {}}}", PART),
    "partition": ("gpu: {{partition: {}}}", WORD),
    "whole": ("gpu: {{whole: {}}}", number(64)),
    "devices": ("gpu: {{devices: {}}}", number(64)),
    "gpu compute": ("gpu: {{compute: {}}}", PART),
    "products": ("place: {{products: {}}}", NAMES),
    "not_products": ("place: {{not_products: {}}}", NAMES),
    "vendor": ("place: {{vendor: {}}}", choice(*Vendor)),
    "not_vendor": ("place: {{not_vendor: {}}}", choice(*Vendor)),
    "spread": ("place: {{spread: {}}}", FLAG),
    "pinned": ("place: {{pinned: {}}}", FLAG),
    "with": ("place: {{with: {}}}", NAMES),
    "not_with": ("place: {{not_with: {}}}", NAMES),
    "place partition": ("place: {{partition: {}}}", WORD),
    "cpu": ("host: {{cpu: {}}}", CORES),
    "host memory": ("host: {{memory: {}}}", SIZE),
    "throughput": ("slo: {{throughput: {}}}", RATE),
    "availability": ("slo: {{availability: {}}}", PART),
    **{name: (f"slo: {{{{{name}: {{}}}}}}", TOKEN_TIME if name.startswith("tpot") else TIME) for name in TIMES},
    "low throughput": ("slo: {{classes: {{low: {{throughput: {}}}}}}}", RATE),
    "image": ("image: {}", Kind(["'a b'", "/a", "UPPER", "x" * 400], ["For example: "])),
}
MAPPINGS = {
    "gpu": "gpu",
    "place": "place",
    "host": "host",
    "slo": "slo",
    "args": "args",
    "adapters": "adapters",
    "env": "env",
    "classes": "slo: {classes",
}


def complaint(line: str) -> tuple[str, str]:
    with pytest.raises(InvalidStackFile) as caught:
        parse_stack(f"models:\n  chat:\n    model: m\n    {line}\n")
    return caught.value.message, caught.value.hint or ""


def last_word(key: str) -> str:
    return key.rpartition(" ")[2]


def bare(value: str) -> str:
    return value.strip("'[]{}")


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, (_, kind) in KEYS.items() for value in kind.wrong],
    ids=lambda text: text if len(text) < 20 else f"{text[:8]}...",
)
def test_a_wrong_value_is_named_with_its_key_its_line_and_what_is_allowed(key: str, value: str) -> None:
    line, kind = KEYS[key]
    message, hint = complaint(line.format(value))
    assert message.startswith("stack file, line 4: ")
    assert f"'{last_word(key)}'" in message or "cannot be an image" in message
    assert bare(value)[:30] in message or any(word in message for word in ("no value", "a list", "a mapping"))
    assert any(text in hint for text in kind.allowed), hint
    assert len(message) < 300, "a value without end is not repeated"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("value", "what"), [("", "has no value"), ("~", "has no value"), ("{a: b}", "a mapping"), ("[[a], b]", "a list")]
)
def test_what_is_not_one_value_is_called_what_it_is(key: str, value: str, what: str) -> None:
    message, hint = complaint(KEYS[key][0].format(value))
    assert message.startswith("stack file, line 4: ")
    assert f"'{last_word(key)}'" in message
    assert what in message
    assert f"{last_word(key)}: " in hint, "an example to copy"


@pytest.mark.parametrize("key", MAPPINGS)
@pytest.mark.parametrize("value", ["[a]", "5", "text", ""])
def test_what_should_have_keys_and_has_none_is_refused(key: str, value: str) -> None:
    line = f"{MAPPINGS[key]}: {value}" + ("}" if key == "classes" else "")
    message, hint = complaint(line)
    assert message.startswith("stack file, line 4: ")
    assert f"'{key}'" in message
    assert hint


def test_the_table_has_every_key_that_the_parser_reads() -> None:
    """A key that is added to the parser and not to this table fails here."""
    covered = {last_word(key) for key in KEYS} | set(MAPPINGS)
    read = {*stack_file._MODEL_KEYS, *stack_file._WANT_KEYS, *place.PLACE_KEYS, *place.HOST_KEYS, *slo.SLO_KEYS, *OVERRIDE_KEYS}
    assert read - covered == {"model"}
    assert {"per_gpu", "longest_wait", "most_queued"} == set(queue.QUEUE_KEYS)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("args: {max_model_len: 5, max-model-len: 6}", "'max-model-len' is here twice", "Keep one"),
        ("args: {--seed: 5, seed: 6}", "'seed' is here twice", "Keep one"),
        ("args: {'a b': 1}", "'a b' cannot be a flag", "enable-prefix-caching"),
        ("args: {seed: {}}", "'seed' must be one value, not a mapping", "seed: "),
        ("args: {seed: []}", "'seed' is an empty list", "Leave it out"),
        ("env: {'1A': x}", "'1A' cannot be a variable", "VLLM_LOGGING_LEVEL"),
        ("env: {A=B: x}", "'A=B' cannot be a variable", "VLLM_LOGGING_LEVEL"),
        ("env: {A: {}}", "'A' must say where its value is", "from_file"),
        ("env: {A: {from_file: a, from_variable: B}}", "'A' must say where its value is", "from_variable"),
        ("env: {A: {from_variable: 'a b'}}", "'a b' cannot be a variable", "from_variable: A"),
        ("env: {A: {from_flie: a}}", "unknown key 'from_flie'", "Did you mean 'from_file'?"),
        ("env: {A: [x]}", "'A' must be one value, not a list", "A: "),
        ("sharing: promise", "'sharing: promise' needs a promise to keep", "slo: {tpot_p95: 50ms}"),
        ("sharing: promise\n    slo: {availability: 99%}", "needs a promise to keep", "strict or fair"),
    ],
)
def test_values_that_contradict_each_other_are_refused(line: str, message: str, hint: str) -> None:
    found, hinted = complaint(line)
    assert message in found
    assert hint in hinted


def test_a_hundred_arguments_are_read_and_more_are_refused() -> None:
    flags = ", ".join(f"f{number}: {number}" for number in range(100))
    (chat,) = parse_stack(f"models: {{chat: {{model: m, args: {{{flags}}}}}}}").deployments
    assert len(chat.overrides.arguments) == 100
    for key in ("args", "env"):
        message, hint = complaint(f"{key}: {{{flags}, more: 1}}")
        assert f"'{key}' has 101 entries" in message
        assert "At most 100" in hint


def test_a_character_that_json_escapes_as_a_pair_is_one_and_half_of_a_pair_is_refused() -> None:
    text = json.dumps({"models": {"chat": {"model": "./\N{COLLISION SYMBOL}"}}})
    assert [one.model for one in parse_stack(text).deployments] == ["./\N{COLLISION SYMBOL}"]
    message, hint = complaint('args: {name: "\\ud83d"}')
    assert "half of a surrogate pair" in message
    assert hint


@settings(max_examples=examples(40))
@given(st.sampled_from(sorted(KEYS)), st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_text_as_a_value_is_taken_or_complained_about_on_its_line(key: str, value: str) -> None:

    quoted = yaml.safe_dump(value, default_style='"', allow_unicode=False, width=10_000).strip()
    text = f"models:\n  chat:\n    model: m\n    {KEYS[key][0].format(quoted)}\n"
    complaint = refusal_of(text)
    if complaint is None:
        assert [one.name for one in parse_stack(text).deployments] == ["chat"]
    else:
        assert complaint.message.startswith("stack file, line 4: ")
        assert complaint.hint


def refusal_of(text: str) -> InvalidStackFile | None:
    try:
        parse_stack(text)
    except InvalidStackFile as error:
        return error
    return None
