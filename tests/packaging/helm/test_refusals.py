"""What cannot work is refused before it reaches a cluster, by the schema or by a reason."""

from __future__ import annotations

import pytest

from tests.packaging.helm.chart import Helm4, Refused
from tests.packaging.helm.matrix import ACCEPTED, REFUSED

pytestmark = pytest.mark.tools


@pytest.mark.parametrize("name", REFUSED)
def test_refused(helm4: Helm4, name: str) -> None:
    values, words = REFUSED[name]
    with pytest.raises(Refused) as refused:
        helm4.render(values)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(helm4: Helm4, name: str) -> None:
    rendered = helm4.render(ACCEPTED[name])
    assert rendered.objects and "serves" in rendered.notes
