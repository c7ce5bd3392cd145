"""Claims about signed requests: who knows the secret is believed, once, and reveals nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.monitor.signing import (
    ROTATE_S,
    Request,
    RequestVerifier,
    is_answer,
    sign_answer,
    sign_request,
)

SECRET = b"the secret of the job"
REQUEST = Request("GET", "/v1/summary?since=3", b"body")


def test_request_of_who_knows_the_secret_is_accepted_once() -> None:
    verifier = RequestVerifier(SECRET)
    header = sign_request(SECRET, verifier.challenge(0.0), REQUEST)
    assert verifier.accepts(header, REQUEST, 1.0)
    assert not verifier.accepts(header, REQUEST, 1.0)
    again = sign_request(SECRET, verifier.challenge(1.0), REQUEST)
    assert verifier.accepts(again, REQUEST, 1.0)


@pytest.mark.parametrize(
    "changed",
    [
        replace(REQUEST, method="POST"),
        replace(REQUEST, target="/v1/stacks/0"),
        replace(REQUEST, body=b"other"),
    ],
)
def test_signature_of_another_request_is_not_accepted(changed: Request) -> None:
    verifier = RequestVerifier(SECRET)
    header = sign_request(SECRET, verifier.challenge(0.0), REQUEST)
    assert not verifier.accepts(header, changed, 0.0)
    assert verifier.accepts(header, REQUEST, 0.0)


def test_signature_under_another_secret_or_an_unknown_challenge_is_not_accepted() -> None:
    verifier = RequestVerifier(SECRET)
    challenge = verifier.challenge(0.0)
    assert not verifier.accepts(sign_request(b"guess", challenge, REQUEST), REQUEST, 0.0)
    # Such as that of the server before its restart.
    other = RequestVerifier(SECRET).challenge(0.0)
    assert not verifier.accepts(sign_request(SECRET, other, REQUEST), REQUEST, 0.0)
    assert not verifier.accepts(sign_request(SECRET, "", REQUEST), REQUEST, 0.0)


def test_challenge_lasts_for_minutes_and_a_recorded_request_does_not_outlive_it() -> None:
    verifier = RequestVerifier(SECRET)
    challenge = verifier.challenge(0.0)
    used, late, too_late = (sign_request(SECRET, challenge, REQUEST) for _ in range(3))
    assert verifier.accepts(used, REQUEST, 0.0)
    assert verifier.challenge(ROTATE_S - 1.0) == challenge
    assert verifier.challenge(ROTATE_S) != challenge
    assert verifier.accepts(late, REQUEST, ROTATE_S)
    assert not verifier.accepts(used, REQUEST, ROTATE_S)
    assert not verifier.accepts(too_late, REQUEST, 2 * ROTATE_S)
    assert not verifier.accepts(used, REQUEST, 2 * ROTATE_S)


@given(st.text(max_size=100), st.booleans())
def test_arbitrary_headers_are_not_accepted_and_raise_nothing(text: str, has_scheme: bool) -> None:
    verifier = RequestVerifier(SECRET)
    challenge = verifier.challenge(0.0)
    header = f"Keepstep {challenge}.{text}" if has_scheme else text
    assert not verifier.accepts(header, REQUEST, 0.0)
    assert not verifier.accepts(None, REQUEST, 0.0)


def test_answer_is_bound_to_its_request_status_and_body() -> None:
    first, second = (sign_request(SECRET, "challenge", REQUEST) for _ in range(2))
    signature = sign_answer(SECRET, first, 200, b"summary")
    assert is_answer(SECRET, first, 200, b"summary", signature)
    assert not is_answer(SECRET, second, 200, b"summary", signature)
    assert not is_answer(SECRET, first, 204, b"summary", signature)
    assert not is_answer(SECRET, first, 200, b"other", signature)
    assert not is_answer(b"guess", first, 200, b"summary", signature)
    for nothing in (None, "", first.rpartition(".")[2]):
        assert not is_answer(SECRET, first, 200, b"summary", nothing)
