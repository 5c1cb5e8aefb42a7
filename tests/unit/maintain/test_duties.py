"""The table of duties: everything that is made from it has each duty, under its one name."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

import persist_lib as persist
from persist_lib.cli.app import app
from persist_lib.cli.root import UPKEEP
from persist_lib.core.duties import BY_NAME, DUTIES, LAYER_DUTIES, NAMES, figures_of
from persist_lib.maintain.duties import FUNCTIONS, carry_out
from tests.worlds import SCHEMA, row

MANUAL = Path(__file__).parents[3] / "docs" / "operations.md"


@pytest.mark.parametrize("duty", [*DUTIES, *LAYER_DUTIES], ids=lambda duty: duty.name)
def test_a_duty_has_an_entry_a_command_and_a_line_in_the_manual(duty):
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert (duty.name in UPKEEP) is duty.is_upkeep
    if duty.name != "census":  # `persist shard list` counts
        command = commands["maintain"] if duty.is_upkeep else commands["shard"].commands[duty.name]
        assert duty.does in (command.help or "")
        assert any(option.name == "dry_run" for option in command.params) is duty.is_upkeep
    assert f"| `{duty.name}` |" in MANUAL.read_text()


def test_names_are_unique_and_duties_come_after_what_they_build_on():
    assert len(BY_NAME) == len(DUTIES) + len(LAYER_DUTIES)
    assert tuple(FUNCTIONS) == NAMES
    for place, duty in enumerate(DUTIES):
        assert set(duty.after) <= set(NAMES[:place])
        assert set(duty.job) <= set(NAMES)
        assert not duty.job or duty.name in duty.job


def test_maintain_does_all_of_upkeep_in_the_order_of_the_table_and_the_last_ones_last():
    with persist.open("memory:") as client:
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(1)], 0, 1)
        upkeep = sorted((duty for duty in DUTIES if duty.is_upkeep), key=lambda duty: duty.is_last)
        assert list(client.maintain("s").done) == [duty.name for duty in upkeep]


@pytest.mark.parametrize("name", NAMES)
def test_a_duty_can_be_carried_out_by_its_name_and_told_in_figures(name):
    with persist.open("memory:") as client:
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(1)], 0, 1)
        before = client.inspect("s").seqno
        answer = carry_out(name, client.machine("s"), client.leases, policy=client.policy(), dry_run=True)
        assert client.inspect("s").seqno == before
    assert all(isinstance(value, (int, float)) for value in figures_of(answer).values())
