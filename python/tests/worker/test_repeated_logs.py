"""A flood of warnings becomes one at a time, with a count; nothing is lost of it but the
repetition."""

from __future__ import annotations

from rollout_workers.worker.repeated_logs import EVERY_SECONDS, Repeats


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_goes_out_and_those_like_it_are_counted() -> None:
    clock = Clock()
    repeats: Repeats[int] = Repeats(clock)
    admitted = [
        repeats.admit("log", f"`score` raised ValueError: can't read '{word}' of sample {number}", number)
        for number, word in enumerate(("a", "b1", "c d", "d"))
    ]
    assert admitted == [True, False, False, False]
    assert repeats.admit("log", "the disk is full", 9)
    assert repeats.admit("another", "`score` raised ValueError: can't read 'x' of sample 1", 8)
    assert list(repeats.due()) == []
    clock.now = EVERY_SECONDS
    assert list(repeats.due()) == [(3, 3)]
    assert list(repeats.due()) == []


def test_a_kind_that_was_quiet_is_new_again() -> None:
    clock = Clock()
    repeats: Repeats[int] = Repeats(clock)
    assert repeats.admit("log", "slow", 1)
    clock.now = EVERY_SECONDS
    assert list(repeats.due()) == []
    assert repeats.admit("log", "slow", 2)


def test_what_is_held_back_comes_out_at_the_end() -> None:
    repeats: Repeats[int] = Repeats(Clock())
    assert repeats.admit("log", "slow", 1)
    assert not repeats.admit("log", "slow", 2)
    assert list(repeats.due(all=True)) == [(2, 1)]
    assert list(repeats.due(all=True)) == []
