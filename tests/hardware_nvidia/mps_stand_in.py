"""Stands in for nvidia-cuda-mps-control and nvidia-cuda-mps-server: real processes, a real socket, the same commands.

Installed under NVIDIA's names with a direct interpreter line, so that the kernel knows the processes by those names. What
goes wrong is set in the environment: STAND_IN_FAULT = refuse | hang | deaf | undying.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

FAULT = os.environ.get("STAND_IN_FAULT", "")


def main() -> int:
    pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    if sys.argv[0].endswith("-server"):
        signal.pause()
        return 0
    if "-d" in sys.argv:
        return start(pipe)
    return talk(pipe, sys.stdin.read())


def start(pipe: Path) -> int:
    if FAULT == "refuse":
        sys.stderr.write("An instance of this daemon is already running\n")
        return 1
    if FAULT == "hang":
        signal.pause()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(pipe / "control"))
    listener.listen()
    if os.fork():
        return 0
    os.setsid()
    (pipe / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    (Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]) / "control.log").write_text(
        f"started for {os.environ['CUDA_VISIBLE_DEVICES']}\n"
    )
    if FAULT == "undying":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(listener)
    return 0


def serve(listener: socket.socket) -> None:
    server: subprocess.Popen[bytes] | None = None
    clients: dict[int, socket.socket] = {}
    while True:
        connection, _ = listener.accept()
        if FAULT == "deaf":
            time.sleep(3600)
        word, _, argument = connection.recv(200).decode().strip().partition(" ")
        if word == "client":  # what libcuda does in a tenant
            server = server or subprocess.Popen([sys.argv[0].replace("-control", "-server")])
            clients[int(argument)] = connection
            connection.sendall(b"welcome\n")
            continue
        answer = {
            "get_server_list": f"{server.pid}\n" if server else "",
            "get_client_list": "".join(f"{pid}\n" for pid in clients if Path(f"/proc/{pid}").exists()),
            "get_default_active_thread_percentage": "100.0\n",
        }.get(word, "")
        connection.sendall(answer.encode())
        connection.close()
        if word == "quit" and FAULT != "undying":
            if server:
                server.kill()
                server.wait()
            return


def talk(pipe: Path, command: str) -> int:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(pipe / "control"))
    except OSError:
        sys.stdout.write("Cannot find MPS control daemon process\n")
        return 1
    connection.sendall(command.encode())
    while chunk := connection.recv(1000):
        sys.stdout.write(chunk.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
