"""Saves the dashboard's layout as a workspace of a wandb project."""

import os
from typing import Any

from recipes.wandb_logger import PROJECT, has_wandb_login
from tools.dashboard_layout import PANELS

NAME = "UniEP recipe"


class WorkspaceError(ValueError):
    """A workspace that cannot be saved. The text says why in one line."""


def build_workspace(entity: str, project: str) -> Any:
    """The workspace, not yet saved. Needs no login.

    Heat maps of the experts are logged a layer (`expert_load/layer_...`): wandb draws them by itself.
    """
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    panels: list[Any] = [
        reports.LinePlot(title=panel.title, x="step", y=list(panel.metrics)) for panel in PANELS if panel.metrics
    ]
    return workspaces.Workspace(
        name=NAME,
        entity=entity,
        project=project,
        sections=[workspaces.Section(name=NAME, panels=panels, is_open=True)],
        auto_generate_panels=True,
    )


def push_workspace() -> str:
    """Saves the workspace in the project that runs are logged to. Returns its address.

    Raises:
        WorkspaceError: wandb-workspaces is not installed, there is no login, or wandb refused.
    """
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
    except ImportError as error:
        raise WorkspaceError(
            f"--wandb must have wandb-workspaces installed, got {error}; pip install -e .[workspace]"
        ) from None
    if not has_wandb_login():
        raise WorkspaceError("--wandb must have a wandb login (`wandb login` or WANDB_API_KEY), got none")
    try:
        entity = os.environ.get("WANDB_TEAM") or wandb.Api().default_entity
        assert entity is not None, "an account has a default team"
        return build_workspace(entity, os.environ.get("WANDB_PROJECT", PROJECT)).save().url
    except Exception as error:  # of wandb, its client and requests: whichever it is, the user reads why
        raise WorkspaceError(f"--wandb must be able to save the workspace, got {error}") from None
