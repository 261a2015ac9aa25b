#!/bin/sh
# Runs uv: the one on PATH, else a private one in .tools, made on first use with the system's Python.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
# Where the system has certificates, uv and pip use them: a proxy may have a certificate authority of its own.
store=
for file in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem /etc/ssl/cert.pem; do
    if [ -z "$store" ] && [ -s "$file" ]; then store=$file; fi
done
[ -z "$store" ] || export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
if command -v uv >/dev/null 2>&1; then
    exec uv "$@"
fi
private="$root/.tools/uv"
wanted="$root/tools/uv-requirements.txt"  # by version and hash
if [ ! -x "$private/bin/uv" ]; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
        echo "error: Python 3.11 or newer is needed ($python is not). Install it, or set PYTHON=/path/to/python3.11." >&2
        exit 2
    }
    install() {  # with which Python, further options
        with=$1
        shift
        export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
        # Where pip is not set to another certificate.
        REQUESTS_CA_BUNDLE=${REQUESTS_CA_BUNDLE:-$store} "$with" -m pip install --quiet --only-binary :all: --require-hashes -r "$wanted" "$@"
    }
    echo "setting up uv in .tools (once)" >&2
    rm -rf "$private"
    # The system's pip into a folder of ours takes a third of the time of a virtual environment; without it, make one.
    install "$python" --target "$private" 2>/dev/null || {
        "$python" -m venv --clear "$private" || {
            echo "error: cannot make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv" >&2
            exit 2
        }
        install "$private/bin/python" || {
            echo "error: cannot install uv. Check the network, or the index that pip uses." >&2
            exit 2
        }
    }
fi
exec "$private/bin/uv" "$@"
