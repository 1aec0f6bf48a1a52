"""Agreement on one order of collectives: rank 0 decides and sends commands to all ranks over authenticated links."""
