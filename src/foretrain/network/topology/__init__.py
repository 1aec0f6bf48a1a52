"""Topologies: nodes, links and ranks as data; their text, TOML and GraphML forms; what a person asks of them."""
