"""A piece of what a tool returns: the types that are judged are the types that are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from flash_mcp.protocol.errors import encodable


def rounded(value: float | None, digits: int) -> float | None:
    if value is None:
        return None
    return round(value, digits)


Rounded = Annotated[float, PlainSerializer(lambda value: round(value, 4), float)]
"""A number that is sent with four decimal places and judged with all of them."""


class ResultModel(BaseModel):
    """A piece of a result. Fields that are None are left out of what is sent."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        return encodable(value)  # environments and files of others may hold what has no UTF-8 form

    @model_serializer(mode="wrap")
    def _without_nulls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = cast("dict[str, Any]", handler(self))
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in type(self).model_fields
        }


# -- what an export asks of the worker's program, and what that answers ----------------------------


class ExportJob(ResultModel):
    kind: str
    """An entry point of flash_mcp.exports."""
    name: str
    """What the model is called in its files."""
    model: str
    """Base model: a catalog name, a hub id (with its commit, if known) or a folder."""
    adapter: Path | None = None
    """Folder of the adapter; None for the base model alone."""
    hub_id: str | None = None
    """Where others find the base model."""
    folder: Path
    """An empty folder to write to."""
    prompts: list[list[dict[str, str]]]
    """Messages whose greedy answers are compared."""


class Agreement(ResultModel):
    """Greedy answers of the written file, read back, against the model in memory."""

    tokens: int
    equal: int


class Exported(ResultModel):
    base_digest: str
    agreement: Agreement | None = None
