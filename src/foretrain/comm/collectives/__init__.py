"""All-reduce on plain buffers, and the executor that issues collectives in the order that all ranks agreed on."""
