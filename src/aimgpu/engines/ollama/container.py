"""Inside Ollama's own image there is a shell and `ollama`, no Python: the same as `start`, in a few lines of sh."""

_SCRIPT = """
ollama serve &
server=$!
trap 'kill "$server"' TERM INT
report() { printf '%s' "$1" >"$state.part" && mv "$state.part" "$state"; }
model=$1 alias=$2 state=$3
until ollama list >/dev/null 2>&1; do
    kill -0 "$server" 2>/dev/null || exit 1
    sleep 0.2
done
report '{"state": "loading"}'
if { ollama show "$model" >/dev/null 2>&1 || ollama pull "$model"; } &&
    ollama cp "$model" "$alias" && ollama run --keepalive -1m "$alias" a >/dev/null; then
    report '{"state": "loaded"}'
else
    report '{"state": "broken", "reason": "the model did not load; see the log"}'
fi
wait "$server"
"""


def container_argv(model: str, alias: str, state_file: str) -> tuple[str, ...]:
    """A shell line that serves, pulls and aliases the model inside the image."""
    return ("/bin/sh", "-c", _SCRIPT, "ollama", model, alias, state_file)
