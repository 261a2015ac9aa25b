import aimgpu.errors
from aimgpu.errors import AimGpuError, all_errors


def test_every_error_has_its_own_stable_code() -> None:
    codes = [error.code for error in all_errors()]
    assert len(codes) == len(set(codes))


def test_every_error_fails_the_command_and_the_request() -> None:
    for error in all_errors():
        assert 1 <= error.exit_status < 126, error
        assert 400 <= error.http_status < 600, error


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert aimgpu.errors.__doc__ is not None
    for error in all_errors(AimGpuError):
        assert error.__name__ in aimgpu.errors.__doc__, error
