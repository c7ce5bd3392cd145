"""Claims about a webhook's address and about what is posted to it."""

import pytest

from keepstep.monitor.views.webhook import WebhookAddress, webhook_content

EVENT = {
    "severity_text": "ERROR",
    "body": "rank 2 <on> a&b: communication hang",
    "attributes": {"keepstep.verdict.to_do": "look at the network"},
    "resource": {"keepstep.job": "run7"},
}


@pytest.mark.parametrize(
    ("text", "url", "is_slack"),
    [
        ("https://example.org/x?key=s3cret", "https://example.org/x?key=s3cret", False),
        ("slack+http://chat:8065/hooks/s3cret", "http://chat:8065/hooks/s3cret", True),
        (
            "https://hooks.slack.com/services/s3cret",
            "https://hooks.slack.com/services/s3cret",
            True,
        ),
    ],
)
def test_address_says_its_form_and_hides_what_may_be_a_secret(
    text: str, url: str, is_slack: bool
) -> None:
    address = WebhookAddress.parse(text)
    assert (address.url, address.is_slack) == (url, is_slack)
    assert "s3cret" not in repr(address)


@pytest.mark.parametrize("text", ["example.org/s3cret", "ftp://h/s3cret", "https://[s3cret", ""])
def test_what_is_no_address_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="https://HOST/PATH") as caught:
        WebhookAddress.parse(text)
    assert "s3cret" not in str(caught.value)


def test_content_is_the_event_or_a_text_for_slack() -> None:
    assert webhook_content(EVENT, is_slack=False) == EVENT
    assert webhook_content(EVENT, is_slack=True) == {
        "text": "run7: rank 2 &lt;on&gt; a&amp;b: communication hang\n"
        "what to do: look at the network"
    }
