"""The event parser: any way of cutting the bytes gives the same events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.engine.sse import Event, EventParser


def events(*chunks: bytes) -> list[Event]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def test_one_event_a_blank_line() -> None:
    assert events(b"data: a\n\ndata:b\n\n") == [Event("message", "a"), Event("message", "b")]


def test_only_one_leading_space_is_dropped() -> None:
    assert events(b"data:  a\n\n") == [Event("message", " a")]


def test_line_ends_of_all_three_kinds() -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        text = end.join([b"event: error", b"data: a", b"data: b", b"", b"data: c", b"", b""])
        assert events(text) == [Event("error", "a\nb"), Event("message", "c")]


def test_a_lone_carriage_return_ends_its_event_at_once() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\r\r") == [Event("message", "a")]
    assert parser.feed(b"\ndata: b\r\n\r") == [Event("message", "b")]
    assert parser.feed(b"\n") == []


def test_comments_other_fields_and_empty_events_are_passed_over() -> None:
    assert events(b": ping\n\nid: 1\nretry: 5\nodd\nevent: x\n\ndata: a\n\n") == [
        Event("message", "a")
    ]


def test_a_data_field_without_colon_is_an_empty_line() -> None:
    assert events(b"data\ndata: a\n\n") == [Event("message", "\na")]


def test_byte_order_mark_and_broken_utf8() -> None:
    assert events(b"\xef\xbb\xbfdata: a\xff\n\n") == [Event("message", "a\ufffd")]


def test_what_the_end_cuts_off_is_dropped() -> None:
    assert events(b"data: a\n\ndata: b\n") == [Event("message", "a")]


LINES = st.lists(
    st.one_of(
        st.just(""),
        st.text(alphabet="añ字😀: x", max_size=6).map(lambda t: f"data: {t}"),
        st.sampled_from([": ping", "event: error", "id: 7", "data"]),
    ),
    max_size=12,
)


@given(LINES, st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_cuts_do_not_matter(lines: list[str], end: str, data: st.DataObject) -> None:
    whole = "".join(line + end for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert events(*pieces) == events(whole)
    assert events(*(bytes([b]) for b in whole)) == events(whole)
