"""What a chat request says about tools, checked."""

from dataclasses import dataclass

from aimgpu.errors import InvalidRequest
from aimgpu.gateway.dialects.call import Fields

_MOST_TOOLS = 1024
_MODES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """`tools` are those that may be called; `forced`: one of them must be."""

    tools: tuple[Fields, ...]
    forced: bool
    named: str | None = None

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


def read_tool_choice(fields: Fields) -> ToolChoice:
    """Raises InvalidRequest where the choice cannot be kept."""
    if fields.get("functions") or fields.get("function_call"):
        raise InvalidRequest("'functions' is not offered.", hint="Send 'tools' and 'tool_choice'.", param="functions")
    tools = _read_tools(fields.get("tools"))
    choice = fields.get("tool_choice") or "auto"
    if isinstance(choice, dict):
        return _read_object(choice, tools)
    if choice not in _MODES:
        raise InvalidRequest(f"'tool_choice' must be one of {', '.join(_MODES)}, or name a tool.", param="tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest("'tool_choice' is required, and there are no tools.", param="tool_choice")
    return ToolChoice(tools=() if choice == "none" else tools, forced=choice == "required")


def _read_tools(tools: object) -> tuple[Fields, ...]:
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise InvalidRequest("'tools' must be an array.", param="tools")
    if len(tools) > _MOST_TOOLS:
        raise InvalidRequest(f"'tools' must be at most {_MOST_TOOLS}.", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"'tools[{index}]' must be a function with a name.", param="tools")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise InvalidRequest(f"'tools[{index}].function.parameters' must be a JSON schema.", param="tools")
    return tuple(tools)


def _read_object(choice: Fields, tools: tuple[Fields, ...]) -> ToolChoice:
    """One function by name, or a list of allowed ones."""
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools") or choice
        names = {name for tool in allowed.get("tools") or () if (name := _name(tool)) is not None}
        kept = tuple(tool for tool in tools if tool["function"]["name"] in names)
        if not kept:
            raise InvalidRequest("None of the allowed tools is among 'tools'.", param="tool_choice")
        return ToolChoice(tools=kept, forced=allowed.get("mode") == "required")
    name = _name(choice)
    kept = tuple(tool for tool in tools if tool["function"]["name"] == name)
    if name is None or not kept:
        raise InvalidRequest("'tool_choice' names a tool that is not among 'tools'.", param="tool_choice")
    return ToolChoice(tools=kept[:1], forced=True, named=name)


def _name(tool: object) -> str | None:
    if not isinstance(tool, dict):
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else None
