"""What the deploy form may ask for callers that may not change anything."""

from typing import Any

import pytest

from aimgpu.errors import NotAllowed
from aimgpu.web.deploy_check import read_deployment, refuse_path

COMMAND = {"engine": "command", "command": "run {port}", "gpu": {"memory": "1GiB"}}


@pytest.mark.parametrize(
    "fields", [{"model": "/etc/passwd"}, {"model": "org/m", "adapters": {"sql": "/etc/passwd"}}, {"model": "org/m", **COMMAND}]
)
def test_whether_a_file_or_a_program_exists_is_not_for_them(fields: dict[str, Any]) -> None:
    with pytest.raises(NotAllowed):
        refuse_path(read_deployment("candidate", fields))


def test_a_model_of_the_hub_is() -> None:
    refuse_path(read_deployment("candidate", {"model": "org/m"}))
