"""How a flow crosses a network of packets: when it sends, what it makes of losses and of marks. One file each."""
