"""Which grammars and patterns reach an engine: those with few ways to read a text, in any spelling."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.grammar_cost import check_grammars

CHEAP_GRAMMARS = {
    "words": 'root ::= "yes" | "no" | "maybe"',
    "500 words with one beginning": "root ::= " + " | ".join(f'"a{number}"' for number in range(500)),
    "a long text": 'root ::= "' + "ab" * 1000 + '"',
    "many characters": "root ::= [a-z ]{0,1000}",
    "rules and comments": 'root ::= item+  # a list\nitem ::= "- " [^\\r\\n\\x0b\\u2028]+ "\\n"\n',
    "options on lines of their own": 'root ::= "a"\n  | "b"\n  | (\n  "c" |\n  "d" )\n',
    "recursion that one character decides": 'root ::= "(" root ")" | [0-9]+',
    "a call": 'root ::= "{\\"name\\": \\"" [a-z_]{1,40} "\\", \\"size\\": " ("0" | [1-9] [0-9]{0,8}) "}"',
}
JSON_GRAMMAR = r"""
root ::= object
thing ::= object | list | text | amount | ("true" | "false" | "null") gap
object ::= "{" gap (text ":" gap thing ("," gap text ":" gap thing)*)? "}" gap
list ::= "[" gap (thing ("," gap thing)*)? "]" gap
text ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" gap
amount ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? gap
gap ::= | " " | "\n" [ \t]{0,20}
"""
CHEAP_GRAMMARS["JSON, whose numbers begin in two ways"] = JSON_GRAMMAR
COSTLY_GRAMMARS = {
    "a number that may end and go on": JSON_GRAMMAR.replace('"," gap thing', "thing"),
    "options in a row": 'root ::= ("a"?){20}',
    "the same option twice": 'root ::= ("a" | "a")*',
    "in other letters": 'root ::= ("a" | "\\x61" | [a-b])*',
    "behind a long text": 'root ::= "' + "b" * 500 + '" ("a"?){20}',
    "within rules": 'root ::= one one one\none ::= two two two\ntwo ::= three three three\nthree ::= "a"?',
    "rules that double": "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)) + '\nr40 ::= ""',
    "a chain of rules": "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(400)) + '\nr400 ::= "a"',
    "two ways into itself": 'root ::= "a" root x | "a" root y | "a"\nx ::= "x"\ny ::= "y"',
    "an end that is not seen": 'root ::= word root "x" | "."\nword ::= "a" | "aa"',
    "groups within rules": "root ::= r0\n"
    + "\n".join("r%d ::= %s r%d %s" % (n, '("x" ' * 40, n + 1, ")" * 40) for n in range(20))  # noqa: UP031
    + '\nr20 ::= "a"',
    "not finished": 'root ::= ("a"',
    "without its rule": "root ::= nowhere",
}
CHEAP_PATTERNS = [
    "^[a-z]{1,20}$",
    r"^\d{4}-\d{2}-\d{2}$",
    r"^[\w.+-]+@[\w-]+\.[\w.-]+$",
    "^(?!x)[a-z]+$",
    r"^\p{L}+$",
    "^(?:a|b)*?$",
]
COSTLY_PATTERNS = ["(a?){100}", "(a|a)*", "^(?=b)(a|[a-c])*$", "(((a?){5}){5}){5}", "(", r"(\w?){30}"]


@pytest.mark.parametrize("grammar", CHEAP_GRAMMARS.values(), ids=CHEAP_GRAMMARS)
def test_a_grammar_with_few_ways_passes(grammar: str) -> None:
    check_grammars({"grammar": grammar})


@pytest.mark.parametrize("grammar", COSTLY_GRAMMARS.values(), ids=COSTLY_GRAMMARS)
def test_a_grammar_with_many_ways_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_grammars({"grammar": grammar})
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("pattern", CHEAP_PATTERNS)
def test_a_pattern_with_few_ways_passes(pattern: str) -> None:
    check_grammars({"guided_regex": pattern})


@pytest.mark.parametrize("pattern", COSTLY_PATTERNS)
def test_a_pattern_with_many_ways_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        check_grammars({"guided_regex": pattern})


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='ab"()[]{}|*+?\\^-., 0123#\n:=rotx', max_size=60), st.booleans())
def test_any_text_is_taken_or_refused_in_words(text: str, as_rule: bool) -> None:  # noqa: FBT001
    fields = {"grammar": f"root ::= {text}"} if as_rule else {"guided_regex": text}
    with contextlib.suppress(InvalidRequest):  # and nothing else
        check_grammars(fields)
