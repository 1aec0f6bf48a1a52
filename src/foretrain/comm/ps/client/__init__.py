"""A worker's end of the parameter server: connections, what is in flight, and what is sent again after a loss."""
