"""The last facts are read, however many a daemon keeps; of these those from a time on."""

from datetime import UTC, datetime

import pytest

from rollmuxd.cli.common import Failed
from rollmuxd.cli.feed import last_facts


class Feed:
    """A daemon with so many facts, one a second from the epoch on; every third is not for the caller."""

    def __init__(self, last, first=1):
        self.first, self.last = first, last

    def get(self, path, after=0, limit=1000):
        if path == "/v1/me":
            return {"first": self.first, "last": self.last}
        seen = [seq for seq in range(max(after + 1, self.first), self.last + 1) if seq % 3]
        page = seen[:limit]
        facts = [{"fact": "daemon_started", "seq": seq, "at": 1000 * seq, "incarnation": seq} for seq in page]
        return {"facts": facts, "last": page[-1] if len(page) == limit else self.last, "first": self.first}


def seconds(facts):
    return [fact.at // 1000 for fact in facts]


def time(second):
    return datetime.fromtimestamp(second, UTC).isoformat()


def test_all_of_a_few_facts():
    assert seconds(last_facts(Feed(10))) == [1, 2, 4, 5, 7, 8, 10]
    assert seconds(last_facts(Feed(10, first=6))) == [7, 8, 10]
    assert last_facts(Feed(0)) == []


def test_of_many_the_last():
    assert seconds(last_facts(Feed(1000), most=10)) == [991, 992, 994, 995, 997, 998, 1000]


@pytest.mark.parametrize("since", range(9, 22))
def test_from_a_time_on(since):
    expected = [second for second in range(since, 31) if second % 3]
    assert seconds(last_facts(Feed(30), time(since))) == expected


def test_a_time_before_the_first_and_one_after_the_last():
    assert seconds(last_facts(Feed(10, first=6), time(2))) == [7, 8, 10]
    assert last_facts(Feed(10), time(11)) == []
    assert seconds(last_facts(Feed(1000), time(5), most=10))[0] == 991


def test_what_is_no_time_is_refused():
    with pytest.raises(Failed, match="yesterday is no time"):
        last_facts(Feed(10), "yesterday")
