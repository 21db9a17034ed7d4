from dora.system.awake import READ_WITHIN_S, AwakeClock


def test_the_own_absence_is_no_time_that_passes() -> None:
    now_s = 100.0
    clock = AwakeClock(lambda: now_s)
    for _ in range(10):
        now_s += READ_WITHIN_S
        clock()
    assert clock() == 100.0 + 10 * READ_WITHIN_S, "a slow loop is awake"
    heard_s = clock()
    now_s += 20.0
    assert clock() - heard_s == 0.0 and clock.absent_s == 20.0
    now_s += 0.5
    assert clock() - heard_s == 0.5
