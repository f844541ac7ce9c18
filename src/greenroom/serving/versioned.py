"""Which model under version control a call means."""

from __future__ import annotations

from greenroom.access.keys import Caller
from greenroom.config.schema import Config
from greenroom.errors import BadRequest, ModelNotFound


def versioned_model(config: Config, name: str | None, caller: Caller) -> str:
    """The id of the model that a call means. Raises BadRequest or ModelNotFound."""
    ours = [one for one, model in config.models.items() if model.versions is not None and caller.sees(one)]
    if name is None:
        if (default := config.versions.default) in ours:
            return str(default)
        if len(ours) != 1:
            raise BadRequest(
                f"{len(ours)} models are under version control: name one by ?model=, or set versions.default.",
                param="model",
            )
        return ours[0]
    found = name if name in config.models else _of_alias(config, name)
    if found is None or not caller.sees(found):
        raise ModelNotFound.named(name)
    if found not in ours:
        raise BadRequest(f"{found} is not under version control: set its key `versions`.", param="model")
    return found


def _of_alias(config: Config, name: str) -> str | None:
    return next((one for one, model in config.models.items() if name in model.aliases), None)
