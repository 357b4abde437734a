"""docs/compatibility.md says of families what was last seen of them."""

from __future__ import annotations

import json

import compatibility
import hub_models
import pytest


def test_the_table_of_families_is_that_of_the_record() -> None:
    record = json.loads(compatibility.RECORD.read_text())
    document = compatibility.DOCUMENT.read_text()
    assert compatibility.render(document, record) == document
    assert list(record["families"]) == list(hub_models.FAMILIES)


@pytest.mark.parametrize(("found", "shown"), [(["a", "b"], "all layouts"), (["b"], "b"), ([], "no")])
def test_what_was_not_seen_is_not_claimed(found: list[str], shown: str) -> None:
    seen = {"model_type": "llama", "layouts": found, "exported": [], "version4": [], "exact": False, "planned": True}
    row = compatibility.table({"layouts": ["a", "b"], "families": {"Llama": seen}}).splitlines()[2]
    assert row == f"| Llama | `llama` | {shown} | no | no | no | yes |"
