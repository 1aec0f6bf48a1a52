"""Fabrics: what stands between servers. One per module, each a function from few numbers to a `Topology`.

Every fabric has places. Without a ``server`` a place holds a host that is one rank; with one it holds that server, all
NICs of which are plugged in there, and each link between switches is as many times faster as a server has NICs, so that
a fabric blocks as much as it does with hosts. ``rail`` alone plugs the NICs of a server into different switches.
"""
