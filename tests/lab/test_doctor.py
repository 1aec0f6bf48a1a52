"""``foretrain doctor`` on hosts whose links have a known rate."""

import json
import sys

from foretrain.lab import Lab, launch
from foretrain.units import parse_rate
from tests.lab.forked import launching


def test_the_rate_between_hosts_is_that_of_their_links(name, tmp_path):
    lab = Lab.up(name, 3, rate="100Mbps")
    hosts, out = ",".join(host.address for host in lab.hosts), tmp_path / "out.json"
    command = [sys.executable, "-m", "foretrain", "doctor", "--hosts", hosts, "--json", str(out)]
    assert launching(lambda: launch(lab, command, timeout=600)) == 0
    found = json.loads(out.read_text())
    assert [pair["hosts"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    # A veth says 10 Gb/s, whatever shapes it: next to that every way would be slow. A busy machine may slow one way
    # next to the others.
    assert not any("reaches host" in text and "the median of all is" not in text for text in found["findings"])
    for pair in found["pairs"]:
        assert pair["interfaces"] == [lab.hosts[rank].interface for rank in pair["hosts"]]
        assert max(pair["rates"]) < 1.2 * parse_rate("100Mbps")  # what a queue has held comes on top
