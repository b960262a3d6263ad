"""The recorder in front of the fake driver."""

import pytest

from bench.driver_log.names import named
from bench.driver_log.recording import recording
from pykern import _C
from tests.driver_log.replay import replay
from tests.fake_cuda.fake import FakeCuda


def log_of(fake: FakeCuda, *lanes: tuple[int, int, int]) -> str:
    """The calls by which the streams of some lanes are made and destroyed."""
    with recording(fake.library._name) as recorder:
        try:
            _C.Lanes(list(lanes))
        except RuntimeError as failed:
            recorder.add(f"# {failed}")
        _C.destroy_idle_streams()
        return named(recorder.text)


def test_calls_and_their_results_are_written_and_passed_on() -> None:
    fake = FakeCuda(num_devices=1)
    before = fake.calls("cuStreamCreateWithPriority")
    log = log_of(fake, (0, 0, 1))
    made = fake.calls("cuStreamCreateWithPriority") - before
    assert log.count("cuStreamCreateWithPriority *stream") == made > 0
    assert log.count("cuStreamDestroy stream") == made
    assert "1 cuDeviceGetCount 0>1 = 0\n" in log
    assert not fake.leaks
    fake.close()
    assert replay(log) == (log.count(" = "), [], [])


def test_a_call_that_fails_is_written() -> None:
    fake = FakeCuda(num_devices=1)
    fake.fail("cuStreamCreateWithPriority", nth=1, error=2)
    log = log_of(fake, (0, 0, 1))
    fake.close()
    assert "1 cuStreamCreateWithPriority *stream0 1 0 = 2\n" in log
    assert "out of memory" in log
    found = replay(log.replace("1 # ", "# "))
    assert found.differences == ["1 cuStreamCreateWithPriority *stream0 1 0 = 2, and now 0"]


def test_groups_of_multiprocessors_are_written_but_not_replayed() -> None:
    fake = FakeCuda(num_devices=1)
    log = log_of(fake, (0, 0, 2), (0, 1, 2))
    fake.close()
    assert "cuGreenCtxCreate *green1 description1 0 1 = 0" in log
    with pytest.raises(ValueError, match="got an argument 'resource'"):
        replay(log)


def test_a_driver_that_is_not_there_is_told() -> None:
    with (
        pytest.raises(RuntimeError, match="no CUDA driver: /no/driver"),
        recording("/no/driver.so"),
    ):
        pass
