"""Repetition detection: which ends of an output count as a loop, and where it stands among the reasons to stop."""

import random
from array import array

import pytest

from scheduler.repetition import RepetitionDetectionParams, ends_in_repetition
from scheduler.request import Request, RequestStatus
from scheduler.stop import check_stop
from tests.scheduler.requests_for_tests import make_request


def by_definition(outputs: list[int], params: RepetitionDetectionParams) -> bool:
    """Some size in the range whose last min_count blocks are equal."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        blocks = [outputs[len(outputs) - size * (k + 1) : len(outputs) - size * k] for k in range(params.min_count)]
        if size * params.min_count <= len(outputs) and all(block == blocks[0] for block in blocks):
            return True
    return False


def test_loops_are_found_as_defined_for_random_outputs():
    rng = random.Random(3)
    counts = {True: 0, False: 0}
    for _ in range(4000):
        smallest = rng.randint(0, 4)
        params = RepetitionDetectionParams(smallest + rng.randint(0, 4), smallest, rng.randint(2, 4))
        prompt = [rng.randrange(2) for _ in range(rng.randrange(9))]
        outputs = [rng.randrange(3) for _ in range(rng.randint(1, 6))] * rng.randint(1, 4)
        outputs = outputs[: rng.randint(1, len(outputs))]
        found = ends_in_repetition(array("i", prompt + outputs), len(prompt), params)
        assert found == by_definition(outputs, params), (prompt, outputs, params)
        counts[found] += 1
    assert min(counts.values()) > 300


def stops(outputs: list[int], **params) -> list[tuple[RequestStatus, int | str | None] | None]:
    """What check_stop says after each output token, up to the end."""
    request = make_request("r", [7, 7, 7], eos=2, **params)
    request.max_num_tokens = 3 + (request.sampling_params.max_tokens or 100)
    results: list = []
    for token_id in outputs:
        request.append_token(token_id)
        status = check_stop(request)
        results.append(status and (status, request.stop_reason))
        if status is not None:
            break
    return results


LOOP = {"max_pattern_size": 2, "min_count": 3}


def test_the_prompt_is_no_part_of_a_loop_and_the_reason_is_named():
    ended = stops([7, 7, 7], repetition_detection={"max_pattern_size": 1, "min_count": 3})
    assert ended == [None, None, (RequestStatus.FINISHED_REPETITION, "repetition_detected")]
    assert RequestStatus.FINISHED_REPETITION.finish_reason == "repetition"
    assert RequestStatus.FINISHED_REPETITION.is_finished


@pytest.mark.parametrize(
    ("outputs", "params", "status", "reason"),
    [
        ([5, 5, 5], {"max_tokens": 3}, RequestStatus.FINISHED_LENGTH_CAPPED, None),
        ([2, 2, 2], {"ignore_eos": False, "min_tokens": 3}, RequestStatus.FINISHED_STOPPED, None),
        ([5, 5, 5], {"stop_token_ids": [5], "min_tokens": 3}, RequestStatus.FINISHED_STOPPED, 5),
        ([5, 5, 5, 5, 5], {"min_tokens": 5}, RequestStatus.FINISHED_REPETITION, "repetition_detected"),
        ([8, 5, 6, 5, 6, 5, 6], {}, RequestStatus.FINISHED_REPETITION, "repetition_detected"),
    ],
)
def test_a_loop_ends_a_request_after_every_other_reason_and_not_before_min_tokens(outputs, params, status, reason):
    ended = stops(outputs, repetition_detection=LOOP, **params)
    assert ended == [None] * (len(outputs) - 1) + [(status, reason)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"max_pattern_size": -1}, r"max_pattern_size=-1 must be an integer in \[0, 2147483647\]"),
        ({"max_pattern_size": 2, "min_count": 10**30}, "min_count=1000000000000000000000000000000 must be an integer"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size=3 must not exceed"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count=1 must be at least 2"),
        ({"max_pattern_size": 2.0, "min_count": 2}, "max_pattern_size=2.0 must be an integer"),
        ({"max_size": 2}, r"unknown keys \['max_size'\]"),
        (3, "repetition_detection=3 must be a RepetitionDetectionParams or a dict"),
    ],
)
def test_bad_values_are_refused_by_name(value, message):
    with pytest.raises(ValueError, match=message):
        make_request("r", 3, repetition_detection=value)


def test_off_means_off():
    request: Request = make_request("r", 3, repetition_detection={"max_pattern_size": 0})
    request.max_num_tokens = 100
    for _ in range(20):
        request.append_token(5)
        assert check_stop(request) is None
