"""Jobs at the same time: results in order, errors after all have ended."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.utils.thread_pool import ThreadPool, balance_by_size


@pytest.mark.parametrize("size", [1, 3])
def test_results_come_in_order(size):
    assert ThreadPool(size).run([lambda i=i: i * i for i in range(7)]) == [i * i for i in range(7)]
    assert ThreadPool(size).run([]) == []


@pytest.mark.parametrize("size", [1, 3])
def test_each_piece_has_its_result(size):
    assert ThreadPool(size).each(lambda i: i * i, range(7), [1, 9, 2, 2, 0, 5, 1]) == [
        i * i for i in range(7)
    ]
    assert ThreadPool(size).each(len, ["ab"], [2]) == [2]
    assert ThreadPool(size).each(len, [], []) == []


def test_jobs_run_at_the_same_time_and_one_of_them_here():
    meeting = threading.Barrier(2, timeout=30)

    def meet():
        meeting.wait()
        return threading.current_thread()

    threads = ThreadPool(2).run([meet, meet])
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threads[0]


def test_an_error_waits_for_the_others():
    ended = []

    def broken():
        raise ValueError("broken")

    for jobs in ([broken, lambda: ended.append(1)], [lambda: ended.append(2), broken]):
        with pytest.raises(ValueError, match="broken"):
            ThreadPool(2).run(jobs)
    assert ended == [1, 2]


def test_each_job_has_its_share_of_the_threads_of_an_operation():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert ThreadPool(2).run([torch.get_num_threads] * 2) == [2, 2]
        assert ThreadPool(8).run([torch.get_num_threads] * 8) == [1] * 8
        assert ThreadPool(2).run([torch.get_num_threads]) == [4]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_dealt_by_hand():
    assert balance_by_size([5, 1, 4, 3], 2) == [[0, 1], [2, 3]]
    assert balance_by_size([1], 3) == [[0], [], []]


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_every_piece_is_dealt_once_and_evenly(sizes, hands):
    shares = balance_by_size(sizes, hands)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
