"""What a step gives to the device, counted where the device does nothing; how long it takes is no test's matter."""

from __future__ import annotations

from bench.gpu import host


def test_graph_takes_no_memory_and_operations_a_few_launches_a_layer() -> None:
    found = {}
    for layers in (1, 2):
        for row in host.measured(layers, steps=1):
            found[row["tp"], row["how"], row["case"], layers] = row
    decode, mixed = host.CASES
    for tp in host.TP:
        exchanges = 0 if tp == 1 else 1 + 2 * 2  # behind the embedding, and two a layer
        for case, a_layer in ((decode, 5), (mixed, 6)):
            one, two = (found[tp, "one by one", case, layers] for layers in (1, 2))
            assert (two["launches"] - one["launches"], two["calls of torch"] - one["calls of torch"]) == (a_layer, 4)
            graph = dict(found[tp, "graph", case, 2])
            assert two.get("exchanges", 0) == graph.pop("exchanges", 0) == exchanges
            assert graph.keys() == {"tp", "case", "how", "us", "copies", "graphs"}
            assert (graph["copies"], graph["graphs"]) == (1, 1 + exchanges)
