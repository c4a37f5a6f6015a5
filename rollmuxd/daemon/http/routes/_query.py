"""What the queries of several routes share."""

from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from rollmuxd.daemon.http.routing import Query

Limit: TypeAlias = Annotated[int, Meta(ge=1, le=1000, description="items in a page")]
Id: TypeAlias = Annotated[str, Meta(max_length=200)]


class PageQuery(Query, frozen=True):
    """Which part of a list."""

    limit: Limit = 100
    after: Id | UnsetType = UNSET
