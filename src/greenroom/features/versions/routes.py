"""`/update-model`, `/status`, `/api/v1/models/{id}/update`, `/rollback`, `/versions`: what a name serves. Owns the
shapes of requests and answers, and which model a call means that names none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from greenroom.access.keys import Caller, Permission
from greenroom.api.asgi import asked_by_admin, caller_of, owner_of
from greenroom.api.declared import NeededOperation, Routes, SignedCall, get, name_in_path, post
from greenroom.api.views import GovernedOrder, View
from greenroom.config.kinds import ID_CHARS_MAX
from greenroom.errors import BadRequest
from greenroom.features.versions.desired import NUMBER_MAX
from greenroom.features.versions.updates import ROUTE, UpdateOrder, Updates
from greenroom.library.orders import DownloadOrder, OrderRules, read_order
from greenroom.library.records import Version, shown_as
from greenroom.runtime.operations.files import Operation, OperationError, OperationStatus
from greenroom.runtime.shell import Shell
from greenroom.serving.versioned import versioned_model

_ONE: Final = "/api/v1/models/{model_id:path}"
Number = Annotated[int, Field(ge=1, le=NUMBER_MAX)]
ModelName = Annotated[
    str | None, Query(max_length=ID_CHARS_MAX, description="Which model, where several are under version control.")
]
Wait = Annotated[bool, Query(description="Answer when the update has ended.")]


class UpdateAsked(GovernedOrder):
    model_repo_id: Annotated[str, Field(min_length=1, max_length=4_096)]
    """A repository of the hub, as org/name or org/name:QUANTIZATION, or a path below the folders of models."""
    revision: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """A branch, tag or commit of the repository; its main branch when not given."""
    model_version: Number | None = None
    """The least number that the version gets. It is larger than every earlier one in any case."""
    allow_gap: bool = False
    """Let requests wait while the old version leaves and the new one is loaded, where both do not fit."""


class RollbackAsked(GovernedOrder):
    version: Number | None = None
    """The number of a version that is kept; the last one before the current when not given."""


class UpdateView(View):
    taskId: str  # noqa: N815
    status: Literal["updating", "completed", "failed"]
    model: str
    model_repo_id: str
    revision: str | None = None
    step: str
    """fetching, checking, loading, warming or flipping; of one that has ended, the last."""
    model_version: int | None = None
    """The number that it got, once it serves."""
    commit: str | None = None
    took_s: float | None = None
    error: str | None = None
    errorCode: str | None = None  # noqa: N815


class Desired(View):
    model_repo_id: str
    revision: str | None = None
    model_version: int | None = None
    """The least number that was asked for."""


class ServedVersion(View):
    model: str
    model_version: int | None
    """Null until it has its first version."""
    model_repo_id: str | None
    commit: str | None = None
    updating: bool
    desired: Desired | None = None
    """What the running or the last, failed update wants; null if that is what serves."""
    error: OperationError | None = None
    """Why the last update failed; null while another one runs."""


class VersionView(View):
    model_version: int
    model_repo_id: str
    commit: str | None = None
    since: float
    serves: bool


class VersionList(BaseModel):
    object: Literal["list"] = "list"
    data: list[VersionView]
    """The one that serves first, then those that are kept, the newest first."""


def _update(call: SignedCall, model: str | None) -> NeededOperation:
    """An update, which may fetch the weights first. Where it names no model it is for the configured one."""
    repo, revision = call.text("model_repo_id"), call.text("revision")

    def read_fetch(rules: OrderRules) -> DownloadOrder:
        if repo is None:
            raise BadRequest("model_repo_id says where the weights come from", param="model_repo_id")
        return read_order(rules, model=repo, revision=revision)

    return NeededOperation("model-update", model, read_fetch=read_fetch)


def _rollback(call: SignedCall) -> NeededOperation:
    return NeededOperation("model-update", call.in_path(), is_rollback=True)


_BEGUN: Final[dict[int | str, dict[str, Any]]] = {202: {"model": UpdateView, "description": "Begun; without `wait`."}}


@dataclass(frozen=True)
class VersionRoutes(Routes):
    _shell: Shell
    _updates: Updates

    @post(ROUTE, needs=Permission.MANAGE, signed=lambda call: _update(call, call.fields.get("model")), responses=_BEGUN)
    async def update_model(
        self, request: Request, response: Response, asked: UpdateAsked, model: ModelName = None, wait: Wait = False
    ) -> UpdateView:
        """Let a model serve other weights. The old version serves until the new one has proved itself."""
        return await self._update(request, response, self._meant(model, caller_of(request)), asked, wait)

    @get(ROUTE + "/{task_id}", needs=Permission.READ)
    async def show_update(self, task_id: str) -> UpdateView:
        """One update as it is now; it is kept for an hour after its end."""
        return await self._view(self._updates.get(task_id))

    @get("/status", needs=Permission.ASK)
    async def version_status(self, request: Request, model: ModelName = None) -> ServedVersion:
        """Which version of a model serves, and whether it is being updated."""
        name, updates, is_admin = self._meant(model, caller_of(request)), self._updates, asked_by_admin(request)
        version, desired, error = updates.of(name).current, updates.desired(name), updates.error(name)
        message = "" if error is None else error.message if is_admin else "An operator can see why."
        return ServedVersion(
            model=name,
            model_version=None if version is None else version.number,
            model_repo_id=None if version is None else shown_as(version.repo_id, to_operator=is_admin),
            commit=None if version is None else version.commit,
            updating=updates.running(name) is not None,
            desired=None
            if desired is None
            else Desired(
                model_repo_id=shown_as(desired.model_repo_id, to_operator=is_admin),
                revision=desired.revision,
                model_version=desired.number_asked,
            ),
            error=None if error is None else OperationError(error.code, message),
        )

    @post(
        f"{_ONE}/update", needs=Permission.MANAGE, signed=lambda call: _update(call, call.in_path()), responses=_BEGUN
    )
    async def update_one(
        self, request: Request, response: Response, model_id: str, asked: UpdateAsked, wait: Wait = False
    ) -> UpdateView:
        """The same, of the model that is named."""
        return await self._update(request, response, self._named(request), asked, wait)

    @post(f"{_ONE}/rollback", needs=Permission.MANAGE, signed=_rollback, responses=_BEGUN)
    async def roll_back(
        self,
        request: Request,
        response: Response,
        model_id: str,
        asked: RollbackAsked | None = None,
        wait: Wait = False,
    ) -> UpdateView:
        """Serve kept weights again, under a new number."""
        name, updates = self._named(request), self._updates
        row = await updates.rollback(name, None if asked is None else asked.version, **owner_of(request))
        return await self._begun(response, row, wait)

    @get(f"{_ONE}/versions", needs=Permission.ASK)
    async def list_versions(self, request: Request, model_id: str) -> VersionList:
        """The versions of a model that can be served without fetching anything."""
        name = self._named(request)
        known, is_admin = self._updates.of(name), asked_by_admin(request)
        versions = [version for version in (known.current, *known.kept) if version is not None]
        return VersionList(data=[_shown(one, serves=one is known.current, to_operator=is_admin) for one in versions])

    async def _update(
        self, request: Request, response: Response, name: str, asked: UpdateAsked, wait: bool
    ) -> UpdateView:
        order = UpdateOrder(asked.model_repo_id, asked.revision, asked.model_version, asked.allow_gap)
        return await self._begun(response, await self._updates.submit(name, order, **owner_of(request)), wait)

    async def _begun(self, response: Response, row: Operation, wait: bool) -> UpdateView:
        updates = self._updates
        if wait:
            await updates.ended(row.id)
            return await self._view(updates.get(row.id))
        response.status_code = 202
        response.headers["location"] = f"{ROUTE}/{row.id}"
        return await self._view(row)

    async def _view(self, row: Operation) -> UpdateView:
        facts = msgspec.structs.asdict(await self._updates.facts(row))
        return UpdateView(
            **facts,
            taskId=row.id,
            status="completed"
            if row.status is OperationStatus.DONE
            else "failed"
            if row.status.is_over
            else "updating",
            model=row.model,
            error=None if row.error is None else row.error.message,
            errorCode=None if row.error is None else row.error.code,
        )

    def _meant(self, model: str | None, caller: Caller) -> str:
        return versioned_model(self._shell.config, model, caller)

    def _named(self, request: Request) -> str:
        """The model in the path. Raises ModelNotFound, or BadRequest if it is not under version control."""
        return versioned_model(self._shell.config, name_in_path(request.scope), caller_of(request))


def _shown(version: Version, *, serves: bool, to_operator: bool) -> VersionView:
    return VersionView(
        model_version=version.number,
        model_repo_id=shown_as(version.repo_id, to_operator=to_operator),
        commit=version.commit,
        since=version.since,
        serves=serves,
    )
