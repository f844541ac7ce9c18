"""Every causal family of Transformers: served as Transformers itself would, or refused, as the document says."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import transformers

from greenroom.workers.torch_host.kernels.attention import AttentionOptions, attend_plain, paged_attention
from tests.workers.torch_host.families import (
    DOCUMENT,
    FAMILIES,
    SERVED,
    TOLERANCE,
    apart,
    documented,
    paged_logits,
    plain_logits,
    tiny_model,
    tried,
)

# Some families say things about torch or their own tiny sizes that do not matter here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SERVED_FAMILIES = [family for family in FAMILIES if documented().get(family) == SERVED]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_served_as_transformers_does_or_refused_as_documented(family: str) -> None:
    assert tried(family) == documented()[family]


def test_the_document_is_of_this_version_and_names_every_family() -> None:
    assert f"With Transformers {transformers.__version__}, of {len(FAMILIES)} families" in DOCUMENT.read_text()
    assert sorted(documented()) == FAMILIES


def unmasked(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> Any:
    """Pieces of prompts look ahead."""
    right = paged_attention(module, query, key, value, attention_mask, **more)
    if query.shape[2] == 1:
        return right
    how = AttentionOptions(
        float(more.get("scaling") or query.shape[-1] ** -0.5), softcap=more.get("softcap"), sinks=more.get("s_aux")
    )
    return attend_plain(query, key, value, None, how).transpose(1, 2).contiguous(), None


class WiderWindow:
    """A window that shows one token too many."""

    is_needed = False

    def __call__(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> Any:
        if more.get("sliding_window") is not None:
            self.is_needed = True
            more["sliding_window"] += 1
        return paged_attention(module, query, key, value, attention_mask, **more)


def one_further(_module: Any, _given: Any, named: dict[str, Any]) -> Any:
    """Decoded tokens stand one place too far."""
    if named["input_ids"].shape[1] == 1:
        named["position_ids"] = named["position_ids"] + 1
    return _given, named


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_a_mistake_in_masks_windows_or_positions_would_show(family: str) -> None:
    model = tiny_model(family)
    plain = plain_logits(model)
    # The first pieces are enough: the longest has outgrown the window then.
    assert apart(islice(paged_logits(model, unmasked), 5), plain) > 100 * TOLERANCE
    wider = WiderWindow()
    assert apart(islice(paged_logits(model, wider), 5), plain) > (100 * TOLERANCE if wider.is_needed else -1)
    model.register_forward_pre_hook(one_further, with_kwargs=True)
    assert apart(paged_logits(model), plain) > 100 * TOLERANCE
