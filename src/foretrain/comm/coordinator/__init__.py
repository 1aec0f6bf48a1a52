"""All ranks issue the same collectives in the same order: rank 0 decides, the others follow over authenticated
links."""
