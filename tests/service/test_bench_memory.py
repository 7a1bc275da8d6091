"""What the memory benchmark prints, and that it is what the project promises."""

from __future__ import annotations

import json

from click.testing import CliRunner

from service.bench import bench


def test_latents_take_a_quarter_of_expanded_heads_or_less() -> None:
    answer = CliRunner().invoke(bench, ["memory", "--json"])
    assert answer.exit_code == 0, answer.output
    figures = json.loads(answer.output.splitlines()[-1])["latent"]
    assert len(figures) == 2
    for name, each in figures.items():
        assert each["latent"] > 0 and each["expanded"] / each["latent"] >= 4, name
