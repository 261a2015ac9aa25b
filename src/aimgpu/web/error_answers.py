"""Errors of the page's API and of the control API as answers: JSON with a stable code, whatever went wrong."""

from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aimgpu.errors import AimGpuError, MethodNotAllowed, NoSuchPath, from_os_error

_METHOD_NOT_ALLOWED = 405

ErrorHandlers = dict[type[Exception] | int, Callable[[Request, Exception], Response]]


def make_error_handlers(headers: Mapping[str, str]) -> ErrorHandlers:
    """For Starlette; `headers` go with every answer. What is none of ours, such as a fault in the code, is raised."""

    def answer(request: Request, error: Exception) -> Response:
        return answer_error(_translate(request, error), {**headers, **(getattr(error, "headers", None) or {})})

    return {AimGpuError: answer, OSError: answer, HTTPException: answer}


def answer_error(error: AimGpuError, headers: Mapping[str, str]) -> Response:
    return JSONResponse({"error": error.to_json()}, status_code=error.http_status, headers=dict(headers))


def _translate(request: Request, error: Exception) -> AimGpuError:
    if isinstance(error, AimGpuError):
        return error
    if isinstance(error, OSError):
        return from_os_error(error)
    path = request.url.path[:100]
    if isinstance(error, HTTPException) and error.status_code == _METHOD_NOT_ALLOWED:
        return MethodNotAllowed(f"{path} does not take {request.method}.")
    return NoSuchPath(f"There is nothing at {path}.")
