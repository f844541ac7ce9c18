"""The options of models under version control: where versions come from, how they prove themselves, which are kept."""

from typing import Annotated

from pydantic import Field

from greenroom.config.kinds import ModelId, NotBool, SecondsAboveZero, Section
from greenroom.config.marks import FILE, Variable


class ModelVersions(Section):
    """A model under version control: its weights change by updates, without a failed request."""

    repo_id: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """The id of its repository in the hub, as org/name or org/name:QUANTIZATION. Told with its first version; without
    `path` the gateway fetches that version from there when it starts."""
    keep: Annotated[int, Field(ge=1, le=100), NotBool] = 2
    """Versions that are kept, the one that serves among them. Files that an update fetched are deleted when their
    version is no longer kept."""
    warm_up: Annotated[str, Field(min_length=1, max_length=100_000)] = "Hello"
    """What a new version is asked before it may serve. Its answer must not be empty."""
    warm_up_tokens: Annotated[int, Field(ge=1, le=10_000), NotBool] = 8
    """How long that answer may be."""
    warm_up_timeout_s: SecondsAboveZero = 60
    """A version that has not answered by then is given up."""

    drain_s: SecondsAboveZero = 120
    """Where both versions do not fit: how long answers of the old one may go on before it leaves. Requests wait
    meanwhile. If one takes longer, the update has failed and the old version serves on."""


class Versions(Section):
    default: ModelId | None = None
    """The model that /status, /generate and /update-model mean where several are under version control and the call
    names none by ?model=."""
    state_file: Annotated[
        Annotated[str, Field(min_length=1, max_length=4_096)] | None,
        FILE,
        Variable("SYNC_STATE_FILE", "The file in which a trainer says what to serve."),
    ] = None
    """A file in which a trainer says what to serve, as /models/sync_state.json on a volume that all replicas share.
    Whoever can write it can change the model."""
