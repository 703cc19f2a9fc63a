"""The operator's logins at services, and what may use them.

A caller over HTTP uses one only if their token was created with `--secret VARIABLE`, or, for the
machine's own user, if settings.toml names it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from flash_mcp.protocol.run_files import Json

HUB = "HF_TOKEN"
TRACKERS = {"wandb": "WANDB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI", "trackio": HUB}
"""The variable that stands for the login of each tracker that sends metrics elsewhere."""
NO_HUB_LOGIN = "FLASH_NO_HUB_LOGIN"
"""Set where the hub may serve only what it serves to anybody."""
_LOGINS = (HUB, "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")


def environment_for(
    granted: Collection[str] | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """The variables for a process that acts for a caller with these grants; None for all."""
    if granted is None or HUB in granted:
        return dict(variables)
    kept = {name: value for name, value in variables.items() if name not in _LOGINS}
    # The second one keeps huggingface_hub from the login that it has stored in a file.
    return kept | {NO_HUB_LOGIN: "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}


def restrict(job: Json) -> None:
    """Take from this process's variables what the job's caller was not granted. Called before
    huggingface_hub is imported, which reads them then.
    """
    variables = environment_for(job.get("lineage", {}).get("granted"), os.environ)
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)
