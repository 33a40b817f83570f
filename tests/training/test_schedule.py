import pytest

from slipstream.training import schedule as schedule_module
from slipstream.training.schedule import Display, Progress, Schedule


def schedule(progress: Progress, tokens: int | None = 1000, minutes: float | None = None) -> Schedule:
    return Schedule(progress, tokens, minutes, decay_share=0.3, warmup_steps=4)


def test_warms_up_holds_and_decays() -> None:
    progress = Progress()
    s = schedule(progress)
    assert s.factor() == 0.25
    progress.step, progress.tokens = 10, 500
    assert s.factor() == 1.0
    progress.tokens = 700
    assert s.factor() == 1.0
    progress.tokens = 850
    assert s.factor() == pytest.approx(0.5)
    progress.tokens = 1000
    assert s.done
    assert s.factor() == 0.0


def test_minutes_count_time_spent_not_tokens() -> None:
    progress = Progress(step=10, tokens=10**9, seconds=60.0)
    s = schedule(progress, tokens=None, minutes=10.0)
    assert s.share == pytest.approx(0.1)
    assert s.factor() == 1.0
    progress.seconds = 510.0
    assert s.factor() == pytest.approx(0.5)


def test_a_run_resumed_with_another_budget_follows_its_schedule() -> None:
    progress = Progress(step=10, tokens=850)
    assert schedule(progress, tokens=1000).factor() == pytest.approx(0.5)
    assert schedule(progress, tokens=2000).factor() == 1.0
    assert schedule(progress, tokens=2000).share == pytest.approx(0.425)
    assert schedule(progress, tokens=850).done


def test_finished_run_with_more_budget_decays_once_more() -> None:
    progress = Progress(step=10)
    schedule(progress, tokens=1000)
    progress.tokens = 1000
    s = schedule(progress, tokens=1500)
    assert not s.done
    for tokens in (1000, 1250):  # resumed in the middle, too
        progress.tokens = tokens
        assert schedule(progress, tokens=1500).factor() == s.factor() == pytest.approx((1500 - tokens) / 500)
    progress.tokens = 1500
    assert s.done


@pytest.mark.parametrize(
    ("budget", "rate", "first", "later"),
    [
        ({"budget_tokens": None, "budget_minutes": 20.0}, None, "ETA 20 min", "ETA 15 min"),
        ({"budget_tokens": 12000, "budget_minutes": None}, 10.0, "ETA 20 min", "ETA 5 min"),  # faster than estimated
    ],
)
def test_the_time_left_comes_from_the_budget(budget, rate, first, later, capsys):
    progress = Progress()
    shown = Display(Schedule(progress, **budget, decay_share=0.2, warmup_steps=1), rate)  # type: ignore[arg-type]
    assert first in capsys.readouterr().out
    progress.step, progress.tokens, progress.seconds = 1, 6000, 300.0
    shown.show(1.0, 20.0, 1.0)
    assert later in capsys.readouterr().out


def test_the_first_step_is_shown_and_then_one_every_ten_seconds(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr(schedule_module.time, "monotonic", lambda: now)
    progress = Progress()
    shown = Display(Schedule(progress, 1000, None, 0.2, 1))
    for _ in range(9):
        now += 4.0
        progress.step += 1
        shown.show(1.0, 20.0, 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1", "4", "7"]
