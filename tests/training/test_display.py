"""The time that is left is shown from the first line on, and a slow run is not silent."""

import pytest

from slipstream.training import display
from slipstream.training.display import Display
from slipstream.training.schedule import Progress, Schedule


@pytest.mark.parametrize(
    ("budget", "rate", "first", "later"),
    [
        ({"budget_tokens": None, "budget_minutes": 20.0}, None, "ETA 20 min", "ETA 15 min"),
        ({"budget_tokens": 12000, "budget_minutes": None}, 10.0, "ETA 20 min", "ETA 5 min"),  # faster than estimated
    ],
)
def test_the_time_left_comes_from_the_budget(budget, rate, first, later, capsys):
    progress = Progress()
    schedule = Schedule(progress, **budget, decay_share=0.2, warmup_steps=1)  # type: ignore[arg-type]
    with Display(schedule, rate) as shown:
        assert first in capsys.readouterr().out
        progress.step, progress.tokens, progress.seconds = 1, 6000, 300.0
        shown.show(progress, 1.0, 20.0, 1.0)
    assert later in capsys.readouterr().out


def test_without_a_terminal_the_first_step_is_shown_and_then_one_every_ten_seconds(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    progress = Progress()
    with Display(Schedule(progress, 1000, None, 0.2, 1)) as shown:
        for _ in range(9):
            now += 4.0
            progress.step += 1
            shown.show(progress, 1.0, 20.0, 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1", "4", "7"]
